"""The C++ engine as a backend: packs a model's weights once, and passes prompts and memory through as NumPy arrays.

Its memory has the eager backend's names, so that one `LoopState` serves both.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from looped.backends.module import load_engine
from looped.config import LoopedConfig
from looped.exits import PRECISION_OF, ROUNDING_LEVEL, RULES, Fixed
from looped.loop import LoopResult, LoopSpec, LoopState, Status, check_weights, not_begun
from looped.model import LoopedTransformer, clear_padding, own_tokens
from looped.weights import checksum, first_weight, weights_of

_engine, _missing = load_engine()

DTYPES = (torch.float32, torch.float64)

KEPT = 4  # packed copies under one first weight

_packed: Any = WeakTensorKeyDictionary()  # the first weight: {slot: (key, the engine, checksum)}; goes with that weight
_lock = threading.Lock()


def why_not(model: LoopedTransformer, spec: LoopSpec | None = None) -> str | None:
    """Why this backend cannot run the model this way, and None where it can."""
    return cannot_run(first_weight(model), spec) or model.why_not_as_configured()


def is_there() -> bool:
    """Whether this installation has the engine."""
    return _engine is not None


def cannot_run(parameter: Tensor, spec: LoopSpec | None = None) -> str | None:
    """`why_not` of a model with weights like this one."""
    if _engine is None:
        return _missing
    if parameter.device.type != "cpu":
        return f"the C++ engine runs on the CPU and the model is on {parameter.device}"
    if parameter.dtype not in DTYPES:
        return f"the C++ engine computes in float32 or float64 and the model is {parameter.dtype}"
    if spec is not None and type(spec.rule) not in RULES.values():
        return f"{type(spec.rule).__name__} is a rule of your own, which runs on the eager backend"
    return None


def describe() -> str:
    """Whether it works in this installation, and on which instructions; else why not."""
    return _missing or f"works ({_engine.isa()} instructions, float32 and float64)"


def run(
    model: LoopedTransformer,
    prompts: Tensor,
    lengths: Tensor | None,
    spec: LoopSpec,
    state: LoopState | Tensor | None = None,
    on_progress: Callable[[int], object] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> LoopResult:
    """`eager.run` on the C++ engine: the same arguments and results; the same bits in any batch and at any thread count.

    weights: used in place of the model's own. An interrupt is noticed within 0.1 s.
    """
    weights = weights_of(model) if weights is None else weights
    engine, n_threads, own = None, thread_count(), None if lengths is None else lengths.numpy()
    try:
        engine, weights_sum = packed(model.config, weights)
        check_weights(state, weights_sum)
        P = torch.from_numpy(engine.embed(_array(prompts), own, n_threads=n_threads))
    except KeyboardInterrupt:
        read = torch.no_grad()(model.read) if engine is None else functools.partial(_read, engine)
        return not_begun(model.config, prompts, lengths, next(iter(weights.values())).dtype, spec, state, "cpu", read)
    memory: dict[str, np.ndarray] | None = None
    if isinstance(state, LoopState):
        Y, memory = state.y, _memory_of(state, spec)
    else:
        Y = clear_padding(first_state(model, P, state), own_tokens(P.shape[1], lengths))
    values = spec_values(spec, P.dtype)
    out = engine.run(P.numpy(), _array(Y), own, values, memory, n_threads=n_threads, progress=on_progress)
    arrays = {name: torch.from_numpy(array) for name, array in out["memory"].items()}
    y, status = torch.from_numpy(out["y"]), arrays["status"]
    if out["interrupted"]:
        status = torch.where(torch.from_numpy(out["finished"]), status, Status.INTERRUPTED)
    return LoopResult(
        y=y,
        prediction=torch.from_numpy(out["prediction"]),
        n_loops=arrays["t"],
        status=status,
        residual=arrays["residual"],
        predictions=torch.from_numpy(out["predictions"]) if spec.return_predictions else None,
        n_loops_by_token=arrays.get("prefix.n_loops"),
        state=LoopState(y, arrays, spec.stopping, weights_sum=weights_sum),
        backend="cpu",
        reason="",
        interrupted=out["interrupted"],
    )


def _array(tensor: Tensor) -> np.ndarray:
    """A tensor's numbers as the engine takes them, copied only where they do not lie so."""
    array: np.ndarray = tensor.detach().resolve_neg().contiguous().numpy()
    return array


