"""`train.json`, by which a run's folder says what the run is."""

from __future__ import annotations

import json
import re
from pathlib import Path

from looped.checkpoint import CONFIG_FILE, write_atomically
from looped.config import LoopedConfig
from looped.train.identity import differences
from looped.train.recipe import TrainConfig

FILE = "train.json"
NO_RECORD = f"no {FILE} is beside it"
MODEL = r"model(_[0-9]+)?"  # the folders of models in a run's: the last one, and copies by their step


def write_record(config: TrainConfig, folder: Path) -> None:
    write_atomically(folder / FILE, json.dumps(config.to_dict(), indent=2).encode())


def read_record(path: Path) -> TrainConfig:
    """The run that a file describes. Raises FileNotFoundError, and ValueError for a file that is damaged or describes none."""
    try:
        return _read(path)
    except ValueError as error:
        raise ValueError(f"train: {error}; restore it, or remove its folder to train again") from error


def _read(path: Path) -> TrainConfig:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    try:
        return TrainConfig.from_dict(content)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} describes no run ({reason})") from error


def is_record_of(path: Path, config: TrainConfig) -> bool:
    """Whether a file is there and is of this run (`looped.train.identity`). Raises as `read_record`."""
    return path.is_file() and not differences(config, read_record(path).to_dict())


def run_of_model(folder: Path, model: LoopedConfig) -> tuple[TrainConfig | None, str]:
    """The run that a model's folder comes from, or None and why it is not known.

    The file is looked for in the folder and, of one that is named as a run names its models, in the folder above; where it is
    a link, beside its target too. Another program's file of that name counts as none.
    """
    folder = folder.absolute()
    places: list[Path] = []
    for place in (folder, folder.resolve()):
        places += [place, *([place.parent] if re.fullmatch(MODEL, place.name) else [])]
    for path in (place / FILE for place in places):
        if not path.is_file() or _is_of_another_program(path):
            continue
        try:
            run = _read(path)
        except (OSError, ValueError) as error:
            return None, str(error)
        return (run, "") if run.model == model else (None, f"{path} is of another model")
    return None, NO_RECORD


def _is_of_another_program(path: Path) -> bool:
    """Whether it is whole and has neither of the fields that each of ours has."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return not (isinstance(content, dict) and content.keys() & {"model", "task"})


def model_of_run(folder: Path) -> Path:
    """The last model in a run's folder; any other folder as it is."""
    is_run = (folder / "model" / CONFIG_FILE).is_file() and not (folder / CONFIG_FILE).exists()
    return folder / "model" if is_run else folder


def refuse_other_models(config: TrainConfig, folder: Path) -> None:
    """Raises ValueError where the folder holds models of another run: they would pass for those of this one."""
    models = sorted(place.name for place in folder.glob("model*") if re.fullmatch(MODEL, place.name))
    if models and not is_record_of(folder / FILE, config):
        raise ValueError(
            f"train: {folder} holds {', '.join(models)} and no state.pt, and its train.json is not of this run; choose another "
            "folder, or remove them"
        )
