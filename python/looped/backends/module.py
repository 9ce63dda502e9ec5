"""Finds the module looped._engine, or says why this installation has none that loads."""

from __future__ import annotations

import importlib
import importlib.util
import struct
from pathlib import Path
from typing import Any

NAME = "looped._engine"


def load_engine() -> tuple[Any, str | None]:
    """The module and None; or None and why: there was no C++ compiler, it is for another Python, or it is damaged."""
    try:
        spec = importlib.util.find_spec(NAME)
        if spec is not None and spec.origin is not None and _is_cut_short(Path(spec.origin)):
            raise ImportError(f"{spec.origin} is cut short")
        return importlib.import_module(NAME), None
    except ImportError as error:
        what = "is not in this installation" if isinstance(error, ModuleNotFoundError) else "does not load"
        return None, f"the C++ engine {what} ({error}); install looped again where a C++20 compiler is"


def _is_cut_short(path: Path) -> bool:
    """Whether an ELF file ends before its table of sections, which stands last: a full disk, a copy that was stopped.

    The system's loader would map what is not there, and the process would die of SIGBUS.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError:
        return False  # the loader says what is wrong
    if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":  # of 64 bits, little-endian
        return False
    (table,) = struct.unpack_from("<Q", head, 40)
    size, n_sections = struct.unpack_from("<HH", head, 58)
    return path.stat().st_size < table + size * n_sections
