#!/usr/bin/env bash
# Everything that needs a GPU, in one command of at most 6 minutes on an H200: the chip's ceilings, every kernel against float64,
# the same bits in any batch, then times beside floors and beside PyTorch's own. Leaves device.json in the folder given
# (default benches/results). Without a GPU it runs the checks it can in Triton's interpreter, and says so.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-benches/results}"
python="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
mkdir -p "$out"
export PYTHONPATH="$PWD/python:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    exec timeout "${LIMIT:-350}" "$python" -W ignore benches/device.py --out "$out"
fi
echo "no GPU is here: the checks run in Triton's interpreter, and nothing is timed"
export TRITON_INTERPRET=1 OMP_NUM_THREADS=1
exec "$python" -W ignore benches/device.py --out "$out"
