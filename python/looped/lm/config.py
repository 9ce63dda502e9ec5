"""`LoopedGPT2Config`: the fields of `LoopedConfig`, flat, as a transformers configuration."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, ClassVar

from transformers import PretrainedConfig

from looped.config import ELSEWHERE, LoopedConfig
from looped.lm.exits import Exit, token_rule
from looped.lm.policy import CachePolicy
from looped.suggestion import suggestion

MODEL_FIELDS = tuple(field.name for field in dataclasses.fields(LoopedConfig))

# What lets a folder be loaded where nothing has imported looped, by programs that only know `trust_remote_code`.
SHIM_FILE = "modeling_looped_gpt2.py"
SHIM = '''"""Finds the classes of this model in the installed package: pip install looped."""

from looped.lm import LoopedGPT2, LoopedGPT2Config

__all__ = ["LoopedGPT2", "LoopedGPT2Config"]
'''
AUTO_MAP = {
    "AutoConfig": f"{Path(SHIM_FILE).stem}.LoopedGPT2Config",
    "AutoModelForCausalLM": f"{Path(SHIM_FILE).stem}.LoopedGPT2",
}

# Keys of transformers that are no fields of its base class, and that its files and its own calls nevertheless carry.
KEYS_OF_TRANSFORMERS = {"auto_map", "model_type", "torch_dtype", "num_labels", "name_or_path", "output_attentions"}
KEYS_OF_TRANSFORMERS |= {
    "attn_implementation",
    "experts_implementation",
    "quantization_config",
}
KEYS_OF_TRANSFORMERS |= {"_name_or_path", "_commit_hash", "_auto_class", "_is_quantized", "_from_auto", "_from_pipeline"}
KEYS_OF_TRANSFORMERS |= {f"_{kind}_implementation{end}" for kind in ("attn", "experts") for end in ("", "_internal")}
KEYS_OF_TRANSFORMERS |= {"_attn_implementation_autoset"}


class LoopedGPT2Config(PretrainedConfig):
    """A looped language model: tokens in, vocabulary logits out, causal. The defaults are GPT-2 (small), one loop.

    Fields of `LoopedConfig` have its meanings and its checks, those of transformers theirs; any other key is a ValueError that
    names the nearest, or all. Its own are

        cache_policy: which loops keep keys and values: ``"per_loop"`` (exact), ``"last_only"``, ``"modulo(N)"``,
            ``"first_then_shared"``; see `looped.lm.policy`.
        exit: the exit rule of calls that name none: None (all loops), a name of `looped.lm.exits.TOKEN_RULES`, or a mapping
            ``{"rule": name, field: value, ...}``.
        exit_gate: the model has a gate, a linear map from C to 1, for the rule "gate".
        warm_start: while decoding, a token's state starts from the last state of the token before it.
        initializer_range: standard deviation of fresh weights.
    """

    model_type = "looped_gpt2"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_heads",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values", "n_loops"]

    input_kind: str = "tokens"
    n_dims: int | None = None
    vocab_size: int = 50257
    readout: str = "vocabulary"
    n_classes: int | None = None
    tie_readout: bool = True
    read_stride: int = 1
    d_model: int = 768
    n_heads: int = 12
    head_dim: int | None = None
    d_ff: int | None = None
    activation: str = "gelu_tanh"
    norm_kind: str = "layernorm"
    norm_eps: float = 1e-5
    bias: bool = True
    mask_kind: str = "causal"
    n_prelude: int = 0
    n_core: int = 12
    n_coda: int = 0
    pos_kind: str = "learned"
    n_positions: int = 1024
    pos_when: str = "once"
    inject: str = "none"
    state_init: str = "embedding"
    loop_norm: str = "once"
    n_loops: int = 1

    cache_policy: str = "per_loop"
    exit: Any = None
    exit_gate: bool = False
    warm_start: bool = False
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.get("model_type") == "gpt2":
            raise ValueError("LoopedGPT2Config: this folder is a GPT-2; use LoopedGPT2.from_gpt2(folder)")
        check_names(kwargs)
        for name in ("auto_map", "model_type"):  # of a saved file; both are the class's own
            kwargs.pop(name, None)
        if kwargs.pop("tie_word_embeddings", self.tie_readout) != self.tie_readout:
            raise ValueError(
                "LoopedGPT2Config: tie_word_embeddings contradicts tie_readout, which says the same; give the latter"
            )
        for name in ("exit_gate", "warm_start", "use_cache"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"LoopedGPT2Config: {name}={getattr(self, name)!r} must be true or false")
        model = self.looped  # checks the fields
        self.head_dim, self.d_ff = model.head_dim, model.d_ff
        CachePolicy.parse(self.cache_policy)
        if self.exit is not None and not isinstance(self.exit, str | dict):
            raise ValueError(
                f"LoopedGPT2Config: exit={self.exit!r} must be a rule's name or a mapping, so that a file can hold it"
            )
        check_exit(self.exit, self.exit_gate)
        if self.warm_start:
            check_warm_start(model)
        super().__post_init__(**kwargs)

    @property
    def looped(self) -> LoopedConfig:
        """The fields that make the `LoopedTransformer`. Raises ValueError where they make none, or no language model."""
        fields = {name: getattr(self, name) for name in MODEL_FIELDS}
        for name, needed in (("input_kind", "tokens"), ("readout", "vocabulary"), ("mask_kind", "causal"), ("read_stride", 1)):
            if fields[name] != needed:
                raise ValueError(f"LoopedGPT2Config: {name}={fields[name]!r}, but a language model needs {needed!r}")
        if fields["state_init"] == "given":
            raise ValueError(
                'LoopedGPT2Config: state_init="given" leaves the state to the caller; use zeros, ones or embedding'
            )
        return LoopedConfig(**fields)

    @property
    def tie_word_embeddings(self) -> bool:
        """The name of `tie_readout` in transformers."""
        return self.tie_readout

    @property
    def num_hidden_layers(self) -> int:
        """Layers with weights of their own: prelude, core and coda."""
        return self.n_prelude + self.n_core + self.n_coda

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"auto_map": dict(AUTO_MAP)}

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write config.json, and beside it the few lines that let `trust_remote_code=True` find the installed looped."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / SHIM_FILE).write_text(SHIM, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing to do: saved folders carry `SHIM_FILE`, not a copy of this package."""


