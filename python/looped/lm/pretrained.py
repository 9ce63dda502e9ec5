"""`LoopedGPT2` from other people's GPT-2, and from a `LoopedTransformer`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from looped.checkpoint import CONFIG_FILE, load_checkpoint
from looped.config import LoopedConfig
from looped.layouts import from_state_dict
from looped.lm.config import MODEL_FIELDS, LoopedGPT2Config, check_names
from looped.model import LoopedTransformer

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_gpt2(
    source: str | os.PathLike[str] | Mapping[str, Any] | PreTrainedModel, n_loops: int, changes: dict[str, Any]
) -> tuple[LoopedTransformer, LoopedGPT2Config, GenerationConfig | None]:
    """The model in a source of `LoopedGPT2.from_gpt2`, its configuration, and the generation settings that came with it."""
    check_names({name: value for name, value in changes.items() if name not in config_names()})
    fields = {name: changes.pop(name) for name in list(changes) if name in MODEL_FIELDS} | {"n_loops": n_loops}
    generation: GenerationConfig | None = None
    told: Mapping[str, Any] = {}
    if isinstance(source, PreTrainedModel):
        told, generation = source.config.to_dict(), source.generation_config
        state = source.state_dict()
        who = f"from_gpt2: the {type(source).__name__}"
        model = from_state_dict(who, state, fields, declared=told, allow_extra=False)
    else:
        if isinstance(source, str | os.PathLike) and not Path(source).exists():
            raise FileNotFoundError(
                f"from_gpt2: there is no file or folder {source}, and names of the hub are not downloaded; pass a folder, or "
                f"GPT2LMHeadModel.from_pretrained({str(source)!r})"
            )
        model = load_checkpoint(source, **fields)
        folder = Path(source) if isinstance(source, str | os.PathLike) else Path()
        if not isinstance(source, Mapping) and folder.is_dir():
            told = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            if (folder / "generation_config.json").is_file():
                generation = GenerationConfig.from_pretrained(folder)
    special = {name: told.get(name) for name in SPECIAL_TOKENS}
    return model, language_config(model.config, **(special | changes)), generation


def language_config(config: LoopedConfig, **fields: Any) -> LoopedGPT2Config:
    """The configuration of a language model around one of config."""
    return LoopedGPT2Config(**(config.to_dict() | fields))


def config_names() -> set[str]:
    return {field.name for field in dataclasses.fields(LoopedGPT2Config)}


def same_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype of a model's parameters. Raises ValueError where there are several."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        raise ValueError(f"LoopedGPT2: the weights have several dtypes, {', '.join(map(str, dtypes))}; convert them to one")
    return dtypes.pop()
