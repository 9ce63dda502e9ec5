"""Compiles the kernels for a named GPU on a machine without one, reads what the compiler made of them, and fails where a gate does.

    python -m loopkernels.aot --target sm_90 --kernel all

Needs Triton's compiler and its bundled tools, no driver. TRITON_INTERPRET must not be set: an interpreted function has no binary.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loopkernels.launch import LAUNCHES, Launch
from loopkernels.loop import COUNTS, loop_tile

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
SHARED_LIMIT = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536, "gfx950": 163_840}
TENSOR_MEMORY_LIMIT = 512
MATRIX_INSTRUCTION = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTC[A-Z]*MMA", "gfx942": "v_mfma", "gfx950": "v_mfma"}
FORBIDDEN_ADVICE = ("C7510", "C7511", "C7514", "C7515", "C7519")
LEAST_INSTRUCTIONS = 500  # a kernel that asks too much tensor memory compiles to an empty trap, silently


@dataclass
class Report:
    """What one launch row compiled to."""

    target: str
    kernel: str
    precision: str
    rows: int
    warps: int
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    tensor_memory: int = 0
    matrix_instructions: int = 0
    waits: int = 0
    instructions: int = 0
    seconds: float = 0.0
    faults: tuple[str, ...] = ()


def signature_of(launch: Launch, sizes: dict[str, int]) -> dict[str, str]:
    """Types of the run-time arguments of `loop_tile`."""
    element = "bf16" if launch.precision.startswith("bf16") else "fp32"
    CP, HP, KC = sizes["CP"], sizes["HP"], sizes["KC"]
    shapes = {"w_in": (HP, CP), "w_out": (CP, HP), "w_up": (KC, CP), "w_down": (CP, KC)}
    types = dict.fromkeys(("ints", "order", "lengths", "queue"), "*i32") | dict.fromkeys(("tol", "phi", "read_bias"), "fp32")
    types |= dict.fromkeys(COUNTS, "i32")
    for name, (rows, columns) in shapes.items():
        types[name] = f"tensordesc<{element}[{rows},{columns}]>" if launch.tma else f"*{element}"
    return types


def compile_row(launch: Launch, target: str, n_heads: int | None = None, slots: int = 1, **fixed: Any) -> Any:
    """The compiled kernel of a launch row for its widest block. `fixed` changes compile-time arguments."""
    C = launch.width
    H = n_heads or max(1, C // 32 if C > 64 else C // 16)
    sizes = dict(C=C, CP=C, H=H, HP=max(16, C // H), FP=4 * C, KC=min(launch.chunk, 4 * C), N_CORE=1)
    constants = dict(
        **sizes, M=launch.rows, NSLOT=slots, NORM="layernorm", EPS=1e-5, ACT="gelu_tanh", CAUSAL=True, INJECT="add", HAS_POS=False,
        LOOP_NORM="each", READ=0, STRIDE=1, RULE="contraction", ON_STALL="exit", ENDLESS=False, PREC=launch.precision, EMULATE=False,
        FAST=launch.precision == "bf16" and target.startswith("sm_"), TMA=launch.tma, RESIDENT=launch.resident, HOLD=launch.hold,
        STAGES=launch.stages,
    )  # fmt: skip
    constants |= fixed
    types = signature_of(launch, sizes)
    names = loop_tile.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(loop_tile, signature, {(names.index(k),): v for k, v in constants.items()}, attrs)
    options = dict(num_warps=launch.warps, num_stages=launch.stages)
    if launch.maxnreg and target.startswith("sm_"):
        options["maxnreg"] = launch.maxnreg
    return triton.compile(source, target=TARGETS[target], options=options)


def examine(launch: Launch, target: str, **changes: Any) -> Report:
    """Compile one row and read its figures."""
    report = Report(target, launch.name, launch.precision, launch.rows, launch.warps)
    began = time.time()
    kernel = compile_row(launch, target, **changes)
    report.seconds = time.time() - began
    report.shared = kernel.metadata.shared
    report.tensor_memory = getattr(kernel.metadata, "tmem_size", 0) or 0
    if target.startswith("sm_"):
        _read_cubin(kernel.asm["cubin"], report)
    else:
        _read_amdgcn(kernel.asm["amdgcn"], report)
    report.faults = tuple(_faults(launch, report))
    return report


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _read_cubin(cubin: bytes, report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = subprocess.run([_tool("cuobjdump"), "-res-usage", path], capture_output=True, text=True).stdout
        code = subprocess.run([_tool("nvdisasm"), "-c", path], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found:
        report.registers, report.spilled = int(found[1]), int(found[2])
    report.matrix_instructions = len(re.findall(rf"\b{MATRIX_INSTRUCTION[report.target]}", code))
    report.waits = len(re.findall(r"WARPGROUP\.DEPBAR", code))
    report.instructions = len(re.findall(r"/\*[0-9a-f]{4,}\*/ ", code))


def _read_amdgcn(text: str, report: Report) -> None:
    for name, pattern in (("registers", r"\.vgpr_count:\s+(\d+)"), ("spilled", r"\.vgpr_spill_count:\s+(\d+)")):
        found = re.search(pattern, text)
        setattr(report, name, int(found[1]) if found else 0)
    report.matrix_instructions = len(re.findall(MATRIX_INSTRUCTION[report.target], text))
    report.instructions = len(re.findall(r"^\s+[svdb][a-z_]*_", text, re.MULTILINE))


def _faults(launch: Launch, report: Report) -> list[str]:
    faults = []
    if report.shared > SHARED_LIMIT[report.target]:
        faults.append(f"{report.shared} bytes of shared memory, the chip has {SHARED_LIMIT[report.target]}")
    if report.tensor_memory > TENSOR_MEMORY_LIMIT:
        faults.append(f"{report.tensor_memory} columns of tensor memory, the chip has {TENSOR_MEMORY_LIMIT}")
    if report.matrix_instructions == 0 and report.precision != "fp32":
        faults.append("no matrix instruction")
    if report.instructions < LEAST_INSTRUCTIONS:
        faults.append(f"{report.instructions} instructions: an empty kernel")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sm_90", help=f"{', '.join(TARGETS)} or all")
    parser.add_argument("--kernel", default="all", help="a row's name, such as S256, or all")
    parser.add_argument("--precision", default="all")
    parser.add_argument("--json", help="write the reports to a file")
    chosen = parser.parse_args()
    reports = []
    for target in TARGETS if chosen.target == "all" else [chosen.target]:
        for launch in LAUNCHES:
            if target in launch.targets and chosen.kernel in ("all", launch.name) and chosen.precision in ("all", launch.precision):
                reports.append(examine(launch, target))
                print_report(reports[-1])
    if chosen.json:
        Path(chosen.json).write_text(json.dumps([dataclasses.asdict(report) for report in reports], indent=1) + "\n")
    sys.exit(any(report.faults for report in reports))


def print_report(report: Report) -> None:
    values = [f"{v}" for k, v in dataclasses.asdict(report).items() if k not in ("faults", "seconds")]
    print("  ".join(values), f"{report.seconds:.0f} s", "; ".join(report.faults) or "ok", flush=True)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
