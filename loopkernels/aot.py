"""Compiles the kernels for a named GPU on a machine without one, reads what the compiler made of them, and fails where a gate
does.

    python -m loopkernels.aot --target sm_90 --kernel all

Needs Triton's compiler and its bundled tools, no driver. TRITON_INTERPRET must not be set: an interpreted function has no
binary.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from loopkernels.linear import linear_rows
from loopkernels.loop import COUNTS, loop_blocks, loop_tile
from loopkernels.settle import BLOCK, LANES, MOST_CHUNKS, advance, decide, measure
from loopkernels.table import LAUNCHES, NOT_OFFERED, VERSION, Launch, why_not_compiled

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
ALLOWED_BEFORE_39 = ("C7519",)  # assembler 12.8 adds a fence where 13.4 does not; products in a row are counted by their waits
# Bytes that a kernel may spill (`Report.spilled`), with heads of any width; none where it is not named. What Triton 3.9 makes
# of it, rounded up to 256. Most are a few registers, in row blocks. Kilobytes: bf16x3 at 256 lanes, where the stream and two
# parts of its operand fill the registers of 8 warps, and no tile of fewer rows goes through Hopper's matrix unit; fp32 at 128
# lanes, which is for checks alone.
SPILL_BUDGET: dict[str, int] = {
    "sm_90 S256 bf16 tile": 256,
    "sm_90 S256 bf16 blocks": 768,
    "sm_90 S64 bf16x3 tile": 256,
    "sm_90 S128 bf16x3 tile": 1280,
    "sm_90 S128 bf16x3 blocks": 768,
    "sm_90 S256 bf16x3 tile": 3328,
    "sm_90 S256 bf16x3 blocks": 4864,
    "sm_90 S32 tf32 blocks": 256,
    "sm_90 S64 tf32 blocks": 256,
    "sm_90 S128 tf32 tile": 256,
    "sm_90 S128 tf32 blocks": 1280,
    "sm_90 S16 fp32 blocks": 256,
    "sm_90 S32 fp32 tile": 256,
    "sm_90 S128 fp32 tile": 1536,
    "sm_90 S128 fp32 blocks": 1792,
    "sm_100 R64 bf16 tile": 512,
    "sm_100 S64 bf16 tile": 256,
    "sm_100 S256 bf16 tile": 512,
    "sm_100 S256 bf16 blocks": 512,
    "sm_100 S64 bf16x3 blocks": 512,
    "sm_100 S128 bf16x3 tile": 512,
    "sm_100 S128 bf16x3 blocks": 768,
    "sm_100 S256 bf16x3 tile": 2048,
    "sm_100 S256 bf16x3 blocks": 2816,
    "sm_100 S64 tf32 blocks": 256,
    "sm_100 S128 tf32 blocks": 256,
    "sm_100 S16 fp32 blocks": 256,
    "sm_100 S128 fp32 tile": 1536,
    "sm_100 S128 fp32 blocks": 1792,
    "sm_80 S64 bf16 blocks": 256,
    "sm_80 S128 bf16 tile": 768,
    "sm_80 S128 bf16 blocks": 512,
    "sm_80 S256 bf16 blocks": 256,
    "sm_80 S32 bf16 blocks": 256,
    "sm_80 S32 bf16x3 blocks": 768,
    "sm_80 S64 bf16x3 tile": 768,
    "sm_80 S64 bf16x3 blocks": 1024,
    "sm_80 S256 bf16x3 tile": 1024,
    "sm_80 S256 bf16x3 blocks": 512,
    "sm_80 S32 tf32 blocks": 1024,
    "sm_80 S64 tf32 tile": 768,
    "sm_80 S64 tf32 blocks": 768,
    "sm_80 S128 tf32 tile": 256,
    "sm_80 S128 tf32 blocks": 256,
    "sm_80 S128 fp32 tile": 1280,
    "sm_80 S128 fp32 blocks": 1792,
    "gfx942 S16 bf16 blocks": 256,
    "gfx942 S32 bf16 blocks": 512,
    "gfx942 S64 bf16 blocks": 512,
    "gfx942 S128 bf16 tile": 512,
    "gfx942 S128 bf16 blocks": 768,
    "gfx942 S256 bf16 tile": 256,
    "gfx942 S256 bf16 blocks": 512,
    "gfx942 S32 bf16x3 blocks": 512,
    "gfx942 S64 bf16x3 blocks": 512,
    "gfx942 S128 bf16x3 tile": 768,
    "gfx942 S128 bf16x3 blocks": 768,
    "gfx942 S256 bf16x3 tile": 768,
    "gfx942 S256 bf16x3 blocks": 512,
    "gfx942 S64 fp32 blocks": 256,
    "gfx942 S128 fp32 blocks": 256,
    "gfx950 S16 bf16 blocks": 256,
    "gfx950 S32 bf16 blocks": 512,
    "gfx950 S64 bf16 blocks": 1024,
    "gfx950 S128 bf16 tile": 512,
    "gfx950 S128 bf16 blocks": 1024,
    "gfx950 S256 bf16 tile": 256,
    "gfx950 S256 bf16 blocks": 512,
    "gfx950 S16 bf16x3 blocks": 256,
    "gfx950 S32 bf16x3 blocks": 512,
    "gfx950 S64 bf16x3 blocks": 512,
    "gfx950 S128 bf16x3 tile": 256,
    "gfx950 S128 bf16x3 blocks": 768,
    "gfx950 S256 bf16x3 tile": 256,
    "gfx950 S256 bf16x3 blocks": 512,
    "gfx950 S64 fp32 blocks": 256,
    "gfx950 S128 fp32 blocks": 256,
}
OLDER_SPILLS = 2048  # bytes that Triton before 3.9 may spill beyond a row's budget; its register counts move by tens
# Kernels beside the fused ones: no matrix unit asked for, no row of the table, and nothing to spill.
SMALL: dict[str, tuple[Any, dict[str, Any]]] = {
    "measure": (measure, dict(BLOCK=BLOCK)),
    "decide": (decide, dict(LANES=LANES, CHUNKS=MOST_CHUNKS, RULE="contraction", ON_STALL="damp", ENDLESS=False)),
    "advance": (advance, dict(BLOCK=BLOCK, DAMPS=True)),
    "linear": (linear_rows, dict(ROWS=32, COLUMNS=32, KB=32)),
}
LEAST_INSTRUCTIONS = 500  # a kernel that asks too much tensor memory compiles to an empty trap, silently
LEAST_SMALL_INSTRUCTIONS = 50


@dataclass
class Report:
    """What one launch row compiled to.

    head: lanes of a head. spilled: bytes of a thread; on NVIDIA those that spills store and load, by the assembler's account;
    on AMD its scratch memory, where spilled registers stand. unread: figures that the account does not give.
    """

    target: str
    row: str
    kernel: str
    precision: str
    rows: int
    warps: int
    head: int = 0
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    tensor_memory: int = 0
    matrix_instructions: int = 0
    waits: int = 0
    instructions: int = 0
    advice: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    seconds: float = 0.0
    faults: tuple[str, ...] = ()


def signature_of(launch: Launch, sizes: dict[str, Any]) -> dict[str, str]:
    """Types of the run-time arguments."""
    element = "bf16" if launch.precision.startswith("bf16") else "fp32"
    by_descriptor = launch.tma and not sizes.get("RESIDENT")
    CP, HP, KC = sizes["CP"], sizes["HP"], sizes["KC"]
    shapes = {"w_in": (HP, CP), "w_out": (CP, HP), "w_up": (KC, CP), "w_down": (CP, KC)}
    types = dict.fromkeys(("ints", "order", "lengths", "queue"), "*i32") | dict.fromkeys(("tol", "phi", "read_bias"), "fp32")
    types |= dict.fromkeys(COUNTS, "i32")
    for name, (rows, columns) in shapes.items():
        types[name] = f"tensordesc<{element}[{rows},{columns}]>" if by_descriptor else f"*{element}"
    types["keys"] = f"*{element}"
    return types


def heads_of(launch: Launch) -> tuple[int, ...]:
    """Lanes of the heads that a row is compiled with: the usual ones, and the widest."""
    return tuple(sorted({32 if launch.width > 64 else 16, launch.widest_head}))


def constants_of(launch: Launch, target: str, kernel: str, head: int | None) -> dict[str, Any]:
    """Compile-time arguments for a row's widest block: the looped in-context learner's, with the exit rule it is evaluated
    with. head: its lanes, the usual ones where it is None."""
    C, HP = launch.width, head or heads_of(launch)[0]
    constants = dict(
        C=C, CP=C, H=max(1, C // HP), HP=HP, FP=4 * C, KC=min(launch.chunk, 4 * C), N_CORE=1, M=launch.rows, NORM="layernorm",
        EPS=1e-5, ACT="gelu_tanh", CAUSAL=True, INJECT="add", HAS_POS=False, LOOP_NORM="each", READ=0, STRIDE=1,
        RULE="contraction", ON_STALL="exit", ENDLESS=False, PREC=launch.precision, EMULATE=False,
        FAST=launch.precision == "bf16" and target.startswith("sm_"), TMA=launch.tma, STAGES=launch.stages,
    )  # fmt: skip
    if kernel == "tile":
        return constants | dict(NSLOT=1, RESIDENT=launch.resident)
    return constants | dict(TP=-(-101 // launch.rows) * launch.rows)


def compile_row(launch: Launch, target: str, kernel: str = "tile", head: int | None = None, **changes: Any) -> Any:
    """The compiled kernel of a launch row: `loop_tile` or `loop_blocks`. `changes` replaces compile-time arguments."""
    constants = constants_of(launch, target, kernel, head) | changes
    function = loop_tile if kernel == "tile" else loop_blocks
    types = signature_of(launch, constants)
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(function, signature, {(names.index(k),): v for k, v in constants.items()}, attrs)
    warps = launch.warps if kernel == "tile" else launch.block_warps
    return triton.compile(source, target=TARGETS[target], options=dict(num_warps=warps, num_stages=launch.stages))


def examine(launch: Launch, target: str, kernel: str = "tile", head: int | None = None, **changes: Any) -> Report:
    """Compile one row and read its figures."""
    head = head or heads_of(launch)[0]
    warps = launch.warps if kernel == "tile" else launch.block_warps
    report = Report(target, launch.name, kernel, launch.precision, launch.rows, warps, head)
    began = time.time()
    compiled = compile_row(launch, target, kernel, head, **changes)
    report.seconds = time.time() - began
    read(compiled, report)
    report.faults = tuple(faults_of(launch, report))
    if kernel == "tile" and launch.resident:
        report.faults += tuple(residency_faults(compiled.asm["ttgir"]))
    return report


def examine_small(name: str, target: str) -> Report:
    """Compile one of the kernels beside the fused ones and read its figures."""
    function, constants = SMALL[name]
    report = Report(target, name, "small", "fp32", 0, 4)
    pointers = ("new", "old", "sums", "read_sums", "floats", "image", "state", "final", "source", "weight", "bias", "target")
    types = dict.fromkeys(pointers, "*fp32") | dict.fromkeys(("ints", "moves", "noted", "limit"), "*i32")
    types |= dict.fromkeys(("tol", "phi"), "fp32")
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(function, signature, {(names.index(k),): v for k, v in constants.items()}, attrs)
    began = time.time()
    compiled = triton.compile(source, target=TARGETS[target], options=dict(num_warps=4))
    report.seconds = time.time() - began
    read(compiled, report)
    report.faults = tuple(f"the compiler's account has no {what}" for what in report.unread)
    if report.spilled:
        report.faults += (f"{report.spilled} bytes spilled, the budget is 0",)
    if report.instructions < LEAST_SMALL_INSTRUCTIONS:
        report.faults += (f"{report.instructions} instructions: an empty kernel",)
    return report


def read(compiled: Any, report: Report) -> None:
    """The figures of a compiled kernel, into the report, which names its target."""
    report.shared = compiled.metadata.shared
    report.tensor_memory = getattr(compiled.metadata, "tmem_size", 0) or 0
    if report.target.startswith("sm_"):
        _read_cubin(compiled.asm["cubin"], report)
        _read_advice(compiled.asm["ptx"], report.target, report)
    else:
        _read_amdgcn(compiled.asm["amdgcn"], report)


def tool(name: str) -> str:
    """The path of a program of NVIDIA's that Triton brings."""
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _numbers(pattern: str, text: str, what: str, report: Report) -> list[int]:
    """The numbers in a compiler's account; [0], and noted in the report, where there is none."""
    found = [int(n) for n in re.findall(pattern, text)]
    if not found:
        report.unread += (what,)
    return found or [0]


