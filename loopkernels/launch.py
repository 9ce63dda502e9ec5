"""Launchers: shape checks and the calls of the fused kernels.

The other half of what a backend needs stands beside this: `table` the launch table, `pack` the weights, `linear` read-in and
read-out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopkernels.linear import linear as linear
from loopkernels.loop import loop_blocks, loop_tile
from loopkernels.pack import Block as Block
from loopkernels.pack import Layer as Layer
from loopkernels.pack import Packed, padded
from loopkernels.pack import choose as choose
from loopkernels.pack import pack as pack
from loopkernels.stop import FLOATS, INTS
from loopkernels.table import LAUNCHES as LAUNCHES
from loopkernels.table import MOST_TOKENS as MOST_TOKENS
from loopkernels.table import Launch
from loopkernels.table import target_of as target_of
from loopkernels.table import why_not_compiled as why_not_compiled
from loopkernels.table import why_not_offered as why_not_offered


@dataclass(frozen=True)
class Stop:
    """When a prompt leaves the loop: docs/exits.md."""

    n_loops: int
    rule: str = "fixed"
    tol: float = 0.0
    phi: float = 0.0
    n_passes: int = 1
    check_every: int = 1
    min_loops: int = 0
    window: int = 16
    on_stall: str = "ignore"


def fresh_memory(n_prompts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`ints` and `floats` of prompts that have run no loop."""
    ints = torch.zeros(n_prompts, len(INTS), dtype=torch.int32, device=device)
    floats = torch.zeros(n_prompts, len(FLOATS), dtype=torch.float32, device=device)
    floats[:, :2] = math.nan
    floats[:, 2] = math.inf
    return ints, floats


@dataclass
class Looped:
    """What a launch leaves: F, Y' (None: F itself), the memory it changed, predictions [B, loops, N]."""

    final: Tensor
    going: Tensor | None
    ints: Tensor
    floats: Tensor
    last_read: Tensor | None
    reads: Tensor | None


