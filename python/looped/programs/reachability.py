"""Which commands a program can come to."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def notes_on(following: Sequence[Collection[int]]) -> tuple[str, ...]:
    """Warnings: an end, the last command, that no command leads to. following: what may come after each command."""
    reached, todo = {0}, [0]
    while todo:
        for to in set(following[todo.pop()]) - reached:
            reached.add(to)
            todo.append(to)
    return () if len(following) - 1 in reached else ("no command leads to the end",)
