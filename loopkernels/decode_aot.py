"""Compiles the decode kernels for a named GPU on a machine without one, as `loopkernels.aot` does the loop kernels.

    python -m loopkernels.decode_aot --target sm_90 --kernel all

Each row of the table is compiled as `decode`, which is `decode_tile`, and as `prefill`, which is `prefill_blocks`, with heads
of the usual width and of the widest that it takes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource

from loopkernels import aot
from loopkernels.aot import Report, print_report
from loopkernels.decode import COUNTS as DECODE_COUNTS
from loopkernels.decode import decode_tile
from loopkernels.decode_launch import LAUNCHES, DecodeLaunch
from loopkernels.prefill import COUNTS as PREFILL_COUNTS
from loopkernels.prefill import prefill_blocks

KERNELS = {"decode": (decode_tile, DECODE_COUNTS), "prefill": (prefill_blocks, PREFILL_COUNTS)}
# A tile of 16 or 32 rows is too small for the instructions of Hopper's warp groups and Blackwell's tensor memory.
MATRIX_INSTRUCTION = aot.MATRIX_INSTRUCTION | {"sm_90": "HMMA|HGMMA", "sm_100": "HMMA|UTC[A-Z]*MMA"}
# Bytes that a kernel may spill (`aot.Report.spilled`), with heads of any width; none where it is not named. What Triton 3.9
# makes of it, rounded up.
SPILL_BUDGET: dict[str, int] = {
    "sm_90 R64 bf16 decode": 768,
    "sm_90 D128 bf16 prefill": 80,
    "sm_90 D256 bf16 decode": 96,
    "sm_90 D32 bf16x3 prefill": 80,
    "sm_90 D256 bf16x3 decode": 1280,
    "sm_90 D256 bf16x3 prefill": 192,
    "sm_90 D256 tf32 decode": 2528,
    "sm_90 D64 fp32 prefill": 272,
    "sm_90 D128 fp32 decode": 1968,
    "sm_90 D128 fp32 prefill": 1600,
    "sm_100 R64 bf16 decode": 736,
    "sm_100 D128 bf16 decode": 160,
    "sm_100 D256 bf16 decode": 64,
    "sm_100 D32 bf16x3 prefill": 96,
    "sm_100 D256 bf16x3 decode": 1312,
    "sm_100 D256 bf16x3 prefill": 208,
    "sm_100 D256 tf32 decode": 2576,
    "sm_100 D128 fp32 decode": 1920,
    "sm_100 D128 fp32 prefill": 1600,
    "sm_80 D256 bf16 decode": 336,
    "sm_80 D256 bf16 prefill": 208,
    "sm_80 D128 bf16x3 decode": 304,
    "sm_80 D256 bf16x3 decode": 3568,
    "sm_80 D256 bf16x3 prefill": 384,
    "sm_80 D128 tf32 decode": 176,
    "sm_80 D256 tf32 decode": 2720,
    "sm_80 D64 fp32 decode": 80,
    "sm_80 D128 fp32 decode": 2368,
    "sm_80 D128 fp32 prefill": 1408,
    "gfx942 D256 bf16 decode": 112,
    "gfx942 D64 bf16x3 decode": 512,
    "gfx942 D64 bf16x3 prefill": 112,
    "gfx942 D128 bf16x3 decode": 1264,
    "gfx942 D128 bf16x3 prefill": 288,
    "gfx942 D64 fp32 decode": 608,
    "gfx942 D64 fp32 prefill": 176,
    "gfx950 D256 bf16 decode": 48,
    "gfx950 D256 bf16 prefill": 32,
    "gfx950 D64 bf16x3 decode": 592,
    "gfx950 D64 bf16x3 prefill": 112,
    "gfx950 D128 bf16x3 decode": 224,
    "gfx950 D128 bf16x3 prefill": 160,
    "gfx950 D64 fp32 decode": 640,
    "gfx950 D64 fp32 prefill": 160,
}


def constants_of(launch: DecodeLaunch, target: str, kernel: str, head: int | None = None) -> dict[str, Any]:
    """Compile-time arguments for a row's widest model: a looped language model of one core layer that judges every token.
    head: lanes of its heads, the usual ones where it is None."""
    C, HP = launch.width, head or aot.heads_of(launch)[0]
    constants = dict(
        C=C, CP=C, H=C // HP, D=HP, HP=HP, FP=4 * C, KC=min(launch.chunk, 4 * C), N_PRELUDE=0, N_CORE=1, N_CODA=0,
        POLICY="per_loop", PERIOD=1, NORM="layernorm", EPS=1e-5, ACT="gelu_tanh", INJECT="add", INIT="zeros", POS="each_loop",
        LOOP_NORM="each", RULE="contraction", ENDLESS=False, PREC=launch.precision, EMULATE=False,
        FAST=launch.precision == "bf16" and target.startswith("sm_"), STAGES=launch.stages, WARM=False, KEEP=False,
    )  # fmt: skip
    if kernel == "decode":
        return constants | dict(M=launch.rows, KEYS=launch.keys(HP), RESIDENT=launch.resident)
    return constants | dict(M=launch.block_rows, KEYS=launch.block_keys)


def signature_of(launch: DecodeLaunch, kernel: str) -> dict[str, str]:
    """Types of the run-time arguments."""
    weights = "*bf16" if launch.precision.startswith("bf16") else "*fp32"
    cached = "*bf16" if launch.precision == "bf16" else "*fp32"
    types = dict.fromkeys(("seats", "loops", "order", "first", "counts", "lengths", "used", "marks"), "*i32")
    types |= dict.fromkeys(("w_in", "w_out", "w_up", "w_down"), weights) | dict.fromkeys(("keys", "values"), cached)
    return types | dict.fromkeys(("tol", "phi"), "fp32") | dict.fromkeys(KERNELS[kernel][1], "i32")


def warps_of(launch: DecodeLaunch, kernel: str) -> int:
    return launch.warps if kernel == "decode" else launch.block_warps


def compile_row(launch: DecodeLaunch, target: str, kernel: str = "decode", head: int | None = None, **changes: Any) -> Any:
    """The compiled kernel of a launch row, ``"decode"`` or ``"prefill"``. `changes` replaces compile-time arguments."""
    constants = constants_of(launch, target, kernel, head) | changes
    function = KERNELS[kernel][0]
    types, names = signature_of(launch, kernel), function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(function, signature, {(names.index(k),): v for k, v in constants.items()}, attrs)
    options = dict(num_warps=warps_of(launch, kernel), num_stages=launch.stages)
    return triton.compile(source, target=aot.TARGETS[target], options=options)


def examine(launch: DecodeLaunch, target: str, kernel: str = "decode", head: int | None = None, **changes: Any) -> Report:
    """Compile one row and read its figures."""
    head = head or aot.heads_of(launch)[0]
    rows = launch.rows if kernel == "decode" else launch.block_rows
    report = Report(target, launch.name, kernel, launch.precision, rows, warps_of(launch, kernel), head)
    began = time.time()
    compiled = compile_row(launch, target, kernel, head, **changes)
    report.seconds = time.time() - began
    aot.read(compiled, report)
    if target.startswith("sm_"):
        report.matrix_instructions = count_matrix_instructions(compiled.asm["cubin"], target)
    report.faults = tuple(faults_of(launch, report))
    if kernel == "decode" and launch.resident:
        report.faults += tuple(residency_faults(compiled.asm["ttgir"]))
    return report


def count_matrix_instructions(cubin: bytes, target: str) -> int:
    """Warp-level ones too."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        code = subprocess.run([aot.tool("nvdisasm"), "-c", path], capture_output=True, text=True).stdout
    return len(re.findall(rf"\b(?:{MATRIX_INSTRUCTION[target]})", code))


