"""Verdicts on claims about several models, of which some may not be there."""

from __future__ import annotations

from collections.abc import Sequence


def for_all(holds: Sequence[bool], n_wanted: int) -> bool | None:
    """Of something said of all n_wanted cases, by those measured: no by one against it, yes by all of them; else None."""
    if not all(holds):
        return False
    return True if len(holds) == n_wanted > 0 else None


def for_most(holds: Sequence[bool], n_wanted: int) -> bool | None:
    """Of something said of more than half of n_wanted cases: no where half of all are against it, yes by all of them; else
    None."""
    if 2 * (len(holds) - sum(holds)) >= n_wanted > 0:
        return False
    return True if len(holds) == n_wanted > 0 else None


def part_of(n_measured: int, n_wanted: int, what: str) -> str:
    """The end of what was measured, where that is not all of it."""
    return "" if n_measured == n_wanted else f" ({n_measured} of {n_wanted} {what} measured)"
