"""What this installation can do: versions, devices, backends. For `looped info` and for bug reports."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

from looped.backends import cpu, graph, triton
from looped.backends.cpu import n_cores as n_cores
from looped.pretrained import bundled_models

PACKAGES = (
    *("looped", "torch", "triton", "numpy", "safetensors", "transformers"),
    *("scikit-learn", "scipy", "matplotlib", "xgboost"),
)


def environment() -> dict[str, dict[str, Any]]:
    """Tables of plain JSON values: ``versions``, ``devices``, ``backends``, ``models``."""
    versions: dict[str, Any] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    devices: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": n_cores(),
        "threads": torch.get_num_threads(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.cuda.is_available():
        devices |= {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    else:
        devices["cuda"] = "none: " + ("this torch is built without CUDA" if torch.version.cuda is None else "no device found")
    backends = {"cpu": cpu.describe(), "triton": triton.describe(), "graph": graph.describe()}
    backends |= {"eager": "works on CPU and CUDA tensors"}
    backends |= {
        "auto, on a CPU": "cpu, else eager",
        "auto, on a GPU": "triton, else graph, else eager; result.reason",
    }
    return {"versions": versions, "devices": devices, "backends": backends, "models": bundled_models()}


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
