"""The command line of programs: `looped run`, `looped verify`, `looped machine`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import click

EXIT_CODES = {"halted": 0, "loop limit": 3, "corrupt": 4}
Options = dict[str, Any]

_files = click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
_machine_options = [
    click.option("--dtype", default="float64", show_default=True, type=click.Choice(["float64", "float32"])),
    click.option("--lambda", "lam", type=float, help="Sharpness of attention; default 12 (SUBLEQ), 80 (FLEQ)."),
    click.option("--layers", type=click.Choice(["9", "5"]), help="SUBLEQ: layers; default 9."),
    click.option(
        "--product",
        type=click.Choice(["single", "pair", "richardson"]),
        help="FLEQ: the form of the matrix product; default pair.",
    ),
    click.option("--kappa", type=float, help="FLEQ: scale of products, at least twice the largest; default by precision."),
    click.option("--terms", type=click.IntRange(2, 512), help="FLEQ: heads of inv, and of sqrt; default 32."),
]
_run_options = [
    click.option("--set", "fields", multiple=True, metavar="NAME=VALUE", help="First value: x=7, list=5,3,9, A=[[1,2],[3,4]]."),
    click.option("--formula", help="In place of a file: an expression such as sqrt(1/((a+b-c)*d))/100, with --set a=6 ..."),
    click.option("--wrap", is_flag=True, help="Words out of range wrap."),
    click.option("--max-loops", default=10_000, show_default=True, type=click.IntRange(min=1), help="Commands at most."),
    click.option("--backend", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "eager", "triton"])),
]


def _with(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def add_to(main: click.Group) -> None:
    """Add the commands to the command line."""
    for command in (run_command, verify_command, machine_command):
        main.add_command(command)


def _value_of(text: str, name: str) -> Any:
    try:
        return json.loads(text if text.startswith("[") or "," not in text else f"[{text}]")
    except (ValueError, RecursionError):  # no JSON, more than 4,300 digits, or brackets within a thousand brackets
        shown = repr(text) if len(text) <= 100 else f"{text[:60]!r}... ({len(text):,} characters)"
        raise click.UsageError(f"--set {name} takes a number, a list 5,3,9 or a matrix [[1,2],[3,4]], got {shown}") from None


def _load(
    files: tuple[Path, ...], *, fields: tuple[str, ...] = (), formula: str | None = None, wrap: bool = False
) -> list[Any]:
    from looped.programs.formula import compile_formula
    from looped.programs.machines import read_program

    values = {}
    for text in fields:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"--set takes NAME=VALUE, got {text!r}")
        values[name] = _value_of(value, name)
    if (formula is None) == (not files):
        raise click.UsageError("give program files, or --formula")
    if wrap and (formula is not None or any(file.suffix != ".subleq" for file in files)):
        raise click.UsageError("--wrap is of .subleq programs, whose words wrap")
    if formula is not None:
        compiled = compile_formula(formula, values)
        for name in values:
            if name not in compiled.names:
                raise click.UsageError(f"--set {name}: the formula has no {name!r}")
        return [compiled]
    programs: list[Any] = []
    for file in files:
        program: Any = read_program(file, wrap=wrap)
        for note in program.notes:
            click.echo(f"looped: {program.name}: {note}", err=True)
        if values:
            program = program.with_values(values, wrap=wrap) if program.kind == "subleq" else program.with_values(values)
        programs.append(program)
    return programs


def _refuse_others(kind: str, options: Options) -> None:
    """Options of the other kind of machine do nothing here."""
    for other, names in (("fleq", ("layers", "bits")), ("subleq", ("product", "kappa", "terms", "width", "functions"))):
        for name in names:
            if kind == other and options.get(name) is not None:
                raise click.UsageError(f"--{name} is not of {kind.upper()} machines")


def _blocks(names: Collection[str], options: Options) -> Any:
    """The functions of a FLEQ machine, made as the options say."""
    import torch

    from looped.programs.blocks import MatrixProduct, SigmoidSum
    from looped.programs.fleq import FUNCTION_NAMES, Blocks, default_product

    standard = default_product(getattr(torch, options["dtype"]), options["product"] or "pair")
    kappa, terms = options["kappa"], options["terms"] or 32
    for name in names:
        if name not in FUNCTION_NAMES:
            raise click.UsageError(f"--functions: {name!r} is not one of {', '.join(FUNCTION_NAMES)}")
    return Blocks(
        tuple(name for name in FUNCTION_NAMES if name in names),
        product=MatrixProduct(standard.form, standard.kappa if kappa is None else kappa, standard.sink),
        inv=SigmoidSum("inv", terms, 0.2, 20.0),
        sqrt=SigmoidSum("sqrt", terms, 0.02, 40.0),
    )


def _machine(programs: list[Any], options: Options) -> Any:
    import torch

    from looped.programs.machines import machine_for

    kind, more = programs[0].kind, Options()
    _refuse_others(kind, options)
    if kind == "fleq":
        used = {command.function for program in programs if program.kind == "fleq" for command in program.commands}
        more["blocks"] = _blocks(used - {None}, options)
    elif options["layers"] is not None:
        more["n_layers"] = int(options["layers"])
    return machine_for(programs, dtype=getattr(torch, options["dtype"]), lam=options["lam"], **more)


def _machine_without_program(kind: str, options: Options) -> Any:
    """A machine of given sizes."""
    import torch

    from looped.programs.addresses import bits_for
    from looped.programs.fleq import FleqMachine, least_tokens
    from looped.programs.subleq import SubleqMachine

    _refuse_others(kind, options)
    more: Options = {"dtype": getattr(torch, options["dtype"])}
    if options["lam"] is not None:
        more["lam"] = options["lam"]
    if kind == "subleq":
        return SubleqMachine(options["bits"] or 16, options["address_bits"] or 6, n_layers=int(options["layers"] or 9), **more)
    functions = "mm,add,sub" if options["functions"] is None else options["functions"]
    names, width = [name.strip() for name in functions.split(",")], options["width"] or 4
    needed = bits_for(least_tokens(width))
    address_bits = options["address_bits"] or max(6, needed)
    if address_bits < needed:
        raise click.UsageError(
            f"--address-bits {address_bits} tells {2**address_bits} tokens apart, and the shortest program at "
            f"--width {width} has {least_tokens(width)}; give at least {needed}"
        )
    return FleqMachine(width, address_bits, blocks=_blocks(names, options), **more)


def _check_picture(path: Path | None) -> None:
    """A run is not begun for a picture that cannot be written."""
    from matplotlib.figure import Figure

    if path is None:
        return
    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise click.UsageError(f"--picture {path}: the suffix must be one of {', '.join(kinds)}")
    if not path.parent.is_dir():
        raise click.UsageError(f"--picture {path}: there is no folder {path.parent}")


def _run_all(machine: Any, programs: list[Any], max_loops: int, backend: str) -> list[Any]:
    from looped.loop import Interrupted
    from looped.programs.run import run_programs

    try:
        return run_programs(machine, programs, max_loops=max_loops, backend=backend)
    except Interrupted as stop:
        n_ended = int(stop.result.finished.sum())
        raise KeyboardInterrupt(
            f"interrupted: {n_ended} of {len(programs)} programs had ended; --max-loops N ends the others after N commands"
        ) from None


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 110)


@click.command("run")
@_files
@_with(*_run_options, *_machine_options)
@click.option("--trace", "traced", is_flag=True, help="Show every loop (of one program).")
@click.option("--json", "as_json", is_flag=True, help="Print results, and the trace where one is asked for, as JSON.")
@click.option(
    "--picture", type=click.Path(path_type=Path), help="Draw the program counter and memory against loops (of one program)."
)
def run_command(
    files: tuple[Path, ...],
    fields: tuple[str, ...],
    formula: str | None,
    wrap: bool,
    max_loops: int,
    backend: str,
    traced: bool,
    as_json: bool,
    picture: Path | None,
    **options: Any,
) -> None:
    """Run programs (.subleq, .minsky, .fleq) of one kind on one machine, a looped transformer, all at once.

    Exits with 0 where all halted, 3 where one came to the loop limit, 4 where one is corrupt, 2 for a mistake.
    """
    from looped.programs.tracing import trace, trace_table

    if len(files) > 1 and (traced or picture):
        raise click.UsageError("--trace and --picture are of one program")
    _check_picture(picture)
    programs = _load(files, fields=fields, formula=formula, wrap=wrap)
    machine = _machine(programs, options)
    runs = _run_all(machine, programs, max_loops, backend)
    is_seen = runs[0].memory is not None  # else there is no state to show
    rows = list(trace(machine, programs[0], max_loops, backend=backend, check=False)) if traced and is_seen else []
    if as_json:
        result: list[dict[str, Any]] = [run.to_dict() for run in runs]
        if traced:
            result[0]["trace"] = [row.to_dict() for row in rows]
        click.echo(json.dumps(result if len(files) > 1 else result[0]))
    else:
        if traced and is_seen:
            _console().print(trace_table(rows))
        for run in runs:
            click.echo(f"{run.program.name}: {run.outcome.value} after {run.steps} steps ({run.n_loops} loops, {run.backend})")
            for line in run.named_values():
                click.echo(f"  {line}")
    if picture and is_seen:
        from looped.programs.pictures import draw_run

        draw_run(machine, programs[0], max_loops, picture, backend=backend, check=False)
        click.echo(f"looped: wrote {picture}", err=True)
    raise click.exceptions.Exit(max(EXIT_CODES[run.outcome.value] for run in runs))


@click.command("verify")
@_files
@_with(*_run_options, *_machine_options)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="Largest difference of a number; default 0 for SUBLEQ, none for FLEQ.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def verify_command(
    files: tuple[Path, ...],
    fields: tuple[str, ...],
    formula: str | None,
    wrap: bool,
    max_loops: int,
    backend: str,
    tolerance: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run programs beside a plain interpreter, loop by loop, and show the first difference. Exits with 1 where there is one."""
    from looped.programs.verification import verify

    if tolerance is not None and math.isnan(tolerance):
        raise click.UsageError("--tolerance nan is no number; give one of at least 0")
    programs = _load(files, fields=fields, formula=formula, wrap=wrap)
    machine = _machine(programs, options)
    results = []
    for program in programs:
        result = verify(machine, program, max_loops=max_loops, tolerance=tolerance, backend=backend)
        results.append(result)
        if as_json:
            continue
        end = "to its halt" if result.halted else "and has not halted"
        error = f", largest error {result.error:.2g}" if program.kind == "fleq" else ""
        click.echo(f"{program.name}: {result.difference or f'equal for {result.n_loops} loops, {end}{error}'}")
    if as_json:
        facts = [{"program": p.name, **result.to_dict()} for p, result in zip(programs, results, strict=True)]
        click.echo(json.dumps(facts if len(files) > 1 else facts[0]))
    raise click.exceptions.Exit(0 if all(result.is_equal for result in results) else 1)


