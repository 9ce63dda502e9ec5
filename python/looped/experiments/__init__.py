"""The experiments of the in-context papers, one module each: `looped experiment NAME`."""

from looped.experiments.catalog import EXPERIMENTS, run_experiment
from looped.experiments.lab import Lab
from looped.experiments.outcome import Outcome

__all__ = ["EXPERIMENTS", "Lab", "Outcome", "run_experiment"]
