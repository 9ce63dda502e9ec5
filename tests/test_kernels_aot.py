"""The Triton kernels compiled ahead of time, for chips that are not here: `make kernels` compiles the whole launch table."""

import dataclasses
import importlib.util
import os
import subprocess
import types

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("an interpreted function cannot be compiled", allow_module_level=True)

from loopkernels import aot, table
from loopkernels.launch import LAUNCHES, MOST_TOKENS, Block, Layer, choose


def row(name, precision="bf16", target="sm_90"):
    return next(x for x in LAUNCHES if (x.name, x.precision) == (name, precision) and target in x.targets)


@pytest.mark.parametrize(("name", "target", "kernel", "head"), [
    ("R64", "sm_90", "tile", 16),
    ("R64", "sm_90", "tile", 32),
    ("S128", "sm_90", "blocks", 32),
    ("S128", "sm_90", "blocks", 64),
    ("S64", "sm_80", "tile", 32),
    ("S64", "gfx942", "tile", 16),
])  # fmt: skip
def test_one_row_of_each_kernel_passes_its_gates(name, target, kernel, head):
    launch = row(name, target=target)
    assert head in aot.heads_of(launch)
    report = aot.examine(launch, target, kernel, head)
    assert report.faults == ()
    assert report.head == head
    assert report.matrix_instructions > 0
    assert 0 < report.shared <= aot.SHARED_LIMIT[target]


@pytest.mark.parametrize("activation", ["gelu", "silu_gated"])
def test_resident_weights_with_every_activation(activation):
    """What the interpreter does not see: an index into weights that are held must be known when the kernel is compiled."""
    report = aot.examine(row("R16"), "sm_90", "tile", ACT=activation)
    assert report.faults == ()
    assert report.matrix_instructions > 0


@pytest.mark.parametrize("name", aot.SMALL)
def test_the_kernels_beside_the_fused_ones(name):
    assert aot.examine_small(name, "sm_90").faults == ()


def test_what_a_target_does_not_offer_is_told(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["aot", "--target", "sm_80", "--kernel", "R64"])
    with pytest.raises(SystemExit) as end:
        aot.main()
    assert not end.value.code
    assert "R64  bf16  not offered: the matrix unit takes no operands from shared memory" in capsys.readouterr().out
    for names, precision, targets, _ in table.NOT_OFFERED:
        for name in names.split():
            for target in targets:
                assert table.why_not_offered(int(name[1:]), precision, target) or name[0] == "R"
                assert not [x for x in LAUNCHES if (x.name, x.precision) == (name, precision) and target in x.targets]
    monkeypatch.setattr("sys.argv", ["aot", "--target", "sm_80", "--kernel", "S9"])
    with pytest.raises(SystemExit, match="nothing to compile"):
        aot.main()


def test_every_row_is_offered_or_its_absence_explained():
    for target in aot.TARGETS:
        for precision in table.PRECISIONS:
            for width in (16, 32, 64, 128, 256):
                is_there = any(x.width == width and x.precision == precision and target in x.targets for x in LAUNCHES)
                assert is_there or table.why_not_offered(width, precision, target)


def test_a_budget_is_of_a_row_that_there_is():
    for entry in aot.SPILL_BUDGET:
        target, name, precision, kernel = entry.split()
        assert kernel in ("tile", "blocks")
        row(name, precision, target)


def test_a_row_takes_no_head_wider_than_it_is_compiled_with():
    weight = torch.zeros(1, 1)
    for launch in LAUNCHES:
        assert aot.heads_of(launch)[-1] == launch.widest_head
        for target in launch.targets:
            for head, fits in ((launch.widest_head - 1, True), (launch.widest_head, True), (launch.widest_head + 1, False)):
                layer = Layer(
                    (None, None), (weight.expand(3 * head, launch.width), None), *[(weight.expand(launch.width, 8), None)] * 4
                )
                found = choose(Block((layer,), n_heads=1, head_dim=head), launch.precision, target)
                assert (found is not None) == fits
                assert not fits or head <= found.widest_head


def test_spills_are_counted_in_bytes_on_amd():
    text = """
        .private_segment_fixed_size: 432
        .sgpr_spill_count: 0
        .vgpr_count:     256
        .vgpr_spill_count: 115
    """
    report = aot.Report("gfx942", "S64", "blocks", "bf16", 64, 8)
    aot._read_amdgcn(text, report)
    assert (report.registers, report.spilled, report.unread) == (256, 432, ())


def test_an_account_without_a_figure_is_a_fault(monkeypatch):
    for target, read, missing in (
        ("gfx942", lambda report: aot._read_amdgcn("v_mfma", report), ["registers", "scratch memory"]),
        ("sm_90", lambda report: aot._read_advice("", "sm_90", report), ["spill stores", "spill loads"]),
        ("sm_90", lambda report: aot._read_cubin(b"", report), ["registers"]),
    ):
        quiet = subprocess.CompletedProcess([], 0, "", "")
        monkeypatch.setattr(aot, "subprocess", types.SimpleNamespace(run=lambda *args, quiet=quiet, **kwargs: quiet))
        report = aot.Report(target, "S64", "tile", "bf16", 64, 4)
        read(report)
        report = dataclasses.replace(report, matrix_instructions=26, instructions=3000)
        assert aot.faults_of(row("S64", target=target), report) == [f"the compiler's account has no {what}" for what in missing]


def test_gates_see_what_is_wrong():
    good = aot.Report("sm_90", "S64", "tile", "bf16", 64, 4, 16, 200, 0, 40_000, 0, 26, 9, 3000)
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
