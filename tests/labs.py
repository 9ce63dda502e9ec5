"""Labs, measurements and conditions that tests of training and of the experiments share."""

import pytest
import torch

from looped.experiments import Lab
from looped.experiments.measure import Measured, single

# pyproject.toml takes older ones
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9 or newer")


def quick(folder, preset_name="tiny", **options):
    return Lab(preset_name, folder, **(dict(n_steps=4, n_prompts=6, progress=False) | options))


def curves(**errors):
    return {name: Measured(single(values), [], 0.0) for name, values in errors.items()}
