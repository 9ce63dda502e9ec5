"""What decode sessions share, whichever engine they run on. The session itself is defined in lm/session.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from looped.exits import RULES, ExitRule, Readout


class Policy(Protocol):
    """Which loops keep keys and values of their own: per_loop, last_only, modulo (of a period), first_then_shared."""

    @property
    def kind(self) -> str: ...
    @property
    def period(self) -> int: ...


class Extension(NamedTuple):
    """What `extend` gives for N new tokens, packed like its input.

    hidden: [N, C], after the coda and the final norm: what the head reads.
    n_loops: int64 [N], loops run by each token.
    states: Y_0 .. Y_n, each [N, C], when asked for; entries after a token's exit repeat its last state.
    """

    hidden: Tensor
    n_loops: Tensor
    states: list[Tensor] | None = None


def reads_logits(rule: ExitRule) -> bool:
    """Whether a check of the rule runs the coda and the head. A rule of one's own that does not say so is taken to."""
    said: bool | None = getattr(rule, "reads_logits", None)
    return isinstance(rule, Readout) or type(rule) not in RULES.values() if said is None else said


@dataclass
class CachedKeys:
    """What the cached tokens of a session have no keys for, and the refusal of calls that would read these.

    has_coda: of the model; a rule that reads logits then reads keys of the coda at every check.
    lack_loops: some token ran none. check_every: all tokens have keys of the coda at the checks of such rules; None: not all.
    """

    has_coda: bool
    lack_loops: bool = False
    check_every: int | None = None
    before: tuple[list[int], bool, int | None] | None = None  # lengths of the rows and the two, before these last changed

    def check(self, rule: ExitRule, n_loops: int, *, has_tokens: bool) -> None:
        """Raises ValueError where a call would read keys that tokens cached before it lack."""
        if not has_tokens:
            return
        if self.lack_loops and n_loops:
            raise ValueError(
                "extend: tokens cached with n_loops=0 have no keys for a call with loops; start a new cache, or reset the "
                "session"
            )
        every = checks_of(rule, n_loops)
        if self.has_coda and every is not None and every != self.check_every:
            raise ValueError(
                f"extend: exit {type(rule).__name__} runs the coda at every check, so all cached tokens must come from calls "
                f"that checked by such a rule with check_every={every}; start a new cache, or reset the session"
            )

    def add(self, rule: ExitRule, n_loops: int, n_new: int, *, starts: Sequence[int]) -> None:
        """Count in the n_new tokens of a call. starts: what the rows had before it."""
        if not any(starts):
            self.lack_loops, self.check_every, self.before = False, None, None
        lack_loops, check_every = self.lack_loops or n_loops == 0, checks_of(rule, n_loops)
        if n_new and (lack_loops, check_every) != (self.lack_loops, self.check_every):
            self.before = (list(starts), self.lack_loops, self.check_every) if any(starts) else None
            self.lack_loops, self.check_every = lack_loops, check_every

    def crop(self, lengths: Sequence[int]) -> None:
        """Rows have these lengths now: tokens that lacked something may be gone, as drafts of few loops are."""
        if self.before is not None and all(n <= had for n, had in zip(lengths, self.before[0], strict=True)):
            (_, self.lack_loops, self.check_every), self.before = self.before, None

    def select(self) -> None:
        """Rows are others now, and `crop` can no longer tell which tokens were whose."""
        self.before = None


def checks_of(rule: ExitRule, n_loops: int) -> int | None:
    """`check_every`, where n_loops loops have a check that reads logits; else None."""
    return rule.check_every if not rule.is_fixed and reads_logits(rule) and n_loops >= rule.check_every else None
