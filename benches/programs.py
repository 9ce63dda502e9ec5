"""Commands per second of SUBLEQ programs: one, and thousands that halt at different loops.

    python benches/programs.py [--programs 4096] [--rounds 3] [--threads 1] [--dtype float32] [--most 6] [--json OUT]

A machine of 16 bits multiplies by factors from 0 to --most, so that programs halt at different loops; finished ones cost
nothing on eager and cpu alike. Beside them stands a NumPy step of the same weights, which does what a reader of the paper would
write: every layer in full, over the programs still running; of many programs it runs the first 256. Ways take turns in each
round; printed are medians, and the ratio to eager. A command is a loop of one program.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch
from heap import restart_with_heap_kept

import looped
from looped.backends import cpu
from looped.programs.machines import machine_for
from looped.programs.subleq_plain import run_subleq
from looped.programs.subleq_text import assemble_subleq

SOURCE = """
.bits 16
x: 12
y: 11
z: 0
k: 0
t: 0
one: 1
stay: 0
      subleq y t
      subleq t k
      subleq t t
      subleq x t
loop: subleq ZERO k end
      subleq t z
      subleq one k
      subleq stay stay loop
end:  halt
"""


def numpy_weights(machine):
    """Arrays of every layer, per head."""
    config, layers = machine.model.config, []
    for block in machine.model.core:
        q, k, v = block.attn.qkv.weight.numpy().reshape(3, config.n_heads, config.head_dim, -1)
        out = block.attn.proj.weight.numpy()
        mlp = (block.mlp.fc.weight.numpy().T, block.mlp.fc.bias.numpy(), block.mlp.proj.weight.numpy().T)
        layers.append((q, k, v, np.split(out, config.n_heads, axis=1), *mlp))
    return layers, 1 / np.sqrt(config.head_dim)


def numpy_step(X, layers, scale):
    """One loop of states X [B, n, d]."""
    for q, k, v, outs, up, bias, down in layers:
        Y = X
        for h, out in enumerate(outs):
            if not out.any():
                continue
            scores = (X @ q[h].T) @ (X @ k[h].T).transpose(0, 2, 1) * X.dtype.type(scale)
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            Y = Y + scores @ (X @ v[h].T) @ out.T
        X = Y + np.maximum(Y @ up + bias, 0) @ down
    return X


def run_numpy(prompts, layers, scale, n_loops):
    """All programs to their fixed points, or n_loops. Returns the loops that were run."""
    X, total = prompts, 0
    for _ in range(n_loops):
        if not len(X):
            break
        Y = numpy_step(X, layers, scale)
        total += len(X)
        X = Y[(Y != X).any(axis=(1, 2))]
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--most", type=int, default=6)
    parser.add_argument("--json", help="write one row per way to this file")
    options = parser.parse_args()
    if not cpu.is_there():
        parser.error(f"this bench is of the C++ engine: {cpu.describe()}")
    torch.set_num_threads(options.threads)
    base = assemble_subleq(SOURCE)
    programs = [base.with_values({"x": i % 97, "y": i % (options.most + 1)}) for i in range(options.programs)]
    machine = machine_for(programs, dtype=getattr(torch, options.dtype))
    layers, scale = numpy_weights(machine)
    rows = []
    for name, chosen in (("1 program", programs[3:4]), (f"{len(programs)} programs", programs)):
        prompts = torch.stack([machine.encode(program) for program in chosen])
        steps = np.array([run_subleq(program, 1000)[0] for program in chosen])
        n_loops = int(steps.max()) + 1
        ways = {
            "eager": lambda prompts=prompts, n=n_loops: solve(machine, prompts, n, "eager"),
            "cpu": lambda prompts=prompts, n=n_loops: solve(machine, prompts, n, "cpu"),
            "numpy": lambda prompts=prompts, n=n_loops: run_numpy(prompts[:256].numpy(), layers, scale, n),
        }
        counts = dict.fromkeys(ways, int((steps + 1).sum())) | {"numpy": int((steps[:256] + 1).sum())}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, run in ways.items():
                begin = time.perf_counter()
                total = run()
                seconds[way].append(time.perf_counter() - begin)
                assert total == counts[way], (way, total)
        print(f"{name}, {steps.min()} to {steps.max()} steps, {prompts.shape[1]} tokens, width {prompts.shape[2]}:")
        eager = counts["eager"] / statistics.median(seconds["eager"])
        for way, times in seconds.items():
            median = statistics.median(times)
            speed = counts[way] / median
            row = dict(programs=len(chosen), way=way, seconds=median, fastest=min(times), commands_per_second=speed)
            rows.append(row | dict(times_eager=speed / eager, threads=options.threads, dtype=options.dtype))
            print(f"  {way:6} {speed:12,.0f} commands/s   {speed / eager:6.2f} x eager   {median:.3f} s ({min(times):.3f})")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(dict(torch=torch.__version__, isa=cpu.describe(), rows=rows), file, indent=1)


def solve(machine, prompts, n_loops, backend):
    """All programs to their fixed points. Returns the loops that were run."""
    result = looped.solve(machine.model, prompts, n_loops=n_loops, exit="exact", backend=backend)
    assert bool((result.status == looped.Status.CONVERGED).all())
    return int(result.n_loops.sum())


if __name__ == "__main__":
    restart_with_heap_kept()
    main()
