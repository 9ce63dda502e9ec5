"""Exit rules of language models: every token stops by itself (scope "token").

All rules of `looped.exits` serve, with a token as the unit: contraction, relative, absolute, exact, readout, fixed. The rules
here read the next-token distribution after every loop, which costs the coda and the head at every check, or the exit gate of
the model, as Ouro has one (Zhu et al., 2025). Thresholds default to those of Huginn (Geiping et al., 2025); the gate's is ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from looped.exits import RULES, Exit, ExitRule, Fixed, Memory, Step, rule_of


@dataclass(frozen=True, kw_only=True)
class TokenRule(ExitRule):
    """A rule for tokens alone. reads_logits: it calls `step.predict`, the logits [n, 1, V] of the tokens that still move."""

    scope: str = "token"
    reads_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scope != "token":
            raise ValueError(f"{type(self).__name__}: judges tokens, so scope must be 'token', got {self.scope!r}")

    def check_number(self, name: str) -> None:
        """Raises ValueError for a field that is no number of at least 0 that a float holds."""
        value: Any = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and value >= 0):
            raise ValueError(f"{type(self).__name__}: {name}={value!r} must be a number of at least 0")
        try:
            object.__setattr__(self, name, float(value))
        except OverflowError:
            raise ValueError(f"{type(self).__name__}: {name} is more than a float holds; use math.inf") from None


@dataclass(frozen=True, kw_only=True)
class DistributionRule(TokenRule):
    """A rule on the change of the next-token distribution since the check before; tol = 0 means `Fixed`."""

    tol: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_number("tol")

    @property
    def is_fixed(self) -> bool:
        return self.tol == 0


@dataclass(frozen=True, kw_only=True)
class EntropyDifference(DistributionRule):
    """|H(p_t) - H(p_s)| <= tol, p_t being the distribution after loop t, s the check before and H the entropy in nats."""

    def start(self, g: Tensor) -> Memory:
        return {"entropy": torch.full_like(g, torch.nan)}

    def update(self, memory: Memory, step: Step) -> Tensor:
        log_p = _log_probabilities(step)
        entropy = -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)  # 0 log 0 = 0
        entropy = torch.where(log_p.isnan().any(-1), torch.nan, entropy)
        passed = (entropy - memory["entropy"]).abs() <= self.tol  # false at the first check: NaN
        memory["entropy"] = entropy
        return passed


@dataclass(frozen=True, kw_only=True)
class KLDivergence(DistributionRule):
    """KL(p_t || p_s) <= tol in nats, p_t being the distribution after loop t and s the check before."""

    def update(self, memory: Memory, step: Step) -> Tensor:
        log_p = _log_probabilities(step)
        before = memory.get("log_p", torch.full_like(log_p, torch.nan))
        terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - before))
        memory["log_p"] = log_p
        return terms.sum(-1) <= self.tol  # false at the first check: NaN


@dataclass(frozen=True, kw_only=True)
class ArgmaxStable(TokenRule):
    """The likeliest next token is the same at this check and the `patience` - 1 before it."""

    patience: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_counter("patience", 1)

    def start(self, g: Tensor) -> Memory:
        return {"token": torch.full_like(g, -1, dtype=torch.int64), "same": torch.zeros_like(g, dtype=torch.int64)}

    def update(self, memory: Memory, step: Step) -> Tensor:
        token = step.predict()[:, 0].argmax(-1)
        memory["same"] = torch.where(token == memory["token"], memory["same"] + 1, 1)
        memory["token"] = token
        return memory["same"] >= self.patience


@dataclass(frozen=True, kw_only=True)
class Gate(TokenRule):
    """The model's exit gate: lambda_t = sigmoid(gate(F_t)); the token stops when 1 - prod(1 - lambda_s, s <= t) >= threshold.

    The product, over the checks, is the probability of not having left: Ouro's cumulative exit probability. Ouro's own
    threshold is 1, at which tokens hardly leave. Needs a model with `exit_gate=True`.
    """

    threshold: float = 0.5
    reads_logits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_number("threshold")

    def start(self, g: Tensor) -> Memory:
        return {"stay": torch.ones_like(g)}

    def update(self, memory: Memory, step: Step) -> Tensor:
        if step.gate is None:
            raise ValueError('exit="gate" needs a model with an exit gate; make one with exit_gate=True')
        memory["stay"] = memory["stay"] * torch.sigmoid(-step.gate().double())
        return 1 - memory["stay"] >= self.threshold


TOKEN_RULES: dict[str, type[ExitRule]] = {
    **RULES,
    "entropy": EntropyDifference,
    "kl": KLDivergence,
    "argmax": ArgmaxStable,
    "gate": Gate,
}


def token_rule(rule: Exit) -> ExitRule:
    """The rule itself, one by its name in `TOKEN_RULES`, one by ``{"rule": name, field: value, ...}``, or `Fixed` for None.

    Raises ValueError that names the nearest, or all, for an unknown name or field, and for a rule that freezes prefixes;
    TypeError for anything else.
    """
    if rule is None:
        return Fixed(scope="token")
    if isinstance(rule, str):
        rule = {"rule": rule}
    if isinstance(rule, Mapping):
        rule = rule_of(rule, TOKEN_RULES, scope="token")
    if not isinstance(rule, ExitRule):
        raise TypeError(f"exit must be a rule, its name, a mapping or None, got {type(rule).__name__}")
    if rule.scope == "prefix":
        raise ValueError('exit: a token of a language model stops by itself; use scope="token" instead of "prefix"')
    return rule if rule.scope == "token" else dataclasses.replace(rule, scope="token")


def _log_probabilities(step: Step) -> Tensor:
    """float32 or better [n, V]."""
    logits = step.predict()[:, 0]
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
