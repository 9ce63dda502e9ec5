"""What `solve_iter` holds in memory: prompts of the small shape (C 64, H 4, T 22, 20 loops), as many as asked for.

    python benches/memory.py                      # 100,000 prompts; about two minutes on one core
    python benches/memory.py --prompts 2000 --loops 40 --json out.json

Prints the peak of the resident memory above what it was before the first prompt, with torch, looped and the weights loaded.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import looped

T, N_DIMS = 22, 5


def peak_bytes() -> int:
    """The most resident memory this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def prompts(n: int) -> Iterator[Tensor]:
    """Made when they are asked for, so that what is measured is the engine's."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(n):
        yield torch.randn(T, N_DIMS, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--loops", type=int, default=20)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--progress", action="store_true", help="show a bar")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = looped.LoopedTransformer(looped.icl_config(n_dims=N_DIMS, n_points=T, d_model=64, n_heads=4)).eval()
    before, start, n_done = peak_bytes(), time.perf_counter(), 0
    for result in looped.solve_iter(
        model,
        prompts(options.prompts),
        n_loops=options.loops,
        batch_size=options.batch,
        backend=options.backend,
        progress=options.progress,
    ):
        assert result.n_loops == options.loops
        n_done += 1
    figures = {
        "prompts": n_done,
        "loops": options.loops,
        "batch": options.batch,
        "threads": options.threads,
        "seconds": round(time.perf_counter() - start, 2),
        "megabytes_before": round(before / 1e6, 1),
        "megabytes_above": round((peak_bytes() - before) / 1e6, 1),
    }
    print(", ".join(f"{name} {value}" for name, value in figures.items()))
    if options.json:
        options.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
