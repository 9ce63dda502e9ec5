"""What the backends with kernels on a GPU share: the kernels themselves, and what these remember of a prompt as a `LoopState`
has it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from looped.backends.module import load_engine
from looped.exits import ROUNDING_LEVEL, RULES
from looped.loop import LoopSpec, LoopState, Status
from looped.model import LoopedTransformer, own_tokens

_engine: Any = load_engine()[0]

DTYPES = (torch.float32, torch.bfloat16)

IMAGES = {"t": 0, "done": 1, "status": 2, "passes": 3, "t_prev": 4, "checks_without_gain": 5, "damped": 6}
REALS = {"residual": 0, "s_prev": 1, "best_g": 2}


@functools.cache
def kernels(module: str = "launch") -> Any:
    """A module of `loopkernels`, or the reason why it cannot be imported."""
    try:
        return importlib.import_module(f"loopkernels.{module}")
    except ImportError as error:
        return f"Triton is not in this installation ({error}); a CUDA build of PyTorch brings it"


def is_there() -> bool:
    """Whether this installation has Triton, without importing it."""
    return importlib.util.find_spec("triton") is not None and importlib.util.find_spec("loopkernels") is not None


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is where the kernels run."""
    return tensor.is_cuda


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which takes tensors on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def groups_of(lengths: list[int], tile_rows: int) -> list[tuple[int, Tensor]]:
    """How prompts share tiles (`looped._engine.pack`): rows that a prompt takes, and int32 numbers of prompts, longest
    first."""
    if _engine is None:
        groups: list[tuple[int, Tensor]] = kernels().groups_of(lengths, tile_rows)
        return groups
    found = _engine.pack(np.asarray(lengths, dtype=np.int64), tile_rows)
    return [(group.slot_rows, torch.from_numpy(group.order)) for group in found]


def why_not_spec(spec: LoopSpec) -> str | None:
    """What of a call the stopping rule on the device does not know; None where it knows all."""
    if type(spec.rule) not in RULES.values():
        return f"{type(spec.rule).__name__} is a rule of your own, which runs on the eager backend"
    if spec.accelerate is not None:
        return "the kernels on a GPU iterate plainly; Anderson acceleration needs a history that they do not keep"
    if spec.rule.scope == "prefix":
        return 'the kernels on a GPU judge whole prompts; scope="prefix" runs on the other backends'
    if spec.n_loops >= 2**31:
        return f"the kernels on a GPU count loops in 32 bits and n_loops is {spec.n_loops}"
    return None


def stop_of(spec: LoopSpec, precision: str) -> Any:
    """A `LoopSpec` as the kernels take it."""
    rule = spec.rule
    return kernels().Stop(
        n_loops=spec.n_loops,
        rule="fixed" if rule.is_fixed else type(rule).__name__.lower(),
        tol=getattr(rule, "tol", 0.0),
        phi=ROUNDING_LEVEL[precision],
        n_passes=rule.n_passes,
        check_every=rule.check_every,
        min_loops=rule.min_loops,
        window=rule.stall_window,
        on_stall=spec.on_stall if rule.can_stall and not rule.is_fixed else "ignore",
    )


def memory_of(state: LoopState, spec: LoopSpec) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """A state's memory as the kernels keep it, (ints, floats) and the predictions of the last check: all of it under the same
    way to stop, else with fresh counters."""
    kept = state.memory
    ints, floats = kernels().fresh_memory(len(state.y), state.y.device)
    same = state.stopping == spec.stopping
    for name, i in IMAGES.items():
        if name in kept and (same or name in ("t", "done", "status")):
            ints[:, i] = kept[name].int()
    for name, i in REALS.items():
        if name in kept and (same or name == "residual"):
            floats[:, i] = kept[name].float()
    if not same:
        nonfinite = ints[:, 2] == Status.NONFINITE
        ints[:, 1] = nonfinite.int()
        ints[:, 2] = torch.where(nonfinite, ints[:, 2], 0)
    last_read = None
    if same and "rule.prediction" in kept:
        last_read = kept["rule.prediction"].float().contiguous()
        ints[:, 7] = kept["rule.has_prediction"].int()
    return (ints, floats), last_read


def remembered(ints: Tensor, floats: Tensor, last_read: Tensor | None) -> dict[str, Tensor]:
    """The inverse of `memory_of`, under the eager backend's names."""
    memory: dict[str, Tensor] = {name: ints[:, i].long() for name, i in IMAGES.items()}
    memory |= {name: floats[:, i].double() for name, i in REALS.items()}
    memory["done"], memory["damped"] = memory["done"].bool(), memory["damped"].bool()
    if last_read is not None:
        memory |= {"rule.prediction": last_read.double(), "rule.has_prediction": ints[:, 7].bool()}
    return memory


def after_every_loop(
    model: LoopedTransformer, reads: Tensor, last: Tensor, t: Tensor, lengths: Tensor | None, first: int, first_t: Tensor | None
) -> Tensor:
    """Predictions [B, loops, N, ...] of the loops from `first` on: still after a prompt's exit, NaN before its first loop
    here, 0 in padding."""
    loops = torch.arange(first, first + reads.shape[1], device=reads.device)

    def wide(mask: Tensor) -> Tensor:
        return mask.reshape(*mask.shape, *[1] * (reads.dim() - mask.dim()))

    predictions = torch.where(wide(loops >= t[:, None]), last[:, None], reads)
    own = own_tokens(int(lengths.max()), lengths) if lengths is not None and len(lengths) else None
    if own is not None:
        is_read = torch.zeros(reads.shape[0], 1, reads.shape[2], dtype=torch.bool, device=reads.device)
        at = own[:, :: model.config.prediction_stride]
        is_read[:, 0, : at.shape[1]] = at
        predictions = predictions.masked_fill(~wide(is_read), 0)
    return predictions if first_t is None else predictions.masked_fill(wide(loops < first_t[:, None]), math.nan)
