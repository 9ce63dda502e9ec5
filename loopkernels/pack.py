"""A block's weights as the kernels read them.

`pack` folds what can be folded (norm affine, softmax scale, log2(e), value bias) in float64 and lays the weights out in tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from loopkernels.table import LAUNCHES, RESIDENT_BYTES, Launch

LOG2_E = 1.0 / math.log(2.0)


@dataclass(frozen=True)
class Layer:
    """One transformer layer in `torch.nn.Linear` layout (out, in); a bias or a norm's affine part may be None.

    qkv [3 H D, C] in q, k, v order; proj [C, H D]; up [F, C], or [2 F, C] with a gate's rows first; down [C, F].
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

    n_heads H, head_dim D. norm: ``"layernorm"``, ``"rms"``, ``"none"``. activation: ``"gelu_tanh"``, ``"gelu"``,
    ``"relu"``, ``"silu_gated"``. mask: ``"causal"``, ``"full"``. inject: ``"add"``, ``"mul"``, ``"none"``. positions [n, C]:
    added in every loop, or None. final_norm: scale and shift of the final norm, used by loop_norm ``"each"`` in every loop and
    by ``"once"`` before the read-out. read [C] and its bias: a scalar read-out of every read_stride-th token, or None.
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
        return self.layers[0].down[0].shape[1]

    @property
    def up_parts(self) -> int:
        """Maps from the width to the hidden units: two of a gated MLP."""
        return 2 if self.activation == "silu_gated" else 1


def choose(block: Block, precision: str, target: str) -> Launch | None:
    """The first row that serves the block's width and heads at this precision on this target, or None."""
    width, head = padded(block.width), padded(block.head_dim)
    for launch in LAUNCHES:
        is_asked = launch.width == width and launch.precision == precision and target in launch.targets
        if is_asked and head <= launch.widest_head and _fits(block, launch):
            return launch
    return None


def _fits(block: Block, launch: Launch) -> bool:
    """Whether a resident row's weights leave room beside them in an SM's shared memory."""
    if not launch.resident:
        return True
    sizes = shape_of(block, launch)
    tiles = 4 * sizes["H"] * sizes["HP"] + (1 + block.up_parts) * sizes["FP"]
    return sizes["N_CORE"] * tiles * sizes["CP"] * 2 <= RESIDENT_BYTES


def padded(n: int, least: int = 16) -> int:
    """The power of two that holds n."""
    return max(least, triton.next_power_of_2(n))


@dataclass(frozen=True)
class Packed:
    """A block's weights in tiles, for one launch row; none of the block's own tensors but its positions.

    positions: those that no P can hold. added: those that inject adds with P. `fixed` holds the compile-time arguments that
    follow from the block.
    """

    launch: Launch
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
    added: Tensor | None
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
        parts, F = block.up_parts, block.hidden
        tiles["up"].append(_pad(up.view(parts, F, C), parts, FP, CP).view(parts, FP // KC, KC, CP).transpose(0, 1))
        tiles["down"].append(_pad(down, CP, FP).view(CP, FP // KC, KC).transpose(0, 1))
        tiles["b_q"].append(_pad(b_qkv[0], H, HP))
        tiles["b_out"].append(_pad(_wide(layer.proj[1], proj, C) + proj @ b_qkv[2].reshape(-1), CP))
        tiles["b_up"].append(_pad(b_up.view(parts, F), parts, FP).view(parts, FP // KC, KC).transpose(0, 1))
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
        FAST=launch.precision == "bf16" and not emulate and like.is_cuda and torch.version.hip is None,
        TMA=launch.tma, STAGES=launch.stages,
    )  # fmt: skip
    positions = None if block.positions is None else block.positions.detach().float().contiguous()
    is_added = block.inject == "add"
    return Packed(
        launch, **weights, **biases, norm_scale=_pad(scale, CP).float(), norm_shift=_pad(shift, CP).float(),
        positions=None if is_added else positions, added=positions if is_added else None, read_weight=read_weight,
        read_bias=read_bias, fixed=fixed,
    )  # fmt: skip
