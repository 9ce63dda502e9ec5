"""Linear maps whose bits, row by row, do not depend on the other rows: read-in and read-out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=("n_rows", "K", "N"))
def linear_rows(
    source, weight, bias, target, n_rows, K, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, KB: tl.constexpr
):  # fmt: skip
    """target [n_rows, N] = source [n_rows, K] weight [N, K]' + bias, float32, each row summed in the same order whatever the
    batch.

    Library products choose their kernel, and so the order of sums, by the number of rows.
    """
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, K, KB):
        k = at + tl.arange(0, KB)
        x = tl.load(source + r[:, None] * K + k[None, :], mask=(r < n_rows)[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(weight + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    total += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    tl.store(target + r[:, None] * N + n[None, :], total, mask=(r < n_rows)[:, None] & (n < N)[None, :])


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
