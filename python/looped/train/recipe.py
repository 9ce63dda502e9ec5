"""What a training run does, as data: `TrainConfig`, its curricula, and the presets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from looped.config import LoopedConfig, icl_config
from looped.icl.tasks import Task, make_task
from looped.integers import integer_of, take_integers
from looped.suggestion import suggestion


@dataclass(frozen=True)
class Ramp:
    """A curriculum quantity: `start`, then `increment` more every `every` steps, up to `end`."""

    start: int
    end: int
    increment: int = 1
    every: int = 1

    def __post_init__(self) -> None:
        take_integers(self, ("start", "end", "increment", "every"))
        if any(isinstance(x, bool) or not isinstance(x, int) for x in (self.start, self.end, self.increment, self.every)):
            raise ValueError(f"Ramp: start, end, increment and every must be integers, got {self}")
        if not (self.start <= self.end and self.increment >= 1 and self.every >= 1):
            raise ValueError(f"Ramp: needs start <= end, increment >= 1 and every >= 1, got {self}")

    def at(self, step: int) -> int:
        """The value at a step, counted from 0."""
        return min(self.end, self.start + self.increment * (step // self.every))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run of a looped in-context learner (Yang et al., 2024, section 4 and their public code).

    Each step draws `batch_size` fresh prompts of `points` pairs with `dims` live coordinates, runs `loops` loops and takes
    the mean squared error of the last `window` loops' predictions at every point (truncated loss, eq. 1). The loops before
    the window run without gradient where the prompt is injected; the weight-tied twin keeps it through all of them.

    From step `settle_from` on, the loss also asks states to come to rest, in the spirit of Bai et al. (2021), "Stabilizing
    Equilibrium Models by Jacobian Regularization": `rest_weight` times the mean over prompts of the squared relative change
    in the last loop, with 0 to `extra_loops` more loops (a new random number each step). The published recipe has neither.

    optimizer: ``"adam"``, as published, or ``"muon"``, which orthogonalises the steps of the blocks' matrices (Jordan et al.,
    2024, with the step sizes of Liu et al., 2025; torch 2.9 or newer) and leaves the other weights to Adam. lr is reached after
    `warmup_steps` linear steps; `decay="cosine"` then takes it to 0 at n_steps. grad_clip bounds the gradient's norm; None
    leaves it. weight_decay: decoupled (AdamW, Loshchilov and Hutter, 2019), on the matrices alone.
    precision: ``"fp32"``; ``"tf32"``, float32 with TF32 products on a GPU, as the authors train, and ``"fp32"`` on a CPU; or
    ``"bf16"``, autocast with the state, the loss and the weights in float32. The paper names clipping, decay and mixed
    precision for large windows.

    n_distinct: None for fresh prompts, or the number of prompts in a fixed set that every batch is drawn from (the paper's
    sample efficiency); dims and points must then be constant. A model with `readout="classes"` is trained on the
    cross-entropy of y as a class, any other one on the squared error.

    save_every: steps between checkpoints that a killed run resumes from. keep_every: steps between copies of the model that
    stay; 0 keeps none. seed: of the weights and of the prompts. task_options: fields of the task beside n_dims; real tables are
    not read before training starts.

    Raises ValueError for values that do not fit each other.
    """

    model: LoopedConfig
    task: str = "linear_regression"
    task_options: dict[str, Any] = field(default_factory=dict)
    window: int
    dims: Ramp
    points: Ramp
    loops: Ramp
    batch_size: int = 64
    n_steps: int = 500_000
    optimizer: str = "adam"
    lr: float = 1e-4
    warmup_steps: int = 0
    decay: str = "none"
    grad_clip: float | None = None
    weight_decay: float = 0.0
    precision: str = "fp32"
    n_distinct: int | None = None
    rest_weight: float = 0.0
    extra_loops: int = 0
    settle_from: int = 0
    seed: int = 42
    save_every: int = 1000
    keep_every: int = 0

    def __post_init__(self) -> None:
        take_integers(self, (*COUNTS, "n_distinct"))
        for name in RAMPS:
            if not isinstance(getattr(self, name), Ramp):
                raise ValueError(f"TrainConfig: {name}={getattr(self, name)!r} must be a Ramp(start, end, increment, every)")
        for name in ("lr", "grad_clip", "weight_decay", "rest_weight"):
            value = getattr(self, name)
            if name == "grad_clip" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LARGEST:
                raise ValueError(f"TrainConfig: {name}={_short(value)} must be a number of at least 0, and at most {LARGEST:g}")
            if value == 0 and name in ("lr", "grad_clip"):
                raise ValueError(f"TrainConfig: {name} must be above 0")
        if not isinstance(self.model, LoopedConfig):
            raise ValueError(f"TrainConfig: model={self.model!r} must be a LoopedConfig")
        if not isinstance(self.task_options, dict):
            raise ValueError(f"TrainConfig: task_options={self.task_options!r} must be a mapping of the task's options")
        for name in COUNTS:
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int):
                raise ValueError(f"TrainConfig: {name}={getattr(self, name)!r} must be an integer")
        numbers = {name: getattr(self, name) for name in (*COUNTS, "n_distinct") if name != "seed"} | self.task_options
        for name, value in numbers.items():
            if isinstance(value, int) and abs(value) >= COUNT_LIMIT:
                raise ValueError(f"TrainConfig: {name}={_short(value)} must be below 2^31; take a smaller number")
        for name in ("name", "n_dims"):
            if name in self.task_options:
                raise ValueError(f"TrainConfig: task_options takes no {name}: the run's task and dims say it")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"TrainConfig: seed={self.seed} must lie in 0 .. 2^32 - 1")
        for name, allowed in (("decay", DECAYS), ("precision", PRECISIONS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"TrainConfig: {name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.n_distinct is not None:
            if isinstance(self.n_distinct, bool) or not isinstance(self.n_distinct, int) or self.n_distinct < 1:
                raise ValueError(f"TrainConfig: n_distinct={self.n_distinct!r} must be an integer of at least 1, or None")
            if self.dims.start != self.dims.end or self.points.start != self.points.end:
                raise ValueError(
                    "TrainConfig: a fixed set of n_distinct prompts has no curriculum; give dims and points one number"
                )
        if not 1 <= self.window <= self.loops.start:
            raise ValueError(f"TrainConfig: window={self.window} must lie in 1 .. loops.start={self.loops.start}")
        if self.loops.end != self.model.n_loops:
            raise ValueError(
                f"TrainConfig: loops end at {self.loops.end} but the model runs {self.model.n_loops}; change both, "
                "in Python by model=config.model.replace(n_loops=...)"
            )
        if self.dims.end != self.model.n_dims or self.dims.start < 1:
            raise ValueError(f"TrainConfig: dims {self.dims} must go from 1 or more to the model's {self.model.n_dims}")
        if self.points.start < 1:
            raise ValueError(f"TrainConfig: points {self.points} must start at 1 or more")
        if 2 * self.points.end - 1 > self.model.n_positions:
            raise ValueError(
                f"TrainConfig: {self.points.end} points take {2 * self.points.end - 1} tokens but the model has "
                f"{self.model.n_positions} positions"
            )
        if min(self.batch_size, self.n_steps, self.save_every) < 1 or min(self.warmup_steps, self.keep_every) < 0:
            raise ValueError("TrainConfig: batch_size, n_steps and save_every must be at least 1, the others 0 or more")
        if min(self.extra_loops, self.settle_from) < 0:
            raise ValueError("TrainConfig: extra_loops and settle_from must be 0 or more")
        if self.rest_weight and self.window < 2:
            raise ValueError("TrainConfig: rest_weight compares the last two loops; set window to 2 or more")
        self.make_task()

    def make_task(self) -> Task:
        """The task that prompts are drawn from."""
        return make_task(self.task, self.dims.end, **self.task_options)

    def with_data_named(self) -> TrainConfig:
        """This run with the content of its real tables among the task's options (`digest`), so that it is the same run wherever
        they lie; any other one as it is. Reads the tables, and raises what `looped.icl.tabular.load_tables` raises."""
        if self.task != "tabular":
            return self
        from looped.icl.tabular import TabularTask

        content = TabularTask(self.dims.end, **self.task_options).content
        return self if content is None else dataclasses.replace(self, task_options=self.task_options | {"digest": content})

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        if self.decay == "none" or step < self.warmup_steps:
            return self.lr * warm
        done = (step - self.warmup_steps) / max(1, self.n_steps - self.warmup_steps)
        return self.lr * 0.5 * (1 + math.cos(math.pi * done))

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The inverse of `to_dict`. Raises ValueError that names the nearest field, or all, for an unknown one."""
        _check_names(values)
        ramps = {name: _ramp(name, values[name]) for name in RAMPS if name in values}
        return cls(**{**values, **ramps, "model": LoopedConfig.from_dict(values["model"])})


RAMPS = ("dims", "points", "loops")
COUNTS = ("window", "batch_size", "n_steps", "warmup_steps", "extra_loops", "settle_from", "seed", "save_every", "keep_every")
DECAYS = ("none", "cosine")
OPTIMIZERS = ("adam", "muon")
COUNT_LIMIT = 2**31  # that no count reaches
LARGEST = 1e30  # of a rate or a weight: Adam takes ten times as much in float32
PRECISIONS = ("fp32", "tf32", "bf16")


def _check_names(values: Mapping[str, Any]) -> None:
    known = [f.name for f in dataclasses.fields(TrainConfig)]
    for key in values:
        if key not in known:
            raise ValueError(f"TrainConfig: unknown field {key!r}{suggestion(key, known)}")


def _short(value: Any) -> str:
    """A number in an error: not all of a thousand digits."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} characters)"


def _ramp(name: str, value: Any) -> Ramp:
    """A Ramp from one, from a mapping of its fields, or from a number that stays."""
    if isinstance(value, Mapping) and {"start", "end"} <= set(value) <= {f.name for f in dataclasses.fields(Ramp)}:
        return Ramp(**value)
    if (count := integer_of(value)) is not None:
        return Ramp(count, count)
    if not isinstance(value, Ramp):
        raise ValueError(f"TrainConfig: {name}={value!r} must be a number or start, end, increment and every")
    return value


# b, T and the points curriculum of the authors' script, by task (exec/script_loop.sh and configs/ of their code).
PAPER = {
    "linear_regression": (30, 15, Ramp(11, 41, 2, 5000)),
    "noisy_linear_regression": (30, 15, Ramp(11, 41, 2, 5000)),
    "sparse_linear_regression": (20, 10, Ramp(11, 41, 2, 5000)),
    "quadratic_regression": (30, 15, Ramp(11, 41, 2, 5000)),
    "decision_tree": (70, 15, Ramp(26, 101, 5, 5000)),
    "relu_2nn_regression": (12, 5, Ramp(26, 101, 5, 5000)),
    "tabular": (30, 15, Ramp(41, 41)),  # the yaml's curriculum of points is never read: train_openml.py takes 41
}

# The weight-tied twin: starts from the embedding and injects nothing.
TIED = {"inject": "none", "state_init": "embedding"}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What of the presets `small` and `tiny` depends on the task; `dims_every`: steps to one more live dimension, from 2 on."""

    n_dims: int
    n_points: int
    n_loops: int
    window: int
    dims_every: int
    options: dict[str, Any] = field(default_factory=dict)


_LINEAR = Sizes(n_dims=5, n_points=11, n_loops=30, window=15, dims_every=1500)
SMALL = {
    "linear_regression": _LINEAR,
    "noisy_linear_regression": _LINEAR,
    "quadratic_regression": _LINEAR,
    "sparse_linear_regression": Sizes(n_dims=8, n_points=17, n_loops=20, window=12, dims_every=1000, options={"sparsity": 2}),
    "decision_tree": Sizes(n_dims=4, n_points=21, n_loops=24, window=12, dims_every=2000, options={"depth": 2}),
    "relu_2nn_regression": Sizes(n_dims=4, n_points=21, n_loops=12, window=5, dims_every=2000, options={"hidden": 8}),
    "tabular": Sizes(n_dims=10, n_points=21, n_loops=20, window=12, dims_every=1500),
}
TINY_OPTIONS: dict[str, dict[str, Any]] = {
    "sparse_linear_regression": {"sparsity": 1},
    "decision_tree": {"depth": 2},
    "relu_2nn_regression": {"hidden": 4},
}


def preset(
    name: str, task: str = "linear_regression", *, tied: bool = False, unlooped: bool = False, **changes: Any
) -> TrainConfig:
    """A named run.

    ``"paper"``: the published sizes, steps and precision (quadratic regression, which the paper does not train, uses the
    linear ones). ``"small"``: 4 to 8 dimensions and 11 to 21 points by the task (`SMALL`), for 2 CPU cores in an hour or a few.
    ``"tiny"``: seconds, for tests.
    `tied` trains the weight-tied twin, `unlooped` the transformer of Garg et al.: 12 layers of their own weights (2 at
    ``"tiny"``), run once. Further keywords replace fields of `TrainConfig`. Raises ValueError for an unknown name or task, and
    for both twins at once.
    """
    if tied and unlooped:
        raise ValueError("preset: tied and unlooped are two twins; choose one")
    if task not in PAPER:
        make_task(task, 1)  # says what there is
    run: dict[str, Any]
    options: dict[str, Any] = {}
    if name == "paper":
        n_loops, window, points = PAPER[task]
        model = icl_config(n_dims=20, n_points=101, n_loops=n_loops)
        run = dict(points=points, dims=Ramp(5, 20, 1, 5000), loops=Ramp(window, n_loops, 2, 500), precision="tf32")
        if task == "tabular":
            run |= dict(batch_size=40, n_steps=100_000)
    elif name == "small":
        sizes = SMALL[task]
        n_loops, window, options = sizes.n_loops, sizes.window, sizes.options
        model = icl_config(n_dims=sizes.n_dims, n_points=sizes.n_points, d_model=64, n_heads=4, n_loops=n_loops)
        run = dict(
            dims=Ramp(2, sizes.n_dims, 1, sizes.dims_every),
            points=Ramp(sizes.n_points, sizes.n_points),
            loops=Ramp(window, n_loops, 1, 300),
            n_steps=16_000,
            lr=1e-3,
            warmup_steps=500,
            decay="cosine",
            grad_clip=1.0,
            rest_weight=10.0,
            extra_loops=20,
            settle_from=7500,
            save_every=500,
            keep_every=2000,
        )
    elif name == "tiny":
        window, options = 2, TINY_OPTIONS.get(task, {})
        model = icl_config(n_dims=2, n_points=5, d_model=16, n_heads=2, n_loops=4)
        run = dict(dims=Ramp(1, 2, 1, 4), points=Ramp(3, 5, 1, 3), loops=Ramp(2, 4, 1, 2))
        run |= dict(batch_size=8, n_steps=12, lr=1e-3, grad_clip=1.0, save_every=5)
    else:
        raise ValueError(f"preset: {name!r} is not one of {', '.join(PRESETS)}")
    if task == "tabular":
        model = model.replace(readout="classes", n_classes=2)
        run["dims"] = Ramp(run["dims"].end, run["dims"].end)  # a table has all its columns from the first step on
    if tied:
        model = model.replace(**TIED)
    elif unlooped:
        model = model.replace(**TIED, n_core=2 if name == "tiny" else 12, n_loops=1)
        window = 1
        run |= dict(loops=Ramp(1, 1), rest_weight=0.0, extra_loops=0)
    _check_names(changes)
    changes |= {name: _ramp(name, changes[name]) for name in RAMPS if name in changes}
    fields: dict[str, Any] = {"model": model, "task": task, "task_options": dict(options), "window": window}
    return TrainConfig(**(fields | run | changes))


PRESETS = ("paper", "small", "tiny")
