"""`train.json`, by which a run's folder says what the run is."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from looped.checkpoint import write_atomically
from looped.train.recipe import TrainConfig

FILE = "train.json"
MODEL = r"model(_[0-9]+)?"  # the folders of models in a run's: the last one, and copies by their step


def write_record(config: TrainConfig, folder: Path) -> None:
    write_atomically(folder / FILE, json.dumps(config.to_dict(), indent=2).encode())


def read_record(path: Path) -> TrainConfig:
    """The run that a file describes. Raises FileNotFoundError, and ValueError for a file that is damaged or describes none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"train: {path} is not JSON ({error}); restore it, or remove its folder to train again") from error
    try:
        return TrainConfig.from_dict(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(
            f"train: {path} describes no run ({reason}); restore it, or remove its folder to train again"
        ) from error


def is_record_of(path: Path, config: TrainConfig) -> bool:
    """Whether a file is there and names this configuration, how often it is saved apart. Raises as `read_record`."""
    if not path.is_file():
        return False
    return dataclasses.replace(read_record(path), save_every=config.save_every, keep_every=config.keep_every) == config


def record_of_model(folder: Path) -> TrainConfig | None:
    """The run that a model's folder comes from, as the file in it or in the folder above says; None without one.

    Raises as `read_record`.
    """
    folder = folder.resolve()
    above = [folder.parent] if re.fullmatch(MODEL, folder.name) else []
    path = next((place / FILE for place in (folder, *above) if (place / FILE).is_file()), None)
    return read_record(path) if path else None


def refuse_other_models(config: TrainConfig, folder: Path) -> None:
    """Raises ValueError where the folder holds models of another run: they would pass for those of this one."""
    models = sorted(place.name for place in folder.glob("model*") if re.fullmatch(MODEL, place.name))
    if models and not is_record_of(folder / FILE, config):
        raise ValueError(
            f"train: {folder} holds {', '.join(models)} of another run, whose state.pt is gone; choose another folder, or "
            "remove them"
        )
