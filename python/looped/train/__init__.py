"""Training looped in-context learners."""

from looped.train.device import usable_device
from looped.train.recipe import Ramp, TrainConfig, preset
from looped.train.trainer import train, train_seeds

__all__ = ["Ramp", "TrainConfig", "preset", "train", "train_seeds", "usable_device"]
