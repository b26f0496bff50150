#!/usr/bin/env bash
# Compiles and runs everything on a machine with a Hopper GPU: checks, timings, then the memory and race checkers.
#   run.sh          all            run.sh check | time   only the checks or the timings of the harness, no checkers
set -u
cd "$(dirname "$0")"
build=${BUILD_DIR:-$(mktemp -d)}
export PATH="$PATH:/usr/local/cuda/bin"
start=$SECONDS
nvcc -std=c++17 -O3 -lineinfo -gencode=arch=compute_90a,code=sm_90a -split-compile=0 -Xptxas -v -o "$build/harness" harness.cu \
  > "$build/compile.log" 2>&1 || { cat "$build/compile.log"; exit 1; }
echo "compiled in $((SECONDS - start)) s; registers and spills:"
grep -E "Compiling entry|spill|Used" "$build/compile.log" | paste - - - |
  sed -nE 's/.*(verify|probe)_kernelI.*VerifyConfigI([A-Za-z0-9]*)EEE.* ([0-9]+) bytes spill stores.*Used ([0-9]+) registers.*/  \1 \2: \4 registers, \3 B spilled/p'
"$build/harness" "${1:-all}"
status=$?
echo "harness: status $status"
[ $# -eq 0 ] || exit $status
if python3 -c "import torch, pytest" 2> /dev/null; then
  KERNEL_EXT_CACHE="$build" timeout 200 python3 test_verify_attention.py
else
  echo "torch or pytest is missing: the Python test is left out"
fi
for tool in memcheck racecheck; do
  echo "compute-sanitizer $tool:"
  timeout 180 compute-sanitizer --tool "$tool" "$build/harness" tiny 2>&1 | tail -15
done
exit $status
