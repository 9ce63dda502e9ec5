"""The Triton kernels compiled ahead of time, for chips that are not here: `make kernels` compiles the whole launch table."""

import dataclasses
import importlib.util
import os

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("an interpreted function cannot be compiled", allow_module_level=True)

from loopkernels import aot
from loopkernels.launch import LAUNCHES, MOST_TOKENS


def row(name, precision="bf16", target="sm_90"):
    return next(x for x in LAUNCHES if (x.name, x.precision) == (name, precision) and target in x.targets)


@pytest.mark.parametrize(("name", "target", "kernel"), [
    ("R64", "sm_90", "tile"),
    ("S128", "sm_90", "blocks"),
    ("S64", "sm_80", "tile"),
    ("S64", "gfx942", "tile"),
])  # fmt: skip
def test_one_row_of_each_kernel_passes_its_gates(name, target, kernel):
    report = aot.examine(row(name, target=target), target, kernel)
    assert report.faults == ()
    assert report.matrix_instructions > 0
    assert 0 < report.shared <= aot.SHARED_LIMIT[target]


def test_gates_see_what_is_wrong():
    good = aot.Report("sm_90", "S64", "tile", "bf16", 64, 4, 200, 0, 40_000, 0, 26, 9, 3000)
    launch = row("S64")
    assert aot.faults_of(launch, good) == []
    for changes, word in [
        (dict(shared=232_449), "shared memory"),
        (dict(tensor_memory=592), "tensor memory"),
        (dict(matrix_instructions=0), "no matrix instruction"),
        (dict(instructions=20), "empty kernel"),
        (dict(waits=26), "serialised"),
        (dict(advice=("C7515",)), "C7515"),
        (dict(spilled=8192), "spilled"),
    ]:
        (fault,) = aot.faults_of(launch, dataclasses.replace(good, **changes))
        assert word in fault


def test_weights_read_inside_the_loop_are_seen():
    """The streamed kernel is what a resident one becomes when its loads are not hoisted."""
    compiled = aot.compile_row(dataclasses.replace(row("S64"), tma=False), "sm_90")
    assert aot.residency_faults(compiled.asm["ttgir"])


def test_the_launch_table_is_whole():
    """Every target has bf16 at every width up to 256, and no two rows answer the same question unless the first may not fit."""
    for target in aot.TARGETS:
        widths = {x.width for x in LAUNCHES if target in x.targets and x.precision == "bf16"}
        assert {16, 32, 64, 128, 256} <= widths
        keys = [(x.width, x.precision) for x in LAUNCHES if target in x.targets and not x.resident]
        assert len(keys) == len(set(keys))
    assert all(MOST_TOKENS % x.rows == 0 and x.rows >= 16 for x in LAUNCHES)
