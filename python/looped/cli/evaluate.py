"""`looped eval`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from looped.cli.arguments import BUNDLED, EVAL_TOLERANCE, load_model_of, run_of, say_what_differs, task_of, use_threads

if TYPE_CHECKING:
    from looped.config import LoopedConfig
    from looped.icl.evaluate import Evaluation


@click.command("eval")
@click.argument("model", required=False)
@click.option("--twin", help="A second model to show beside it; default the bundled weight-tied twin of the bundled model.")
@click.option("--task", help="The family of functions that prompts are drawn from; default what the model was trained on.")
@click.option(
    "--task-set", "task_fields", multiple=True, metavar="KEY=VALUE", help="A number of the family; default as trained."
)
@click.option("--prompts", "n_prompts", default=1280, show_default=True, type=click.IntRange(min=1), help="Fresh prompts.")
@click.option("--points", "n_points", type=click.IntRange(min=1), help="Pairs in a prompt; default as trained.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**32 - 1), help="Of the prompts.")
@click.option("--exit", "rule", default="contraction", show_default=True, help="Exit rule, or fixed for the trained loops.")
@click.option("--tol", type=float, help="Tolerance of the exit rule; default 3e-3 for contraction, else 1e-3.")
@click.option("--on-stall", default="exit", show_default=True, type=click.Choice(["ignore", "exit", "damp"]))
@click.option("--anderson", type=click.IntRange(1, 3), help="Accelerate with this depth.")
@click.option(
    "--loops",
    "n_loops",
    type=click.IntRange(min=1),
    help="The most loops; default 5 times the trained ones, 1 of an unlooped model.",
)
@click.option("--baselines/--no-baselines", default=True, show_default=True, help="Score the task's baselines too.")
@click.option("--settling/--no-settling", default=True, show_default=True, help="Study states over 300 loops.")
@click.option("--batch", "batch_size", default=128, show_default=True, type=click.IntRange(min=1), help="Prompts at once.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; default PyTorch's.")
@click.option(
    "--set", "fields", multiple=True, metavar="KEY=VALUE", help="For another project's checkpoint: n_loops=20, n_heads=8"
)
@click.option("--twin-set", "twin_fields", multiple=True, metavar="KEY=VALUE", help="The same for the twin.")
@click.option("--out", type=click.Path(path_type=Path), help="Write evaluation.json, .csv and .png into this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
def evaluate_command(
    model: str | None,
    twin: str | None,
    task: str | None,
    task_fields: tuple[str, ...],
    n_prompts: int,
    n_points: int | None,
    seed: int,
    rule: str,
    tol: float | None,
    on_stall: str,
    anderson: int | None,
    n_loops: int | None,
    baselines: bool,
    settling: bool,
    batch_size: int,
    threads: int | None,
    fields: tuple[str, ...],
    twin_fields: tuple[str, ...],
    out: Path | None,
    as_json: bool,
) -> None:
    """Score MODEL in context on fresh prompts, beside classical baselines. Ctrl-C keeps the prompts that are finished.

    MODEL is a folder or file of any layout that looped reads, the folder of a run of `looped train`, or the name of a
    bundled model; by default the bundled linear-regression model. Prompts are those of its training, as its train.json has
    them; of a model without one, linear regression with 2 * dimensions + 1 pairs. Standard error says so, and where a model
    was trained on others than those drawn.
    """
    from tqdm import tqdm

    from looped.accelerate import Anderson
    from looped.exits import make_exit
    from looped.icl.baselines import baselines_for
    from looped.icl.evaluate import SLOW_PROMPTS, EvaluationInterrupted, another_interrupt_ignored, evaluate
    from looped.icl.predictor import LoopedPredictor
    from looped.report.titles import task_title

    use_threads(threads)
    if out:
        out.mkdir(parents=True, exist_ok=True)
    if "" in (model, twin):
        raise click.UsageError("the name of a model is empty; give a folder, a file or a bundled model, or leave it out")
    if twin_fields and not twin:
        raise click.UsageError("--twin-set goes with --twin")
    is_default, is_default_twin = model is None, model is None and twin is None
    if is_default_twin:
        twin = f"{BUNDLED}_tied"
    source = BUNDLED if model is None else model
    main_model = load_model_of(source, fields, is_default=is_default)
    config = main_model.config
    if config.input_kind != "features" or config.readout != "scalar" or config.n_dims is None:
        raise click.UsageError("eval scores in-context models: features in, a scalar read out")
    defaults = "numbers of the family and pairs in a prompt are the defaults, where not given"
    run = None if fields else run_of(source, config, is_default=is_default, instead=task and defaults)
    functions = task_of(run, task, config.n_dims, task_fields)
    if functions.name == "tabular":
        raise click.UsageError("eval scores functions with a scalar value; tables are scored by looped experiment tabular")
    if run is None and not task:
        why = "--set reads no train.json" if fields else f"no train.json beside {source}"
        drawn = task_title(functions.name, functions.options, functions.n_dims)
        click.echo(f"looped: {why}: scored on {drawn}; give --task if it was trained on others", err=True)
    if n_points is None:
        default = 2 * config.n_dims + 1
        n_points = run.points.end if run is not None else min(default, _most_points(config) or default)
    _check_points(f"the model {source}", config, n_points)
    say_what_differs("the model", run, functions, n_points)
    if rule == "contraction" and tol is None:
        tol = EVAL_TOLERANCE
    exit_rule = make_exit(rule, **({} if tol is None else {"tol": tol}))
    limit = n_loops or (config.n_loops if exit_rule.is_fixed or config.n_loops == 1 else 5 * config.n_loops)
    predictors: list[Any] = [
        LoopedPredictor(
            main_model,
            name="unlooped" if config.n_loops == 1 else "weight-tied" if _is_tied(config) else "looped",
            exit=exit_rule,
            n_loops=limit,
            on_stall=on_stall,
            accelerate=Anderson(anderson) if anderson else None,
        )
    ]
    others = baselines_for(functions) if baselines else []
    if twin:
        twin_model = load_model_of(twin, twin_fields, is_default=is_default_twin)
        _check_twin(twin, twin_model.config, config.n_dims)
        _check_points(f"the twin {twin}", twin_model.config, n_points)
        name = _name_of_twin(twin, twin_model.config, {predictors[0].name, *(predictor.name for predictor in others)})
        predictors.append(LoopedPredictor(twin_model, name=name))
        unknown = "whether the twin was trained on what is drawn is not known"
        twin_run = run_of(twin, twin_model.config, is_default=is_default_twin, instead=unknown) if not twin_fields else None
        say_what_differs(f"the twin {twin}", twin_run, functions, n_points)
    predictors += others
    ready = [predictor for predictor in predictors if not predictor.why_unavailable]
    total = sum(min(n_prompts, SLOW_PROMPTS) if predictor.cost == "slow" else n_prompts for predictor in ready)
    quiet = sys.stderr is None
    with tqdm(
        total=total,
        unit="prompt",
        desc=f"evaluating {len(ready)} predictors",
        file=sys.stderr,
        dynamic_ncols=True,
        disable=quiet,
    ) as bar:

        def progress(name: str, n_done: int) -> None:
            bar.set_postfix_str(name)
            bar.update(n_done)

        stopped = None
        try:
            result = evaluate(
                functions,
                predictors,
                n_prompts=n_prompts,
                n_points=n_points,
                seed=seed,
                batch_size=batch_size,
                n_loops_settling=300 if settling else 0,
                progress=progress,
            )
        except EvaluationInterrupted as stop:
            result, stopped = stop.result, stop
    with another_interrupt_ignored() if stopped else nullcontext():
        _give(dataclasses.replace(result, sources={"model": source, "twin": twin}), as_json, out)
    if stopped:
        raise KeyboardInterrupt(f"{stopped}, which are shown")


def _most_points(config: LoopedConfig) -> int | None:
    """Pairs for which a model has positions; None where it needs none."""
    return (config.n_positions + 1) // 2 if config.pos_kind == "learned" else None


def _check_points(who: str, config: LoopedConfig, n_points: int) -> None:
    most = _most_points(config)
    if most is not None and n_points > most:
        raise click.UsageError(
            f"{who} has positions for {most} points, and {n_points} are asked for; give --points {most} or less"
        )


def _check_twin(twin: str, config: LoopedConfig, n_dims: int) -> None:
    if config.input_kind != "features" or config.readout != "scalar":
        raise click.UsageError(f"the twin {twin} is no in-context model: features in, a scalar read out; give another --twin")
    if config.n_dims != n_dims:
        raise click.UsageError(f"the twin {twin} reads {config.n_dims} dimensions, and the model {n_dims}; give another --twin")


def _is_tied(config: LoopedConfig) -> bool:
    """Whether a model starts from the embedded prompt and injects nothing."""
    return (config.inject, config.state_init) == ("none", "embedding") and config.n_loops > 1


def _name_of_twin(source: str, config: LoopedConfig, taken: set[str]) -> str:
    """What a weight-tied twin is, else the bundled model's name or the folder's; of a run's model, with the run's folder."""
    if _is_tied(config):
        return "weight-tied twin"
    name = source
    if Path(source).exists():
        path = Path(os.path.abspath(source))  # "." has no name
        name = path.name
        if name == "model":
            name = path.parent.name
        elif path.is_file() or re.match("model_[0-9]+$", name):
            name = f"{path.parent.name}/{name}"
    shown = {other.replace("_", " ") for other in (*taken, "weight-tied twin")}  # in tables and figures
    return f"{name} (twin)" if name.replace("_", " ") in shown else name


def _give(result: Evaluation, as_json: bool, out: Path | None) -> None:
    try:  # whatever becomes of one of them, a full disk or a closed pipe must not lose the result of the other
        _show(result, as_json)
    finally:
        if out:
            from looped.report.plots import plot_evaluation

            result.save(out)
            plot_evaluation(result, out / "evaluation.png")
            click.echo(f"looped: wrote {out}/evaluation.json, .csv and .png", err=True)


def _show(result: Evaluation, as_json: bool) -> None:
    """The result on standard output, at once; what to know of it on standard error."""
    if as_json:
        click.echo(json.dumps(result.to_dict()))
    else:
        from rich.console import Console

        from looped.report.tables import evaluation_tables

        console = Console(width=None if sys.stdout.isatty() else 130)
        for table in evaluation_tables(result):
            console.print(table)
    for remark in result.remarks():
        click.echo(f"looped: {remark}", err=True)
