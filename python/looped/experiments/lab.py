"""Where an experiment gets its models and prompts: `Lab`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor
from tqdm import tqdm

from looped.checkpoint import CONFIG_FILE, WEIGHTS_FILE, load_model
from looped.experiments.given import Given, apart
from looped.model import LoopedTransformer
from looped.pretrained import bundled_models
from looped.suggestion import suggestion
from looped.train import Ramp, TrainConfig, preset, train, usable_device
from looped.train.divergence import why_diverged
from looped.train.record import FILE, is_record_of
from looped.train.shortfall import shortfall

log = logging.getLogger(__name__)

N_PROMPTS = {"tiny": 64, "small": 1280, "paper": 1280}
# What an experiment trains at "tiny": enough to begin to learn two dimensions. `looped train --preset tiny` has 12 steps.
TINY: dict[str, Any] = dict(n_steps=2000, batch_size=64, lr=3e-3, warmup_steps=100, decay="cosine", points=5, save_every=500)
TINY_WIDTH, TINY_DIMS = 32, Ramp(1, 2, 1, 600)
SEED = 42

Run = tuple[str, TrainConfig]  # a model's name, and how it is trained


class Models(list[LoopedTransformer]):
    """The models of a name, one for each seed. n_lost: the seeds whose model is not there, while others' are."""

    n_lost = 0


class Batch(Protocol):
    """Prompts of a measurement."""

    @property
    def ys(self) -> Tensor: ...


Prompts = TypeVar("Prompts", bound=Batch)


