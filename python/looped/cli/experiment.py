"""`looped experiment`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from looped.cli.arguments import integers, use_threads

if TYPE_CHECKING:
    from looped.experiments.outcome import Outcome


@click.command("experiment")
@click.argument("name", required=False)
@click.option(
    "--preset", default="small", show_default=True, type=click.Choice(["tiny", "small", "paper"]), help="The numbers."
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder of models and results; default experiments/PRESET.")
@click.option("--list", "as_list", is_flag=True, help="List the models that NAME asks for and where each is; run nothing.")
@click.option("--models", "given", multiple=True, metavar="NAME=FOLDER", help="Use this model; a folder or a bundled model.")
@click.option("--train/--no-train", "may_train", default=True, show_default=True, help="Train the models that are missing.")
@click.option("--resume", is_flag=True, help="Go on with trainings that were stopped.")
@click.option("--seeds", default="42", show_default=True, help="Train every model once for each: a list such as 42,43,44.")
@click.option("--steps", "n_steps", type=click.IntRange(min=1), help="Of every training, in folders of their own.")
@click.option("--prompts", "n_prompts", type=click.IntRange(min=1), help="Of each measurement; default 64 (tiny) or 1280.")
@click.option("--seed", default=0, show_default=True, help="Of the prompts that models are measured on.")
@click.option("--device", default="cpu", show_default=True, help="Where to train and measure: cpu or cuda.")
@click.option("--data", default="bundled", show_default=True, help="Of tabular: bundled, openml, or a folder.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; default PyTorch's.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON on standard output.")
def experiment_command(
    name: str | None,
    preset: str,
    out: Path | None,
    as_list: bool,
    given: tuple[str, ...],
    may_train: bool,
    resume: bool,
    seeds: str,
    n_steps: int | None,
    n_prompts: int | None,
    seed: int,
    device: str,
    data: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Run the experiment NAME of the in-context papers; without NAME, list them.

    Leaves OUT/NAME.json, .csv and .png, and the models it needs in OUT/models, where other experiments find them. A quick look
    (--steps, or fewer prompts than by default) takes the place of no measurement: it leaves NAME_100_steps_32_prompts.json.

    Presets: tiny (minutes, a first look), small (2 CPU cores, an hour or a few for each model), paper (the published sizes, for
    a GPU).

    --models takes the names that --list shows, each with the folder of a model or the name of a bundled one. A model that is
    missing is trained. Ctrl-C keeps its checkpoint, and the same command with --resume goes on.
    """
    from looped.experiments.catalog import EXPERIMENTS, models_of, run_experiment
    from looped.experiments.lab import Lab
    from looped.report.outcomes import plot_outcome

    if name is None:
        for known, entry in EXPERIMENTS.items():
            click.echo(f"{known:18} {entry.figures:22} {entry.about}")
        return
    use_threads(threads)
    models: dict[str, str] = {}
    for text in given:
        model, _, source = text.partition("=")
        if not model or not source or model in models:
            raise click.UsageError(f"--models takes NAME=FOLDER, each NAME once, got {text!r}")
        models[model] = source
    out = out or Path("experiments") / preset
    lab = Lab(
        preset,
        out,
        given=models,
        may_train=may_train,
        resume=resume,
        seeds=integers("--seeds", seeds, 0),
        n_prompts=n_prompts or 0,
        seed=seed,
        n_steps=n_steps or 0,
        device=device,
        data=data,
    )
    if as_list:
        found = lab.inventory(models_of(name, lab).items())
        if as_json:
            click.echo(json.dumps([{"name": label, "n_steps": steps, "source": origin} for label, steps, origin in found]))
            return
        click.echo(f"{'model':44} {'training':>15}  where it is")
        for label, steps, origin in found:
            missing = "to be trained" if may_train else "left out: not trained"
            click.echo(f"{label:44} {f'{steps:,} steps' if steps else '':>15}  {origin or missing}")
        return
    place = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not place.is_dir():
        raise click.UsageError(f"--out {out} takes a folder, and {place} is a file; give another place")
    how = "give models with --models" + ("" if may_train else " or leave --no-train away")
    nothing = click.UsageError(
        f"{name} has no model to measure, and no result was written; {how} (--list shows what {name} asks for)"
    )
    places = [place for *_, place in lab.inventory(models_of(name, lab).items())]
    if not may_train and not set(places) - {None, "diverged"}:
        raise nothing
    outcome = run_experiment(name, lab)
    if not outcome.is_measured:
        for note in outcome.notes:
            click.echo(f"looped: {note}", err=True)
        raise nothing
    try:  # whatever becomes of one of them, a full disk or a closed pipe must not lose the result of the other
        _show(outcome, as_json)
    finally:
        outcome.save(out)
        plot_outcome(outcome, out / f"{outcome.stem}.png")
        click.echo(f"looped: wrote {out / outcome.stem}.json, .csv and .png in {outcome.seconds:.0f} s", err=True)


def _show(outcome: Outcome, as_json: bool) -> None:
    """The result on standard output, at once; its notes on standard error."""
    if as_json:
        click.echo(json.dumps(outcome.to_dict()))
    else:
        from rich.console import Console

        from looped.report.outcomes import outcome_tables

        console = Console(width=None if sys.stdout.isatty() else 160)
        for table in outcome_tables(outcome):
            console.print(table)
    for note in outcome.notes:
        click.echo(f"looped: {note}", err=True)