def slot_rows(length: int, rows: int) -> int:
    """Rows that a prompt takes: the power of two that holds it, of a tile; or row blocks of a whole program, by its length
    alone."""
    return padded(length) if length <= rows else -(-length // rows) * rows


Groups = Sequence[tuple[int, Tensor]]


def groups_of(lengths: list[int], rows: int) -> Groups:
    """Prompts by the rows they take, most rows first: (rows, int32 on the CPU: numbers of prompts, longest first)."""
    found: dict[int, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        found.setdefault(slot_rows(lengths[i], rows), []).append(i)
    return [(rows, torch.tensor(members, dtype=torch.int32)) for rows, members in found.items()]


def programs_of(device: torch.device, launch: Launch, n_tiles: int) -> int:
    """Programs of a persistent grid."""
    if device.type == "cpu":  # the interpreter runs them one after another: the second finds an empty queue
        return min(n_tiles, 2)
    return max(1, min(n_tiles, torch.cuda.get_device_properties(device).multi_processor_count * launch.per_sm))


def _on_device(values: Tensor, device: torch.device) -> Tensor:
    """int32 on the device; without a copy from the host, which no CUDA graph can capture, where the values follow a rule."""
    if torch.equal(values, torch.arange(len(values), dtype=torch.int32)):
        return torch.arange(len(values), dtype=torch.int32, device=device)
    if bool((values == values[0]).all()):
        return torch.full((len(values),), int(values[0]), dtype=torch.int32, device=device)
    return values.to(device)


def most_steps(n_prompts: int, n_loops: int) -> int:
    """The watchdog: more loops than one program could run if it ran every prompt alone."""
    return min(2**31 - 1, n_prompts * n_loops + 1)


def _sources(packed: Packed, weights: list[Tensor]) -> list[Any]:
    """Descriptors of the weights, one tile each."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    CP, HP, KC = (packed.fixed[name] for name in ("CP", "HP", "KC"))
    shapes = [[HP, CP], [CP, HP], [KC, CP], [CP, KC]]
    return [TensorDescriptor.from_tensor(w, shape) for w, shape in zip(weights, shapes, strict=True)]


@torch.no_grad()
def run(
    packed: Packed,
    prompts: Tensor,
    start: Tensor,
    lengths: list[int],
    stop: Stop,
    memory: tuple[Tensor, Tensor] | None = None,
    final: Tensor | None = None,
    last_read: Tensor | None = None,
    first_loop: int = 0,
    keep_reads: bool = False,
    programs: int | None = None,
    groups: Groups | None = None,
) -> Looped:
    """All loops of all prompts: prompts P and start Y [B, T, C] float32, own tokens by `lengths`.

    groups: what `groups_of` finds, where the caller has it. memory: `ints` and `floats` of an earlier launch (not changed),
    with final its F; loops go on from there. first_loop: loops the least advanced prompt has behind it; predictions are kept
    from there on.
    """
    launch, fixed = packed.launch, packed.fixed
    B, T, _ = prompts.shape
    device = prompts.device
    prompts = prompts.contiguous()
    if packed.added is not None:
        prompts = prompts + packed.added[:T].to(prompts)
    start = start.contiguous()
    final = start.clone() if final is None else final.clone()
    going = start.clone() if stop.on_stall == "damp" else None
    ints, floats = fresh_memory(B, device) if memory is None else (memory[0].clone(), memory[1].clone())
    N = -(-T // fixed["STRIDE"])
    is_read = packed.read_weight is not None
    keeps = keep_reads and is_read
    reads = torch.full((B, max(stop.n_loops - first_loop, 0), N), math.nan, device=device) if keeps else None
    if stop.rule == "readout":
        last_read = torch.zeros(B, N, device=device) if last_read is None else last_read.clone()
    weights = [packed.w_in, packed.w_out, packed.w_up, packed.w_down]
    own = _on_device(torch.tensor(lengths, dtype=torch.int32), device)
    nothing = floats
    M = launch.rows
    for rows, members in groups_of(lengths, M) if groups is None else groups:
        is_tile = rows <= M
        n_slots = M // rows if is_tile else 1
        n_programs = programs or programs_of(device, launch, -(-len(members) // n_slots))
        by_descriptor = launch.tma and not (is_tile and launch.resident)
        sources = _sources(packed, weights) if by_descriptor else weights
        order = _on_device(members, device)
        queue = torch.zeros(1, dtype=torch.int32, device=device)
        before = torch.empty(n_programs, 2, max(M, rows), fixed["CP"], dtype=torch.float32, device=device)
        arguments = [
            prompts, start, final, final if going is None else going, before, ints, floats, order, own, queue,
            *sources, *(w.shape[0] // 2 for w in weights), packed.b_q, packed.b_out, packed.b_up, packed.b_down,
            packed.norm_scale, packed.norm_shift, nothing if packed.positions is None else packed.positions,
            packed.read_weight if is_read else nothing, packed.read_bias,
            nothing if last_read is None else last_read, nothing if reads is None else reads,
        ]  # fmt: skip
        counts = [
            len(members), T, stop.n_loops, first_loop, stop.check_every, stop.min_loops, stop.n_passes, stop.window,
            most_steps(len(members), stop.n_loops), 0.0 if math.isinf(stop.tol) else stop.tol, stop.phi,
        ]  # fmt: skip
        constants = fixed | dict(
            M=M, HAS_POS=packed.positions is not None, READ=2 if keeps else int(stop.rule == "readout"), RULE=stop.rule,
            ON_STALL=stop.on_stall, ENDLESS=math.isinf(stop.tol), num_stages=launch.stages, num_warps=launch.warps if is_tile
            else launch.block_warps,
        )  # fmt: skip
        if is_tile:
            loop_tile[(n_programs,)](*arguments, *counts, **constants, NSLOT=n_slots, RESIDENT=launch.resident)
        else:
            parts = 4 if launch.precision == "bf16x3" else 2
            keys = packed.w_in.new_empty(n_programs, parts, fixed["H"], rows, fixed["HP"])
            loop_blocks[(n_programs,)](*arguments, keys, *counts, **constants, TP=rows)
    return Looped(final, going, ints, floats, last_read, reads)


def with_stop(stop: Stop, **changes: Any) -> Stop:
    """A `Stop` with some entries changed."""
    return dataclasses.replace(stop, **changes)