@dataclass
class Lab:
    """An experiment's surroundings.

    preset: ``"tiny"``, ``"small"`` or ``"paper"``. out: the folder that models are trained in (out/models/NAME) and results are
    written to; experiments with the same `out` share models. given: models by name, each a folder of `save_model` or the name
    of a bundled one. may_train: train what is missing; else it is left out with a note. resume: go on with trainings that were
    stopped. seeds: every model is trained once for each. n_prompts: of each measurement; default by the preset. seed: of these.
    n_steps: of every training, in folders of their own; default the experiment's own. device: where to train and evaluate.
    data: where real tables come from, a source of `looped.icl.tabular`.

    Raises ValueError, before anything is trained, for a setting that is not allowed, and what `load_model` raises for a given
    model that cannot be read.
    """

    preset: str
    out: Path
    given: Mapping[str, str] = field(default_factory=dict)
    may_train: bool = True
    resume: bool = False
    seeds: Sequence[int] = (SEED,)
    n_prompts: int = 0
    seed: int = 0
    n_steps: int = 0
    device: str = "cpu"
    data: str = "bundled"
    progress: bool = True
    used: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    short: dict[str, list[str]] = field(default_factory=dict)  # the models whose runs end without something, by what it is
    loaded: dict[str, Given] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.preset not in N_PROMPTS:
            raise ValueError(f"Lab: preset={self.preset!r} is not one of {', '.join(N_PROMPTS)}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"Lab: seeds={list(self.seeds)} must be one or more, each once")
        for name, seed in (("seed", self.seed), *(("seeds", one) for one in self.seeds)):
            if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
                raise ValueError(f"Lab: {name}={seed!r} must be an integer in 0 .. 2^32 - 1")
        for name in ("n_prompts", "n_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"Lab: {name}={getattr(self, name)} must be 1 or more, or 0 for the default")
        usable_device(self.device)
        self.loaded = {name: Given.load(name, source) for name, source in self.given.items()}
        self.n_prompts = self.n_prompts or N_PROMPTS[self.preset]

    @property
    def variant(self) -> str:
        """What a quick look has in its files' names: the steps of its trainings, and prompts that are fewer than by default."""
        steps = f"_{self.n_steps}_steps" if self.n_steps else ""
        return steps + (f"_{self.n_prompts}_prompts" if self.n_prompts < N_PROMPTS[self.preset] else "")

    def config(self, task: str = "linear_regression", **changes: Any) -> TrainConfig:
        """`looped.train.preset` of this preset, with what an experiment needs to learn something at "tiny"."""
        if self.preset != "tiny":
            return preset(self.preset, task, **changes)
        dims = {} if task == "tabular" else {"dims": TINY_DIMS}
        config = preset("tiny", task, **(TINY | dims | changes))
        return dataclasses.replace(config, model=config.model.replace(d_model=TINY_WIDTH))

    def check(self, experiment: str, wanted: Mapping[str, TrainConfig]) -> None:
        """Raises ValueError for a given model that the experiment does not ask for, or that is not what its name says.

        That is one of another kind or task, and one that is unlike the run of its name in what sets the experiment's runs of
        that task and kind apart (the sparsity in `sparsity`, b and T in `loops-and-window`). Other differences are noted by
        `models`.
        """
        for name in self.given:
            if name not in wanted:
                raise ValueError(
                    f"{experiment} uses no model {name!r}{suggestion(name, wanted)} "
                    f"(looped experiment {experiment} --preset {self.preset} --list names all {len(wanted)})"
                )
            self.loaded[name].check(name, wanted[name], self.preset, apart(wanted)[name])

    def models(self, name: str, config: TrainConfig, *, optional: bool = False) -> Models:
        """The models of this name, one for each seed: given, bundled with this very configuration, or trained.

        Empty where there is none: not trained, as asked, or diverged; a note then says so, and where some are missing: no
        verdict rests on those that are left. optional: take what is there, and neither train nor note what is not. A given
        model stands for all seeds; in what it is unlike the configuration is noted.
        Raises ValueError for a given model of another kind, and for a run of another configuration in the folder.
        """
        if name in self.given:
            given = self.loaded[name]
            given.check(name, config, self.preset)
            self._note_model(name, given.model, f"given: {given.source}", given.run)
            remarks = given.remarks(name, self._by_seed(config)[0])
            if len(self.seeds) > 1:
                remarks.append(f"{name} is {given.source}: one model stands for all {len(self.seeds)} seeds")
            self.notes += [remark for remark in remarks if remark not in self.notes]  # some ask for a model twice
            return Models([given.model.to(self.device)])
        found = {own.seed: self._one(name, own, optional) for own in self._by_seed(config)}
        models = Models(model.to(self.device) for model in found.values() if model is not None)
        if models and len(models) < len(self.seeds):
            models.n_lost = len(self.seeds) - len(models)
            lost = [seed for seed, model in found.items() if model is None]
            without = ", ".join(str(seed) for seed in lost)
            of_seeds = f"{len(models)} of {len(self.seeds)} seeds, without {without}"
            self.notes.append(f"{name}: its numbers are of {of_seeds}, and no verdict rests on it")
            for seed in lost:
                self.used.setdefault(_label(name, seed), {"source": "not there"})
        return models

    def inventory(self, wanted: Iterable[Run]) -> list[tuple[str, int | None, str | None]]:
        """Of each model, for each seed: its label, its steps (None of a given one), and where it comes from (None: nowhere
        yet). Trains nothing."""
        rows: list[tuple[str, int | None, str | None]] = []
        for name, config in wanted:
            if name in self.given:
                rows.append((name, None, f"given: {self.given[name]}"))
                continue
            for own in self._by_seed(config):
                place = self._place(name, own)
                diverged = why_diverged(own, self.run_folder(name, own.seed)) is not None
                rows.append((_label(name, own.seed), own.n_steps, place[0] if place else "diverged" if diverged else None))
        return rows

    def run_folder(self, name: str, seed: int) -> Path:
        """Where a model of this name and seed is trained. A run of other steps than its own does not stand in its way."""
        steps = f"_steps_{self.n_steps}" if self.n_steps else ""
        return self.out / "models" / (name + steps + (f"_seed_{seed}" if seed != SEED else ""))

    def _by_seed(self, config: TrainConfig) -> list[TrainConfig]:
        if self.n_steps:
            save_every = max(config.save_every, self.n_steps // 10)
            config = dataclasses.replace(config, n_steps=self.n_steps, save_every=save_every)
        return [dataclasses.replace(config, seed=seed) for seed in self.seeds]

    def _place(self, name: str, config: TrainConfig) -> tuple[str, Path] | None:
        """Where a model of this very configuration is, in words and as a folder."""
        folder = self.run_folder(name, config.seed)
        model_files = (folder / "model" / CONFIG_FILE, folder / "model" / WEIGHTS_FILE)  # one alone: saving was cut short
        if all(file.is_file() for file in model_files) and is_record_of(folder / FILE, config):
            if load_model(folder / "model").config != config.model:
                raise ValueError(
                    f"experiment: {folder / 'model'} is another model than {folder / FILE} describes; remove {folder} to train "
                    "it again"
                )
            return f"trained: {folder.name}", folder / "model"
        for bundled, place in bundled_models().items():
            if is_record_of(Path(place) / FILE, config):
                return f"bundled: {bundled}", Path(place)
        return None

    def _one(self, name: str, config: TrainConfig, optional: bool) -> LoopedTransformer | None:
        folder, label = self.run_folder(name, config.seed), _label(name, config.seed)
        if place := self._place(name, config):
            return self._note_model(label, load_model(place[1]).float(), place[0], config)
        if optional:
            return None
        if not self.may_train:
            self.notes.append(f"{label} is left out: it is neither given, bundled nor trained in {self.out / 'models'}")
            return None
        if (reason := why_diverged(config, folder)) is not None:
            self._note_divergence(label, reason)
            return None
        log.info("training %s for %s steps in %s", label, f"{config.n_steps:,}", folder)
        try:
            model = train(config, folder, resume=self.resume, progress=self.progress, device=self.device)
        except FloatingPointError as error:
            self._note_divergence(label, str(error))
            return None
        return self._note_model(label, model, f"trained: {folder.name}", config)

    def watched(self, title: str, batches: Iterable[Prompts], n_prompts: int | None = None) -> Iterator[Prompts]:
        """The batches of a measurement, with a bar on standard error once it takes more than two seconds."""
        n_prompts = n_prompts or self.n_prompts
        options: dict[str, Any] = dict(unit="prompt", delay=2, leave=False, dynamic_ncols=True, disable=not self.progress)
        with tqdm(total=n_prompts, desc=f"measuring {title}", **options) as bar:
            for batch in batches:
                yield batch
                bar.update(len(batch.ys))

    def remarks(self) -> list[str]:
        """The notes, and which models are of runs that were shorter than their curricula."""
        return [
            *self.notes,
            *(f"trained for too few steps ({what}): {'; '.join(labels)}" for what, labels in self.short.items()),
        ]

    def reasons(self, name: str) -> list[str]:
        """Why trainings of a model diverged, those that `models` met."""
        used = [self.used.get(_label(name, seed), {}) for seed in self.seeds]
        return [one["reason"] for one in used if "reason" in one]

    def _note_divergence(self, label: str, reason: str) -> None:
        reason = reason.removeprefix("train: ")
        self.used[label] = {"source": "diverged", "reason": reason}
        self.notes.append(f"{label} diverged: {reason}")

    def _note_model(
        self, label: str, model: LoopedTransformer, source: str, config: TrainConfig | None = None
    ) -> LoopedTransformer:
        self.used[label] = {
            "source": source,
            "n_steps": config.n_steps if config else None,
            "n_parameters": n_parameters(model),
            "n_loops": model.config.n_loops,
            "window": config.window if config else None,
            "n_layers": model.config.n_core,
        }
        if config and (missing := shortfall(config)):
            labels = self.short.setdefault(missing, [])
            labels += [label] if label not in labels else []
        return model


def n_parameters(model: LoopedTransformer) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _label(name: str, seed: int) -> str:
    return name if seed == SEED else f"{name}, seed {seed}"
