"""Reading and writing models."""

from __future__ import annotations

import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from looped.config import LoopedConfig
from looped.model import LoopedTransformer

FORMAT = "looped-1"


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace a file whole: after a crash or on a full disk either the old content or the new one is there."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def save_model(model: LoopedTransformer, folder: str | os.PathLike[str]) -> None:
    """Write `model.safetensors` and `config.json` into a folder, which is made if missing."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    write_atomically(folder / "model.safetensors", safetensors.torch.save(tensors, metadata={"format": FORMAT}))
    write_atomically(folder / "config.json", json.dumps({"format": FORMAT} | model.config.to_dict(), indent=2).encode())


def load_model(folder: str | os.PathLike[str]) -> LoopedTransformer:
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("format")
    model = LoopedTransformer(LoopedConfig.from_dict(config))
    model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
    return model


def write_training_state(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write a trainer's state (tensors, numbers and containers of them) atomically. Raises OSError on a full disk."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(path, buffer.getvalue())


def load_training_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    return torch.load(path, weights_only=True, map_location="cpu")
