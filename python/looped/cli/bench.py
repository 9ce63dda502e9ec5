"""`looped bench`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from looped.cli.arguments import BUNDLED, EVAL_TOLERANCE, integers, load_model_of, run_of, say_what_differs, task_of


@click.command("bench")
@click.argument("model", required=False)
@click.option("--checkpoint", help="The same as MODEL.")
@click.option("--shape", help="Instead of MODEL: a model of this shape with random weights, such as C256H8T82.")
@click.option("--loops", default="1,2,5,10,20,50,100", show_default=True, help="Loops: a list, or a range FIRST:LAST[:STEP].")
@click.option("--batch", "batch_sizes", default="1,64", show_default=True, help="Prompts in a call: a list or a range.")
@click.option("--backend", "backends", default="cpu,eager", show_default=True, help="A list of cpu, eager, auto.")
@click.option("--threads", help="CPU threads: a list or a range, up to the cores; default PyTorch's.")
@click.option(
    "--tokens", "n_tokens", type=click.IntRange(min=1), help="Tokens of a prompt; default as trained, or all positions."
)
@click.option("--exit", "rule", help="Exit rule to measure beside all loops, or none; default contraction for a checkpoint.")
@click.option("--tol", type=float, help="Tolerance of the exit rule; default 3e-3 for contraction, else 1e-3.")
@click.option(
    "--on-stall", type=click.Choice(["ignore", "exit", "damp"]), help="With the exit: what a cycle does; default exit."
)
@click.option("--anderson", type=click.IntRange(1, 3), help="With the exit: accelerate with this depth.")
@click.option("--task", help="Draw prompts from these functions, and show the error against the time.")
@click.option(
    "--task-set", "task_fields", multiple=True, metavar="KEY=VALUE", help="A number of the family; default as trained."
)
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
    task_fields: tuple[str, ...],
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

    Prompts leave by an exit after loops of their own, so with one the time and the loops used are means over 64 prompts in
    batches of B, or the first of them that take 2 seconds. The error is that of 512 prompts, whatever B.

    MODEL is a folder or file of any layout that looped reads, or the name of a bundled model; by default the bundled
    linear-regression model. Prompts are as long as its train.json says, drawn with --task from its functions with the numbers
    that it was trained with; without --task they are random numbers, on which an exit takes other loops.

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

    if model and checkpoint:
        raise click.UsageError(f"MODEL {model!r} and --checkpoint {checkpoint!r} are the same argument; give one")
    source = model or checkpoint
    if shape and (source or fields):
        raise click.UsageError("--shape makes its own model; leave out MODEL, --checkpoint and --set")
    if as_json and as_csv:
        raise click.UsageError("--json and --csv both print on standard output; choose one, or --out for both")
    if task_fields and not task:
        raise click.UsageError("--task-set goes with --task")
    if shape and task:
        raise click.UsageError("--task scores a trained model; give a MODEL with it")
    looped_model = random_model(shape, seed=seed) if shape else load_model_of(source or BUNDLED, fields, is_default=not source)
    config = looped_model.config
    run = None
    if config.input_kind == "features" and not (shape or fields):
        defaults = "numbers of the family and tokens of a prompt are the defaults, where not given"
        run = run_of(source or BUNDLED, config, is_default=not source, instead=defaults)
    functions = None
    if task:
        if config.input_kind != "features" or config.readout != "scalar" or config.n_dims is None:
            raise click.UsageError("--task needs an in-context model: features in, a scalar read out")
        functions = task_of(run, task, config.n_dims, task_fields)
    if n_tokens is None:
        n_tokens = shape_sizes(shape)[2] if shape else 2 * run.points.end - 1 if run is not None else _tokens_of(config)
    elif config.pos_kind == "learned" and n_tokens > config.n_positions:
        raise click.UsageError(f"--tokens {n_tokens} is more than the model's {config.n_positions} positions")
    elif task and n_tokens % 2 == 0:
        raise click.UsageError(f"--tokens {n_tokens} must be odd with --task: prompts end at an x, and its y is predicted")
    say_what_differs("the model", run, functions, n_tokens // 2 + 1)
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
        loops=sorted(set(integers("--loops", loops, 0))),
        batch_sizes=sorted(set(integers("--batch", batch_sizes, 1))),
        backends=chosen_backends,
        threads=_up_to_the_cores(sorted(set(integers("--threads", threads, 1))) if threads else [torch.get_num_threads()]),
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


def _tokens_of(config: Any) -> int:
    """Without a run: tokens of the prompts that eval scores with an in-context model; else all positions, or 64."""
    if config.input_kind == "features" and config.read_stride == 2:
        n_tokens = 4 * config.n_dims + 1
        return min(n_tokens, config.n_positions - 1 + config.n_positions % 2) if config.pos_kind == "learned" else n_tokens
    return config.n_positions if config.pos_kind == "learned" else 64


def _up_to_the_cores(threads: list[int]) -> list[int]:
    """More threads than cores only wait for each other, and the engine does not make them."""
    from looped.environment import n_cores

    most = n_cores()
    if max(threads) > most:
        what = f"{most} core{'s' * (most > 1)}, and no more threads are measured"
        click.echo(f"looped: {max(threads)} threads on {what}", err=True)
    return sorted({min(n, most) for n in threads})
