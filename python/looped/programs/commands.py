"""The command line of programs: `looped run`, `looped verify`, `looped machine`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

EXIT_CODES = {"halted": 0, "loop limit": 3, "corrupt": 4}

_program = click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
_settings = [
    click.option("--set", "fields", multiple=True, metavar="NAME=VALUE", help="First value: x=7, list=5,3,9, A=[[1,2],[3,4]]."),
    click.option("--wrap", is_flag=True, help="Words out of range wrap."),
    click.option("--max-loops", default=10_000, show_default=True, type=click.IntRange(min=1), help="Commands at most."),
    click.option("--backend", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "eager", "triton"])),
    click.option("--dtype", default="float64", show_default=True, type=click.Choice(["float64", "float32"])),
    click.option("--layers", default=9, show_default=True, type=click.Choice([5, 9]), help="Of a SUBLEQ machine."),
    click.option("--lambda", "lam", type=float, help="Sharpness of attention; default 12 (SUBLEQ), 80 (FLEQ)."),
    click.option(
        "--product", default="pair", show_default=True, type=click.Choice(["single", "pair", "richardson"]),
        help="FLEQ: the form of the matrix product.",
    ),
    click.option("--kappa", type=float, help="FLEQ: scale of products, at least twice the largest."),
    click.option("--terms", default=32, show_default=True, type=click.IntRange(2, 512), help="FLEQ: heads of inv, of sqrt."),
]  # fmt: skip


def _with_settings(command: Any) -> Any:
    for option in reversed(_settings):
        command = option(command)
    return command


def add_to(main: click.Group) -> None:
    """Add the commands to the command line."""
    for command in (run_command, verify_command, machine_command):
        main.add_command(command)


def _value_of(text: str, name: str) -> Any:
    try:
        return json.loads(text if text.startswith("[") or "," not in text else f"[{text}]")
    except json.JSONDecodeError:
        raise click.UsageError(f"--set {name} takes a number, a list 5,3,9 or a matrix [[1,2],[3,4]], got {text!r}") from None


def _load(files: tuple[Path, ...], fields: tuple[str, ...], wrap: bool) -> list[Any]:
    from looped.programs.machines import read_program

    values = {}
    for text in fields:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"--set takes NAME=VALUE, got {text!r}")
        values[name] = _value_of(value, name)
    programs: list[Any] = []
    for file in files:
        program: Any = read_program(file, wrap=wrap)
        for note in program.notes:
            click.echo(f"looped: {program.name}: {note}", err=True)
        if values:
            program = program.with_values(values, wrap=wrap) if program.kind == "subleq" else program.with_values(values)
        programs.append(program)
    return programs


def _machine(programs: list[Any], dtype: str, layers: int, lam: float | None, product: str, kappa: float | None, terms: int) -> Any:
    import torch

    from looped.programs.blocks import MatrixProduct, SigmoidSum
    from looped.programs.fleq import FUNCTION_NAMES, Blocks, default_product
    from looped.programs.machines import machine_for

    blocks = None
    if programs[0].kind == "fleq":
        used = {command.function for program in programs for command in program.commands if program.kind == "fleq"}
        standard = default_product(getattr(torch, dtype), product)
        blocks = Blocks(
            tuple(name for name in FUNCTION_NAMES if name in used),
            product=MatrixProduct(product, kappa or standard.kappa, standard.sink),  # type: ignore[arg-type]
            inv=SigmoidSum("inv", terms, 0.2, 20.0),
            sqrt=SigmoidSum("sqrt", terms, 0.02, 40.0),
        )
    return machine_for(programs, dtype=getattr(torch, dtype), n_layers=layers, lam=lam, blocks=blocks)


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 110)


@click.command("run")
@_program
@_with_settings
@click.option("--trace", "traced", is_flag=True, help="Show every loop (of one program).")
@click.option("--json", "as_json", is_flag=True, help="Print results, and the trace where one is asked for, as JSON.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw the program counter and memory against loops (of one program).")
def run_command(
    files: tuple[Path, ...], fields: tuple[str, ...], wrap: bool, max_loops: int, backend: str, dtype: str, layers: int,
    lam: float | None, product: str, kappa: float | None, terms: int, traced: bool, as_json: bool, picture: Path | None,
) -> None:  # fmt: skip
    """Run programs (.subleq, .minsky, .fleq) of one kind on one machine, a looped transformer, all at once.

    Exits with 0 where all halted, 3 where one came to the loop limit, 4 where one is corrupt, 2 for a mistake.
    """
    from looped.programs.machines import check_program
    from looped.programs.run import run_programs
    from looped.programs.trace import trace, trace_table

    if len(files) > 1 and (traced or picture):
        raise click.UsageError("--trace and --picture are of one program")
    programs = _load(files, fields, wrap)
    machine = _machine(programs, dtype, layers, lam, product, kappa, terms)
    for program in programs:
        check_program(machine, program, max_loops)
    runs = run_programs(machine, programs, max_loops=max_loops, backend=backend)
    rows = list(trace(machine, programs[0], max_loops, backend=backend)) if traced else []
    if as_json:
        result: list[dict[str, Any]] = [run.to_dict() for run in runs]
        if traced:
            result[0]["trace"] = [row.to_dict() for row in rows]
        click.echo(json.dumps(result if len(files) > 1 else result[0]))
    else:
        if traced:
            _console().print(trace_table(rows))
        for run in runs:
            click.echo(f"{run.program.name}: {run.outcome.value} after {run.steps} steps ({run.n_loops} loops, {run.backend})")
            for line in run.named_values():
                click.echo(f"  {line}")
    if picture:
        from looped.programs.pictures import draw_run

        draw_run(machine, programs[0], max_loops, picture, backend=backend)
        click.echo(f"looped: wrote {picture}", err=True)
    raise click.exceptions.Exit(max(EXIT_CODES[run.outcome.value] for run in runs))


@click.command("verify")
@_program
@_with_settings
@click.option("--tolerance", type=click.FloatRange(min=0), help="Largest difference of a number; default 0 for SUBLEQ, none for FLEQ.")
def verify_command(
    files: tuple[Path, ...], fields: tuple[str, ...], wrap: bool, max_loops: int, backend: str, dtype: str, layers: int,
    lam: float | None, product: str, kappa: float | None, terms: int, tolerance: float | None,
) -> None:  # fmt: skip
    """Run programs beside a plain interpreter, loop by loop, and show the first difference. Exits with 1 where there is one."""
    from looped.programs.machines import check_program
    from looped.programs.verify import verify

    programs = _load(files, fields, wrap)
    machine = _machine(programs, dtype, layers, lam, product, kappa, terms)
    equal = True
    for program in programs:
        check_program(machine, program, max_loops)
        result = verify(machine, program, max_loops=max_loops, tolerance=tolerance, backend=backend)
        equal &= result.is_equal
        end = "to its halt" if result.halted else "and has not halted"
        error = f", largest error {result.error:.2g}" if program.kind == "fleq" else ""
        click.echo(f"{program.name}: {result.difference or f'equal for {result.n_loops} loops, {end}{error}'}")
    raise click.exceptions.Exit(0 if equal else 1)


@click.command("machine")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_with_settings
@click.option("--bits", default=16, show_default=True, type=click.IntRange(2, 63), help="Without a program: word width.")
@click.option("--address-bits", default=6, show_default=True, type=click.IntRange(2, 20), help="Without a program: of positions.")
@click.option("--json", "as_json", is_flag=True)
def machine_command(
    files: tuple[Path, ...], fields: tuple[str, ...], wrap: bool, max_loops: int, backend: str, dtype: str, layers: int,
    lam: float | None, product: str, kappa: float | None, terms: int, bits: int, address_bits: int, as_json: bool,
) -> None:  # fmt: skip
    """Describe the machine that runs these programs, or a SUBLEQ machine: layers, heads, widths, lambda and its bound, limits."""
    import torch

    from looped.programs.describe import describe, description_tables
    from looped.programs.subleq import LAMBDA, SubleqMachine

    if files:
        machine = _machine(_load(files, fields, wrap), dtype, layers, lam, product, kappa, terms)
    else:
        machine = SubleqMachine(bits, address_bits, n_layers=layers, lam=lam or LAMBDA, dtype=getattr(torch, dtype))
    facts = describe(machine)
    if as_json:
        click.echo(json.dumps(facts))
        return
    for table in description_tables(facts):
        _console().print(table)
