"""Looped transformers: one block of weights applied to a prompt until its state stops changing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from looped import exits, op
from looped.accelerate import Anderson
from looped.checkpoint import load_checkpoint, load_model, save_model
from looped.config import LoopedConfig, gpt2_config, icl_config
from looped.engine import repack, solve, solve_iter
from looped.loop import Interrupted, LoopResult, LoopState, PromptResult, Status
from looped.model import LoopedTransformer
from looped.pretrained import load_pretrained
from looped.registration import register_with_transformers

if TYPE_CHECKING:
    from looped.lm import LoopedGPT2, LoopedGPT2Config

__version__ = "0.1.0"

# Names that need transformers, which takes seconds to import, and packages that `solve` does not need load on first use.
LAZY = {"LoopedGPT2": "looped.lm", "LoopedGPT2Config": "looped.lm"}
LAZY_PACKAGES = ("experiments", "icl", "lm", "programs", "train")
register_with_transformers()


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    if name in LAZY_PACKAGES:
        return import_module(f"looped.{name}")
    raise AttributeError(f"module 'looped' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY, *LAZY_PACKAGES})


__all__ = [
    "Anderson",
    "Interrupted",
    "LoopResult",
    "LoopState",
    "LoopedConfig",
    "LoopedGPT2",
    "LoopedGPT2Config",
    "LoopedTransformer",
    "PromptResult",
    "Status",
    "exits",
    "gpt2_config",
    "icl_config",
    "load_checkpoint",
    "load_model",
    "load_pretrained",
    "op",
    "repack",
    "save_model",
    "solve",
    "solve_iter",
]
