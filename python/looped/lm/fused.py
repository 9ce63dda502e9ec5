"""The fused engines as backends of `LoopedGPT2`: "cpu", the C++ engine, and "triton", the kernels on a GPU."""

from __future__ import annotations

import contextlib

from looped.backends.decode import CpuSession, torch_on_one_thread
from looped.backends.triton_decode import TritonSession
from looped.lm.cache import LoopedCache
from looped.lm.session import SESSIONS

SESSIONS["cpu"] = CpuSession
SESSIONS["triton"] = TritonSession


def threads_for(backend: str | None, cache: object) -> contextlib.AbstractContextManager[None]:
    """How `generate` uses threads: beside the C++ engine PyTorch keeps to one, because its others would spin on the cores that
    the engine needs for the next token."""
    if backend is None and isinstance(cache, LoopedCache):
        backend = cache.session.backend
    return torch_on_one_thread() if backend == "cpu" else contextlib.nullcontext()
