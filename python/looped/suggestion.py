"""`suggestion`: the end of an error about an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST = 30  # names that are listed


def suggestion(word: object, allowed: Iterable[str], *, listed: bool = False) -> str:
    """``; did you mean 'n_loops'?`` where a name is like the word, or one begins with the other, in letters of either case,
    else ``; choose from`` and the names.

    listed: the names follow a likely one too, in brackets. Empty where nothing is allowed.
    """
    text, names = str(word).lower(), list(allowed)
    in_lower_case = {name.lower(): name for name in names}
    alike = difflib.get_close_matches(text, in_lower_case, n=1) or [name for name in in_lower_case if _begin_alike(name, text)]
    nearest = [in_lower_case[name] for name in alike]
    known = ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")
    if nearest:
        return f"; did you mean {nearest[0]!r}?" + (f" (of {known})" if listed else "")
    return f"; choose from {known}" if known else ""


def _begin_alike(name: str, text: str) -> bool:
    """An abbreviation, or a name with more behind it: at least three letters."""
    return len(name) > 2 < len(text) and (name.startswith(text) or text.startswith(name))
