"""The decode kernels ahead of time, and what of their table needs no kernel: `make kernels` compiles all rows."""

import dataclasses
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("an interpreted function cannot be compiled", allow_module_level=True)

from loopkernels import aot, decode_aot, decode_launch
from loopkernels.decode_launch import LAUNCHES, Layout
from loopkernels.launch import Block, Layer


def row(name, precision="bf16", target="sm_90"):
    return next(x for x in LAUNCHES if (x.name, x.precision) == (name, precision) and target in x.targets)


@pytest.mark.parametrize(("name", "target", "kernel"), [
    ("R32", "sm_90", "decode"),
    ("D64", "sm_80", "decode"),
    ("D64", "gfx942", "decode"),
    ("D16", "sm_90", "prefill"),
])  # fmt: skip
def test_one_row_of_each_kernel_passes_its_gates(name, target, kernel):
    report = decode_aot.examine(row(name, target=target), target, kernel)
    assert report.faults == ()
    assert report.matrix_instructions > 0
    assert 0 < report.shared <= aot.SHARED_LIMIT[target]


def test_weights_read_inside_the_loop_are_seen():
    """A tile of 64 rows whose weights are streamed is what a resident one becomes when its loads are not hoisted."""
    streamed = dataclasses.replace(row("R16"), resident=False)
    ttgir = decode_aot.compile_row(streamed, "sm_90").asm["ttgir"]
    assert "the loop reads weights" in decode_aot.residency_faults(ttgir)
    spilled = dataclasses.replace(decode_aot.Report("sm_90", "R16", "decode", "bf16", 64, 4), spilled=8, instructions=900)
    assert "8 bytes spilled" in decode_aot.faults_of(row("R16"), spilled)[-1]


@pytest.mark.parametrize("module", ["loopkernels.aot", "loopkernels.decode_aot"])
def test_nothing_is_compiled_for_the_interpreter(module):
    """It is chosen when Triton is imported: taking the variable away afterwards does not help."""
    interpreted = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", module, "--kernel", "none"]
    done = subprocess.run(command, env=interpreted, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == f"{module}: TRITON_INTERPRET is set, with which Triton has nothing to compile; unset it"


def block(width, n_layers, n_heads=4):
    def linear(n_out, n_in):
        return torch.zeros(n_out, n_in), None

    layer = Layer(
        (None, None),
        linear(3 * width, width),
        linear(width, width),
        (None, None),
        linear(4 * width, width),
        linear(width, 4 * width),
    )
    return Block((layer,) * n_layers, n_heads, width // n_heads)


def test_weights_are_held_where_they_fit():
    for width, n_core, name in (
        (64, 1, "R64"),
        (64, 2, "D64"),
        (32, 3, "R32"),
        (32, 4, "D32"),
        (20, 1, "R32"),
        (128, 1, "D128"),
    ):
        assert decode_launch.choose(block(width, n_core), n_core, "bf16", "sm_90").name == name
    assert decode_launch.choose(block(64, 3), 1, "bf16", "sm_90").name == "R64"  # prelude and coda are read once a token
    assert decode_launch.choose(block(64, 1), 1, "bf16", "sm_80").name == "D64"
    assert decode_launch.choose(block(64, 1), 1, "tf32", "gfx942") is None
    assert decode_launch.choose(block(512, 1), 1, "bf16", "sm_90") is None
    assert decode_launch.choose(block(256, 1), 1, "bf16", "sm_90").name == "D256"
    assert decode_launch.choose(block(256, 1, n_heads=2), 1, "bf16", "sm_90") is None  # heads of 128 lanes were not compiled


def test_slots_of_a_policy():
    for policy, period, slots in (
        ("per_loop", 1, [1, 3, 8]),
        ("last_only", 1, [1, 1, 1]),
        ("modulo", 3, [1, 3, 3]),
        ("first_then_shared", 1, [1, 2, 2]),
    ):
        layout = Layout(1, 2, 3, policy=policy, period=period)
        assert [layout.slots_of_core(n) for n in (1, 3, 8)] == slots
        assert [layout.slots(n) for n in (1, 3, 8)] == [4 + 2 * n for n in slots]


def test_the_launch_table_is_whole():
    """Every target has bf16 at every width up to 256 and bf16x3 up to 128; one streamed row answers a question."""
    for target in aot.TARGETS:
        for precision, widths in (("bf16", {16, 32, 64, 128, 256}), ("bf16x3", {16, 32, 64, 128})):
            assert widths <= {x.width for x in LAUNCHES if target in x.targets and x.precision == precision}
        keys = [(x.width, x.precision) for x in LAUNCHES if target in x.targets and not x.resident]
        assert len(keys) == len(set(keys))
    for launch in LAUNCHES:
        assert launch.precision != "bf16" or len({target[:3] for target in launch.targets}) == 1  # one vendor's tanh
        assert launch.rows >= 16
        assert launch.block_rows % 16 == 0
        assert launch.keys(16) * 16 <= launch.key_lanes


def test_more_rows_than_a_chip_has_places_share_tiles(monkeypatch):
    """Few rows spread over the chip, many share tiles, none more than a tile holds."""

    class Chip:
        multi_processor_count = 100

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: Chip)
    device = torch.device("cuda")
    assert [decode_launch.per_tile(row("D64"), n, device) for n in (1, 100, 101, 900, 9000)] == [1, 1, 2, 16, 16]
    assert decode_launch.per_tile(row("R64"), 9000, device) == 64
