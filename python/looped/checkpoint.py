"""Reading and writing models. No file is ever unpickled into anything but tensors and plain containers."""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from looped.config import LoopedConfig
from looped.layouts import assemble, check_keys, from_state_dict, listed
from looped.model import LoopedTransformer, unwrapped

FORMAT = "looped-1"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
PICKLED_WEIGHTS_FILE = "pytorch_model.bin"
REMEDY_OF_STATE = "restore it, or remove it to start the run again"


# Our own layout ---------------------------------------------------------------------------------------------------


def save_model(model: LoopedTransformer, folder: str | os.PathLike[str]) -> None:
    """Write `model.safetensors` and `config.json` into a folder, which is made if missing.

    Dtypes are kept; the wrappers of torch.compile, DataParallel and DistributedDataParallel are left out. Raises OSError where
    the disk is full or read-only; a model saved there before is then left whole. Raises ValueError for a model whose parameters
    are not those of its configuration, TypeError for what is no `LoopedTransformer`.
    """
    folder, model = Path(folder), unwrapped(model, "save_model")
    state = {re.sub(r"(_orig_mod|module)\.", "", name): tensor for name, tensor in model.state_dict().items()}
    with torch.device("meta"):
        check_keys("save_model: the model", LoopedTransformer(model.config).state_dict(), state)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    config = json.dumps({"format": FORMAT} | model.config.to_dict(), indent=2)
    folder.mkdir(parents=True, exist_ok=True)
    # One key of metadata: safetensors writes several in a random order, and equal models should be equal files.
    _replace_files(
        {
            folder / WEIGHTS_FILE: safetensors.torch.save(tensors, metadata={"config": config}),
            folder / CONFIG_FILE: config.encode(),
        }
    )


def load_model(folder: str | os.PathLike[str]) -> LoopedTransformer:
    """The model that `save_model` wrote, on the CPU, bit for bit and in its dtypes.

    Raises FileNotFoundError for a missing folder or file; ValueError for a file that is damaged or of another format, for
    an unknown field of the configuration, and, listing them, for missing or extra keys and wrong shapes.
    """
    folder, who = Path(folder), "load_model"
    if folder.is_file():
        raise ValueError(
            f"{who}: {folder} is a file; pass the folder that save_model wrote. A bare state dict has no configuration: "
            "model = LoopedTransformer(config); model.load_state_dict(...)"
        )
    fields = _read_json(who, folder / CONFIG_FILE)
    if (found := fields.pop("format", None)) != FORMAT:
        raise ValueError(
            f"{who}: {folder / CONFIG_FILE} has the format {found!r} but must have {FORMAT!r}; "
            "models of other libraries are read by load_checkpoint"
        )
    try:
        config = LoopedConfig.from_dict(fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{who}: {folder / CONFIG_FILE} describes no model: {error}") from error
    tensors = _read_safetensors(who, folder / WEIGHTS_FILE)
    saved_with = _config_beside(who, folder / WEIGHTS_FILE)
    if saved_with is not None and saved_with != {"format": FORMAT} | fields:
        raise ValueError(
            f"{who}: {folder / WEIGHTS_FILE} and {folder / CONFIG_FILE} come from two models (a save was cut short, or one of "
            "them was edited); save the model again"
        )
    return assemble(f"{who}: {folder / WEIGHTS_FILE}", config, tensors)


# Other people's layouts -------------------------------------------------------------------------------------------


def load_checkpoint(
    source: str | os.PathLike[str] | Mapping[str, Any], *, allow_extra: bool = False, **fields: Any
) -> LoopedTransformer:
    """A model from a GPT-2 checkpoint of any of these layouts, which is recognised by its keys and shapes.

    - Looped ICL (Yang et al., 2024): `state.pt`, `model_N.pt`. The file does not tell how the model loops. Pass
      n_loops=1 for the family `gpt2`; n_loops=b, inject="add" for `gpt2_loop` with z=f(x+z), or inject="mul" with z=f(x*z);
      n_loops=n_layer, inject="none" for `gpt2_tying`. `add_inputs_embeds`, which leaves no trace in a file, is not supported.
    - Garg et al. (2022): `state.pt`, or the bare state dicts `model_N.pt`. The unused `wte` is dropped.
    - nanoGPT: `ckpt.pt`. It does not record its activation, so the caller must pass it: activation="gelu", the exact one, for
      a model of today's code, and activation="gelu_tanh" for one of older code. Each unit is off by up to 5e-4 with the other.
    - Hugging Face GPT-2: a folder with config.json and model.safetensors, else pytorch_model.bin; or a state dict alone,
      which is taken to have GPT-2's own activation, gelu_new (tanh).
    - A folder of `save_model`, which takes no fields. A bare state dict of ours is an error that says how to load it:
      nothing in it tells how the model loops.

    Parameters
        source: the folder or file, exactly that one being read; or a state dict. Wrappers {'model': ...},
            {'model_state_dict': ...} and {'state_dict': ...} and key prefixes `module.` and `_orig_mod.` are looked through.
        allow_extra: drop keys that the layout does not have.
        fields: fields of `LoopedConfig` that the tensors cannot tell. `n_heads` is required unless nanoGPT's model_args or a
            GPT-2 config.json tells it; in the two in-context layouts of width 256 it is 8, as published. Fields that no
            tensor decides may change the model: n_loops=3, n_prelude=2, n_coda=2 loops the middle of a GPT-2.

    Returns the model on the CPU; its parameters are copies in the file's dtypes.

    Raises TypeError for a source of another type; FileNotFoundError for a missing file; ValueError for a file that is
    damaged or needs code to be unpickled (it is never run), for an unknown layout, for missing or extra keys and wrong
    shapes (listed), for a field that contradicts the file, and for one that is needed and absent.
    """
    who = "load_checkpoint"
    if isinstance(source, Mapping):
        return from_state_dict(f"{who}: the mapping", source, fields, declared={}, allow_extra=allow_extra)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"{who}: source must be a path or a state dict, got {type(source).__name__}; for a module pass its state_dict()"
        )
    path = Path(source)
    declared: dict[str, Any] = {}
    if path.is_dir():
        declared = _read_folder_config(who, path)
        if "format" in declared:
            if fields:
                raise ValueError(
                    f"{who}: {path} was written by save_model and takes no {listed(fields)}; change the loaded model"
                )
            return load_model(path)
        names = [name for name in (WEIGHTS_FILE, PICKLED_WEIGHTS_FILE) if (path / name).is_file()]
        if not names:
            raise FileNotFoundError(
                f"{who}: {path} has neither {WEIGHTS_FILE} nor {PICKLED_WEIGHTS_FILE}; merge shards into one"
            )
        path = path / names[0]
    state = _read_safetensors(who, path) if path.suffix == ".safetensors" else _read_pickle(who, path)
    return from_state_dict(f"{who}: {path}", state, fields, declared=declared, allow_extra=allow_extra)


