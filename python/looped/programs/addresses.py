"""Position codes of +-1, arithmetic on them, and how sharp attention must be to tell one from another."""

from __future__ import annotations

import math

import numpy as np

from looped.programs.circuit import Layer, Terms, merged


def codes(n: int, n_bits: int) -> np.ndarray:
    """[n, n_bits], the bits of positions 0 .. n - 1 as -1 and 1, the lowest first; position 0, the scratchpad, has zeros."""
    table = np.where((np.arange(n)[:, None] >> np.arange(n_bits)) & 1, 1.0, -1.0)
    table[:1] = 0.0
    return table


def position(bits: np.ndarray) -> np.ndarray:
    """The inverse of `codes`, over the last axis."""
    return ((np.asarray(bits) > 0) * (1 << np.arange(bits.shape[-1], dtype=np.int64))).sum(axis=-1)


def bits_for(n_positions: int) -> int:
    """The fewest bits that tell n positions apart."""
    return max(1, math.ceil(math.log2(n_positions)))


def least_lambda(n_bits: int) -> float:
    """The bound on lambda of a machine whose reads are ties of two tokens.

    Of all 2^L codes, those at Hamming distance h score 2 h below the tie, so the weights of the others sum to
    rho = (1 + exp(-2 lambda))^(L + 1) - 1 at most, and a bit that is read is off by up to 4 rho / (1 + rho): less than the 1/4
    that the correction layer takes. It grows with log log of the number of tokens.
    """
    return -0.5 * math.log((16 / 15) ** (1 / (n_bits + 1)) - 1)


def add_small(layer: Layer, code_block: range, addend: Terms, most: int, one: int, out: range) -> None:
    """out += the code of (position + addend) modulo 2^L, for an integer addend in 0 .. most.

    Bit i is that of S_i = sum_{j <= i} 2^j bit_j + addend at weight 2^i: its steps at 2^i, 2^{i+1}, ... up and down in turn.
    """
    total: dict[int, float] = dict(addend)
    for i, row in enumerate(code_block):
        total = merged(total, {row: 2.0**i / 2, one: 2.0**i / 2})
        for k in range(1, (2 ** (i + 1) - 1 + most) // 2**i + 1):
            layer.step(total, k * 2**i, one, {out[i]: 2.0 if k % 2 else -2.0})
        layer.unit({one: 1.0}, 0.0, {out[i]: -1.0})


def increment(layer: Layer, code_block: range, one: int, out: range) -> None:
    """out += the code of position + 1 modulo 2^L, with one unit a bit and small numbers alone.

    c_i says that all bits below i are set: bit i turns where c_i holds, and where c_{i+1} does it turns to -1.
    """
    layer.add({one: 1.0}, {out[0]: 2.0})
    total: dict[int, float] = {}
    for i, row in enumerate(code_block):
        layer.add({row: 1.0}, {out[i]: 1.0})
        total = merged(total, {row: 1.0})
        carry: dict[int, float] = {out[i]: -2.0}
        if i + 1 < len(code_block):
            carry[out[i + 1]] = 1.0
        layer.unit(merged(total, {one: -(i - 1.0)}), 0.0, carry)
