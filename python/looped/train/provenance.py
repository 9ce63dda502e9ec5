"""Where a run's numbers come from: one line for every time the run was started or gone on with."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

FILE = "provenance.jsonl"


def record(folder: Path, *, step: int, device: torch.device, fused: bool) -> None:
    """Append a line to the run's `provenance.jsonl`: what code, on what machine, from which step on."""
    line: dict[str, Any] = {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "looped": importlib.metadata.version("looped"),
        "source": source_digest(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "loops_before_the_window": "fused" if fused else "eager",
        "process": os.getpid(),
    }
    with open(folder / FILE, "a") as file:
        file.write(json.dumps(line) + "\n")


@functools.cache
def source_digest() -> str:
    """The SHA-256 of the package's Python files, by name and content: equal where the code is."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
