"""Programs from files, and the machine that runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from looped.programs import fleq, subleq
from looped.programs.addresses import bits_for
from looped.programs.fleq import FUNCTION_NAMES, Blocks, FleqMachine
from looped.programs.fleq_program import FleqProgram
from looped.programs.fleq_text import read_fleq
from looped.programs.minsky import translate_minsky
from looped.programs.subleq import SubleqMachine
from looped.programs.subleq_text import SubleqProgram, read_subleq

SUFFIXES = (".subleq", ".minsky", ".fleq")


def read_program(path: str | Path, *, wrap: bool = False) -> SubleqProgram | FleqProgram:
    """Assemble a file by its suffix: .subleq, .minsky (translated to SUBLEQ), .fleq.

    Raises ValueError for another suffix, ProgramError for a mistake in the program.
    """
    path = Path(path)
    try:
        if path.suffix == ".subleq":
            return read_subleq(path, wrap=wrap)
        if path.suffix == ".minsky":
            return translate_minsky(path.read_text(encoding="utf-8"), name=path.name)
        if path.suffix == ".fleq":
            return read_fleq(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: a program is UTF-8 text; byte {error.start} is not") from None
    raise ValueError(f"{path}: the suffix of a program is one of {', '.join(SUFFIXES)}")


def machine_for(
    programs: Sequence[Any],
    *,
    dtype: torch.dtype = torch.float64,
    n_layers: int | None = None,
    lam: float | None = None,
    address_bits: int | None = None,
    blocks: Blocks | None = None,
) -> Any:
    """The smallest machine that takes all these programs, which must be of one kind.

    n_layers: of a SUBLEQ machine; default 9. blocks: of a FLEQ machine; default the functions that the programs use. The other
    parameters are those of `SubleqMachine` and `FleqMachine`. Raises ValueError for programs that no machine takes together, or
    a parameter of the other machine.
    """
    if not programs:
        raise ValueError("machine_for: there is no program")
    kinds = {program.kind for program in programs}
    if len(kinds) > 1:
        raise ValueError("machine_for: SUBLEQ and FLEQ programs need a machine each")
    options: dict[str, Any] = {} if lam is None else {"lam": lam}
    for kind, name, given in (("fleq", "n_layers", n_layers), ("subleq", "blocks", blocks)):
        if kinds == {kind} and given is not None:
            raise ValueError(f"machine_for: {name} is not of {kind.upper()} machines; leave it out")
    if kinds == {"subleq"}:
        widths = {program.n_bits for program in programs}
        if len(widths) > 1:
            raise ValueError(f"machine_for: words of {', '.join(map(str, sorted(widths)))} bits need a machine each")
        bits = address_bits or _bits_for_tokens("SUBLEQ", {p.name: p.n_tokens for p in programs}, subleq.MOST_ADDRESS_BITS)
        return SubleqMachine(widths.pop(), bits, n_layers=9 if n_layers is None else n_layers, dtype=dtype, **options)
    width = max(program.width for program in programs)
    n_tokens = {p.name: width + 2 + p.memory.shape[1] + len(p.commands) for p in programs}
    if blocks is None:
        used = {command.function for program in programs for command in program.commands}
        blocks = Blocks(tuple(name for name in FUNCTION_NAMES if name in used))
    bits = address_bits or _bits_for_tokens("FLEQ", n_tokens, fleq.MOST_ADDRESS_BITS)
    return FleqMachine(width, bits, blocks=blocks, dtype=dtype, **options)


def _bits_for_tokens(kind: str, n_tokens: Mapping[str, int], most: int) -> int:
    """Position bits for the longest of the programs. Raises ValueError where a machine cannot tell so many tokens apart."""
    name, n = max(n_tokens.items(), key=itemgetter(1))
    if n > 2**most:
        raise ValueError(
            f"{name} needs {n:,} tokens, one for each cell and command and some of the machine's own, and a {kind} machine has "
            f"at most {2**most:,}; name fewer cells"
        )
    return max(2, bits_for(n))


def check_program(machine: Any, program: Any, max_loops: int) -> None:
    """Raises ProgramError where a program leaves, within so many commands, what its machine carries, which that cannot tell."""
    machine.check(program, max_loops)
