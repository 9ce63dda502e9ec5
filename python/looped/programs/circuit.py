"""Layers written by hand, and the `LoopedTransformer` that holds them.

A machine's state is X [n, d]: n tokens (the paper's columns) of d features (its rows), which stand in named blocks. A layer is

    Y = X + sum_h softmax(lam (Q_h X)(K_h X)^T) V_h X,      Z = Y + W2 relu(W1 Y + b1)

over all tokens, without a norm (Giannou et al., 2023, eq. 1). `Layer` takes it as heads and hidden units, each a few named
terms; `transformer` lays all layers out as the weights of one ordinary model, whose layers have one size: the largest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from looped.config import LoopedConfig
from looped.model import LoopedTransformer

# What the layers of a machine need of a model. Every token sees every other: there is no causal mask, and no padding, which a
# prompt of a machine never has.
FORM: dict[str, Any] = {
    "input_kind": "states",
    "readout": "none",
    "activation": "relu",
    "norm_kind": "none",
    "mask_kind": "full",
    "pos_kind": "none",
    "inject": "none",
    "state_init": "embedding",
    "loop_norm": "none",
}

Terms = Mapping[int, float]  # sum of coefficient * feature, by the feature's number


class Layout:
    """Named blocks of features, in order: `layout["PC"]` is their range."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.blocks: dict[str, range] = {}
        first = 0
        for name, size in sizes.items():
            self.blocks[name] = range(first, first + size)
            first += size
        self.width = first

    def __getitem__(self, name: str) -> range:
        return self.blocks[name]

    def __contains__(self, name: str) -> bool:
        return name in self.blocks

    def row(self, name: str, i: int = 0) -> int:
        """The number of the i-th feature of a block."""
        return self.blocks[name][i]


@dataclass(frozen=True)
class Head:
    """Scores lam * <query, key>, and what is moved: every (source, target) pair adds one feature to the target's."""

    query: Sequence[Terms]
    key: Sequence[Terms]
    moves: Sequence[tuple[Terms, Terms]]
    lam: float
    is_address: bool  # scores are of +-1 codes: lam is rounded up so that they are whole numbers before the kernel's scale

    def gain(self, head_dim: int) -> float:
        """What queries are multiplied by: the kernel divides scores by sqrt(head_dim)."""
        gain = self.lam * math.sqrt(head_dim)
        return math.ceil(gain) if self.is_address else gain


@dataclass
class Layer:
    """One transformer layer. Hidden units of one pre-activation are one unit."""

    name: str
    heads: list[Head] = field(default_factory=list)
    units: dict[tuple[tuple[tuple[int, float], ...], float], dict[int, float]] = field(default_factory=dict)

    def attend(
        self,
        query: Sequence[Terms],
        key: Sequence[Terms],
        moves: Sequence[tuple[Terms, Terms]],
        *,
        lam: float = 1.0,
        is_address: bool = False,
    ) -> None:
        """Add a head."""
        self.heads.append(Head(query, key, moves, lam, is_address))

    def unit(self, terms: Terms, bias: float, out: Terms) -> None:
        """out += relu(terms + bias)."""
        key = tuple(sorted((row, value) for row, value in terms.items() if value)), bias
        targets = self.units.setdefault(key, {})
        for row, value in out.items():
            targets[row] = targets.get(row, 0.0) + value

    def add(self, terms: Terms, out: Terms, *, unless: Terms | None = None) -> None:
        """out += terms, to the bit: relu(x) - relu(-x). Where `unless` is large, and not 0, nothing is added."""
        block = {} if unless is None else unless
        self.unit(merged(terms, block, scale=-1.0), 0.0, out)
        self.unit(merged({row: -value for row, value in terms.items()}, block, scale=-1.0), 0.0, scaled(out, -1.0))

    def clear(self, row: int, *, unless: Terms | None = None) -> None:
        """The feature becomes exactly 0; where `unless` is large it keeps every bit."""
        self.add({row: 1.0}, {row: -1.0}, unless=unless)

    def step(self, total: Terms, threshold: float, one: int, out: Terms) -> None:
        """out += [total >= threshold] for a total within 1/4 of an integer; `one` is a feature of 1 where there is a total."""
        self.unit(merged(total, {one: 0.75 - threshold}), 0.0, scaled(out, 2.0))
        self.unit(merged(total, {one: 0.25 - threshold}), 0.0, scaled(out, -2.0))

    def round(self, row: int) -> None:
        """A feature within 1/4 of -1, 0 or 1 becomes that number."""
        self.clear(row)
        for sign in (1.0, -1.0):
            self.unit({row: sign}, -0.25, {row: 2 * sign})
            self.unit({row: sign}, -0.75, {row: -2 * sign})


