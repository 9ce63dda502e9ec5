"""In-context pairs as the token sequence x1, y1, x2, y2, ... that a looped in-context learner reads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def interleave(xs: Tensor | np.ndarray, ys: Tensor | np.ndarray, *, keep_last_y: bool = False) -> Tensor:
    """Prompts [B, 2n - 1, d] (or [B, 2n, d] with the last y) of xs [B, n, d] and ys [B, n], in the dtype of xs.

    ys may be [B, n - 1] where the last y is what is asked for. A y token holds y in coordinate 0 and zeros after it. No
    prediction depends on the last y under a causal mask, and it is the slowest token to settle, so it is left out by default.
    n = 0 gives [B, 0, d]. Raises ValueError for other shapes.
    """
    xs, ys = torch.as_tensor(xs), torch.as_tensor(ys)
    n_ys = (xs.shape[1], xs.shape[1] if keep_last_y else max(0, xs.shape[1] - 1)) if xs.dim() == 3 else ()
    if ys.dim() != 2 or ys.shape[1] not in n_ys or len(ys) != len(xs):
        last = "" if keep_last_y else " or [B, n - 1]"
        raise ValueError(f"interleave: xs must be [B, n, d] and ys [B, n]{last}, got {list(xs.shape)} and {list(ys.shape)}")
    tokens = torch.zeros(xs.shape[0], xs.shape[1], 2, xs.shape[2], dtype=xs.dtype, device=xs.device)
    tokens[:, :, 0] = xs
    tokens[:, : ys.shape[1], 1, 0] = ys
    tokens = tokens.flatten(1, 2)
    return tokens if keep_last_y else tokens[:, :-1]
