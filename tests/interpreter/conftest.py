import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # models.py, tolerances.py
if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("run these through tests/test_kernels_interpreter.py, which sets TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def _highest():
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def tiles(monkeypatch):
    """Calls `tiles(16, precision="fp32")` make the backend launch with small tiles, so that row blocks are cheap to reach."""
    from looped.backends import triton as backend
    from loopkernels import launch

    def choose(rows, precision="fp32", resident=False, tma=False, **changes):
        def small(block, _precision, _target):
            return launch.Launch("test", ("sm_90",), launch.padded(block.width), precision, rows, 4, 32, resident=resident, tma=tma, **changes)

        monkeypatch.setattr(launch, "choose", small)
        monkeypatch.setattr(backend, "_packed", type(backend._packed)())

    return choose
