"""Labs and measurements that tests of the experiments share."""

from looped.experiments import Lab
from looped.experiments.measure import Measured, single


def quick(folder, preset_name="tiny", **options):
    return Lab(preset_name, folder, **(dict(n_steps=4, n_prompts=6, progress=False) | options))


def curves(**errors):
    return {name: Measured(single(values), [], 0.0) for name, values in errors.items()}
