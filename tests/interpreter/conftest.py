import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

sys.path.insert(0, str(Path(__file__).parent.parent))  # models.py, tolerances.py
if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("run these through tests/test_kernels_interpreter.py, which sets TRITON_INTERPRET=1")


class PatchOnce:
    """The interpreter patches `triton.language` again at every call of a device function, which takes half of its time."""

    def __init__(self):
        self.patch, self.run = interpreter._patch_lang, interpreter.GridExecutor.__call__
        self.patched = set()
        interpreter._patch_lang = self.once
        outer = self

        def run(executor, *args, **kwargs):
            outer.patched.clear()
            return outer.run(executor, *args, **kwargs)

        interpreter.GridExecutor.__call__ = run

    def once(self, function):
        """Patch what a function sees of the language, unless this launch has done so for the same modules."""
        names = function.__globals__
        seen = tuple(name for name in ("tl", "core", "math", "libdevice") if name in names)
        if seen in self.patched:
            return None
        self.patched.add(seen)
        return self.patch(function)


PatchOnce()


def dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
    """`tl.dot` that sums over k in order. BLAS, which the interpreter calls, rounds a row otherwise beside other rows on some
    CPUs, and the bits of a prompt would then depend on its neighbours."""
    left, right = (operand.data.astype(d.data.dtype) for operand in (a, b))
    total = np.zeros_like(d.data)
    for k in range(left.shape[-1]):
        total += left[..., k : k + 1] * right[..., k : k + 1, :]
    return interpreter.TensorHandle(total + d.data, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = dot


@pytest.fixture(autouse=True)
def _threads():
    torch.set_num_threads(1)


@pytest.fixture
def tiles(monkeypatch):
    """`tiles(16)` makes the backend launch with tiles of 16 rows, so that row blocks and refilled slots are cheap to reach."""
    from looped.backends import triton as backend
    from loopkernels import launch

    def choose(rows, precision="fp32", **changes):
        def small(block, _precision, _target):
            width = launch.padded(block.width)
            return launch.Launch("test", ("sm_90",), width, precision, rows, 4, 32, **changes)

        monkeypatch.setattr(launch, "choose", small)
        monkeypatch.setattr(backend, "_packed", type(backend._packed)())

    return choose
