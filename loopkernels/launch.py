"""From a block's weights to a launch: packing, the launch table, shape checks, launchers.

`pack` folds what can be folded (norm affine, softmax scale, log2(e), value bias) in float64 and lays the weights out in the
tiles the kernels read. `LAUNCHES` is the launch table: data, chosen from by width, precision and device alone, so that the bits
of a result never depend on the number of prompts.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from loopkernels.loop import FLOATS, INTS, linear_rows, loop_blocks, loop_tile

PRECISIONS = ("bf16", "bf16x3", "tf32", "fp32")
LOG2_E = 1.0 / math.log(2.0)
MOST_TOKENS = 256
RESIDENT_BYTES = 98_304


@dataclass(frozen=True)
class Layer:
    """One transformer layer in `torch.nn.Linear` layout (out, in); a bias or a norm's affine part may be None.

    qkv [3 H D, C] in q, k, v order; proj [C, H D]; up [F, C]; down [C, F].
    """

    norm_1: tuple[Tensor | None, Tensor | None]
    qkv: tuple[Tensor, Tensor | None]
    proj: tuple[Tensor, Tensor | None]
    norm_2: tuple[Tensor | None, Tensor | None]
    up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Block:
    """What is looped: `M(Y)` of docs/exits.md.

    n_heads H, head_dim D. norm: ``"layernorm"``, ``"rms"``, ``"none"``. activation: ``"gelu_tanh"``, ``"relu"``. mask:
    ``"causal"``, ``"full"``. inject: ``"add"``, ``"mul"``, ``"none"``. positions [n, C]: added in every loop, or None.
    final_norm: scale and shift of the final norm, used by loop_norm ``"each"`` in every loop and by ``"once"`` before the
    read-out. read [C] and its bias: a scalar read-out of every read_stride-th token, or None.
    """

    layers: tuple[Layer, ...]
    n_heads: int
    head_dim: int
    norm: str = "layernorm"
    eps: float = 1e-5
    activation: str = "gelu_tanh"
    mask: str = "causal"
    inject: str = "add"
    positions: Tensor | None = None
    loop_norm: str = "each"
    final_norm: tuple[Tensor | None, Tensor | None] = (None, None)
    read: tuple[Tensor, Tensor | None] | None = None
    read_stride: int = 1

    @property
    def width(self) -> int:
        return self.layers[0].qkv[0].shape[1]

    @property
    def hidden(self) -> int:
        return self.layers[0].up[0].shape[0]


@dataclass(frozen=True)
class Launch:
    """A row of the launch table: which kernel runs blocks of up to `width` padded lanes at a precision, and how.

    rows: rows of a tile. chunk: hidden units of the MLP at a time. resident: weights stay in shared memory through all loops.
    hold: P stays in registers. tma: weights come through tensor descriptors. per_sm: programs an SM runs at a time.
    """

    name: str
    targets: tuple[str, ...]
    width: int
    precision: str
    rows: int
    warps: int
    chunk: int
    stages: int = 2
    resident: bool = False
    hold: bool = False
    tma: bool = False
    per_sm: int = 1
    maxnreg: int | None = None

    @property
    def block_warps(self) -> int:
        """Warps of `loop_blocks`: it holds more at a time than `loop_tile`, and four warps serialise its matrix
        instructions."""
        return max(self.warps, 8)


HOPPER, AMPERE, AMD = ("sm_90", "sm_100"), ("sm_80",), ("gfx942", "gfx950")

# Chosen from compiled figures (registers, spills, shared memory; docs/kernels.md): no row has been timed on a device yet. Where
# no row of a width and precision names a target, the backend says so: tf32 at 256 lanes serialises its matrix instructions, and
# fp32 without a matrix unit is for checking, not for speed.
LAUNCHES = (
    Launch("R16", HOPPER, 16, "bf16", 64, 4, 64, resident=True, tma=True, per_sm=2),
    Launch("R32", HOPPER, 32, "bf16", 64, 4, 64, resident=True, tma=True, per_sm=2),
    Launch("R64", HOPPER, 64, "bf16", 64, 4, 64, resident=True, tma=True, per_sm=2),
    Launch("S16", HOPPER, 16, "bf16", 64, 4, 64, tma=True, per_sm=2),
    Launch("S32", HOPPER, 32, "bf16", 64, 4, 64, tma=True, per_sm=2),
    Launch("S64", HOPPER, 64, "bf16", 64, 4, 64, tma=True, per_sm=2),
    Launch("S128", HOPPER, 128, "bf16", 64, 8, 64, tma=True),
    Launch("S256", HOPPER, 256, "bf16", 64, 8, 32, tma=True),
    Launch("S16", HOPPER, 16, "bf16x3", 64, 4, 64, tma=True),
    Launch("S32", HOPPER, 32, "bf16x3", 64, 4, 64, tma=True),
    Launch("S64", HOPPER, 64, "bf16x3", 64, 4, 64, tma=True),
    Launch("S128", HOPPER, 128, "bf16x3", 64, 8, 64, tma=True),
    Launch("S256", HOPPER, 256, "bf16x3", 64, 8, 32, stages=1, tma=True),
    Launch("S16", HOPPER, 16, "tf32", 64, 4, 64, tma=True),
    Launch("S32", HOPPER, 32, "tf32", 64, 4, 64, tma=True),
    Launch("S64", HOPPER, 64, "tf32", 64, 4, 64, tma=True),
    Launch("S128", HOPPER, 128, "tf32", 64, 8, 64, tma=True),
    Launch("S16", AMPERE + AMD, 16, "bf16", 64, 4, 64),
    Launch("S32", AMPERE + AMD, 32, "bf16", 64, 4, 64),
    Launch("S64", AMPERE + AMD, 64, "bf16", 64, 4, 64),
    Launch("S128", AMPERE + AMD, 128, "bf16", 64, 8, 64),
    Launch("S256", AMPERE, 256, "bf16", 32, 8, 32),
    Launch("S256", AMD, 256, "bf16", 32, 8, 32, stages=1),
    Launch("S16", AMPERE + AMD, 16, "bf16x3", 64, 4, 64),
    Launch("S32", AMPERE + AMD, 32, "bf16x3", 64, 4, 64),
    Launch("S64", AMPERE + AMD, 64, "bf16x3", 64, 4, 64),
    Launch("S128", AMPERE + AMD, 128, "bf16x3", 32, 8, 32),
    Launch("S256", AMPERE + AMD, 256, "bf16x3", 16, 8, 32),
    Launch("S16", AMPERE, 16, "tf32", 64, 4, 64),
    Launch("S32", AMPERE, 32, "tf32", 64, 4, 64),
    Launch("S64", AMPERE, 64, "tf32", 64, 4, 64),
    Launch("S128", AMPERE, 128, "tf32", 32, 8, 32),
    Launch("S16", HOPPER + AMPERE + AMD, 16, "fp32", 16, 4, 32, stages=1),
    Launch("S32", HOPPER + AMPERE + AMD, 32, "fp32", 16, 4, 32, stages=1),
    Launch("S64", HOPPER + AMPERE + AMD, 64, "fp32", 16, 4, 32, stages=1),
    Launch("S128", HOPPER + AMPERE + AMD, 128, "fp32", 16, 8, 32, stages=1),
)


def target_of(device: torch.device) -> str:
    """The launch table's name for a device; the interpreter stands in for Hopper."""
    if device.type == "cpu":
        return "sm_90"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def choose(block: Block, precision: str, target: str) -> Launch | None:
    """The first row that serves the block's width at this precision on this target, or None."""
    width = padded(block.width)
    for launch in LAUNCHES:
        if launch.width == width and launch.precision == precision and target in launch.targets and _fits(block, launch):
            return launch
    return None


