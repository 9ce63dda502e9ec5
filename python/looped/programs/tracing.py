"""What a program did, loop by loop: as rows, as a table, as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from looped.programs.run import Machine, snapshots


@dataclass(frozen=True)
class TraceRow:
    """One loop: the command that it ran, where that stands, and the cells that changed, by name."""

    loop: int
    command: int
    line: int
    text: str
    changes: dict[str, Any]
    next: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def trace(
    machine: Machine, program: Any, max_loops: int = 10_000, *, backend: str = "auto", check: bool = True
) -> Iterator[TraceRow]:
    """The rows of a run, from loop 1 until the program halts or max_loops; the loop that confirms a halt is left out.

    check, and what is raised: as in `run_programs`.
    """
    states = snapshots(machine, program, max_loops, backend=backend, check=check)
    pc, memory, _ = next(states)
    for loop, (next_pc, next_memory, _) in enumerate(states, start=1):
        changes = {}
        for place in zip(*np.nonzero(next_memory != memory), strict=True):
            value = next_memory[place]
            changes[program.cell_name(*(int(i) for i in place))] = int(value) if program.kind == "subleq" else float(value)
        if next_pc == pc and not changes:
            return
        yield TraceRow(loop, pc, program.places[pc].line, program.command_text(pc), changes, next_pc)
        pc, memory = next_pc, next_memory


def trace_table(rows: list[TraceRow], *, most: int = 200) -> Any:
    """A rich table of the first rows."""
    from rich.table import Table

    table = Table(title=None if len(rows) <= most else f"the first {most} of {len(rows)} loops")
    for title, side in (("loop", "right"), ("line", "right"), ("command", "left"), ("changes", "left"), ("next", "right")):
        table.add_column(title, justify=side)  # type: ignore[arg-type]
    for row in rows[:most]:
        changes = ", ".join(f"{name} = {value:.6g}" for name, value in row.changes.items())
        table.add_row(str(row.loop), str(row.line), row.text, changes, str(row.next))
    return table