def check_names(kwargs: dict[str, Any]) -> None:
    """Raises ValueError that names the nearest field, or all, for a key that neither looped nor transformers has."""
    others = [field.name for field in dataclasses.fields(LoopedGPT2Config) if field.name not in MODEL_FIELDS]
    own = [name for name in others if name in LoopedGPT2Config.__annotations__]  # named first, before transformers' many
    names = list(dict.fromkeys([*own, *MODEL_FIELDS, *others]))
    known = {*names, *KEYS_OF_TRANSFORMERS, "tie_word_embeddings"}
    for key in kwargs:
        if key in ELSEWHERE or key not in known:
            meant = f"; did you mean {ELSEWHERE[key]!r}?" if key in ELSEWHERE else suggestion(key, names)
            raise ValueError(f"LoopedGPT2Config: unknown key {key!r}{meant}")


def check_exit(rule: Exit, has_gate: bool) -> None:
    """Raises ValueError for an exit that is none, or that needs a gate where there is none."""
    from looped.lm.exits import Gate

    if isinstance(token_rule(rule), Gate) and not has_gate:
        raise ValueError('LoopedGPT2: exit="gate" needs a model with an exit gate; make one with exit_gate=True')


def check_warm_start(config: LoopedConfig) -> None:
    """Raises ValueError where a state that starts elsewhere would never see its token."""
    if config.inject == "none":
        raise ValueError(
            'LoopedGPT2: warm_start needs a model that injects its tokens; with inject="none" the start is all it sees'
        )
