"""`CpuSession`: decoding of looped language models on the C++ engine, with weights and a cache in layouts of its own.

A session holds ragged rows of tokens and extends them: all loops and layers of a call's tokens at once, without the GIL. A
token's result depends on its own row alone: the same bits alone and in any batch, at any thread count, and with the cache
policy per_loop in any split of the row into calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from looped.backends import cpu
from looped.decoding import CachedKeys, Extension, Policy
from looped.exits import PRECISION_OF, ROUNDING_LEVEL, ExitRule
from looped.model import LoopedTransformer
from looped.weights import first_weight, weights_of

# Rules that the engine has, by the names of their classes and where these are.
RULES = ("Fixed", "Exact", "Absolute", "Relative", "Contraction", "Readout")
TOKEN_RULES = ("EntropyDifference", "KLDivergence", "ArgmaxStable", "Gate")
HOMES = dict.fromkeys(RULES, "looped.exits") | dict.fromkeys(TOKEN_RULES, "looped.lm.exits")


def why_not(model: LoopedTransformer) -> str | None:
    """Why no session of this model can be had, and None where it can."""
    config = model.config
    if config.mask_kind != "causal":
        return "decoding needs a causal mask"
    if config.input_kind == "features" or config.state_init == "given":
        return f"decoding has no input_kind={config.input_kind!r} with state_init={config.state_init!r}"
    return cpu.why_not(model)


@dataclasses.dataclass
class _OneThread:
    """Who is inside `torch_on_one_thread`, and what the first to come found."""

    n_inside: int = 0
    of_torch: int = 0
    of_sessions: int = 0


_one_thread, _one_thread_lock = _OneThread(), threading.Lock()
_nesting = threading.local()  # depth: of the calling thread


@contextlib.contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """PyTorch runs on one thread, and sessions on as many as it had: for loops that do little between a session's calls.

    The threads of PyTorch spin for milliseconds after every operation that they share, on the cores that a session then
    wants. A token of `generate` took half the time without them. PyTorch's setting is one for the process and one for every
    thread that has asked for it, so each thread sets its own back, to what the first of all found.
    """
    shared, depth, is_inside = _one_thread, getattr(_nesting, "depth", 0), False
    try:
        with _one_thread_lock:
            n_threads = torch.get_num_threads()  # sets a new thread to the process's number, which must not come after the 1
            if shared.n_inside == 0:
                shared.of_torch, shared.of_sessions = n_threads, cpu.thread_count()
            shared.n_inside += 1
            is_inside = True
            cpu.set_aside(shared.of_torch)
        _nesting.depth = depth + 1
        torch.set_num_threads(1)
        yield
    finally:
        _nesting.depth = depth
        if is_inside:
            with _one_thread_lock:
                shared.n_inside -= 1
                if depth == 0:
                    torch.set_num_threads(shared.of_torch)
                if shared.n_inside == 0:
                    cpu.set_aside(None)


def thread_count() -> int:
    """Threads of a session's call: torch's setting and no more than the cores, or as `torch_on_one_thread` found them."""
    return _one_thread.of_sessions if _one_thread.n_inside else cpu.thread_count()


class CpuSession:
    """Rows of tokens and what is kept of them, on the C++ engine. It is for one thread at a time; `copy` gives another its own.

    The weights are packed once for a model, and looked at again where rows begin anew: an edit while rows have tokens shows
    after `reset`. Inference only. Raises ValueError where `why_not` has a reason, RuntimeError where two threads call at once,
    and KeyboardInterrupt within 0.1 s of Ctrl-C, which leaves the rows as they were.
    """

    backend = "cpu"

    def __init__(self, model: LoopedTransformer, policy: Policy, gate: nn.Linear | None = None) -> None:
        """gate: a linear map from C to 1 for the exit rule Gate."""
        if reason := why_not(model):
            raise ValueError(f'backend="cpu" cannot decode with this model: {reason}')
        self.model, self.policy, self.gate = model, policy, gate
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self._session: Any = None
        self._before: tuple[Any, CachedKeys] | None = None  # the session and its keys before the last extend, if that was warm
        self._keys = CachedKeys(self.model.config.n_coda > 0)

    @property
    def lengths(self) -> list[int]:
        """Tokens kept of each row; empty before the first `extend`, which fixes the number of rows."""
        return [] if self._session is None else self._session.lengths

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

        embeds: [N, C] of the model's dtype, token embeddings without positions: the new tokens of row 0, then of row 1, ...
        lengths: new tokens of each row, 0 allowed; N is their sum.
        n_loops: loops to run at most. rule: judges every token by itself.
        positions: int64 [N] rows of the position table; by default each row counts on from its cached length.
        warm_start: tokens of a row that has cached tokens start from the last state of the last of them.
        return_states: see `Extension`.

        Raises NotImplementedError for a rule of one's own; ValueError for what does not fit, a gradient that is asked for, more
        tokens than positions, and cached tokens that lack the keys which this rule needs. Nothing is changed then.
        """
        if torch.is_grad_enabled() and embeds.requires_grad:
            raise ValueError('backend="cpu" records no gradient; decode under torch.no_grad(), or use backend="eager"')
        if embeds.dtype != (dtype := first_weight(self.model).dtype):
            raise ValueError(f'backend="cpu": embeds are {embeds.dtype} but the weights are {dtype}; convert one of them')
        starts = self.lengths
        if self._session is None or not any(starts):
            self._begin(len(starts))
        values = rule_values(rule, n_loops, embeds.dtype)
        self._keys.check(rule, n_loops, has_tokens=any(starts))
        self._before = None  # its pages would be copied when written
        before = (self._session.copy(), dataclasses.replace(self._keys)) if warm_start and any(starts) else None
        out = self._session.extend(
            embeds.detach().contiguous().numpy(),
            list(lengths),
            values | {"warm_start": warm_start},
            None if positions is None else positions.contiguous().numpy(),
            return_states=return_states,
            n_threads=thread_count(),
        )
        self._keys.add(rule, n_loops, len(embeds), starts=starts)
        self._before = before
        states = [torch.from_numpy(state) for state in out["states"]] if return_states else None
        return Extension(torch.from_numpy(out["hidden"]), torch.from_numpy(out["n_loops"]), states)

    def head(self, hidden: Tensor) -> Tensor:
        """The logits [..., vocabulary] of hidden states [..., C], on the packed head. Raises ValueError without a read-out."""
        rows = hidden.detach().reshape(-1, hidden.shape[-1]).contiguous().numpy()
        logits = torch.from_numpy(self._made().read(rows, n_threads=thread_count()))
        return logits.reshape(*hidden.shape[:-1], logits.shape[-1])

    def crop(self, n_tokens: Sequence[int]) -> None:
        """Forget the last n_tokens[b] tokens of row b, and every row's last state for warm starts."""
        self._before = None
        if self._session is not None or len(n_tokens):
            self._made().crop(list(n_tokens))
            self._keys.crop(self.lengths)

    def take_back(self, n_tokens: Sequence[int]) -> None:
        """`crop`, and where these are all tokens of the last `extend` and that had warm_start, the rows have their last states
        from before it. After another `extend` they have none: the next warm start is a cold one.
        """
        lengths, before = [length - n for length, n in zip(self.lengths, n_tokens, strict=True)], self._before
        if before is not None and before[0].lengths == lengths:
            (self._session, self._keys), self._before = before, None
        else:
            self.crop(n_tokens)

    def select(self, rows: Tensor) -> None:
        """New row i is what row rows[i] was (int64): reorders for beams, repeats and drops rows."""
        self._before = None
        self._made().select(rows.tolist())
        self._keys.select()

    def copy(self) -> CpuSession:
        """A session of the same model that goes on independently from here."""
        session = CpuSession(self.model, self.policy, self.gate)
        if self._session is not None:
            session._session = self._session.copy()
        session._keys = dataclasses.replace(self._keys)
        return session

    def _made(self) -> Any:
        if self._session is None:
            self._begin(0)
        return self._session

    def _begin(self, n_rows: int) -> None:
        """An empty session of the weights as they are; n_rows: rows that it must go on having, or 0."""
        engine, _ = cpu.packed(self.model.config, weights_of(self.model))
        gate = {}
        if self.gate is not None:
            gate["gate_weight"] = np.ascontiguousarray(self.gate.weight.detach().numpy()[0])
            if self.gate.bias is not None:
                gate["gate_bias"] = self.gate.bias.detach().numpy()
        self._session = engine.session(self.policy.kind, self.policy.period, n_rows=n_rows, **gate)


def rule_values(rule: ExitRule, n_loops: int, dtype: torch.dtype) -> dict[str, Any]:
    """A rule as the engine takes it. Raises NotImplementedError for a rule of one's own."""
    name = type(rule).__name__
    if HOMES.get(name) != type(rule).__module__:
        raise NotImplementedError(f'backend="cpu" has no exit rule {name}; it has {", ".join(HOMES)}; use backend="eager"')
    values = {name: value for name, value in vars(rule).items() if name in ("tol", "patience", "threshold")}
    return values | {
        # All loops: with a tolerance of 0, or with no check among them.
        "rule": "fixed" if rule.is_fixed or n_loops < rule.check_every else name.lower(),
        "n_loops": n_loops,
        "check_every": rule.check_every,
        "min_loops": rule.min_loops,
        "phi": ROUNDING_LEVEL[PRECISION_OF.get(dtype, "fp32")],
    }
