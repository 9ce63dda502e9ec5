#!/usr/bin/env bash
# Trains a model of the published size (preset "paper", 500,000 steps) on one GPU for at most so many minutes, and says how far it is:
#
#     benches/train_device.sh [OUT [MINUTES [OPTIONS OF looped train ...]]]     # default runs/paper 30
#
# Run again with the same OUT, it goes on from the last checkpoint, bit for bit; when all steps are done it scores the model.
# For example: benches/train_device.sh runs/tree 30 --task decision_tree; benches/train_device.sh runs/unlooped 30 --unlooped.
# Float32 with TF32 products, as the authors train and the preset says. Without a GPU it makes three steps of one prompt on the CPU,
# to see that it runs.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-runs/paper}" minutes="${2:-30}"
shift $(($# < 2 ? $# : 2))
python="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
export PYTHONPATH="$PWD/python:$PWD${PYTHONPATH:+:$PYTHONPATH}"
options=(--preset paper --out "$out" --resume --device cuda "$@")
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU is here: three steps of one prompt on the CPU"
    options=(--preset paper --out "$out" --resume --set n_steps=3 --set batch_size=1 "$@")
fi
# An interrupt finishes the step and writes a checkpoint; timeout then ends with 124.
code=0
timeout -s INT -k 120 "$((minutes * 60))" "$python" -m looped.cli train "${options[@]}" || code=$?
if [ "$code" != 0 ] && [ "$code" != 124 ]; then exit "$code"; fi
"$python" - "$out" <<'EOF'
import json, sys
from pathlib import Path

out = Path(sys.argv[1])
n_steps = json.loads((out / "train.json").read_text())["n_steps"]
lines = (out / "log.jsonl").read_text().splitlines()
if not lines:
    sys.exit(print(f"no step of {n_steps:,} is logged yet (every 20th is): run the same command again"))
last = json.loads(lines[-1])
took, left = last["seconds"] / 60, n_steps - last["step"]
print(f"step {last['step']:,} of {n_steps:,} after {took:.1f} minutes, {last['step'] / last['seconds']:.1f} steps a second; loss {last['loss']:.4g}")
if left:
    print(f"about {took / last['step'] * left:.0f} minutes are left at this speed: run the same command again")
EOF
if [ -d "$out/model" ] && ! grep -q '"task": "tabular"' "$out/train.json"; then
    task=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["task"])' "$out/train.json")
    "$python" -m looped.cli eval "$out/model" --task "$task" --prompts "${PROMPTS:-1280}" --exit fixed --no-settling --out "$out/evaluation"
fi
