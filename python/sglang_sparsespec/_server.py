"""Start and stop an SGLang server as a child process. Used by the demo, the doctor and the tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

HOST = "127.0.0.1"
POLL_S = 0.25
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """The server ended early or was not ready in time. The text holds the end of its log."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on at the time of the call."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return sock.getsockname()[1]


def log_tail(path: Path, lines: int = 30, limit: int = 64 * 1024) -> str:
    """The last `lines` lines of a log, reading at most its last `limit` bytes; "" when there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - limit))
            text = log.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


class ServerProcess:
    """A server on a free port of 127.0.0.1 for the length of a `with` block.

    It runs in a process group of its own, so leaving the block ends its scheduler and detokenizer processes
    too, whatever state they are in: SIGTERM, then SIGKILL after `stop_timeout_s`.

    Args:
        model_path: passed as `--model-path`.
        args: more arguments of `sglang.launch_server`.
        env: environment variables set besides the caller's own.
        log_path: file for stdout and stderr. By default a temporary file, kept only when an exception
            leaves the block.
        timeout_s: seconds until the server must be ready.
        command: what to run instead of `sys.executable -m sglang.launch_server`, for tests.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        timeout_s: float = 600.0,
        stop_timeout_s: float = 15.0,
        command: Sequence[str] | None = None,
    ) -> None:
        self.model_path = str(model_path)
        self.args = list(args)
        self.env = dict(env or {})
        self.timeout_s = timeout_s
        self.stop_timeout_s = stop_timeout_s
        self._command = list(command or (sys.executable, "-m", "sglang.launch_server"))
        self._own_log = log_path is None
        self.log_path = Path(log_path) if log_path is not None else Path()  # set by start()
        self.port = 0  # set by start()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id, and process group id, of the server. Raises RuntimeError when it was not started."""
        return self._started().pid

    def __enter__(self) -> ServerProcess:
        try:
            self.start()
            self.wait_ready()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._own_log and (kind is None or not issubclass(kind, Exception)):
            self.log_path.unlink(missing_ok=True)

    def start(self) -> None:
        """Start the process and return at once. Raises RuntimeError when it was started before."""
        if self._process is not None:
            raise RuntimeError(
                f"this ServerProcess runs already (pid {self._process.pid}); make another one."
            )
        self.port = free_port()
        if self._own_log:
            handle, name = tempfile.mkstemp(prefix="sparsespec-server-", suffix=".log")
            os.close(handle)
            self.log_path = Path(name)
        argv = [*self._command, "--model-path", self.model_path, "--host", HOST, "--port", str(self.port)]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*argv, *self.args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env},
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until the server answers. Raises ServerError when it ends or `timeout_s` is over."""
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline:
            if (status := self._exit_status()) is not None:
                raise self._error(f"the server ended with exit status {status} before it was ready")
            if self._answers():
                return
            time.sleep(POLL_S)
        raise self._error(f"the server was not ready after {self.timeout_s:.0f} s")

    def stop(self) -> None:
        """End the whole process group. Does nothing when the server was not started or is stopped."""
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + self.stop_timeout_s
        while time.monotonic() < deadline and self._exit_status() is None:
            time.sleep(0.05)
        # The leader is not reaped yet, so its id still names this group and no other.
        self._signal(signal.SIGKILL)
        process.wait()
        self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(
                "the server is not running; use `with ServerProcess(...)` or call start() first."
            )
        return self._process

    def _exit_status(self) -> int | None:
        """Exit status or signal number of the leader, None while it runs. Does not reap it."""
        # Reaping frees the id, and stop() would then signal whatever group has it next.
        ended = os.waitid(os.P_PID, self._started().pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return None if ended is None else ended.si_status

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._started().pid, number)
        except ProcessLookupError:
            return

    def _answers(self) -> bool:
        try:
            with _NO_PROXY.open(f"{self.url}/health", timeout=5) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _error(self, what: str) -> ServerError:
        tail = log_tail(self.log_path) or "(the log is empty)"
        return ServerError(f"{what}. End of its log ({self.log_path}):\n{tail}")