def _read_cubin(cubin: bytes, report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = subprocess.run([tool("cuobjdump"), "-res-usage", path], capture_output=True, text=True).stdout
        code = subprocess.run([tool("nvdisasm"), "-c", path], capture_output=True, text=True).stdout
    report.registers = max(_numbers(r"REG:(\d+)", usage, "registers", report))
    report.matrix_instructions = len(re.findall(rf"\b{MATRIX_INSTRUCTION[report.target]}", code))
    report.waits = len(re.findall(r"WARPGROUP\.DEPBAR", code))
    report.instructions = len(re.findall(r"/\*[0-9a-f]{4,}\*/ ", code))


def _read_advice(ptx: str, target: str, report: Report) -> None:
    """Spills and warnings, from the account of the assembler that Triton takes, with Triton's options."""
    options = ["--regAllocOptLevel=2"] if VERSION >= (3, 9) else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        chip = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
        command = [get_ptxas(TARGETS[target].arch).path, "-v", *options, f"--gpu-name={chip[1] if chip else target}"]
        done = subprocess.run([*command, str(path), "-o", f"{folder}/kernel.cubin"], capture_output=True, text=True)
    said = done.stderr
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {said[-500:]}")
    report.spilled = sum(
        sum(_numbers(rf"(\d+) bytes spill {which}", said, f"spill {which}", report)) for which in ("stores", "loads")
    )
    report.advice = tuple(sorted(set(re.findall(r"C7\d\d\d", said))))


def residency_faults(ttgir: str) -> list[str]:
    """What speaks against weights that are laid into shared memory before the loop and stay there."""
    lines = ttgir.splitlines()
    start, end = max(loops_of(lines), key=lambda span: span[1] - span[0], default=(0, 0))
    faults = []
    if sum("ttg.local_alloc" in line and "= ttg.local_alloc %" in line for line in lines[:start]) < 6:
        faults.append("the weights are not in shared memory before the loop")
    inside = "\n".join(lines[start:end])
    if re.search(r"async_copy_global_to_local|async_tma_copy_global_to_local|descriptor_load", inside):
        faults.append("the loop reads weights")
    return faults


def loops_of(lines: list[str]) -> Iterator[tuple[int, int]]:
    """First and last line of every `scf.while`, both of its regions."""
    for start, line in enumerate(lines):
        if "scf.while" in line:
            closing = " " * (len(line) - len(line.lstrip())) + "}"
            for end in range(start + 1, len(lines)):
                if lines[end].startswith(closing) and not lines[end].startswith(closing + " do"):
                    yield start, end
                    break


def _read_amdgcn(text: str, report: Report) -> None:
    report.registers = max(_numbers(r"\.vgpr_count:\s+(\d+)", text, "registers", report))
    report.spilled = max(_numbers(r"\.private_segment_fixed_size:\s+(\d+)", text, "scratch memory", report))
    report.matrix_instructions = len(re.findall(MATRIX_INSTRUCTION[report.target], text))
    report.instructions = len(re.findall(r"^\s+[svdb][a-z_]*_", text, re.MULTILINE))


def faults_of(launch: Launch, report: Report) -> list[str]:
    """The gates that a compiled row does not pass."""
    faults = [f"the compiler's account has no {what}" for what in report.unread]
    if report.shared > SHARED_LIMIT[report.target]:
        faults.append(f"{report.shared} bytes of shared memory, the chip has {SHARED_LIMIT[report.target]}")
    if report.tensor_memory > TENSOR_MEMORY_LIMIT:
        faults.append(f"{report.tensor_memory} columns of tensor memory, the chip has {TENSOR_MEMORY_LIMIT}")
    if report.matrix_instructions == 0 and report.precision != "fp32":
        faults.append("no matrix instruction")
    if report.instructions < LEAST_INSTRUCTIONS:
        faults.append(f"{report.instructions} instructions: an empty kernel")
    if report.target == "sm_90" and report.waits > 0.75 * report.matrix_instructions > 0:
        faults.append(f"{report.waits} waits for {report.matrix_instructions} matrix instructions: serialised")
    allowed = () if VERSION >= (3, 9) else ALLOWED_BEFORE_39
    faults += [f"ptxas {code}" for code in report.advice if code in FORBIDDEN_ADVICE and code not in allowed]
    budget = SPILL_BUDGET.get(f"{report.target} {report.row} {report.precision} {report.kernel}", 0)
    budget += 0 if VERSION >= (3, 9) else OLDER_SPILLS
    if report.spilled > budget:
        faults.append(f"{report.spilled} bytes spilled, the budget is {budget}")
    return faults


def refuse_interpreter(program: str) -> None:
    """Ends a program that compiles, where Triton was imported for its interpreter: its kernels are Python functions then."""
    if not isinstance(loop_tile, triton.JITFunction):
        sys.exit(f"{program}: TRITON_INTERPRET is set, with which Triton has nothing to compile; unset it")


def main() -> None:
    refuse_interpreter("loopkernels.aot")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sm_90", help=f"{', '.join(TARGETS)} or all")
    parser.add_argument("--kernel", default="all", help=f"a row's name, such as S256, or all; or {', '.join(SMALL)}")
    parser.add_argument("--precision", default="all")
    parser.add_argument("--json", help="write the reports to a file")
    chosen = parser.parse_args()
    reports, n_told = [], 0
    for target in TARGETS if chosen.target == "all" else [chosen.target]:
        too_old = why_not_compiled(target)
        if too_old:
            print(f"{target}  {too_old}", flush=True)
            n_told += 1
        for launch in LAUNCHES:
            if (
                target in launch.targets
                and not too_old
                and chosen.kernel in ("all", launch.name)
                and chosen.precision in ("all", launch.precision)
            ):
                for head, kernel in itertools.product(heads_of(launch), ("tile", "blocks")):
                    reports.append(examine(launch, target, kernel, head))
                    print_report(reports[-1])
        for name in SMALL:
            if chosen.kernel in ("all", name) and chosen.precision == "all":
                reports.append(examine_small(name, target))
                print_report(reports[-1])
        for names, precision, targets, reason in NOT_OFFERED:
            for name in names.split() if target in targets else ():
                if chosen.kernel in ("all", name) and chosen.precision in ("all", precision):
                    print(f"{target}  {name}  {precision}  not offered: {reason}", flush=True)
                    n_told += 1
    if not reports and not n_told:
        sys.exit(f"nothing to compile: {chosen.target} has no row {chosen.kernel} in {chosen.precision}")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps([dataclasses.asdict(report) for report in reports], indent=1) + "\n")
    sys.exit(any(report.faults for report in reports))


def print_report(report: Report) -> None:
    values = [f"{v}" for k, v in dataclasses.asdict(report).items() if k not in ("unread", "seconds", "faults")]
    print("  ".join(values), f"{report.seconds:.0f} s", "; ".join(report.faults) or "ok", flush=True)


if __name__ == "__main__":
    main()
