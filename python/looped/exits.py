"""Exit rules: when has a prompt stopped changing? The whole stopping rule is written out in docs/exits.md.

A rule is a small frozen object. `start` makes what it must remember between checks and `update` says which units pass a
check. A unit is a prompt, or a token where `scope` is "prefix" or "token". Counting passes in a row, `min_loops`,
`check_every` and stalls are the same for every rule and stand in `Watch`. A rule of your own is a subclass with an `update`;
it runs on the eager backend.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from looped.integers import integer_of
from looped.model import MOST_LOOPS
from looped.suggestion import suggestion

Memory = dict[str, Tensor]

# The rounding level phi: a step this small against the state is noise of the arithmetic, not motion of the state. Measured on
# the shipped model, on states that float64 shows to be at rest (the table is in docs/exits.md).
ROUNDING_LEVEL = {"fp64": 2e-15, "fp32": 1e-6, "bf16_states": 2e-2}
ROUNDING_LEVEL |= {"bf16x3": 2e-5, "tf32": 2e-3, "bf16": 1e-2}  # operands of the Triton kernels; their states are float32
PRECISION_OF = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16_states"}

STALL_GAIN = 0.9  # a check is progress when g falls below this share of its best


class Step(NamedTuple):
    """What one loop did, for the units of a batch; every tensor has the live prompts first.

    t: int64, loops applied so far. g = ||F - Y||, n = ||F||, s = ||Y' - Y||: float64 per unit, over own tokens.
    rho: float64, the rate (s / s_p)^(1 / (t - t_p)) since the previous check, NaN where there is none.
    state, image: Y and F = M(Y), [n, T, C]. predict: reads the predictions of F, [n, N] or [n, N, classes], when called.
    phi: the rounding level of the arithmetic. read_stride: tokens between two predictions.
    gate: the logits of the model's exit gate on F, one per unit, where it has one (language models).

    In language models the n units are tokens of any rows: g is [n], state and image [n, C], predict() [n, 1, V], and
    `is_per_token` is False.
    """

    t: Tensor
    g: Tensor
    n: Tensor
    s: Tensor
    rho: Tensor
    state: Tensor
    image: Tensor
    predict: Callable[[], Tensor]
    phi: float
    read_stride: int
    gate: Callable[[], Tensor] | None = None

    @property
    def is_per_token(self) -> bool:
        """Whether the units are tokens (g is [n, T]) or prompts (g is [n])."""
        return self.g.dim() == 2


@dataclass(frozen=True, kw_only=True)
class ExitRule:
    """Fields that all rules share.

    check_every: the rule is asked at loops that are a multiple of this.
    min_loops: no exit before this many loops.
    scope: ``"prompt"``; ``"prefix"``: every token is judged, and the longest prefix that has passed is frozen; or
        ``"token"``: every token stops by itself (language models, `looped.lm`).
    stall_window: checks in a row without progress (g below 0.9 of its best) that make a stall.
    """

    check_every: int = 1
    min_loops: int = 0
    scope: str = "prompt"
    stall_window: int = 16

    passes_needed: ClassVar[int] = 1
    can_stall: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least in (("check_every", 1), ("min_loops", 0), ("stall_window", 1)):
            self._check_counter(name, least)
        if self.scope not in ("prompt", "prefix", "token"):
            raise ValueError(f"{type(self).__name__}: scope={self.scope!r} is not one of prompt, prefix, token")

    def _check_counter(self, name: str, least: int) -> None:
        value: Any = getattr(self, name)
        count = integer_of(value)
        if count is None or count < least:
            raise ValueError(f"{type(self).__name__}: {name}={value!r} must be an integer of at least {least}")
        object.__setattr__(self, name, count)  # it may have been NumPy's
        if count > MOST_LOOPS:
            raise ValueError(f"{type(self).__name__}: {name}={value} is more than a loop counter holds; give at most 2^62 - 1")

    @property
    def n_passes(self) -> int:
        """Passes in a row that end the loop."""
        return self.passes_needed

    @property
    def is_fixed(self) -> bool:
        """Whether the rule never passes, so that all loops run and nothing counts as a stall."""
        return False

    def start(self, g: Tensor) -> Memory:
        """What the rule remembers, for units of the shape of g: tensors with the prompts first."""
        return {}

    def update(self, memory: Memory, step: Step) -> Tensor:
        """Which units pass: bool of the shape of `step.g`. May replace entries of `memory`."""
        raise NotImplementedError(f"{type(self).__name__} needs update(memory, step), which returns a bool tensor like step.g")


@dataclass(frozen=True, kw_only=True)
class Fixed(ExitRule):
    """Never passes: all loops are run."""

    @property
    def is_fixed(self) -> bool:
        return True

    def update(self, memory: Memory, step: Step) -> Tensor:
        return torch.zeros_like(step.g, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class Exact(ExitRule):
    """No bit of F differs from Y: the rule for programs, whose halted state is a fixed point."""

    can_stall: ClassVar[bool] = False

    def update(self, memory: Memory, step: Step) -> Tensor:
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[step.image.element_size()]
        same = step.image.contiguous().view(bits) == step.state.contiguous().view(bits)
        return same.all(-1) if step.is_per_token else same.flatten(1).all(-1)


@dataclass(frozen=True, kw_only=True)
class ToleranceRule(ExitRule):
    """A rule with a tolerance; tol = 0 means `Fixed`."""

    tol: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        value: Any = self.tol
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not (is_number and value >= 0):
            raise ValueError(f"{type(self).__name__}: tol={self.tol!r} must be a number of at least 0")
        try:
            object.__setattr__(self, "tol", float(self.tol))  # PyTorch takes integers of 64 bits alone
        except OverflowError:
            raise ValueError(f"{type(self).__name__}: tol is more than a float holds; use math.inf") from None

    @property
    def is_fixed(self) -> bool:
        return self.tol == 0


@dataclass(frozen=True, kw_only=True)
class Absolute(ToleranceRule):
    """g <= tol."""

    def update(self, memory: Memory, step: Step) -> Tensor:
        return step.g <= self.tol


@dataclass(frozen=True, kw_only=True)
class Relative(ToleranceRule):
    """g <= tol * n. A state that merely grows passes it: prefer `Contraction`."""

    def update(self, memory: Memory, step: Step) -> Tensor:
        if math.isinf(self.tol):  # inf * 0 is NaN
            return torch.ones_like(step.g, dtype=torch.bool)
        return step.g <= self.tol * step.n


@dataclass(frozen=True, kw_only=True)
class Contraction(ToleranceRule):
    """The distance still to go, s * rho / (1 - rho) by the rate seen (Banach), is within tol of the state's norm.

    Passes twice in a row; a step at the rounding level passes without a rate.
    """

    passes_needed: ClassVar[int] = 2

    def update(self, memory: Memory, step: Step) -> Tensor:
        g, s, rho = step.g, step.s, step.rho
        limit = self.tol * step.n if not math.isinf(self.tol) else torch.full_like(g, math.inf)
        to_go = torch.maximum(g, s * rho / (1 - rho))
        contracts = (rho < 1) & (to_go <= limit)  # false where there is no rate: NaN
        return (g == 0) | ((g <= limit) & ((g <= step.phi * step.n) | contracts))


@dataclass(frozen=True, kw_only=True)
class Readout(ToleranceRule):
    """The prompt's predictions change by at most tol of their norm since the previous check (0 / 0 = 0).

    Passes `patience` times in a row. With scope="prefix" a token is judged by the prediction read at it; a token that
    nothing is read from, by g <= tol * n, because later tokens read its state for as long as they move.
    """

    patience: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_counter("patience", 1)

    @property
    def n_passes(self) -> int:
        return self.patience

    def start(self, g: Tensor) -> Memory:
        return {"has_prediction": torch.zeros(g.shape[0], dtype=torch.bool, device=g.device)}

    def update(self, memory: Memory, step: Step) -> Tensor:
        now = step.predict().to(torch.float64)
        before = memory.get("prediction", torch.zeros_like(now))
        known = memory["has_prediction"]
        change, size = (x.reshape(x.shape[0], x.shape[1], -1).norm(dim=-1) for x in (now - before, now))  # [n, N]
        if step.is_per_token:
            passed, known = step.g <= self.tol * step.n, known[:, None]
            passed[:, :: step.read_stride] = self._is_still(change, size)
        else:
            change, size = change.norm(dim=-1), size.norm(dim=-1)
            passed = self._is_still(change, size)
        memory["prediction"], memory["has_prediction"] = now, torch.ones_like(memory["has_prediction"])
        return (passed & known) | (step.g == 0)

    def _is_still(self, change: Tensor, size: Tensor) -> Tensor:
        return torch.ones_like(change, dtype=torch.bool) if math.isinf(self.tol) else change <= self.tol * size


RULES: dict[str, type[ExitRule]] = {
    "fixed": Fixed,
    "exact": Exact,
    "absolute": Absolute,
    "relative": Relative,
    "contraction": Contraction,
    "readout": Readout,
}


Exit = ExitRule | str | Mapping[str, Any] | None


def make_exit(rule: Exit, **fields: Any) -> ExitRule:
    """The rule itself, one by ``{"rule": name, field: value, ...}``, one by its name in `RULES` with some fields set, or
    `Fixed` for None.

    Raises ValueError that names the nearest, or all, for an unknown name or field; TypeError for anything else.
    """
    if isinstance(rule, str):
        return rule_of({"rule": rule} | fields, RULES)
    if fields:
        raise ValueError(f"make_exit: {', '.join(fields)} go with the name of a rule, got {rule!r}")
    if isinstance(rule, Mapping):
        return rule_of(rule, RULES)
    if rule is not None and not isinstance(rule, ExitRule):
        raise TypeError(
            f"exit must be a rule, its name, a mapping or None, got {type(rule).__name__}; subclass ExitRule for your own"
        )
    return Fixed() if rule is None else rule


def rule_of(mapping: Mapping[str, Any], rules: Mapping[str, type[ExitRule]], **defaults: Any) -> ExitRule:
    """A rule by ``{"rule": name in rules, field: value, ...}``; defaults are fields that the mapping may set otherwise."""
    fields = dict(mapping)
    if "rule" not in fields:
        raise ValueError(f"exit={fields!r} has no 'rule'; add one of {', '.join(rules)}")
    name = fields.pop("rule")
    if not isinstance(name, str) or name not in rules:
        raise ValueError(f"exit={name!r} is not a rule{suggestion(name, rules, listed=True)}")
    known = [field.name for field in dataclasses.fields(rules[name])]
    for field in fields:
        if field not in known:
            raise ValueError(f"exit {name!r} has no {field!r}{suggestion(field, known, listed=True)}")
    return rules[name](**defaults | fields)


class Watch:
    """What is counted for every rule alike: rates between checks, passes in a row, and stalls.

    Its memory lives in the dictionary of the live prompts, so that prompts leave the batch with it and resume with it.
    """

    def __init__(self, rule: ExitRule) -> None:
        self.rule = rule

    def start(self, units: Tensor) -> Memory:
        """Memory for fresh units (float64 zeros, [n] or [n, T])."""
        prompts = units if units.dim() == 1 else units[:, 0]
        memory = {
            "passes": torch.zeros_like(units, dtype=torch.int64),
            "s_prev": torch.full_like(units, math.nan),
            "t_prev": torch.zeros_like(units, dtype=torch.int64),
            "best_g": torch.full_like(prompts, math.inf),
            "checks_without_gain": torch.zeros_like(prompts, dtype=torch.int64),
        }
        return memory | {f"rule.{name}": tensor for name, tensor in self.rule.start(units).items()}

    def forget_rate(self, live: Memory, where: Tensor) -> None:
        """The next check has no rate: a step of another kind was taken."""
        live["s_prev"] = live["s_prev"].masked_fill(unit_mask(where, live["s_prev"]), math.nan)

    def reset(self, live: Memory, where: Tensor) -> None:
        """All counters as at the start (damping begins)."""
        self.forget_rate(live, where)
        live["passes"] = live["passes"].masked_fill(unit_mask(where, live["passes"]), 0)
        live["best_g"] = live["best_g"].masked_fill(where, math.inf)
        live["checks_without_gain"] = live["checks_without_gain"].masked_fill(where, 0)

    def enough(self, live: Memory, step: Step) -> Tensor:
        """Which units have passed often enough at a check of this loop: bool, the shape of step.g."""
        rule = self.rule
        due_prompts = step.t % rule.check_every == 0
        if not due_prompts.any():
            return torch.zeros_like(step.g, dtype=torch.bool)
        due = unit_mask(due_prompts, step.g)
        t = step.t if step.g.dim() == 1 else step.t[:, None].expand_as(step.g)
        rho = (step.s / live["s_prev"]) ** (1.0 / (t - live["t_prev"]))
        passed = due & self._ask(live, step._replace(rho=rho), due_prompts)
        live["passes"] = torch.where(due, torch.where(passed, live["passes"] + 1, 0), live["passes"])
        live["s_prev"] = torch.where(due, step.s, live["s_prev"])
        live["t_prev"] = torch.where(due, t, live["t_prev"])
        if rule.is_fixed:
            return torch.zeros_like(passed)
        return passed & ((live["passes"] >= rule.n_passes) | (step.g == 0)) & (t >= rule.min_loops)

    def _ask(self, live: Memory, step: Step, due: Tensor) -> Tensor:
        """The rule's answer; prompts that are not due keep its memory as it was."""
        before = {name.removeprefix("rule."): value for name, value in live.items() if name.startswith("rule.")}
        now = dict(before)
        passed = self.rule.update(now, step)
        for name, value in now.items():
            if name in before and not due.all():
                value = torch.where(due.reshape(-1, *[1] * (value.dim() - 1)), value, before[name])
            live[f"rule.{name}"] = value
        return passed

    def stalled(self, live: Memory, t: Tensor, g: Tensor, passing: Tensor) -> Tensor:
        """Which prompts had gone `stall_window` checks without progress at their last check: bool [n].

        g: float64 [n]. Progress is a g below 0.9 of its best, or a check that the rule passes (passing, bool [n]).
        """
        if self.rule.is_fixed or not self.rule.can_stall:
            return torch.zeros_like(t, dtype=torch.bool)
        due = t % self.rule.check_every == 0
        gains = due & (g < STALL_GAIN * live["best_g"])
        live["best_g"] = torch.where(gains, g, live["best_g"])
        count = torch.where(gains | (due & passing), 0, live["checks_without_gain"] + due.long())
        live["checks_without_gain"] = count
        last_check = t - t % self.rule.check_every
        return (count >= self.rule.stall_window) & (last_check >= self.rule.min_loops)


def unit_mask(prompts: Tensor, units: Tensor) -> Tensor:
    """A mask of prompts [n] spread over units of shape [n] or [n, T]."""
    return prompts if units.dim() == 1 else prompts[:, None].expand_as(units)
