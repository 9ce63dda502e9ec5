"""Models that are given to an experiment: what they were trained on, and whether they are what a name asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looped.checkpoint import load_model
from looped.model import LoopedTransformer
from looped.pretrained import bundled_models
from looped.train import Ramp, TrainConfig
from looped.train.record import model_of_run, run_of_model

# What a model of another value is no model of the name with, whatever the experiment.
KIND = ("input_kind", "n_dims", "readout", "n_classes", "read_stride", "mask_kind", "n_core", "inject", "state_init")
FOLLOWS = ("loops", "dims", "points", "head_dim", "d_ff")  # what changes with a trait that sets runs apart, and is none itself
NO_TRAITS = ("model", "task_options", "seed", "save_every", "keep_every")  # of a run: taken apart, or of no weight


@dataclass(frozen=True)
class Given:
    """A model, and the run that it comes from; without one, why it is not known."""

    source: str
    model: LoopedTransformer
    run: TrainConfig | None
    why_unknown: str = ""

    @classmethod
    def load(cls, name: str, source: str) -> Given:
        """Raises ValueError for a source that is neither a folder nor a bundled model, and what `load_model` raises."""
        folder = Path(source)
        if not source or not folder.exists():
            known = bundled_models()
            if source not in known:
                raise ValueError(
                    f"Lab: the model {source!r} for {name} is neither a folder nor a bundled model ({', '.join(known)}); check "
                    "the path"
                )
            folder = Path(known[source])
        folder = model_of_run(folder)
        model = load_model(folder).float()
        return cls(source, model, *run_of_model(folder, model.config))

    @property
    def traits(self) -> dict[str, Any]:
        """`traits_of` its run, or those of the model alone."""
        return traits_of(self.run) if self.run else self.model.config.to_dict()

    def unlike(self, config: TrainConfig) -> dict[str, tuple[Any, Any]]:
        """The traits that are known and not those of a run: what the model has, and what the run has."""
        own, wanted = self.traits, traits_of(config)
        return {name: (own[name], wanted[name]) for name in own if name in wanted and own[name] != wanted[name]}

    def check(self, name: str, config: TrainConfig, preset: str, apart: Iterable[str] = ()) -> None:
        """Raises ValueError where the model is no model of the name: of another kind, of too few positions, of another task as
        far as its run is known, or other than the name's run in a trait by which the experiment sets its own models `apart`."""
        who, has, wanted = f"experiment: the model {self.source} for {name} has", self.model.config, config.model
        unlike = self.unlike(config)
        for trait in (*KIND, *(["n_loops"] if (has.n_loops == 1) != (wanted.n_loops == 1) else [])):
            if trait in unlike:
                own, needed = unlike[trait]
                raise ValueError(f"{who} {trait}={own!r}, and preset {preset} needs {needed!r}; give another model or preset")
        for trait in ("task", *apart):
            if trait in unlike:
                own, needed = unlike[trait]
                raise ValueError(
                    f"{who} {said(trait, own)}, and the name is of {said(trait, needed)}; give another model or NAME"
                )
        if has.pos_kind == "learned" and has.n_positions < 2 * config.points.end - 1:
            raise ValueError(
                f"{who} {has.n_positions} positions, and preset {preset} needs {2 * config.points.end - 1}; give another model "
                "or preset"
            )

    def remarks(self, name: str, config: TrainConfig) -> list[str]:
        """In what the model is other than a run of the name's, and what of it is not known."""
        unlike = {trait: both for trait, both in self.unlike(config).items() if trait != "n_positions"}
        notes = [f"{said(trait, own)}, not {said(trait, wanted, bare=True)}" for trait, (own, wanted) in unlike.items()]
        remarks = [f"{name} is {self.source}, which has {'; '.join(notes)}"] if notes else []
        if not self.run:
            remarks.append(f"{name} is {self.source}, and what that was trained on is not known: {self.why_unknown}")
        return remarks


def traits_of(config: TrainConfig) -> dict[str, Any]:
    """What makes a run's model what it is: the fields of model, task and training, by name."""
    task = config.make_task()
    own = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name not in NO_TRAITS}
    if not (config.rest_weight or config.extra_loops):
        del own["settle_from"]
    of_task = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    if of_task.get("digest"):
        del of_task["source"]  # where the tables lie: their digest says which they are
    return config.model.to_dict() | of_task | own


def apart(wanted: Mapping[str, TrainConfig]) -> dict[str, list[str]]:
    """By the name of each run, the traits in which it differs from another of the same task and kind: what these are about."""
    groups: dict[Any, dict[str, dict[str, Any]]] = {}
    for name, config in wanted.items():
        model = config.model
        kind = (config.task, model.n_loops == 1, model.inject, model.state_init)
        groups.setdefault(kind, {})[name] = traits_of(config)
    found: dict[str, list[str]] = {}
    for group in groups.values():
        first, *others = group.values()
        known = dict.fromkeys(trait for traits in group.values() for trait in traits if trait not in FOLLOWS)
        varied = [trait for trait in known if any(one.get(trait) != first.get(trait) for one in others)]
        found |= dict.fromkeys(group, varied)
    return found


def said(trait: str, value: Any, *, bare: bool = False) -> str:
    """A trait in words."""
    text = value if isinstance(value, str) else repr(value)
    if isinstance(value, Ramp):
        is_constant = value.start == value.end
        text = f"{value.end}" if is_constant else f"{value.start}..{value.end} by {value.increment} every {value.every}"
    return text if bare else f"{trait}={text}"