def _fits(block: Block, launch: Launch) -> bool:
    """Whether a resident row's weights leave room beside them in an SM's shared memory."""
    if not launch.resident:
        return True
    sizes = shape_of(block, launch)
    tiles = 4 * sizes["H"] * sizes["HP"] + 2 * sizes["FP"]
    return sizes["N_CORE"] * tiles * sizes["CP"] * 2 <= RESIDENT_BYTES


def padded(n: int, least: int = 16) -> int:
    """The power of two that holds n."""
    return max(least, triton.next_power_of_2(n))


@dataclass(frozen=True)
class Packed:
    """A block's weights in tiles, for one launch row. `fixed` holds the compile-time arguments that follow from the block."""

    launch: Launch
    block: Block
    w_in: Tensor
    w_out: Tensor
    w_up: Tensor
    w_down: Tensor
    b_q: Tensor
    b_out: Tensor
    b_up: Tensor
    b_down: Tensor
    norm_scale: Tensor
    norm_shift: Tensor
    positions: Tensor | None
    read_weight: Tensor | None
    read_bias: float
    fixed: dict[str, Any]

    @property
    def n_bytes(self) -> int:
        """Bytes of weights that one loop reads."""
        return sum(w.numel() * w.element_size() for w in (self.w_in, self.w_out, self.w_up, self.w_down))