def _read(engine: Any, y: Tensor, lengths: Tensor | None) -> Tensor:
    """The read-out of states."""
    y, own = y.contiguous(), None if lengths is None else lengths.numpy()
    no_loops = spec_values(LoopSpec(0, Fixed()), y.dtype)
    out = engine.run(torch.zeros_like(y).numpy(), y.numpy(), own, no_loops, None, n_threads=thread_count(), progress=None)
    return torch.from_numpy(out["prediction"])


def first_state(model: LoopedTransformer, P: Tensor, state: Tensor | None) -> Tensor:
    """`model.initial_state`, made by NumPy where it can be: PyTorch's threads would spin on beside the engine's."""
    kind = model.config.state_init
    if kind not in ("zeros", "ones") or state is not None:
        return model.initial_state(P, state)
    return torch.from_numpy((np.zeros if kind == "zeros" else np.ones)(tuple(P.shape), P.numpy().dtype))


def spec_values(spec: LoopSpec, dtype: torch.dtype) -> dict[str, Any]:
    """A `LoopSpec` as the engine takes it."""
    return {
        "n_loops": spec.n_loops,
        "rule": type(spec.rule).__name__.lower(),
        "phi": ROUNDING_LEVEL[PRECISION_OF[dtype]],
        "on_stall": spec.on_stall,
        "depth": spec.accelerate.depth if spec.accelerate else 0,
        "return_predictions": spec.return_predictions,
        **vars(spec.rule),
    }


def _memory_of(state: LoopState, spec: LoopSpec) -> dict[str, np.ndarray]:
    """All of a state's memory under the same way to stop; else where it stands, with fresh counters."""
    kept = state.memory
    if state.stopping != spec.stopping:
        kept = {name: kept[name] for name in ("t", "done", "status", "residual", "Y") if name in kept}
        kept["status"] = torch.where(kept["status"] == Status.NONFINITE, kept["status"], Status.MAX_LOOPS)
    return {name: tensor.contiguous().numpy() for name, tensor in kept.items()}


def _after_fork() -> None:
    """A child has a lock of its own: a thread of the parent that held the old one does not live in it."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def fingerprint(weights: Iterable[Tensor]) -> int:
    """A number that tells whether any byte of weights on the CPU has changed, by whatever way; of this process alone."""
    tensors = [
        weight if weight.is_contiguous() and not weight.is_neg() else weight.detach().resolve_neg().contiguous()
        for weight in weights
    ]
    if _engine is None:
        return checksum(tensors)
    bits: int = _engine.fingerprint([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])
    return bits


def packed(config: LoopedConfig, weights: Mapping[str, Tensor]) -> tuple[Any, int]:
    """The engine of these weights and their checksum. Packed once, and again when any weight has changed in any way: the
    fingerprint sees what versions do not, such as edits through `.data`.

    A changed model takes the place of its old self; some others that share the first weight are kept beside it.
    """
    first = next(iter(weights.values()))
    shapes = tuple((weight.dtype, weight.shape) for weight in weights.values())
    key = (config, tuple(weights), shapes, fingerprint(weights.values()))
    slot = (config, first.dtype, tuple(weight.data_ptr() for weight in weights.values()))
    with _lock:
        kept = _packed.setdefault(first, {})
        known = next((entry for entry in kept.values() if entry[0] == key), None)
        if known is None:
            arrays = {name: np.require(_array(weight), requirements=["C", "A"]) for name, weight in weights.items()}
            known = (key, _engine.Engine(config.to_dict(), arrays), checksum(weights.values()))
            kept.pop(slot, None)
            kept[slot] = known
            if len(kept) > KEPT:
                del kept[next(iter(kept))]
        return known[1:]


_set_aside: int | None = None  # torch's setting while `set_aside` holds


def set_aside(n_threads: int | None) -> None:
    """Count these threads instead of torch's setting, which is 1 for a while; None: torch's again."""
    global _set_aside
    _set_aside = n_threads


def thread_count() -> int:
    """torch's setting, and no more than the cores that this process may use.

    A thread that asks torch for the first time keeps what it then gets, so torch is not asked while its setting is set aside.
    """
    n_threads = _set_aside
    return max(1, min(torch.get_num_threads() if n_threads is None else n_threads, n_cores()))


def n_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
