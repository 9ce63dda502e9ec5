"""The command line: `looped eval`, `bench`, `train`, `experiment`, `info`, and those of looped.programs."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import click

from looped.experiments.command import experiment_command
from looped.programs.commands import add_to as add_program_commands

ERROR_CODE = 2  # of bad use

# Of the contraction rule in eval. On the bundled model it saves 37 % of at most 100 loops and moves the error with ten
# examples by 0.5 %; 1e-2 saves 54 % and moves it by 0.9 %, close to the 1 % it may cost, and 1e-3 saves 23 % for 0.4 %.
EVAL_TOLERANCE = 3e-3


class _Commands(click.Group):
    """Turns the library's errors into one line and an exit code; --traceback shows where they came from."""

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.params.get("traceback"):
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            click.echo(f"looped: {str(stop) or 'interrupted'}", err=True)
            ctx.exit(130)
        except (ValueError, TypeError) as error:
            click.echo(f"looped: {error}", err=True)
            ctx.exit(ERROR_CODE)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and "memory" not in str(error):  # PyTorch's lack of it is a RuntimeError
                raise
            click.echo(f"looped: not enough memory: {str(error) or 'take smaller sizes'}".split("\n")[0], err=True)
            ctx.exit(1)
        except (OSError, FloatingPointError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror and error.filename else str(error)
            name = f" {error.filename}" if isinstance(error, OSError) and error.filename else ""
            click.echo(f"looped: {reason}{':' if name else ''}{name}", err=True)
            ctx.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="looped")
@click.option("--traceback", is_flag=True, help="Show where an error came from, for bug reports.")
def main(traceback: bool) -> None:
    """Looped transformers: evaluate, measure, train, experiment, inspect."""
    logging.basicConfig(level=logging.INFO, format="looped: %(message)s", stream=sys.stderr)
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="sklearn")


@main.command("eval")
@click.argument("model", required=False)
@click.option("--twin", help="A second model to show beside it; default the bundled weight-tied twin of the bundled model.")
@click.option(
    "--task", default="linear_regression", show_default=True, help="The family of functions that prompts are drawn from."
)
@click.option("--prompts", "n_prompts", default=1280, show_default=True, type=click.IntRange(min=1), help="Fresh prompts.")
@click.option("--points", "n_points", type=click.IntRange(min=1), help="Pairs in a prompt; default 2 * dimensions + 1.")
@click.option("--seed", default=0, show_default=True, help="Of the prompts.")
@click.option("--exit", "rule", default="contraction", show_default=True, help="Exit rule, or fixed for the trained loops.")
@click.option("--tol", type=float, help="Tolerance of the exit rule; default 3e-3 for contraction, else 1e-3.")
@click.option("--on-stall", default="exit", show_default=True, type=click.Choice(["ignore", "exit", "damp"]))
@click.option("--anderson", type=click.IntRange(1, 3), help="Accelerate with this depth.")
@click.option("--loops", "n_loops", type=click.IntRange(min=1), help="The most loops; default 5 times the trained ones.")
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
    task: str,
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
    """Score MODEL in context on fresh prompts, beside classical baselines.

    MODEL is a folder or file of any layout that looped reads, or the name of a bundled model; by default the bundled
    linear-regression model.
    """
    from tqdm import tqdm

    from looped.accelerate import Anderson
    from looped.exits import make_exit
    from looped.icl.baselines import baselines_for
    from looped.icl.evaluate import SLOW_PROMPTS, evaluate
    from looped.icl.predictor import LoopedPredictor
    from looped.icl.tasks import make_task

    _use_threads(threads)
    if out:
        out.mkdir(parents=True, exist_ok=True)
    if twin_fields and not twin:
        raise click.UsageError("--twin-set goes with --twin")
    if twin is None and model is None:
        twin = f"{BUNDLED}_tied"
    main_model = _load(model or BUNDLED, fields)
    config = main_model.config
    if config.input_kind != "features" or config.readout != "scalar" or config.n_dims is None:
        raise click.UsageError("eval scores in-context models: features in, a scalar read out")
    functions = make_task(task, config.n_dims)
    if model is None and task != BUNDLED:
        click.echo(f"looped: the bundled model was trained on {BUNDLED}, not on {task}", err=True)
    room = (config.n_positions + 1) // 2 if config.pos_kind == "learned" else 2 * config.n_dims + 1
    n_points = n_points or min(2 * config.n_dims + 1, room)
    if rule == "contraction" and tol is None:
        tol = EVAL_TOLERANCE
    exit_rule = make_exit(rule, **({} if tol is None else {"tol": tol}))
    limit = n_loops or (config.n_loops if exit_rule.is_fixed else 5 * config.n_loops)
    predictors: list[Any] = [
        LoopedPredictor(
            main_model,
            exit=exit_rule,
            n_loops=limit,
            on_stall=on_stall,
            accelerate=Anderson(anderson) if anderson else None,
        )
    ]
    if twin:
        predictors.append(LoopedPredictor(_load(twin, twin_fields), name="weight-tied twin"))
    if baselines:
        predictors += baselines_for(task)
    ready = [predictor for predictor in predictors if not predictor.why_unavailable]
    total = sum(min(n_prompts, SLOW_PROMPTS) if predictor.cost == "slow" else n_prompts for predictor in ready)
    quiet = sys.stderr is None
    with tqdm(total=total, unit="prompt", desc="evaluating", file=sys.stderr, dynamic_ncols=True, disable=quiet) as bar:

        def progress(name: str, n_done: int) -> None:
            bar.set_postfix_str(name)
            bar.update(n_done)

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
    if as_json:
        click.echo(json.dumps(result.to_dict()))
    else:
        from rich.console import Console

        from looped.report.tables import evaluation_tables

        console = Console(width=None if sys.stdout.isatty() else 100)
        for table in evaluation_tables(result):
            console.print(table)
    if out:  # after printing: a full disk must not lose the result
        from looped.report.plots import plot_evaluation

        result.save(out)
        plot_evaluation(result, out / "evaluation.png")
        click.echo(f"looped: wrote {out}/evaluation.json, .csv and .png", err=True)


