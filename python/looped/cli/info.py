"""`looped info`."""

from __future__ import annotations

import json

import click


@click.command("info")
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
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")  # a path is shown whole
        for name, value in entries.items():
            table.add_row(name, str(value))
        Console().print(table)
