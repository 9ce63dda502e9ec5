"""The C++ engine as a backend: packs a model's weights once, and passes prompts and memory through as NumPy arrays.

Its memory has the eager backend's names, so that one `LoopState` serves both.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import threading
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from looped.exits import PRECISION_OF, ROUNDING_LEVEL, RULES
from looped.loop import LoopResult, LoopSpec, LoopState, Status
from looped.model import LoopedTransformer, clear_padding, own_tokens

_engine: Any = None
_missing: str | None = None
try:
    _engine = importlib.import_module("looped._engine")
except ImportError as error:  # built without a C++ compiler, or for another Python
    _missing = f"the C++ engine is not in this installation ({error}); install looped where a C++20 compiler is"

BITS = {torch.float32: torch.int32, torch.float64: torch.int64}

_packed: weakref.WeakKeyDictionary[LoopedTransformer, tuple[tuple[Any, ...], Any]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def why_not(model: LoopedTransformer, spec: LoopSpec | None = None) -> str | None:
    """Why this backend cannot run the model this way, and None where it can."""
    if _engine is None:
        return _missing
    parameter = next(model.parameters())
    if parameter.device.type != "cpu":
        return f"the C++ engine runs on the CPU and the model is on {parameter.device}"
    if parameter.dtype not in BITS:
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
) -> LoopResult:
    """`eager.run` on the C++ engine: the same arguments and results; the same bits in any batch and at any thread count."""
    engine, n_threads = packed(model), thread_count()
    own = None if lengths is None else lengths.numpy()
    P = torch.from_numpy(engine.embed(prompts.detach().contiguous().numpy(), own, n_threads=n_threads))
    memory: dict[str, np.ndarray] | None = None
    if isinstance(state, LoopState):
        Y, memory = state.y, _memory_of(state, spec)
    else:
        Y = clear_padding(model.initial_state(P, state), own_tokens(P.shape[1], lengths))
    out = engine.run(P.numpy(), Y.detach().contiguous().numpy(), own, spec_values(spec, P.dtype), memory, n_threads=n_threads)
    arrays = {name: torch.from_numpy(array) for name, array in out["memory"].items()}
    y = torch.from_numpy(out["y"])
    return LoopResult(
        y=y,
        prediction=torch.from_numpy(out["prediction"]),
        n_loops=arrays["t"],
        status=arrays["status"],
        residual=arrays["residual"],
        predictions=torch.from_numpy(out["predictions"]) if spec.return_predictions else None,
        n_loops_by_token=arrays.get("prefix.n_loops"),
        state=LoopState(y, arrays, spec.stopping),
        backend="cpu",
        reason="",
    )


def spec_values(spec: LoopSpec, dtype: torch.dtype) -> dict[str, Any]:
    """A `LoopSpec` as the engine takes it."""
    return {
        "n_loops": spec.n_loops,
        "rule": type(spec.rule).__name__.lower(),
        "phi": ROUNDING_LEVEL[PRECISION_OF[dtype]],
        "on_stall": spec.on_stall,
        "depth": spec.accelerate.depth if spec.accelerate else 0,
        "return_predictions": spec.return_predictions,
        **dataclasses.asdict(spec.rule),
    }


def _memory_of(state: LoopState, spec: LoopSpec) -> dict[str, np.ndarray]:
    """All of a state's memory under the same way to stop; else where it stands, with fresh counters."""
    kept = state.memory
    if state.stopping != spec.stopping:
        kept = {name: kept[name] for name in ("t", "done", "status", "residual", "Y") if name in kept}
        kept["status"] = torch.where(kept["status"] == Status.NONFINITE, kept["status"], Status.MAX_LOOPS)
    return {name: tensor.contiguous().numpy() for name, tensor in kept.items()}


def packed(model: LoopedTransformer) -> Any:
    """The engine of a model, packed again whenever a parameter has changed in any way, edits through `.data` included."""
    with _lock:
        key = _fingerprint(model)
        known = _packed.get(model)
        if known is None or known[0] != key:
            weights = {name: np.require(p.detach().numpy(), requirements=["C", "A"]) for name, p in model.state_dict().items()}
            known = (key, _engine.Engine(model.config.to_dict(), weights))
            _packed[model] = known
        return known[1]


def _fingerprint(model: LoopedTransformer) -> tuple[Any, ...]:
    """Where every parameter lies, its version, and the sum of its bits: what edits past the version counter change."""
    marks: list[Any] = [model.config]
    for parameter in model.parameters():
        version = -1 if parameter.is_inference() else parameter._version
        bits = parameter.detach().contiguous().view(BITS[parameter.dtype]).sum().item()
        marks.append((parameter.data_ptr(), version, parameter.dtype, tuple(parameter.shape), bits))
    return tuple(marks)


def thread_count() -> int:
    """torch's setting, and no more than the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), cores))