@main.command("bench")
@click.argument("model", required=False)
@click.option("--checkpoint", help="The same as MODEL.")
@click.option("--shape", help="Instead of MODEL: a model of this shape with random weights, such as C256H8T82.")
@click.option("--loops", default="1,2,5,10,20,50,100", show_default=True, help="Loops: a list, or a range FIRST:LAST[:STEP].")
@click.option("--batch", "batch_sizes", default="1,64", show_default=True, help="Prompts in a call: a list or a range.")
@click.option("--backend", "backends", default="cpu,eager", show_default=True, help="A list of cpu, eager, auto.")
@click.option("--threads", help="CPU threads: a list or a range, up to the cores; default PyTorch's.")
@click.option(
    "--tokens", "n_tokens", type=click.IntRange(min=1), help="Tokens of a prompt; default what the model is made for."
)
@click.option("--exit", "rule", help="Exit rule to measure beside all loops, or none; default contraction for a checkpoint.")
@click.option("--tol", type=float, help="Tolerance of the exit rule; default 3e-3 for contraction, else 1e-3.")
@click.option(
    "--on-stall", type=click.Choice(["ignore", "exit", "damp"]), help="With the exit: what a cycle does; default exit."
)
@click.option("--anderson", type=click.IntRange(1, 3), help="With the exit: accelerate with this depth.")
@click.option("--task", help="Draw prompts from these functions, and show the error against the time.")
@click.option(
    "--rounds", "n_rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Of which medians are taken."
)
@click.option("--seed", default=0, show_default=True, help="Of prompts and random weights.")
@click.option(
    "--set", "fields", multiple=True, metavar="KEY=VALUE", help="For another project's checkpoint: n_loops=20, n_heads=8"
)
@click.option("--out", type=click.Path(path_type=Path), help="Write latency.json, .csv and .png into this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the rows as CSV on standard output.")
def bench_command(
    model: str | None,
    checkpoint: str | None,
    shape: str | None,
    loops: str,
    batch_sizes: str,
    backends: str,
    threads: str | None,
    n_tokens: int | None,
    rule: str | None,
    tol: float | None,
    on_stall: str | None,
    anderson: int | None,
    task: str | None,
    n_rounds: int,
    seed: int,
    fields: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Loop count against latency of MODEL: every combination of loops, batch sizes, backends, threads, and exit on and off.

    All combinations run once in each round, in turn, after a warm-up; shown are medians over the rounds with their 10 and
    90 % quantiles, and the share of the FMA peak that was measured in the same rounds. Ctrl-C keeps the finished rounds.

    MODEL is a folder or file of any layout that looped reads, or the name of a bundled model; by default the bundled
    linear-regression model.

    Exit rules: fixed, exact, absolute, relative, contraction, readout.

    Tasks: linear_regression, noisy_linear_regression, sparse_linear_regression, quadratic_regression, relu_2nn_regression,
    decision_tree.
    """
    import torch
    from tqdm import tqdm

    from looped.accelerate import Anderson
    from looped.backends import cpu
    from looped.bench.latency import Sweep, measure, n_ways
    from looped.bench.shapes import random_model, shape_sizes
    from looped.engine import BACKENDS
    from looped.exits import ExitRule, make_exit
    from looped.icl.tasks import make_task

    if model and checkpoint:
        raise click.UsageError(f"MODEL {model!r} and --checkpoint {checkpoint!r} are the same argument; give one")
    source = model or checkpoint
    if shape and (source or fields):
        raise click.UsageError("--shape makes its own model; leave out MODEL, --checkpoint and --set")
    if as_json and as_csv:
        raise click.UsageError("--json and --csv both print on standard output; choose one, or --out for both")
    if shape and task:
        raise click.UsageError("--task scores a trained model; give a MODEL with it")
    looped_model = random_model(shape, seed=seed) if shape else _load(source or BUNDLED, fields)
    config = looped_model.config
    functions = None
    if task:
        if config.input_kind != "features" or config.readout != "scalar" or config.n_dims is None:
            raise click.UsageError("--task needs an in-context model: features in, a scalar read out")
        functions = make_task(task, config.n_dims)
    if n_tokens is None:
        n_tokens = shape_sizes(shape)[2] if shape else _tokens_of(config)
    elif config.pos_kind == "learned" and n_tokens > config.n_positions:
        raise click.UsageError(f"--tokens {n_tokens} is more than the model's {config.n_positions} positions")
    elif task and n_tokens % 2 == 0:
        raise click.UsageError(f"--tokens {n_tokens} must be odd with --task: prompts end at an x, and its y is predicted")
    chosen_backends = [name.strip() for name in backends.split(",")]
    for name in chosen_backends:
        if name not in BACKENDS:
            raise click.UsageError(f"--backend {name!r} is not one of {', '.join(BACKENDS)}")
    if "cpu" in chosen_backends and (obstacle := cpu.why_not(looped_model)):
        raise click.UsageError(f"--backend cpu cannot run this: {obstacle}; use --backend eager")
    rule = rule or ("none" if shape else "contraction")
    if rule == "contraction" and tol is None:
        tol = EVAL_TOLERANCE
    if rule == "none" and tol is not None:
        raise click.UsageError("--tol goes with an exit rule; add --exit contraction")
    exits: list[ExitRule | None] = [None]  # all loops; the fixed rule is no other
    if rule != "none" and not (made := make_exit(rule, **({} if tol is None else {"tol": tol}))).is_fixed:
        exits.append(made)
    if len(exits) == 1 and (on_stall or anderson):
        raise click.UsageError("--on-stall and --anderson go with an exit rule; add --exit contraction")
    if rule == "exact" and anderson:
        raise click.UsageError("--exit exact is for programs, which are never accelerated; leave out --anderson")
    sweep = Sweep(
        loops=_integers("--loops", loops, 0),
        batch_sizes=_integers("--batch", batch_sizes, 1),
        backends=chosen_backends,
        threads=_up_to_the_cores(_integers("--threads", threads, 1) if threads else [torch.get_num_threads()]),
        exits=exits,
        on_stall=on_stall or "exit",
        accelerate=Anderson(anderson) if anderson else None,
    )
    if out:
        out.mkdir(parents=True, exist_ok=True)
    latency, stopped = None, False
    total = n_ways(sweep) * (1 + n_rounds)
    with tqdm(total=total, desc="measuring", file=sys.stderr, dynamic_ncols=True, disable=sys.stderr is None) as bar:

        def progress(way: str) -> None:
            bar.set_postfix_str(way)
            bar.update()

        try:
            for latency in measure(  # noqa: B007  the last one is shown
                looped_model,
                sweep,
                name=shape or source or BUNDLED,
                n_tokens=n_tokens,
                task=functions,
                n_rounds=n_rounds,
                seed=seed,
                progress=progress,
            ):
                pass
        except KeyboardInterrupt:
            if latency is None:
                raise
            stopped = True
    assert latency is not None
    report = latency.to_dict()
    if as_json:
        click.echo(json.dumps(report))
    elif as_csv:
        click.echo(latency.to_csv(), nl=False)
    else:
        from rich.console import Console

        from looped.report.latency import latency_table

        console = Console(width=None if sys.stdout.isatty() else 1000)  # a file takes lines of any length
        console.print(latency_table(report, console.width))
    if out:  # after printing: a full disk must not lose the result
        from looped.report.latency import plot_latency

        latency.save(out)
        plot_latency(report, out / "latency.png")
        click.echo(f"looped: wrote {out}/latency.json, .csv and .png", err=True)
    if stopped:
        shown = "which is shown" if latency.n_rounds == 1 else "which are shown"
        raise KeyboardInterrupt(f"interrupted after {latency.n_rounds} of {n_rounds} rounds, {shown}")


@main.command("train")
@click.option("--preset", "preset_name", default="small", show_default=True, type=click.Choice(["paper", "small", "tiny"]))
@click.option("--task", default="linear_regression", show_default=True, help="The family of functions to learn.")
@click.option("--tied", is_flag=True, help="Train the weight-tied twin: no injection, the state starts at the embedding.")
@click.option("--unlooped", is_flag=True, help="Train the unlooped twin: 12 layers of their own weights, run once.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The run's folder.")
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
    out: Path,
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
    from looped.train import preset, train, train_seeds

    _use_threads(threads)
    changes = _key_values(fields)
    for name in ("name", "task", "tied", "unlooped", "model"):
        if name in changes:
            raise click.UsageError(f"--set {name} is not a field of the run; use --preset, --task, --tied or --unlooped")
    config = preset(preset_name, task, tied=tied, unlooped=unlooped, **changes)
    if seeds:
        numbers = _integers("--seeds", seeds, 0)
        train_seeds(config, out, numbers, resume=resume, device=device)
        folders = [out / f"seed_{number}" for number in numbers]
    else:
        train(config, out, resume=resume, device=device)
        folders = [out]
    if seeds and as_json:
        click.echo(json.dumps([str(folder / "model") for folder in folders]))
    elif seeds:
        click.echo(f"looped: the models are in {', '.join(str(folder / 'model') for folder in folders)}", err=True)
    elif as_json:
        lines = (out / "log.jsonl").read_text().splitlines()
        last = json.loads(lines[-1]) if lines else {}
        click.echo(json.dumps({"model": str(out / "model")} | {name: last.get(name) for name in ("step", "seconds", "loss")}))
    else:
        click.echo(f"looped: the model is in {out / 'model'}; score it with: looped eval {out / 'model'}", err=True)


main.add_command(experiment_command)


@main.command("info")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON on standard output.")
def info_command(as_json: bool) -> None:
    """Versions, devices, and which backends work here."""
    from looped.environment import environment

    report = environment()
    if as_json:
        click.echo(json.dumps(report))
        return
    from rich.console import Console
    from rich.table import Table

    for title, entries in report.items():
        table = Table(title=title, title_justify="left", show_header=False)
        for name, value in entries.items():
            table.add_row(name, str(value))
        Console().print(table)


BUNDLED = "linear_regression"


def _load(source: str, fields: tuple[str, ...]) -> Any:
    from looped.checkpoint import load_checkpoint
    from looped.pretrained import bundled_models, load_pretrained

    if source in bundled_models() and not Path(source).exists():
        if fields:
            raise click.UsageError(f"the bundled model {source} is complete; --set is for other projects' checkpoints")
        return load_pretrained(source)
    return load_checkpoint(source, **_key_values(fields)).float()


def _tokens_of(config: Any) -> int:
    """Tokens of the prompts that eval scores with an in-context model; else all positions, or 64."""
    if config.input_kind == "features" and config.read_stride == 2:
        n_tokens = 4 * config.n_dims + 1
        return min(n_tokens, config.n_positions - 1 + config.n_positions % 2) if config.pos_kind == "learned" else n_tokens
    return config.n_positions if config.pos_kind == "learned" else 64


def _integers(option: str, text: str, least: int) -> list[int]:
    """A list 1,5,20, or a range FIRST:LAST[:STEP] with its last; sorted."""
    try:
        values: set[int] = set()
        for part in text.split(","):
            first, *rest = (int(number) for number in part.split(":"))
            last, step = (*rest, 1)[:2] if rest else (first, 1)
            if len(rest) > 2 or step < 1 or last < first:
                raise ValueError
            values.update(range(first, last + 1, step))
    except ValueError:
        raise click.UsageError(f"{option} takes a list such as 1,5,20 or a range FIRST:LAST[:STEP], got {text!r}") from None
    if min(values) < least:
        raise click.UsageError(f"{option} {text!r} must hold integers of at least {least}")
    return sorted(values)


def _up_to_the_cores(threads: list[int]) -> list[int]:
    """More threads than cores only wait for each other, and the engine does not make them."""
    from looped.environment import n_cores

    most = n_cores()
    if max(threads) > most:
        what = f"{most} core{'s' * (most > 1)}, and no more threads are measured"
        click.echo(f"looped: {max(threads)} threads on {what}", err=True)
    return sorted({min(n, most) for n in threads})


def _key_values(fields: tuple[str, ...]) -> dict[str, Any]:
    values = {}
    for text in fields:
        key, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"--set takes KEY=VALUE, got {text!r}")
        try:
            values[key] = json.loads(value)
        except json.JSONDecodeError:
            values[key] = value
    return values


def _use_threads(threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


add_program_commands(main)

if __name__ == "__main__":
    main()