def merged(a: Terms, b: Terms, *, scale: float = 1.0) -> dict[int, float]:
    """a + scale * b."""
    total = dict(a)
    for row, value in b.items():
        total[row] = total.get(row, 0.0) + scale * value
    return total


def scaled(terms: Terms, by: float) -> dict[int, float]:
    return {row: by * value for row, value in terms.items()}


def rows_of(block: range) -> list[Terms]:
    """Each feature of a block as it is."""
    return [{row: 1.0} for row in block]


def moved(source: range, target: range) -> list[tuple[Terms, Terms]]:
    """Moves of one block to another of the same size."""
    return [({a: 1.0}, {b: 1.0}) for a, b in zip(source, target, strict=True)]


def sizes_of(layers: Sequence[Layer]) -> tuple[int, int, int]:
    """n_heads, head_dim and d_ff that hold all layers."""
    heads = [head for layer in layers for head in layer.heads]
    head_dim = max(max(len(head.query), len(head.moves)) for head in heads)
    return max(len(layer.heads) for layer in layers), head_dim, max(len(layer.units) for layer in layers)


def transformer(layers: Sequence[Layer], width: int, *, dtype: torch.dtype, n_loops: int) -> LoopedTransformer:
    """The layers as the core of a model on raw states, which starts from its prompt and injects nothing.

    Its eval-mode map M is the machine's step: one loop is one instruction.
    """
    n_heads, head_dim, d_ff = sizes_of(layers)
    sizes: dict[str, Any] = {
        "d_model": width,
        "n_heads": n_heads,
        "head_dim": head_dim,
        "d_ff": d_ff,
        "n_core": len(layers),
        "n_loops": n_loops,
    }
    config = LoopedConfig(**sizes, **FORM)
    with torch.device("meta"):
        model = LoopedTransformer(config)
    model = model.to_empty(device="cpu").to(torch.float64).eval().requires_grad_(False)
    blocks: Any = model.core
    for block, layer in zip(blocks, layers, strict=True):
        for parameter in block.parameters():
            parameter.zero_()
        for h, head in enumerate(layer.heads):
            _write_head(block.attn, h, head, n_heads, head_dim)
        for unit, ((terms, bias), out) in enumerate(layer.units.items()):
            for row, value in terms:
                block.mlp.fc.weight[unit, row] = value
            block.mlp.fc.bias[unit] = bias
            for row, value in out.items():
                block.mlp.proj.weight[row, unit] = value
    return model.to(dtype)


def why_not_model(config: LoopedConfig) -> str | None:
    """Why a model cannot be a machine, and None where it can."""
    for name, value in FORM.items():
        if (found := getattr(config, name)) != value:
            reason = ", since every token must see every other" if name == "mask_kind" else ""
            return f"the machine's model has {name}={found!r}, and the layers of a machine need {value!r}{reason}"
    return None


def _write_head(attn: Any, h: int, head: Head, n_heads: int, head_dim: int) -> None:
    qkv, proj = attn.qkv.weight, attn.proj.weight
    first = h * head_dim
    gain = head.gain(head_dim)
    for part, maps, by in ((0, head.query, gain), (1, head.key, 1.0), (2, [source for source, _ in head.moves], 1.0)):
        for i, terms in enumerate(maps):
            for row, value in terms.items():
                qkv[part * n_heads * head_dim + first + i, row] = by * value
    for i, (_, target) in enumerate(head.moves):
        for row, value in target.items():
            proj[row, first + i] = value