def residency_faults(ttgir: str) -> list[str]:
    """What speaks against weights that are read before the loop and stay on the chip: the loop may read keys, values and rows
    of biases, but no matrix of bfloat16."""
    lines = ttgir.splitlines()
    start, end = max(aot.loops_of(lines), key=lambda span: span[1] - span[0], default=(0, 0))
    matrix = re.compile(r"(tt\.load|async_copy_global_to_local).*tensor<\d+x\d+x(?:!tt\.ptr<)?bf16")
    faults = [] if any(matrix.search(line) for line in lines[:start]) else ["no weights are read before the loop"]
    return faults + (["the loop reads weights"] if any(matrix.search(line) for line in lines[start:end]) else [])


def faults_of(launch: DecodeLaunch, report: Report) -> list[str]:
    """The gates that a compiled row does not pass."""
    faults = aot.faults_of(launch, dataclasses.replace(report, spilled=0))
    budget = SPILL_BUDGET.get(f"{report.target} {report.row} {report.precision} {report.kernel}", 0)
    budget += 0 if aot.VERSION >= (3, 9) else aot.OLDER_SPILLS
    if report.spilled > budget:
        faults.append(f"{report.spilled} bytes spilled, the budget is {budget}")
    return faults


def main() -> None:
    aot.refuse_interpreter("loopkernels.decode_aot")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sm_90", help=f"{', '.join(aot.TARGETS)} or all")
    parser.add_argument("--kernel", default="all", help="a row's name, such as D256, or all")
    parser.add_argument("--precision", default="all")
    parser.add_argument("--json", help="write the reports to a file")
    chosen = parser.parse_args()
    reports = []
    for target in aot.TARGETS if chosen.target == "all" else [chosen.target]:
        for launch in LAUNCHES:
            is_asked = chosen.kernel in ("all", launch.name) and chosen.precision in ("all", launch.precision)
            if target in launch.targets and is_asked:
                for head, kernel in itertools.product(aot.heads_of(launch), KERNELS):
                    reports.append(examine(launch, target, kernel, head))
                    print_report(reports[-1])
    if chosen.json:
        Path(chosen.json).write_text(json.dumps([dataclasses.asdict(report) for report in reports], indent=1) + "\n")
    sys.exit(any(report.faults for report in reports))


if __name__ == "__main__":
    main()
