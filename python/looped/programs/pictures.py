"""Pictures of a run: the program counter and memory against loops, and one command on its way through the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from looped.programs.run import Machine, snapshots
from looped.programs.subleq import SubleqMachine

MOST_CELLS = 60


def draw_run(machine: Machine, program: Any, max_loops: int, path: Path, *, backend: str = "auto", check: bool = True) -> None:
    """The command that comes next, and every cell (of a FLEQ machine, the first number of every column), against loops.

    check, and what is raised: as in `run_programs`.
    """
    from matplotlib.figure import Figure

    states = list(snapshots(machine, program, max_loops, backend=backend, check=check))
    counters = np.array([pc for pc, _, _ in states])
    memory = np.stack([memory if memory.ndim == 1 else memory[0] for _, memory, _ in states], axis=1)[:MOST_CELLS]
    n_cells = len(memory)
    figure = Figure(figsize=(9, 3 + 0.16 * n_cells), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, max(1.0, n_cells / 12)])
    above.step(np.arange(len(counters)), counters, where="post", color="black", linewidth=1)
    above.axhline(program.end, color="0.7", linewidth=0.8, linestyle=":")
    above.set_ylabel("command")
    above.set_title(f"{program.name}: {len(counters) - 1} loops")
    shown = np.sign(memory) * np.log2(1 + np.abs(memory))
    limit = max(1e-9, float(np.abs(shown).max()))
    image = below.imshow(shown, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    names = [program.cell_name(i) if program.kind == "subleq" else program.cell_name(0, i) for i in range(n_cells)]
    below.set_yticks(range(n_cells), names, fontsize=6)
    below.set_xlabel("loop")
    figure.colorbar(image, ax=below, label="sign(x) log2(1 + |x|)")
    figure.savefig(path, dpi=110)


@torch.no_grad()
def layer_states(machine: SubleqMachine, program: Any, loop: int) -> list[Tensor]:
    """The state [n, d] at the start of a loop (counted from 1), and after each layer of it, by the eager model."""
    X = machine.encode(program)[None]
    for _ in range(loop - 1):
        X = machine.model.step(X, X)
    states = [X[0].clone()]
    for block in machine.model.core:
        X = block(X)
        states.append(X[0].clone())
    return states


def draw_layers(machine: SubleqMachine, program: Any, loop: int, path: Path) -> None:
    """The scratchpad's features after every layer of one loop, and the cell that is written to."""
    from matplotlib.figure import Figure

    states = layer_states(machine, program, loop)
    blocks = [name for name in ("PC", "PA", "PB", "PJ", "VA", "VB", "BUF", "FLG", "CAR") if name in machine.layout]
    rows = [row for name in blocks for row in machine.layout[name]]
    pc = int(machine.decode(states[0], program).pc)
    b = program.commands[pc][1]
    scratch = torch.stack([state[0, rows] for state in states], dim=1)
    cell = torch.stack([state[1 + b, machine.layout["MEM"]] for state in states], dim=1)
    figure = Figure(figsize=(9, 13), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[len(rows), machine.n_bits])
    for axis, values in ((above, scratch), (below, cell)):
        image = axis.imshow(values.numpy(), aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    first = 0
    ticks, labels = [], []
    for name in blocks:
        size = len(machine.layout[name])
        ticks.append(first + (size - 1) / 2)
        labels.append(name)
        first += size
        above.axhline(first - 0.5, color="black", linewidth=0.6)
    above.set_yticks(ticks, labels)
    above.set_title(f"{program.name}, loop {loop}: {program.command_text(pc)}")
    below.set_yticks([0, machine.n_bits - 1], [f"{program.cell_name(b)} bit 0", f"bit {machine.n_bits - 1}"])
    below.set_xticks(range(len(states)), ["start", *(layer.name.replace(" ", "\n", 1) for layer in machine.layers)], fontsize=7)
    figure.colorbar(image, ax=[above, below], label="-1, 0, 1", shrink=0.4)
    figure.savefig(path, dpi=90)
