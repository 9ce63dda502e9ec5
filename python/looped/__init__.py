"""Looped transformers: one block of weights applied to a prompt until its state stops changing."""

from looped import exits, op
from looped.accelerate import Anderson
from looped.checkpoint import load_checkpoint, load_model, save_model
from looped.config import LoopedConfig, gpt2_config, icl_config
from looped.engine import repack, solve, solve_iter
from looped.loop import Interrupted, LoopResult, LoopState, PromptResult, Status
from looped.model import LoopedTransformer
from looped.pretrained import load_pretrained

__version__ = "0.1.0"

__all__ = [
    "Anderson",
    "Interrupted",
    "LoopResult",
    "LoopState",
    "LoopedConfig",
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
