"""Whether what a checkpoint holds fits a run: checked before any of it is taken."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from looped.integers import integer_of
from looped.layouts import check_keys
from looped.train.optimizers import by_name

FIELDS = ("config", "step", "seconds", "model", "optimizer", "prompt_rng")


# Of an optimizer, by name: what its checkpoint must share with the run's (the learning rate is that of the step), and its
# moments of each parameter.
GROUPS = {
    "adam": ("params", "betas", "eps", "weight_decay"),
    "muon": ("params", "momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "weight_decay", "adjust_lr_fn"),
}
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}


def check_state(
    state: Mapping[str, Any], *, n_steps: int, model: torch.nn.Module, optimizers: Mapping[str, Optimizer], rng: torch.Generator
) -> None:
    """Raises ValueError, in words that follow the file's name, for a state of other fields, sizes or dtypes than the run's."""
    check_fields(state)
    step, seconds, prompt_rng = state["step"], state["seconds"], state["prompt_rng"]
    if integer_of(step) is None or not 0 <= step <= n_steps:
        raise ValueError(f"its step is {step!r} and must be an integer in 0 .. n_steps={n_steps}")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"its seconds are {seconds!r} and must be a number of at least 0")
    weights = model.state_dict()
    check_keys("its model", weights, state["model"])
    for name, weight in weights.items():
        _check_tensor(f"its {name}", state["model"][name], weight)
    for name, part in by_name(state["optimizer"], optimizers).items():
        _check_optimizer(name, part, optimizers[name], step)
    _check_tensor("its prompt_rng", prompt_rng, rng.get_state())
    try:
        torch.Generator().set_state(prompt_rng)
    except RuntimeError as error:
        raise ValueError(f"its prompt_rng is none ({str(error).splitlines()[0]})") from error


def check_fields(state: Mapping[str, Any]) -> None:
    """Raises ValueError for a state that lacks a field, or whose parts are no mappings."""
    if missing := [name for name in FIELDS if name not in state]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    for name in ("config", "model", "optimizer"):
        if not isinstance(state[name], Mapping):
            raise ValueError(f"its {name} is {type(state[name]).__name__} and must be a mapping")


def _check_optimizer(name: str, found: Any, optimizer: Optimizer, step: int) -> None:
    if not isinstance(found, Mapping):
        raise ValueError(f"its optimizer has no {name}")
    groups, moments = found.get("param_groups"), found.get("state")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise ValueError("its optimizer has no groups of parameters")
    if _named(groups, GROUPS[name]) != _named(optimizer.state_dict()["param_groups"], GROUPS[name]):
        raise ValueError("its optimizer is of other parameters or numbers")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not isinstance(moments, Mapping) or set(moments) != (set(range(len(parameters))) if step else set()):
        raise ValueError("its optimizer does not hold the moments of every parameter")
    for i, one in moments.items():
        if not isinstance(one, Mapping):
            raise ValueError(
                f"its optimizer's moments of {name}'s parameter {i} are {type(one).__name__} and must be a mapping"
            )
        for moment in MOMENTS[name]:
            _check_tensor(f"its optimizer's {moment} of {name}'s parameter {i}", one.get(moment), parameters[i])
        if name == "adam" and (not isinstance(one.get("step"), Tensor) or one["step"].numel() != 1):
            raise ValueError(f"its optimizer's step of {name}'s parameter {i} is {one.get('step')!r} and must be one number")


def _named(groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[list[Any]]:
    return [[group.get(name) for name in names] for group in groups]


def _check_tensor(what: str, found: Any, expected: Tensor) -> None:
    if not isinstance(found, Tensor):
        raise ValueError(f"{what} is {type(found).__name__} and must be a tensor")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise ValueError(f"{what} is {found.dtype} {list(found.shape)} and must be {expected.dtype} {list(expected.shape)}")
