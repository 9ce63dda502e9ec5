"""Where an experiment gets its models and prompts: `Lab`."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from looped.checkpoint import load_model
from looped.model import LoopedTransformer
from looped.pretrained import bundled_models
from looped.train import TrainConfig, train

log = logging.getLogger(__name__)

N_PROMPTS = {"tiny": 64, "small": 1280, "paper": 1280}
SEED = 42


@dataclass
class Lab:
    """An experiment's surroundings.

    preset: ``"tiny"``, ``"small"`` or ``"paper"``. out: the folder that models are trained in (out/models/NAME) and results are
    written to; experiments with the same `out` share models. given: models by name, each a folder of `save_model` or the name of
    a bundled one. may_train: train what is missing; else it is left out with a note. resume: go on with trainings that were
    stopped. seeds: every model is trained once for each. n_prompts: of each measurement; default by the preset. seed: of these.
    device: where to train and evaluate. data: where real tables come from, a source of `looped.icl.tabular`.
    """

    preset: str
    out: Path
    given: Mapping[str, str] = field(default_factory=dict)
    may_train: bool = True
    resume: bool = False
    seeds: Sequence[int] = (SEED,)
    n_prompts: int = 0
    seed: int = 0
    device: str = "cpu"
    data: str = "bundled"
    progress: bool = True
    used: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.preset not in N_PROMPTS:
            raise ValueError(f"Lab: preset={self.preset!r} is not one of {', '.join(N_PROMPTS)}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"Lab: seeds={list(self.seeds)} must be one or more, each once")
        self.n_prompts = self.n_prompts or N_PROMPTS[self.preset]

    def models(self, name: str, config: TrainConfig) -> list[LoopedTransformer]:
        """The models of this name, one for each seed: given, bundled with this very configuration, or trained.

        Empty where there is none: not trained, as asked, or diverged; a note then says so. Raises ValueError for a given model
        of other dimensions than the task's, and for a run of another configuration in the folder.
        """
        if name in self.given:
            return [self._given(name, config)]
        found = [self._one(name, dataclasses.replace(config, seed=seed)) for seed in self.seeds]
        return [model.to(self.device) for model in found if model is not None]

    def run_folder(self, name: str, seed: int) -> Path:
        """Where a model of this name and seed is trained."""
        return self.out / "models" / (name if seed == SEED else f"{name}_seed_{seed}")

    def _given(self, name: str, config: TrainConfig) -> LoopedTransformer:
        source = self.given[name]
        model = load_model(bundled_models().get(source, source)) if not Path(source).exists() else load_model(source)
        model = model.float()
        wanted, has = config.model, model.config
        for field_name in ("n_dims", "readout", "read_stride", "mask_kind"):
            if getattr(wanted, field_name) != getattr(has, field_name):
                raise ValueError(
                    f"experiment: the model {source} for {name} has {field_name}={getattr(has, field_name)!r}, and preset "
                    f"{self.preset} needs {getattr(wanted, field_name)!r}; give another model or preset"
                )
        if has.pos_kind == "learned" and has.n_positions < 2 * config.points.end - 1:
            raise ValueError(
                f"experiment: the model {source} for {name} has {has.n_positions} positions, and preset {self.preset} needs "
                f"{2 * config.points.end - 1}; give another model or preset"
            )
        self._note_model(name, model, f"given: {source}")
        return model.to(self.device)

    def _one(self, name: str, config: TrainConfig) -> LoopedTransformer | None:
        folder, label = self.run_folder(name, config.seed), name if config.seed == SEED else f"{name}, seed {config.seed}"
        if (folder / "model").exists() and _is_run_of(folder / "train.json", config):
            return self._note_model(label, load_model(folder / "model"), f"trained: {folder.name}")
        for bundled, place in bundled_models().items():
            if _is_run_of(Path(place) / "train.json", config):
                return self._note_model(label, load_model(place), f"bundled: {bundled}")
        if not self.may_train:
            self.notes.append(f"{label} is left out: it is neither given, bundled nor trained in {self.out / 'models'}")
            return None
        log.info("training %s for %s steps in %s", label, f"{config.n_steps:,}", folder)
        try:
            model = train(config, folder, resume=self.resume, progress=self.progress, device=self.device)
        except FloatingPointError as error:
            self.used[label] = {"source": "diverged", "reason": str(error)}
            self.notes.append(f"{label} diverged: {str(error).removeprefix('train: ')}")
            return None
        return self._note_model(label, model, f"trained: {folder.name}")

    def _note_model(self, label: str, model: LoopedTransformer, source: str) -> LoopedTransformer:
        self.used[label] = {
            "source": source,
            "n_parameters": n_parameters(model),
            "n_loops": model.config.n_loops,
            "n_layers": model.config.n_core,
        }
        return model


def n_parameters(model: LoopedTransformer) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _is_run_of(path: Path, config: TrainConfig) -> bool:
    """Whether a run's file names this configuration; how often it was saved does not matter."""
    if not path.is_file():
        return False
    found = TrainConfig.from_dict(json.loads(path.read_text()))
    return dataclasses.replace(found, save_every=config.save_every, keep_every=config.keep_every) == config
