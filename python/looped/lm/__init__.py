"""Language models: `LoopedGPT2` is used like GPT-2 of transformers, and `generate` is transformers' own.

Importing this package registers the model with `AutoConfig` and `AutoModelForCausalLM`.
"""

from transformers import AutoConfig, AutoModelForCausalLM

import looped.lm.eager  # noqa: F401  enters its session
from looped.decoding import Extension
from looped.lm.cache import LoopedCache
from looped.lm.config import LoopedGPT2Config
from looped.lm.exits import TOKEN_RULES, ArgmaxStable, EntropyDifference, Gate, KLDivergence, TokenRule
from looped.lm.model import LoopedGPT2, LoopedOutput
from looped.lm.policy import CachePolicy
from looped.lm.session import DecodeSession
from looped.lm.speculative import SpeculativeOutput

AutoConfig.register(LoopedGPT2Config.model_type, LoopedGPT2Config, exist_ok=True)
AutoModelForCausalLM.register(LoopedGPT2Config, LoopedGPT2, exist_ok=True)

__all__ = [
    "TOKEN_RULES",
    "ArgmaxStable",
    "CachePolicy",
    "DecodeSession",
    "EntropyDifference",
    "Extension",
    "Gate",
    "KLDivergence",
    "LoopedCache",
    "LoopedGPT2",
    "LoopedGPT2Config",
    "LoopedOutput",
    "SpeculativeOutput",
    "TokenRule",
]
