"""When a training run has diverged, and the note of it that stays in its folder."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looped.checkpoint import write_atomically
from looped.model import LoopedTransformer
from looped.train.identity import differences
from looped.train.loss import matrix_products, window_errors
from looped.train.recipe import TrainConfig

log = logging.getLogger(__name__)

EXPLODED = 10.0  # times the error of answering 0 (or all classes alike)
EXPLODED_STEPS = 20  # so many in a row end the run
FILE = "diverged.json"
REMEDY = "start again in another folder with a lower lr, a grad_clip, weight_decay or a shorter window"


def count_exploded(before: int, error: float, of_nothing: float) -> int:
    """Steps in a row, this one included, whose error is `EXPLODED` times that of answering 0; before: as of the last step."""
    return before + 1 if error > EXPLODED * of_nothing else 0


def of_nothing(config: TrainConfig, ys: Tensor) -> float:
    """The error of answering 0, or all classes alike, to ys [B, n]."""
    return ys.square().mean().item() if config.model.readout == "scalar" else math.log(config.model.readout_width)


@torch.no_grad()
def is_sound(config: TrainConfig, model: LoopedTransformer, xs: Tensor, ys: Tensor, *, n_loops: int) -> bool:
    """Whether the error of the model's window on prompts xs [B, n, d], ys [B, n] is finite and has not exploded."""
    with matrix_products(config.precision):
        errors, _ = window_errors(model, xs, ys, n_loops=n_loops, window=config.window, precision=config.precision)
    error = errors.mean().item()
    return math.isfinite(error) and count_exploded(0, error, of_nothing(config, ys)) == 0


def check(step: int, loss: float, grad_norm: float, n_exploded: int) -> None:
    """Raises FloatingPointError, naming the step, for a run that has diverged."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise FloatingPointError(f"train: the loss or its gradient is not finite at step {step}; {REMEDY}")
    if n_exploded >= EXPLODED_STEPS:
        raise FloatingPointError(
            f"train: the loss has exploded at step {step}: it is {loss:.3g}, and for {n_exploded} steps it was more than "
            f"{EXPLODED:g} times that of answering 0; {REMEDY}"
        )


def at_the_end(step: int, n_exploded: int) -> str:
    """Why a run that ended at a step whose loss had exploded is no good one, though that was not yet for long, or not before
    its last weights (n_exploded 0)."""
    since = f"for the last {n_exploded} of its steps it was" if n_exploded else "that of its last weights is not finite, or"
    return (
        f"train: the loss was exploding when the run ended at step {step}: {since} more than {EXPLODED:g} times that of "
        f"answering 0; {REMEDY}"
    )


def note(config: TrainConfig, folder: Path, step: int, checkpoint: int | None, reason: str) -> None:
    """Leave `diverged.json`: at which step, why, and the step of the last good checkpoint (null where there is none)."""
    content: dict[str, Any] = {"step": step, "reason": reason, "checkpoint": checkpoint, "config": config.to_dict()}
    write_atomically(folder / FILE, json.dumps(content, indent=2).encode())


def why_diverged(config: TrainConfig, folder: Path) -> str | None:
    """What ended this very run in the folder, where it diverged; else None.

    A note that is cut or damaged counts as none, with a warning in the log: the run then goes on from its last checkpoint, or
    starts again where there is none, and leaves a new note where it diverges again.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        left = json.loads(path.read_text(encoding="utf-8"))
        reason, others = left["reason"], differences(config, left["config"])
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        log.warning("%s is damaged and is passed over", path)
        return None
    return None if others else str(reason)


def forget_or_raise(config: TrainConfig, folder: Path, resume: bool) -> None:
    """Raises FloatingPointError where the run to be resumed has diverged before: it would again. Else drops the note."""
    if resume and (reason := why_diverged(config, folder)):
        raise FloatingPointError(reason)
    (folder / FILE).unlink(missing_ok=True)