def shape_of(block: Block, launch: Launch) -> dict[str, int]:
    """Padded sizes: CP lanes of width, HP of a head, FP hidden units in chunks of KC."""
    CP, HP = padded(block.width), padded(block.head_dim)
    KC = min(launch.chunk, padded(block.hidden))
    return dict(C=block.width, CP=CP, H=block.n_heads, HP=HP, FP=-(-block.hidden // KC) * KC, KC=KC, N_CORE=len(block.layers))


def _wide(x: Tensor | None, like: Tensor, size: int) -> Tensor:
    return like.new_zeros(size, dtype=torch.float64) if x is None else x.detach().double()


def _folded(norm: tuple[Tensor | None, Tensor | None], linear: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    """A linear map behind a norm, without the norm's affine part, in float64."""
    weight, (scale, shift) = linear[0].detach().double(), norm
    bias = _wide(linear[1], weight, weight.shape[0])
    if shift is not None:
        bias = bias + weight @ shift.detach().double()
    return (weight if scale is None else weight * scale.detach().double()), bias


def _pad(x: Tensor, *sizes: int) -> Tensor:
    out = x.new_zeros(sizes)
    out[tuple(slice(0, n) for n in x.shape)] = x
    return out


def _stored(x: Tensor, precision: str, emulate: bool) -> Tensor:
    """Tiles in the operand format of a precision, rows flattened: low parts below high ones where there are two."""
    flat = x.reshape(-1, x.shape[-1])
    if precision in ("tf32", "fp32"):
        return flat.float().contiguous()
    high = flat.to(torch.bfloat16)
    parts = [high] if precision == "bf16" else [high, (flat - high.double()).to(torch.bfloat16)]
    stored = torch.cat(parts).contiguous()
    return stored.float() if emulate else stored


def pack(block: Block, launch: Launch, emulate: bool = False) -> Packed:
    """The weights of a block as the kernels read them; all folding is done in float64, before the one rounding."""
    sizes = shape_of(block, launch)
    C, CP, H, HP, FP, KC = (sizes[name] for name in ("C", "CP", "H", "HP", "FP", "KC"))
    D = block.head_dim
    tiles: dict[str, list[Tensor]] = {name: [] for name in ("in", "out", "up", "down", "b_q", "b_out", "b_up", "b_down")}
    for layer in block.layers:
        qkv, b_qkv = _folded(layer.norm_1, layer.qkv)
        qkv, b_qkv = qkv.view(3, H, D, C).clone(), b_qkv.view(3, H, D).clone()
        qkv[0] *= LOG2_E / math.sqrt(D)
        b_qkv[0] *= LOG2_E / math.sqrt(D)
        proj = layer.proj[0].detach().double()
        up, b_up = _folded(layer.norm_2, layer.up)
        down = layer.down[0].detach().double()
        tiles["in"].append(_pad(qkv.transpose(0, 1), H, 3, HP, CP))
        tiles["out"].append(_pad(proj.view(C, H, D).transpose(0, 1), H, CP, HP))
        tiles["up"].append(_pad(up, FP, CP))
        tiles["down"].append(_pad(down, CP, FP).view(CP, FP // KC, KC).transpose(0, 1))
        tiles["b_q"].append(_pad(b_qkv[0], H, HP))
        tiles["b_out"].append(_pad(_wide(layer.proj[1], proj, C) + proj @ b_qkv[2].reshape(-1), CP))
        tiles["b_up"].append(_pad(b_up, FP))
        tiles["b_down"].append(_pad(_wide(layer.down[1], down, C), CP))
    stacked = {name: torch.stack(parts) for name, parts in tiles.items()}
    weights = {f"w_{name}": _stored(stacked[name], launch.precision, emulate) for name in ("in", "out", "up", "down")}
    biases = {name: stacked[name].float().contiguous() for name in ("b_q", "b_out", "b_up", "b_down")}
    like = stacked["b_out"]
    scale = torch.ones_like(like[0, :C]) if block.final_norm[0] is None else block.final_norm[0].detach().double()
    shift = _wide(block.final_norm[1], like, C)
    read_weight, read_bias = None, 0.0
    if block.read is not None:
        read = block.read[0].detach().double().reshape(C)
        read_bias = 0.0 if block.read[1] is None else block.read[1].detach().item()
        if block.loop_norm == "once":
            read, read_bias = read * scale, read_bias + float(read @ shift)
        read_weight = _pad(read, CP).float()
    fixed = dict(
        **sizes, NORM=block.norm, EPS=block.eps, ACT=block.activation, CAUSAL=block.mask == "causal", INJECT=block.inject,
        LOOP_NORM=block.loop_norm, STRIDE=block.read_stride, PREC=launch.precision, EMULATE=emulate,
        FAST=launch.precision == "bf16" and launch.targets[0].startswith("sm_") and not emulate,
        TMA=launch.tma, STAGES=launch.stages,
    )  # fmt: skip
    positions = None if block.positions is None or block.inject == "add" else block.positions.detach().float().contiguous()
    return Packed(
        launch, block, **weights, **biases, norm_scale=_pad(scale, CP).float(), norm_shift=_pad(shift, CP).float(),
        positions=positions, read_weight=read_weight, read_bias=read_bias, fixed=fixed,
    )  # fmt: skip


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


def buckets(lengths: list[int], rows: int) -> dict[int, list[int]]:
    """Prompts by the rows they take, each bucket longest first."""
    found: dict[int, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        found.setdefault(slot_rows(lengths[i], rows), []).append(i)
    return found


def programs_of(device: torch.device, launch: Launch, n_tiles: int) -> int:
    """Programs of a persistent grid."""
    if device.type == "cpu":  # the interpreter runs them one after another: the second finds an empty queue
        return min(n_tiles, 2)
    return max(1, min(n_tiles, torch.cuda.get_device_properties(device).multi_processor_count * launch.per_sm))


def _on_device(values: list[int], device: torch.device) -> Tensor:
    """int32 on the device; without a copy from the host, which no CUDA graph can capture, where the values follow a rule."""
    if values == list(range(len(values))):
        return torch.arange(len(values), dtype=torch.int32, device=device)
    if len(set(values)) == 1:
        return torch.full((len(values),), values[0], dtype=torch.int32, device=device)
    return torch.tensor(values, dtype=torch.int32).to(device)


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
) -> Looped:
    """All loops of all prompts: prompts P and start Y [B, T, C] float32, own tokens by `lengths`.

    memory: `ints` and `floats` of an earlier launch (not changed), with final its F; loops go on from there. first_loop: loops
    the least advanced prompt has behind it; predictions are kept from there on.
    """
    block, launch, fixed = packed.block, packed.launch, packed.fixed
    B, T, _ = prompts.shape
    device = prompts.device
    prompts = prompts.contiguous()
    if block.inject == "add" and block.positions is not None:
        prompts = prompts + block.positions[:T].to(prompts)
    start = start.contiguous()
    final = start.clone() if final is None else final.clone()
    going = start.clone() if stop.on_stall == "damp" else None
    ints, floats = fresh_memory(B, device) if memory is None else (memory[0].clone(), memory[1].clone())
    N = -(-T // block.read_stride)
    is_read = packed.read_weight is not None
    keeps = keep_reads and is_read
    reads = torch.full((B, max(stop.n_loops - first_loop, 0), N), math.nan, device=device) if keeps else None
    if stop.rule == "readout":
        last_read = torch.zeros(B, N, device=device) if last_read is None else last_read.clone()
    weights = [packed.w_in, packed.w_out, packed.w_up, packed.w_down]
    own = _on_device(lengths, device)
    nothing = floats
    M = launch.rows
    for rows, members in buckets(lengths, M).items():
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
        if launch.maxnreg is not None and device.type != "cpu":
            constants["maxnreg"] = launch.maxnreg
        if is_tile:
            loop_tile[(n_programs,)](
                *arguments, *counts, **constants, NSLOT=n_slots, RESIDENT=launch.resident, HOLD=launch.hold
            )  # fmt: skip
        else:
            parts = 4 if launch.precision == "bf16x3" else 2
            keys = packed.w_in.new_empty(n_programs, parts, fixed["H"], rows, fixed["HP"])
            loop_blocks[(n_programs,)](*arguments, keys, *counts, **constants, TP=rows)
    return Looped(final, going, ints, floats, last_read, reads)


@torch.no_grad()
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` in float32 whose bits, row by row, do not depend on the other rows. x [..., K]; weight [N,
    K]."""
    N, K = weight.shape
    rows = x.detach().float().reshape(-1, K).contiguous()
    out = rows.new_empty(len(rows), N)
    shift = rows.new_zeros(N) if bias is None else bias.detach().float().contiguous()
    if len(rows):
        grid = (-(-len(rows) // 32), -(-N // 32))
        linear_rows[grid](rows, weight.detach().float().contiguous(), shift, out, len(rows), K, N, ROWS=32, COLUMNS=32, KB=32)
    return out.reshape(*x.shape[:-1], N)


def with_stop(stop: Stop, **changes: Any) -> Stop:
    """A `Stop` with some entries changed."""
    return dataclasses.replace(stop, **changes)
