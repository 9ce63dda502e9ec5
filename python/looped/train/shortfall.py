"""What a run that is shorter than its curricula never comes to."""

from __future__ import annotations

from looped.train.recipe import RAMPS, TrainConfig


def shortfall(config: TrainConfig) -> str:
    """What is missing at a run's last step, such as ``"dims end at 2, not 5; loops end at 13, not 20"``; "" for nothing."""
    ramps = {name: getattr(config, name) for name in RAMPS}
    last = {name: ramp.at(config.n_steps - 1) for name, ramp in ramps.items()}
    missing = [f"{name} end at {last[name]}, not {ramp.end}" for name, ramp in ramps.items() if last[name] < ramp.end]
    if (config.rest_weight or config.extra_loops) and config.settle_from >= config.n_steps:
        missing.append(f"nothing asks states to rest, as settle_from={config.settle_from} is past the last step")
    return "; ".join(missing)