@click.command("machine")
@_files
@_with(*_machine_options)
@click.option("--kind", type=click.Choice(["subleq", "fleq"]), help="Without a program: which machine; default subleq.")
@click.option("--bits", type=click.IntRange(2, 63), help="Without a program, SUBLEQ: word width; default 16.")
@click.option("--width", type=click.IntRange(1, 64), help="Without a program, FLEQ: rows and columns; default 4.")
@click.option(
    "--functions", metavar="LIST", help="Without a program, FLEQ: of mm,emul,perc,add,sub,inv,sqrt,sig; default mm,add,sub."
)
@click.option(
    "--address-bits", type=click.IntRange(2, 20), help="Without a program: of positions; default 6, or as --width needs."
)
@click.option("--json", "as_json", is_flag=True)
@click.option("--picture", type=click.Path(path_type=Path), help="Draw a command of one program on its way through the layers.")
@click.option("--loop", type=click.IntRange(min=1), help="With --picture: which loop; default 1.")
def machine_command(
    files: tuple[Path, ...],
    kind: str | None,
    as_json: bool,
    picture: Path | None,
    loop: int | None,
    **options: Any,
) -> None:
    """Describe the machine that runs these programs, or one of given sizes: layers, heads, widths, lambda, limits."""
    from looped.programs.describe import describe, description_tables
    from looped.programs.pictures import draw_layers

    _check_picture(picture)
    if loop is not None and picture is None:
        raise click.UsageError("--loop says which loop --picture draws; give that too")
    given = [name for name in ("bits", "width", "functions", "address_bits") if options[name] is not None]
    for name in ["kind"] * (kind is not None) + given:
        if files:
            raise click.UsageError(f"--{name.replace('_', '-')} is of a machine without a program")
    programs = _load(files) if files else []
    machine = _machine(programs, options) if files else _machine_without_program(kind or "subleq", options)
    if picture:
        if len(files) != 1 or machine.kind != "subleq":
            raise click.UsageError("--picture is of one SUBLEQ program")
        draw_layers(machine, programs[0], loop or 1, picture)
        click.echo(f"looped: wrote {picture}", err=True)
    facts = describe(machine)
    if as_json:
        click.echo(json.dumps(facts))
        return
    for table in description_tables(facts):
        _console().print(table)
