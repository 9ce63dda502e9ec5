"""What decoding needs of an engine: `DecodeSession`, the one interface between `LoopedGPT2` and whatever computes.

A session holds what has been computed of B rows of tokens and extends them. It knows nothing of padding, attention masks,
vocabulary heads or sampling: rows are ragged and packed, embeddings come in without positions, and hidden states come out ready
for the head. `looped.lm.eager` is the truth that other engines are tested against.

The semantics of an exit, normative for every engine
    Token i is active at loop t while t <= u_i. u_i is the loop at which its own rule passed, or n_loops.
    While it is active its keys and values of loop t, layer l are computed and kept. At a loop t > u_i every token that attends
    to token i reads the keys and values of loop u_i, the last it has: slot (min(t, u_i), l). So it is within one call, where
    all tokens iterate in parallel, and between calls; also where a later call asks for more loops than a cached token has run.
    The coda and the final norm read the state at the exit. A row's result does not depend on the other rows.
    With the cache policy per_loop, any split of a row into calls gives the same result. The other policies say what a later
    call reads instead (looped.lm.policy); within one call all read loop min(t, u_i), but for modulo(N): a token that left
    shows, at t > u_i, the last of its loops that is t modulo N, in the same call as in later ones, because leaving copies
    nothing over loops that it ran.
    warm_start: a row that was cropped starts cold until it has a token of its own. Taking a call back that failed is no crop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from looped.decoding import Extension, Policy
from looped.exits import ExitRule
from looped.lm.policy import CachePolicy
from looped.model import LoopedTransformer


class DecodeSession(Protocol):
    """Rows of tokens and what is kept of them. Lengths are numbers of the host, so that no call waits for a device."""

    backend: str
    model: LoopedTransformer

    @property
    def policy(self) -> Policy:
        """Which loops keep keys and values of their own."""

    @property
    def lengths(self) -> list[int]:
        """Tokens kept of each row; empty before the first `extend`, which fixes the number of rows."""

    def extend(
        self,
        embeds: Tensor,
        lengths: Sequence[int],
        *,
        n_loops: int,
        rule: ExitRule,
        positions: Tensor | None = None,
        warm_start: bool = False,
        return_states: bool = False,
    ) -> Extension:
        """Append tokens to the rows and compute them.

        embeds: [N, C], token embeddings without positions: the new tokens of row 0, then those of row 1, and so on.
        lengths: new tokens of each row, 0 allowed; N is their sum.
        n_loops: loops to run at most. rule: judges every token by itself; `Fixed` never passes.
        positions: int64 [N] rows of the position table. None means what is usual: each row counts on from its cached length.
        warm_start: tokens of a row that has cached tokens start from the last state of the last of them.
        return_states: see `Extension`.

        The caller has checked that positions are in the table and min_loops <= n_loops. Raises NotImplementedError for an
        argument that this engine does not offer, before anything is changed.
        """

    def crop(self, n_tokens: Sequence[int]) -> None:
        """Forget the last n_tokens[b] tokens of row b."""

    def select(self, rows: Tensor) -> None:
        """New row i is what row rows[i] was (int64): reorders for beams, repeats and drops rows."""

    def reset(self) -> None:
        """Forget all rows."""

    def copy(self) -> DecodeSession:
        """A session of the same model that goes on independently from here."""


class ForgivingSession(DecodeSession, Protocol):
    """A session that can be as it was before its last `extend`. Others crop, and a warm start after that is a cold one."""

    def take_back(self, n_tokens: Sequence[int]) -> None:
        """Forget the last n_tokens[b] tokens of row b. Where these are all tokens of the last `extend`, and nothing but
        extending has been done since, the rows have their last states from before it."""


class DraftingSession(DecodeSession, Protocol):
    """A session that computes tokens which may not stay, and goes on from them where they do: see `looped.lm.speculative`.

    Sessions without it are drafted with by `extend` and `crop`, and run the loops of a draft twice.
    """

    def draft(self, embeds: Tensor, *, n_loops: int, rule: ExitRule, positions: Tensor | None = None) -> Extension:
        """Compute tokens [n, C] behind the end of the one row, provisionally: `lengths` does not count them.

        The arguments are those of `extend`. An `extend` that begins with the same tokens in the same places under the same rule
        goes on from the loops that drafts have run; another one forgets them, and so do crop and select. Both ways give the
        same result: with the policy per_loop, a token's first loops are the same whether or not more follow, and where its rule
        passes within them, it is done. Raises ValueError for several rows and for another policy.
        """


def head_of(session: DecodeSession, model: LoopedTransformer) -> Callable[[Tensor], Tensor]:
    """Logits [..., V] of hidden states [..., C]: the session's own `head`, with packed weights, where it has one."""
    head: Callable[[Tensor], Tensor] = getattr(session, "head", model.head)
    return head


def take_back(session: DecodeSession, n_tokens: Sequence[int]) -> None:
    """Undo an `extend`: the session's own `take_back`, with the last states from before, where it has one; else `crop`."""
    forget: Callable[[Sequence[int]], None] = getattr(session, "take_back", session.crop)
    forget(n_tokens)


# What a backend offers: a session for (model, policy, gate); gate is the exit gate, a Linear from C to 1, or None.
SessionFactory = Callable[[LoopedTransformer, CachePolicy, "nn.Linear | None"], DecodeSession]

SESSIONS: dict[str, SessionFactory] = {}


def make_session(backend: str, model: LoopedTransformer, policy: CachePolicy, gate: nn.Linear | None) -> DecodeSession:
    """An empty session. Raises ValueError for an unknown backend."""
    if backend not in SESSIONS:
        raise ValueError(f"LoopedGPT2: backend={backend!r} is not one of {', '.join(sorted(SESSIONS))}")
    return SESSIONS[backend](model, policy, gate)
