"""A heap that glibc keeps: large buffers are not given back, and eager PyTorch does not fault their pages in again for every
operation, which takes a seventh of benches/exit.py otherwise. Which setting is better depends on the shape."""

import os
import sys

KEEP_HEAP = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}


def restart_with_heap_kept() -> None:
    """Starts this script again with `KEEP_HEAP` set, unless it is already: glibc reads it when a process starts."""
    if not KEEP_HEAP.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_HEAP)
