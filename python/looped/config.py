"""`LoopedConfig`: what a looped transformer is, as data.

Letters used in the whole package: B prompts, T tokens, C width, H heads, L loops.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from looped.integers import take_integers
from looped.suggestion import suggestion

CHOICES: dict[str, tuple[str, ...]] = {
    "input_kind": ("features", "tokens", "states"),
    "readout": ("scalar", "classes", "vocabulary", "none"),
    "norm_kind": ("layernorm", "rms", "none"),
    "activation": ("gelu_tanh", "gelu", "relu", "silu_gated"),
    "pos_kind": ("learned", "none"),
    "pos_when": ("each_loop", "once"),
    "mask_kind": ("causal", "full"),
    "inject": ("add", "mul", "none"),
    "state_init": ("zeros", "ones", "embedding", "given"),
    "loop_norm": ("each", "once", "none"),
}

SIZES = dict.fromkeys(("d_model", "n_heads", "head_dim", "d_ff", "n_core", "read_stride"), 1)  # fields and their least values
SIZES |= dict.fromkeys(("n_prelude", "n_coda", "n_positions", "n_loops"), 0)
OPTIONAL_SIZES = ("n_dims", "vocab_size", "n_classes")

# What other libraries call a field, where its letters would lead to another one.
ELSEWHERE = {
    "n_embd": "d_model",
    "hidden_size": "d_model",
    "width": "d_model",
    "n_layer": "n_core",
    "num_hidden_layers": "n_core",
}
ELSEWHERE |= {"block_size": "n_positions", "intermediate_size": "d_ff", "n_inner": "d_ff", "num_attention_heads": "n_heads"}


@dataclass(frozen=True, kw_only=True)
class LoopedConfig:
    """Architecture of a `LoopedTransformer`. Frozen; an unknown key is Python's TypeError here, and in `from_dict`,
    `icl_config` and `gpt2_config` a ValueError that names the nearest, or all.

    With n_dims and n_positions, which have no default, and read_stride=2, it is the looped in-context learner of Yang et al.
    (2024), "Looped Transformers are Better at Learning Learning Algorithms": one GPT-2 block, prompt added before every loop,
    positions and final norm in every loop.

    Input and read-out
        input_kind: ``"features"`` prompts are float [B, T, n_dims]; ``"tokens"`` int64 [B, T] below vocab_size;
            ``"states"`` float [B, T, C], used as they are.
        n_dims: width of a feature vector. Required for features.
        vocab_size: number of token ids. Required for tokens.
        readout: ``"scalar"`` one number, ``"classes"`` n_classes logits, ``"vocabulary"`` vocab_size logits, ``"none"``.
        n_classes: number of classes. Required for the classes read-out.
        tie_readout: the vocabulary read-out uses the embedding's weights (GPT-2).
        read_stride: predictions are read at positions 0, read_stride, 2 * read_stride, ... In-context prompts interleave
            x and y, so theirs is 2.

    Block
        d_model C, n_heads H, head_dim (C // H), d_ff (4 * C), norm_eps, bias (of every linear map), mask_kind.
        activation: ``"gelu_tanh"`` GPT-2's tanh form, ``"gelu"`` the exact one, ``"relu"``; or ``"silu_gated"``, LLaMA's
            MLP (SwiGLU), down(silu(gate(x)) * up(x)) with d_ff units; ``fc`` holds the d_ff rows of gate and then those of up.
        norm_kind: ``"layernorm"``; ``"rms"``, x / sqrt(mean(x^2) + norm_eps) with a gain and no shift; or ``"none"``.
        n_prelude, n_core, n_coda: layers before, inside and after the loop. Only the core is repeated.
        pos_kind, n_positions, pos_when: a learned table of n_positions rows, added to the input of every loop or
            to the embedding once.

    Loop
        inject: how the prompt P enters each loop: Y + P, Y * P, or not at all (weight tying).
        state_init: Y_0: zeros, ones, the embedding P, or given by the caller.
        loop_norm: the final norm closes every loop and is part of the state (``"each"``), stands only before the
            read-out (``"once"``), or does not exist (``"none"``).
        n_loops: loops of one forward pass when the caller names none.

    Raises ValueError for a value that is not among the allowed ones or does not fit the others.
    """

    input_kind: str = "features"
    n_dims: int | None = None
    vocab_size: int | None = None
    readout: str = "scalar"
    n_classes: int | None = None
    tie_readout: bool = False
    read_stride: int = 1

    d_model: int = 256
    n_heads: int = 8
    head_dim: int | None = None
    d_ff: int | None = None
    activation: str = "gelu_tanh"
    norm_kind: str = "layernorm"
    norm_eps: float = 1e-5
    bias: bool = True
    mask_kind: str = "causal"
    n_prelude: int = 0
    n_core: int = 1
    n_coda: int = 0
    pos_kind: str = "learned"
    n_positions: int = 0
    pos_when: str = "each_loop"

    inject: str = "add"
    state_init: str = "zeros"
    loop_norm: str = "each"
    n_loops: int = 12

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"LoopedConfig: {name}={value!r} is not one of {', '.join(allowed)}")
        take_integers(self, (*SIZES, *OPTIONAL_SIZES))
        for name in ("d_model", "n_heads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"LoopedConfig: {name}={value!r} must be an integer of at least 1")
        if self.head_dim is None:
            if self.d_model % self.n_heads:
                raise ValueError(
                    f"LoopedConfig: d_model {self.d_model} does not divide by n_heads {self.n_heads}; give head_dim"
                )
            object.__setattr__(self, "head_dim", self.d_model // self.n_heads)
        if self.d_ff is None:
            object.__setattr__(self, "d_ff", 4 * self.d_model)
        self._check_sizes()
        self._check_combinations()
        object.__setattr__(self, "_json", json.dumps(self.to_dict()))  # made here: torch.compile cannot look into json

    def _check_sizes(self) -> None:
        for name, least in SIZES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"LoopedConfig: {name}={value!r} must be an integer of at least {least}")
        for name in OPTIONAL_SIZES:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"LoopedConfig: {name}={value!r} must be an integer of at least 1, or None")
        if not isinstance(self.norm_eps, (int, float)) or not 0 < self.norm_eps < math.inf:
            raise ValueError(f"LoopedConfig: norm_eps={self.norm_eps!r} must be a number above 0")
        for name in ("bias", "tie_readout"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"LoopedConfig: {name}={getattr(self, name)!r} must be true or false")
        needed = [
            (self.input_kind == "features", "n_dims", 'input_kind="features"'),
            (self.input_kind == "tokens", "vocab_size", 'input_kind="tokens"'),
            (self.readout == "vocabulary", "vocab_size", 'readout="vocabulary"'),
            (self.readout == "classes", "n_classes", 'readout="classes"'),
            (self.pos_kind == "learned", "n_positions", 'pos_kind="learned"'),
        ]
        for is_needed, name, why in needed:
            if is_needed and not getattr(self, name):
                raise ValueError(f"LoopedConfig: {why} needs {name}")

    def _check_combinations(self) -> None:
        if self.tie_readout and (self.readout != "vocabulary" or self.input_kind != "tokens"):
            raise ValueError('LoopedConfig: tie_readout needs input_kind="tokens" and readout="vocabulary"')
        if self.loop_norm != "none" and self.norm_kind == "none":
            raise ValueError('LoopedConfig: norm_kind="none" has no final norm; set loop_norm="none"')
        if self.inject == "none" and self.state_init in ("zeros", "ones"):
            raise ValueError(
                f'LoopedConfig: inject="none" with state_init={self.state_init!r} never sees its prompt; '
                'use state_init="embedding" or "given"'
            )
        if self.loop_norm == "each" and self.n_coda:
            raise ValueError(
                'LoopedConfig: with loop_norm="each" the read-out reads the state itself, so n_coda must be 0; '
                'use loop_norm="once" or "none"'
            )

    @property
    def attention_width(self) -> int:
        """H * head_dim, the width of the queries, keys and values of all heads together."""
        assert self.head_dim is not None
        return self.n_heads * self.head_dim

    @property
    def prediction_stride(self) -> int:
        """Tokens from one prediction to the next; 1 without a read-out, where the state itself is returned."""
        return self.read_stride if self.readout != "none" else 1

    @property
    def readout_width(self) -> int:
        """Numbers read at one position: 1, n_classes, vocab_size, or 0 without a read-out."""
        widths = {"scalar": 1, "classes": self.n_classes, "vocabulary": self.vocab_size, "none": 0}
        return widths[self.readout] or 0

    def prediction_shape(self, n_prompts: int, n_tokens: int) -> tuple[int, ...]:
        """What `LoopedTransformer.read` gives: [B, N], [B, N, classes or vocabulary], or the state's [B, T, C]."""
        if self.readout == "none":
            return n_prompts, n_tokens, self.d_model
        n_read = (n_tokens + self.read_stride - 1) // self.read_stride
        return (n_prompts, n_read) if self.readout == "scalar" else (n_prompts, n_read, self.readout_width)

    def replace(self, **changes: Any) -> LoopedConfig:
        """A copy with some fields changed, checked like a new one. Widths that followed from others follow again."""
        fields = self.to_dict()
        if self.head_dim is not None and self.head_dim * self.n_heads == self.d_model:
            fields["head_dim"] = None
        if self.d_ff == 4 * self.d_model:
            fields["d_ff"] = None
        return LoopedConfig.from_dict(fields | changes)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return dataclasses.asdict(self)

    @property
    def json(self) -> str:
        """All fields as JSON text."""
        text: str = vars(self)["_json"]
        return text

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LoopedConfig:
        """The inverse of `to_dict`. Raises ValueError that names the nearest field, or all, for an unknown key."""
        cls.check_names(values)
        return cls(**values)

    @classmethod
    def check_names(cls, values: Mapping[str, Any]) -> None:
        """Raises ValueError that names the nearest field, or all, for an unknown key."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                meant = f"; did you mean {ELSEWHERE[key]!r}?" if key in ELSEWHERE else suggestion(key, known)
                raise ValueError(f"LoopedConfig: unknown key {key!r}{meant}")


def icl_config(
    n_dims: int = 20, n_points: int = 101, d_model: int = 256, n_heads: int = 8, n_loops: int = 30, **changes: Any
) -> LoopedConfig:
    """The looped in-context learner of Yang et al. (2024): prompts x1, y1, x2, y2, ... of n_dims features.

    ``n_points`` is the largest number of (x, y) pairs a prompt may hold; the position table has 2 * n_points + 1 rows,
    as in the authors' code. ``inject="none", state_init="embedding"`` makes its weight-tied twin, and
    ``n_core=12, n_loops=1`` the unlooped transformer of Garg et al. (2022).
    """
    fields: dict[str, Any] = dict(
        input_kind="features",
        n_dims=n_dims,
        readout="scalar",
        read_stride=2,
        d_model=d_model,
        n_heads=n_heads,
        n_positions=2 * n_points + 1,
        n_loops=n_loops,
    )
    return LoopedConfig.from_dict(fields | changes)


def gpt2_config(vocab_size: int, n_positions: int, d_model: int, n_heads: int, n_layers: int, **changes: Any) -> LoopedConfig:
    """Plain GPT-2 as a looped transformer of one loop: tokens in, tied vocabulary read-out, positions and norm once."""
    fields: dict[str, Any] = dict(
        input_kind="tokens",
        vocab_size=vocab_size,
        readout="vocabulary",
        tie_readout=True,
        d_model=d_model,
        n_heads=n_heads,
        n_core=n_layers,
        n_positions=n_positions,
        pos_when="once",
        inject="none",
        state_init="embedding",
        loop_norm="once",
        n_loops=1,
    )
    return LoopedConfig.from_dict(fields | changes)
