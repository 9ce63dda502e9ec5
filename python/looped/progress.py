"""Saying how far a run has come: a bar, or the caller's own function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

OnProgress = Callable[[int, "int | None"], object]

BAR_AFTER = 2.0  # seconds; what takes less shows no bar


def reporter(
    progress: bool | OnProgress | None, n_prompts: int | None
) -> AbstractContextManager[Callable[[int], object] | None]:
    """For a `with`: a function of the number of prompts that have finished, or None where nobody asked.

    progress: True for a bar on standard error, or a function of that number and n_prompts (None: not known).
    """
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"solve: progress must be True, a function of (n_finished, n_prompts) or None, got {progress!r}")
    return _reporter(progress, n_prompts)


@contextmanager
def _reporter(progress: bool | OnProgress | None, n_prompts: int | None) -> Iterator[Callable[[int], object] | None]:
    if not progress:
        yield None
    elif progress is True:
        from tqdm import tqdm

        off = sys.stderr is None
        with tqdm(total=n_prompts, unit="prompt", desc="looping", delay=BAR_AFTER, dynamic_ncols=True, disable=off) as bar:
            yield lambda n_finished: bar.update(n_finished - bar.n)
    else:
        yield lambda n_finished: progress(n_finished, n_prompts)
