"""The truncated loss of Yang et al. (2024, eq. 1): loops before the window run fast and without gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

import looped.op  # noqa: F401  registers looped::loop and what it is fused for
from looped.icl.prompts import interleave
from looped.model import FUSED, LoopedTransformer
from looped.weights import weights_of


def window_errors(
    model: LoopedTransformer, xs: Tensor, ys: Tensor, *, n_loops: int, window: int, precision: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Errors of the last `window` loops (Yang et al., eq. 1), and how far the last loop still moved the state.

    The loops before the window run without gradient, as the prompt enters every loop: as the operator looped::loop where the
    device has fused kernels for the weights, else in plain PyTorch. Without injection the prompt enters at Y_0 alone, and
    truncation would leave its read-in untrained: the gradient then goes through all loops, as in the authors' code.

    precision: ``"bf16"`` runs the loops of the window under autocast, with the state between them and the errors in float32.

    Returns the errors [B, window, n] of the predictions at every point, squared, or for a model that reads two or more classes
    the cross-entropy; and ||Y_b - Y_{b-1}|| / ||Y_b|| [B], the denominator without gradient (zeros for a window of 1).
    """
    prompts = interleave(xs, ys)
    n_before = n_loops - window
    n_free = n_before if model.config.inject != "none" else 0
    predictions = []
    states: list[Tensor] = []
    before = state_after(model, prompts, n_free)
    with torch.autocast(prompts.device.type, torch.bfloat16, enabled=precision == "bf16"):
        P = model.embed(prompts)
        Y = model.initial_state(P) if before is None else before
        for t in range(n_free, n_loops):
            Y = model.step(Y, P).to(prompts.dtype)
            if t >= n_before:
                predictions.append(model.read(Y))
            states = [*states[-1:], Y]
    errors = prediction_errors(torch.stack(predictions, dim=1).to(prompts.dtype), ys)
    if len(states) < 2:
        return errors, errors.new_zeros(len(errors))
    moved = (states[1] - states[0]).flatten(1).norm(dim=1)
    return errors, moved / states[1].detach().flatten(1).norm(dim=1)


def prediction_errors(predictions: Tensor, ys: Tensor) -> Tensor:
    """[B, L, n]: (prediction - y)^2 of predictions [B, L, n], or the cross-entropy of logits [B, L, n, classes]; ys [B, n]."""
    if predictions.dim() == 3:
        return (predictions - ys[:, None]).square()
    classes = ys.long()[:, None].expand(predictions.shape[:3])
    return F.cross_entropy(predictions.flatten(0, 2), classes.flatten(), reduction="none").reshape(predictions.shape[:3])


@torch.no_grad()
def state_after(model: LoopedTransformer, prompts: Tensor, n_loops: int, *, fused: bool = True) -> Tensor | None:
    """The state [B, T, C] after the first n_loops loops of prompts [B, T, d], without gradient; None for no loops."""
    if n_loops == 0:
        return None
    if fused and loops_are_fused(model):
        spec = f'{{"n_loops": {n_loops}, "config": {model.config.json}}}'
        state: Tensor = torch.ops.looped.loop(prompts, None, list(weights_of(model).values()), None, spec)[0]
        return state
    *_, last = model.iterate(prompts, n_loops, n_loop_start=n_loops - 1)
    return last


def loops_are_fused(model: LoopedTransformer) -> bool:
    """Whether `state_after` runs the operator: there are kernels for the weights, and the model is what its config says."""
    weight = next(model.parameters())
    return weight.dtype in FUSED.get(weight.device.type, ()) and model.why_not_as_configured() is None


@contextmanager
def matrix_products(precision: str) -> Iterator[None]:
    """On a GPU, TF32 products under "tf32" and full float32 ones else; the setting is put back."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
