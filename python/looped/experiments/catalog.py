"""The experiments by name, and how one is run."""

from __future__ import annotations

import dataclasses
import importlib
import time
from typing import Any, NamedTuple

from looped.experiments.lab import Lab
from looped.experiments.outcome import Outcome, lines_not_finite
from looped.suggestion import suggestion
from looped.train import TrainConfig


class Entry(NamedTuple):
    """An experiment: its module, the paper's figures, and what it shows."""

    module: str
    figures: str
    about: str


FIRST_LOOK = "tiny shows that all runs: its models have hardly learned, and its verdicts say nothing of the paper's claims"

EXPERIMENTS: dict[str, Entry] = {
    "fixed-point": Entry("fixed_point", "Fig. 2, 3", "error against loops far past the trained count; injection against tying"),
    "loops-and-window": Entry(
        "loops_and_window", "Fig. 4, appendix B", "the grid of trained loops b and window T; at paper Fig. 9 too"
    ),
    "sample-efficiency": Entry("sample_efficiency", "Fig. 5, appendix C", "training on a fixed set of distinct prompts"),
    "shift": Entry("shift", "Fig. 6, appendix D", "inputs, queries and outputs unlike those of training"),
    "functions": Entry("functions", "Fig. 10", "linear, sparse, tree and ReLU-network functions beside every baseline"),
    "sparsity": Entry("sparsity", "Fig. 11", "sparse linear functions with more and more non-zero weights"),
    "architecture": Entry("architecture", "Fig. 7", "layers in the loop, width, heads"),
    "probe": Entry("probe", "Fig. 8", "what the states hold of X'y and of the least-squares weights, by loop and by layer"),
    "tabular": Entry("tabular", "Table 1 (OpenML)", "real tables, each left out of training once"),
    "adaptive": Entry("adaptive", "section 7, future work", "mixed difficulty: loops by prompt and token"),
}


def models_of(name: str, lab: Lab) -> dict[str, TrainConfig]:
    """The models that an experiment asks the lab for, by name, in order. Nothing is trained.

    Raises ValueError for an unknown experiment, for tables (`lab.data`) where none are read, and for given models that it does
    not ask for or that do not fit.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"unknown experiment {name!r}{suggestion(name, EXPERIMENTS, listed=True)}")
    if lab.data != "bundled" and name != "tabular":
        raise ValueError(f"{name} reads no tables, and data={lab.data!r} is for the experiment tabular; leave it out")
    wanted = dict(_module(name).runs(lab).values())
    lab.check(name, wanted)
    return wanted


def run_experiment(name: str, lab: Lab) -> Outcome:
    """Run one and return its outcome; nothing is written but the models it trains. Raises as `models_of`, before all else."""
    models_of(name, lab)
    begin = time.perf_counter()
    outcome: Outcome = _module(name).run(lab)
    settings = {"n_prompts": lab.n_prompts, "seed": lab.seed, "seeds": list(lab.seeds), "device": lab.device}
    settings |= {"n_steps": lab.n_steps or None}  # of every training, where these are not the experiment's own
    return dataclasses.replace(
        outcome,
        settings=settings | outcome.settings,
        models=dict(lab.used),
        notes=[
            *lab.remarks(),
            *lines_not_finite(outcome.panels),
            *outcome.notes,
            *([FIRST_LOOK] if lab.preset == "tiny" else []),
        ],
        seconds=time.perf_counter() - begin,
        variant=outcome.variant + lab.variant,
    )


def _module(name: str) -> Any:
    """An experiment's module: `runs(lab)`, the models by what it needs them for, and `run(lab)`."""
    return importlib.import_module(f"looped.experiments.{EXPERIMENTS[name].module}")
