"""What a call reads of its hidden states: the positions that it wants logits of, and the loss of these."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def kept_positions(logits_to_keep: Any, n_new: int) -> slice | Tensor:
    """The index of the last so many of n_new positions (0: all; at most all), or of those named.

    Raises ValueError for a negative number and for positions that there are not; TypeError for anything else.
    """
    if isinstance(logits_to_keep, int) and not isinstance(logits_to_keep, bool):
        if logits_to_keep < 0:
            raise ValueError(f"LoopedGPT2: logits_to_keep={logits_to_keep} must be 0 (all) or more, or positions [K]")
        return slice(max(n_new - logits_to_keep, 0) if logits_to_keep else 0, None)
    if not isinstance(logits_to_keep, Tensor) or logits_to_keep.dim() != 1 or logits_to_keep.dtype not in INTEGERS:
        raise TypeError(f"LoopedGPT2: logits_to_keep must be an integer or int64 [K], got {logits_to_keep!r}")
    positions = logits_to_keep.to(torch.int64)
    if len(positions) and not -n_new <= int(positions.min()) <= int(positions.max()) < n_new:
        raise ValueError(
            f"LoopedGPT2: logits_to_keep has positions {int(positions.min())} .. {int(positions.max())}, "
            f"but the call has {n_new} tokens a row"
        )
    return positions


def check_labels(labels: Tensor, inputs: Tensor, logits_to_keep: Any, vocab_size: int) -> None:
    """Raises ValueError for labels that are not those of the logits of inputs [B, T, ...]."""
    n_rows, n_new = inputs.shape[:2]
    index = kept_positions(logits_to_keep, n_new)
    n_read = len(index) if isinstance(index, Tensor) else n_new - index.start
    if labels.shape != (n_rows, n_read):
        raise ValueError(
            f"LoopedGPT2: labels are {list(labels.shape)}, the logits {[n_rows, n_read]}; leave out logits_to_keep"
        )
    if labels.dtype not in INTEGERS:
        raise ValueError(f"LoopedGPT2: labels are {labels.dtype} but must be int64")
    outside = ((labels < 0) & (labels != -100)) | (labels >= vocab_size)
    if outside.any():
        raise ValueError(
            f"LoopedGPT2: labels hold {int(labels[outside][0])}, but they are -100 or lie in 0 .. {vocab_size - 1}"
        )


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the next tokens, logits [B, T, V] against int64 [B, T]; -100 is left out."""
    wanted = labels[:, 1:].flatten().to(logits.device, torch.int64)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), wanted, ignore_index=-100)
