"""What several commands take: models, lists of integers, KEY=VALUE pairs, threads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from looped.config import LoopedConfig
    from looped.icl.tasks import Task
    from looped.train import TrainConfig

BUNDLED = "linear_regression"

# Of the contraction rule in eval. On the bundled model it saves 68 % of at most 150 loops and moves the error with ten
# examples by 0.1 %; 1e-2 saves 74 % and moves it by 0.8 %, close to the 1 % it may cost, and 1e-3 saves 62 %.
EVAL_TOLERANCE = 3e-3

MOST_INTEGERS = 10_000  # of a list


def load_model_of(source: str, fields: tuple[str, ...], *, is_default: bool = False) -> Any:
    """The model of a folder, a file or a bundled name; by default the bundled one, whatever folder has its name."""
    from looped.checkpoint import load_checkpoint
    from looped.pretrained import bundled_models, load_pretrained
    from looped.train.record import model_of_run

    if source in bundled_models() and (is_default or not Path(source).exists()):
        if fields:
            raise click.UsageError(f"the bundled model {source} is complete; --set is for other projects' checkpoints")
        return load_pretrained(source)
    folder = Path(source)
    if not folder.exists():
        known = ", ".join(bundled_models())
        raise click.UsageError(f"{source!r} is neither a folder or file nor a bundled model ({known}); check the path")
    return load_checkpoint(model_of_run(folder), **key_values(fields)).float()


def run_of(source: str, model: LoopedConfig, *, is_default: bool = False, instead: str | None = None) -> TrainConfig | None:
    """The run that a model of `load_model_of` comes from, as train.json beside it or in the folder above has it; None without.

    Of a train.json that cannot be read or is of another model, standard error says so and what stands instead; it is an error
    where nothing does.
    """
    from looped.pretrained import bundled_models
    from looped.train.record import NO_RECORD, model_of_run, run_of_model

    folder = Path(source)
    if is_default or not folder.exists():
        folder = Path(bundled_models().get(source, source))
    folder = model_of_run(folder) if folder.is_dir() else folder.parent
    run, why_unknown = run_of_model(folder, model)
    if run is None and why_unknown != NO_RECORD:
        why = f"it is not known what the model was trained on: {why_unknown}"
        if instead is None:
            raise click.UsageError(f"{why}; give --task")
        click.echo(f"looped: {why}; {instead}", err=True)
    return run


def task_of(run: TrainConfig | None, name: str | None, n_dims: int, fields: tuple[str, ...]) -> Task:
    """The family of a name or, without one, of the model's run; with the run's own numbers where it is the same family."""
    from looped.icl.tasks import make_task

    name = name or (run.task if run is not None else BUNDLED)
    own = run.task_options if run is not None and run.task == name else {}
    options = key_values(fields, "--task-set")
    if "n_dims" in options:
        raise click.UsageError(f"--task-set takes no n_dims: the model has {n_dims} dimensions")
    return make_task(name, n_dims, **(own | options))


def say_what_differs(model: str, run: TrainConfig | None, task: Task | None, n_points: int) -> None:
    """On standard error, where a model's run had another task or shorter prompts than are drawn."""
    if run is None:
        return
    if task is not None and task != (trained := run.make_task()):
        click.echo(f"looped: {model} was trained on {trained}, not on {task}", err=True)
    if n_points > (end := run.points.end):
        beyond = f"those from {end + 1} to {n_points} were never trained"
        click.echo(f"looped: {model} was trained on prompts of {end} points; {beyond}", err=True)


def integers(option: str, text: str, least: int) -> list[int]:
    """A list 1,5,20, or a range FIRST:LAST[:STEP] with its last, or several; sorted, with what comes twice."""
    values: list[int] = []
    try:
        for part in text.split(","):
            first, *rest = (int(number) for number in part.split(":"))
            last, step = (*rest, 1)[:2] if rest else (first, 1)
            if len(rest) > 2 or step < 1 or last < first:
                raise ValueError
            if len(values) + (last - first) // step >= MOST_INTEGERS:
                raise click.UsageError(f"{option} {text!r} holds more than {MOST_INTEGERS:,} integers; give fewer")
            values += range(first, last + 1, step)
    except ValueError:
        raise click.UsageError(f"{option} takes a list such as 1,5,20 or a range FIRST:LAST[:STEP], got {text!r}") from None
    if min(values) < least:
        raise click.UsageError(f"{option} {text!r} must hold integers of at least {least}")
    return sorted(values)


def key_values(fields: tuple[str, ...], option: str = "--set") -> dict[str, Any]:
    values = {}
    for text in fields:
        key, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"{option} takes KEY=VALUE, got {text!r}")
        try:
            values[key] = json.loads(value)
        except (ValueError, RecursionError):  # RecursionError: of a thousand brackets
            values[key] = value
    return values


def use_threads(threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)
