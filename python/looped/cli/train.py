"""`looped train`."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from looped.cli.arguments import integers, key_values, use_threads

if TYPE_CHECKING:
    from looped.train import TrainConfig


@click.command("train")
@click.option("--preset", "preset_name", default="small", show_default=True, type=click.Choice(["paper", "small", "tiny"]))
@click.option("--task", default="linear_regression", show_default=True, help="The family of functions to learn.")
@click.option("--tied", is_flag=True, help="Train the weight-tied twin: no injection, the state starts at the embedding.")
@click.option("--unlooped", is_flag=True, help="Train the unlooped twin: 12 layers of their own weights, run once.")
@click.option("--out", "folder", required=True, help="The run's folder.")
@click.option("--resume", is_flag=True, help="Go on from the folder's last checkpoint, if it has one.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; default PyTorch's. A resumed run needs the same.")
@click.option("--seeds", help="Train once for each of a list such as 42,43,44, in OUT/seed_42 and so on.")
@click.option("--device", default="cpu", show_default=True, help="Where to compute: cpu or cuda.")
@click.option(
    "--set", "fields", multiple=True, metavar="KEY=VALUE", help="Replace a field of the preset: n_steps=100, lr=3e-4 ..."
)
@click.option("--json", "as_json", is_flag=True, help="Print the folder, steps and seconds as JSON on standard output.")
def train_command(
    preset_name: str,
    task: str,
    tied: bool,
    unlooped: bool,
    folder: str,
    resume: bool,
    threads: int | None,
    seeds: str | None,
    device: str,
    fields: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train a looped in-context learner by a preset; leaves OUT/model.

    Presets: paper (the published sizes and 500,000 steps, for a GPU), small (4 to 8 dimensions by the task, 16,000 steps, an
    hour or a few on one core), tiny (12 steps, to see that it runs).

    The folder also holds state.pt (resumes bit for bit after a stop), log.jsonl, train.json and provenance.jsonl.
    """
    from looped.config import LoopedConfig
    from looped.train import TrainConfig, preset, train, train_seeds

    if not folder:
        raise click.UsageError("--out takes the name of a folder, got ''; --out . is the one you are in")
    out = Path(folder)
    use_threads(threads)
    changes = key_values(fields)
    for name in ("name", "task", "tied", "unlooped", "model"):
        if name in changes:
            raise click.UsageError(f"--set {name} is not a field of the run; use --preset, --task, --tied or --unlooped")
    of_model, of_run = ({field.name for field in dataclasses.fields(kind)} for kind in (LoopedConfig, TrainConfig))
    if sizes := sorted((of_model - of_run) & set(changes)):
        raise click.UsageError(
            f"--set {sizes[0]} is of the model, which the preset gives; train another one from Python, with "
            f"looped.train.train(dataclasses.replace(config, model=config.model.replace({sizes[0]}=...)), ...)"
        )
    if seeds is not None and "seed" in changes:
        raise click.UsageError(f"--seeds {seeds} and --set seed={changes['seed']} are the same field; give one")
    config = preset(preset_name, task, tied=tied, unlooped=unlooped, **changes)
    if seeds is not None:
        numbers = integers("--seeds", seeds, 0)
        train_seeds(config, out, numbers, resume=resume, device=device)
        folders = [out / f"seed_{number}" for number in numbers]
    else:
        train(config, out, resume=resume, device=device)
    if seeds is not None and as_json:
        click.echo(json.dumps([str(folder / "model") for folder in folders]))
    elif seeds is not None:
        click.echo(f"looped: the models are in {', '.join(str(folder / 'model') for folder in folders)}", err=True)
    elif as_json:
        lines = (out / "log.jsonl").read_text().splitlines()
        last = json.loads(lines[-1]) if lines else {}
        click.echo(json.dumps({"model": str(out / "model")} | {name: last.get(name) for name in ("step", "seconds", "loss")}))
    else:
        measure = f"looped eval {shlex.quote(str(out / 'model'))}"
        if task == "tabular":
            measure = _experiment_of_tables(config, preset_name, out / "model")
        click.echo(f"looped: the model is in {out / 'model'}; score it with: {measure}", err=True)


def _experiment_of_tables(config: TrainConfig, preset_name: str, model: Path) -> str:
    """The command that scores a model on the table it was not trained on."""
    left_out = config.task_options.get("leave_out")
    if left_out is None:
        return """looped experiment tabular, of a model that left one table out (--set 'task_options={"leave_out": "iris"}')"""
    from looped.experiments.tabular import name_without

    source = config.task_options.get("source", "bundled")
    name = name_without(source, left_out, unlooped=config.model.n_loops == 1)
    data = "" if source == "bundled" else f" --data {shlex.quote(source)}"
    return f"looped experiment tabular --preset {preset_name} --models {shlex.quote(f'{name}={model}')}{data}"
