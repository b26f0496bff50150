"""Compiles the CUDA sources of this package on first use and loads the result.

The shared library needs neither torch nor a Python ABI. It is kept in the user's cache directory under a hash
of the sources, the compiler's version and the flags: a new version of any is compiled anew, an old one stays.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = ("verify_attention.cu", "few_rows.cu")
CACHE_ENV = "KERNEL_EXT_CACHE"
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-shared",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-split-compile=0",  # the instances compile on all cores
)


class VerifyArgs(ctypes.Structure):
    """`SparseSpecVerifyArgs` of csrc/verify_params.h, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k_cache", "v_cache", "page_table", "first", "queries")),
        *((name, ctypes.c_void_p) for name in ("out", "lse", "ref_lse", "offset", "prefix", "score")),
        ("workspace", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("workspace_bytes", "q_stride", "page_stride")),
        *((name, ctypes.c_int64) for name in ("capacity", "score_stride")),
        *((name, ctypes.c_int32) for name in ("rows", "padded_queries", "q_heads", "kv_heads")),
        *((name, ctypes.c_int32) for name in ("head_dim", "width")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("shift", "device", "flags")),
        ("stream", ctypes.c_void_p),
    )


def source_dir() -> Path:
    """Folder with the CUDA sources: beside the package in a checkout, inside it when installed."""
    here = Path(__file__).resolve().parent
    for folder in (here / "csrc", here.parent / "csrc"):
        if (folder / "verify_attention.cu").is_file():
            return folder
    raise FileNotFoundError(
        f"csrc/verify_attention.cu is neither in {here} nor beside it: "
        "reinstall sgl-kernel-ext with its sources"
    )


def find_nvcc() -> Path | None:
    """The CUDA compiler: $CUDA_HOME, $CUDA_PATH, then PATH, then the usual place; None if there is none."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home]
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((path for path in candidates if path.is_file()), None)


def cache_dir() -> Path:
    """Where compiled libraries are kept: $KERNEL_EXT_CACHE or the user's cache directory."""
    if os.environ.get(CACHE_ENV):
        return Path(os.environ[CACHE_ENV])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sgl-kernel-ext"


def _run(command: list[str]) -> str:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} failed with status {result.returncode}:\n{result.stdout[-4000:]}"
        )
    return result.stdout


@functools.cache
def _tvm_ffi_flags() -> tuple[list[str], list[str]]:
    """Compiler and linker flags for the tvm_ffi export; empty where `apache-tvm-ffi` is missing."""
    try:
        import tvm_ffi
        from tvm_ffi import libinfo
    except ImportError:
        return [], []
    library = Path(libinfo.find_libtvm_ffi())
    includes = dict.fromkeys([libinfo.find_include_path(), libinfo.find_dlpack_include_path()])
    version = f'-DSPARSESPEC_TVM_FFI="{tvm_ffi.__version__}"'
    return [version, *(f"-I{path}" for path in includes)], [f"-L{library.parent}", "-ltvm_ffi"]


def build() -> Path:
    """Path of the compiled library, compiled now (up to a minute) if the cache has none.

    Raises RuntimeError without nvcc or when it fails; its output is in the message.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError(
            "nvcc was not found in $CUDA_HOME, $CUDA_PATH, PATH or /usr/local/cuda: install the CUDA toolkit "
            "(12.3 or later) or set CUDA_HOME; without it use the Triton or FlashInfer kernels"
        )
    sources = source_dir()
    export, link = _tvm_ffi_flags()
    compile_line = [str(nvcc), *_FLAGS, *export]
    digest = hashlib.sha256("\n".join([_run([str(nvcc), "--version"]), *compile_line, *link]).encode())
    for path in sorted(sources.glob("*.*")):
        digest.update(path.name.encode() + path.read_bytes())
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"verify_attention-{digest.hexdigest()[:16]}.so"
    if library.is_file():
        return library
    with open(folder / "build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles, the others wait for its result
        if not library.is_file():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / "made.so"
                _run([*compile_line, "-o", str(made), *(str(sources / name) for name in SOURCES), *link])
                os.replace(made, library)
    return library


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled library with its C interface declared."""
    if _tvm_ffi_flags()[0]:
        import tvm_ffi  # noqa: F401  (its library must be loaded before ours, which refers to it)
    handle = ctypes.CDLL(str(build()))
    handle.sparsespec_verify_attention.argtypes = [ctypes.POINTER(VerifyArgs)]
    handle.sparsespec_verify_attention.restype = ctypes.c_int
    handle.sparsespec_verify_workspace.argtypes = [ctypes.c_int32] * 4
    handle.sparsespec_verify_workspace.restype = ctypes.c_int64
    handle.sparsespec_verify_error.restype = ctypes.c_char_p
    return handle


@functools.cache
def tvm_function(name: str):
    """A function of the library as tvm_ffi exports it, or None where tvm_ffi is missing."""
    if not _tvm_ffi_flags()[0]:
        return None
    import tvm_ffi

    return getattr(tvm_ffi.load_module(str(build())), name)


@functools.cache
def missing(device: torch.device, *, tvm: bool = False) -> str | None:
    """What keeps the kernels from running on `device`, or None. `tvm`: with tvm_ffi. Compiles nothing."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"device is {device}, needed: a CUDA device of compute capability 9.0"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, needed: 9.0 (H100, H200)"
    if find_nvcc() is None:
        return "nvcc was not found: install the CUDA toolkit or set CUDA_HOME"
    if tvm and not _tvm_ffi_flags()[0]:
        return "apache-tvm-ffi is not installed: install it"
    return None
