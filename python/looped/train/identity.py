"""What makes a training run the run it is: whether two descriptions, each as `TrainConfig.to_dict` gives it, are of one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from looped.train.recipe import TrainConfig

SAVING = ("save_every", "keep_every")  # how often a run is saved, and nothing of what it computes
NEWER_FIELDS = ("optimizer", "weight_decay", "precision", "n_distinct")  # that descriptions of older runs do not name
DEFAULTS = {f.name: f.default for f in dataclasses.fields(TrainConfig)}


def differences(config: TrainConfig, described: Mapping[str, Any]) -> list[str]:
    """The fields, each with both values, in which a described run is another than that of the configuration.

    Real tables are compared by the digest of their content where both runs have one, wherever they lie.
    """
    now, then = _plain(config.to_dict()), _plain(described)
    options: list[Any] = [run.get("task_options") for run in (now, then)]
    if all(isinstance(one, dict) for one in options):
        named = all(one.get("digest") for one in options)
        for one in options:
            one.pop("source" if named else "digest", None)
    return [f"{name} ({then.get(name)}, not {now[name]})" for name in now if now[name] != then.get(name)]


def _plain(described: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back, with the fields that it is too old to name."""
    whole = {name: DEFAULTS[name] for name in NEWER_FIELDS} | dict(described)
    plain: dict[str, Any] = json.loads(json.dumps({k: v for k, v in whole.items() if k not in SAVING}, default=repr))
    return plain
