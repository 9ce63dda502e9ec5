"""SUBLEQ programs on lists. Cells have fixed addresses, so what goes through a list is written out for each of its cells."""

from __future__ import annotations

from collections.abc import Sequence


def sort_text(values: Sequence[int], n_bits: int = 16) -> str:
    """Bubble sort: `list` ends in rising order. Differences of two words must fit a word."""
    n = len(values)
    lines = [f".bits {n_bits}", f"list: {' '.join(map(str, values))}", "d: 0", "t: 0"]
    for last in range(n - 1, 0, -1):
        for i in range(last):
            a, b, skip = f"list+{i}", f"list+{i + 1}", f"skip_{last}_{i}"
            lines += [
                "subleq d d",
                "subleq t t",
                f"subleq {a} t",
                "subleq t d",
                f"subleq {b} d {skip}  ; d = {a} - {b}",
                f"subleq d {a}  ; the larger one gives d to the smaller",
                "subleq t t",
                "subleq d t",
                f"subleq t {b}",
                f"{skip}:",
            ]
    return "\n".join([*lines, "halt"]) + "\n"


def search_text(values: Sequence[int], key: int, n_bits: int = 16) -> str:
    """`place` ends as the first place of `key` in `list`, or -1. Differences of two words must fit a word."""
    n = len(values)
    lines = [f".bits {n_bits}", f"list: {' '.join(map(str, values))}", f"key: {key}", "place: 0", "d: 0", "t: 0", "nothing: 0"]
    lines.append(f"length: {n + 1}")
    for i in range(n):
        lines += [
            "subleq d d",
            "subleq t t",
            "subleq key t",
            "subleq t d",
            f"subleq list+{i} d low_{i}  ; d = key - list+{i}",
            f"subleq nothing nothing next_{i}",
            f"low_{i}: subleq t t",
            "subleq d t found  ; t = -d <= 0 holds for d = 0 alone",
            f"next_{i}: subleq MINUS_ONE place",
        ]
    return "\n".join([*lines, f"subleq length place  ; {n} - {n + 1} = -1", "found: halt"]) + "\n"
