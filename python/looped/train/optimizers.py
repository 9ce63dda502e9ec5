"""The optimizers of a run, by name: Adam of all weights, or Muon of the blocks' matrices with Adam of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from looped.model import LoopedTransformer
from looped.train.recipe import TrainConfig


def make_optimizers(config: TrainConfig, model: LoopedTransformer) -> dict[str, Optimizer]:
    """Every weight is in one of them. Raises ValueError for an optimizer that this torch does not have."""
    optimizers: dict[str, Optimizer] = {}
    taken: set[int] = set()
    if config.optimizer == "muon":
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"train: optimizer='muon' needs torch 2.9 or newer, and this is {torch.__version__}; take 'adam'")
        blocks = (*model.prelude, *model.core, *model.coda)
        matrices = [weight for block in blocks for weight in block.parameters() if weight.dim() == 2]
        # the step has the size of Adam's (Liu et al., 2025), so that one learning rate serves both
        optimizers["muon"] = torch.optim.Muon(
            matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        taken = {id(weight) for weight in matrices}
    optimizers["adam"] = _adam(config, [weight for weight in model.parameters() if id(weight) not in taken])
    return optimizers


def _adam(config: TrainConfig, weights: list[nn.Parameter]) -> Optimizer:
    if not config.weight_decay:
        return torch.optim.Adam(weights, lr=config.lr)
    matrices = [weight for weight in weights if weight.dim() >= 2]
    others = [weight for weight in weights if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr)


def state_of(optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """What a checkpoint holds of them: the state of the one there is, or those of several by name."""
    states = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
    return states if len(states) > 1 else next(iter(states.values()))


def by_name(state: Mapping[str, Any], optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """The inverse of `state_of`: a state for each of the optimizers, None for one that is not there."""
    return {name: state.get(name) for name in optimizers} if len(optimizers) > 1 else dict.fromkeys(optimizers, state)