def _read_folder_config(who: str, folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG_FILE).is_file():
        inside = listed(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise FileNotFoundError(f"{who}: {folder} is a folder without {CONFIG_FILE} (it has {inside}); pass the file to load")
    return _read_json(who, folder / CONFIG_FILE)


# A trainer's state ------------------------------------------------------------------------------------------------


def write_training_state(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write a trainer's state (tensors, numbers and containers of them) atomically. Raises OSError on a full disk."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(path, buffer.getvalue())


def load_training_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `write_training_state` wrote, on the CPU. Raises FileNotFoundError, and ValueError for a damaged file.

    PyTorch writes a checksum (CRC-32) beside every part of the file, and does not read it back: it is checked here.
    """
    who, path = "load_training_state", Path(path)
    _check_is_file(who, path)
    if (damaged := _damaged_part(path)) is not None:
        raise ValueError(
            f"{who}: {path} is truncated, corrupt or not written by torch.save ({damaged} is not what was written); "
            f"{REMEDY_OF_STATE}"
        )
    return _read_pickle(who, path, REMEDY_OF_STATE)


def _damaged_part(path: Path) -> str | None:
    """The first part of a zip file that is not as its checksum says; None where all are, and for another kind of file."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip()
    except zipfile.BadZipFile:  # cut, or of torch.save's old format: for the reader to tell
        return None
    except (OSError, EOFError, ValueError, RuntimeError, OverflowError, struct.error, zlib.error):
        return "its index"


# Files ------------------------------------------------------------------------------------------------------------


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace a file whole: after a crash or on a full disk either the old content or the new one is there."""
    _replace_files({Path(path): content})


def _replace_files(contents: Mapping[Path, bytes]) -> None:
    """All are on the disk before the first takes its place, so that a full disk leaves every old one."""
    partial = {path: path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial") for path in contents}
    try:
        for path, content in contents.items():
            with open(partial[path], "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in partial.items():
            os.replace(temporary, path)
    finally:
        for temporary in partial.values():
            temporary.unlink(missing_ok=True)


def _check_is_file(who: str, path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{who}: there is no file {path}; check the path")


def _read_json(who: str, path: Path) -> dict[str, Any]:
    _check_is_file(who, path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{who}: {path} is not JSON ({error}); restore it") from error
    if not isinstance(content, dict):
        raise ValueError(f"{who}: {path} holds a JSON {type(content).__name__} but must hold an object; restore it")
    return content


def _read_safetensors(who: str, path: Path) -> dict[str, Tensor]:
    _check_is_file(who, path)
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{who}: {path} is truncated or corrupt ({error}); fetch it again") from error


def _config_beside(who: str, path: Path) -> Any:
    """The configuration that `save_model` wrote into the file of the weights; None where there is none."""
    with safetensors.safe_open(path, framework="pt") as file:
        written = (file.metadata() or {}).get("config")
    try:
        return None if written is None else json.loads(written)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{who}: the configuration inside {path} is not JSON ({error}); restore the file") from error


def _read_pickle(who: str, path: Path, remedy: str = "fetch it again") -> dict[str, Any]:
    """A dict of `torch.save`. Only tensors and plain containers are rebuilt; anything else in the file is an error."""
    _check_is_file(who, path)
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch names no set: damage has been seen as EOF-, Key-, Index-, Runtime- and UnpicklingError
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            raise ValueError(
                f"{who}: {path} needs the Python object {code[1]}, which is never run; if the file is whole and you trust it, "
                "re-save its tensors alone: torch.save(model.state_dict(), path)"
            ) from error
        raise ValueError(
            f"{who}: {path} is truncated, corrupt or not written by torch.save ({type(error).__name__}); {remedy}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{who}: {path} holds a {type(content).__name__} but must hold a dict; save a state dict")
    return content
