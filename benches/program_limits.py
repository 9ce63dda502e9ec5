"""What the paper on looped computers leaves open, measured: the tables of docs/programs.md.

    python benches/program_limits.py [--only noise,precision,terms,square,transpose,depth] [--loops 200]

noise: the largest disturbance of memory bits, or of the program counter, before every loop that a SUBLEQ machine survives.
precision: which types SUBLEQ and FLEQ survive. terms: the error of 1 / x and the square root against the number of heads.
square: x^2 by one attention layer beside a ReLU network that is as deep as it must be. transpose: the size of the block beside
the one that Charton (2021) trained. depth: backpropagation for deeper networks on one machine.
"""

import argparse
import itertools
import math

import numpy as np
import torch

from looped.programs.algebra import inverse_text, matrix_text
from looped.programs.blocks import MatrixProduct, SigmoidSum
from looped.programs.fleq import Blocks, FleqMachine, default_product
from looped.programs.fleq_plain import run_fleq
from looped.programs.fleq_text import assemble_fleq
from looped.programs.learning import network_text
from looped.programs.machines import machine_for
from looped.programs.run import run_programs
from looped.programs.subleq_plain import subleq_states
from looped.programs.subleq_text import assemble_subleq

RUNNER = """
.bits {bits}
n: {n}
a: 0
b: 1
t: 0
u: 0
one: 1
loop: subleq t t
      subleq a t
      subleq b t
      subleq u u
      subleq b u
      subleq a a
      subleq u a
      subleq b b
      subleq t b
      subleq one n halt
      subleq u u loop
"""


def fibonacci(bits, n):
    return assemble_subleq(RUNNER.format(bits=bits, n=n), name="fibonacci")


@torch.no_grad()
def survives(machine, program, n_loops, *, memory=0.0, counter=0.0, seed=0):
    """Whether the machine and the interpreter agree for n_loops with noise of +- so much before every loop."""
    generator = torch.Generator().manual_seed(seed)
    X = machine.encode(program)[None]
    states = subleq_states(program)
    next(states)
    for _ in range(n_loops):
        for size, tokens, block in ((memory, slice(1, program.first_command), "MEM"), (counter, slice(0, 1), "PC")):
            if size:
                part = X[:, tokens, machine.layout[block][0] : machine.layout[block][-1] + 1]
                part += size * (2 * torch.randint(0, 2, part.shape, generator=generator) - 1).to(part.dtype)
        X = machine.model.step(X, X)
        snapshot = machine.decode(X[0], program)
        pc, words = next(states)
        if int(snapshot.pc) != pc or tuple(snapshot.memory) != words or not float(snapshot.off_grid) < 1e-3:
            return False
    return True


def noise(n_loops):
    print("\nNoise before every loop, the largest survived over 3 seeds (16 bits, float64)")
    program = fibonacci(16, 20)
    grid = {"memory": (0.1, 0.2, 0.24, 0.3, 0.4, 0.5), "counter": (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2)}
    for n_layers in (9, 5):
        for lam in (4.0, 12.0):
            machine = machine_for([program], n_layers=n_layers, lam=lam)
            best = dict.fromkeys(grid, 0.0)
            for what, sizes in grid.items():
                for size in sizes:
                    if not all(survives(machine, program, n_loops, **{what: size}, seed=seed) for seed in range(3)):
                        break
                    best[what] = size
            sizes = ", ".join(f"{what} +-{size}" for what, size in best.items())
            print(f"  {n_layers} layers, lambda {machine.lam:5.2f}: {sizes}")


def precision(n_loops):
    print("\nPrecision: SUBLEQ, loops equal to the interpreter (every tensor in the type)")
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for bits in (8, 12, 15, 24, 32):
        line = f"  {bits:2} bits:"
        for dtype in types:
            try:
                machine = machine_for([fibonacci(bits, 20)], dtype=dtype)
                verdict = "equal" if survives(machine, fibonacci(bits, 20), n_loops) else "wrong"
            except ValueError:  # what the limit refuses, tried all the same
                machine = machine_for([fibonacci(bits, 20)])
                machine.model, machine.dtype = machine.model.to(dtype), dtype
                verdict = "refused; " + ("equal" if survives(machine, fibonacci(bits, 20), n_loops) else "wrong")
            line += f"  {str(dtype)[6:]} {verdict};"
        print(line)
    print("Precision: FLEQ, Newton's inverse 4 x 4 (10 iterations), largest error of X")
    rng = np.random.default_rng(0)
    U, V = (np.linalg.qr(rng.normal(size=(4, 4)))[0] for _ in range(2))
    program = assemble_fleq(inverse_text(U @ np.diag(np.geomspace(2, 0.5, 4)) @ V, 10))
    steps, pc, memory = run_fleq(program, 1000)
    for dtype in types:
        how = default_product(torch.float64 if dtype == torch.float64 else torch.float32)
        if dtype in (torch.float16, torch.bfloat16):
            how = MatrixProduct("pair", 4.0, 1.0)
        machine = machine_for(
            [program],
            dtype=torch.float64 if dtype == torch.float64 else torch.float32,
            blocks=Blocks(("mm", "sub"), product=how),
        )
        X = machine.encode(program).to(dtype)[None]
        model = machine.model.to(dtype)
        with torch.no_grad():
            for _ in range(steps):
                X = model.step(X, X)
        snapshot = machine.decode(X[0], program)
        error = np.abs(program.value("X", snapshot.memory) - program.value("X", memory)).max()
        print(f"  {str(dtype)[6:]:9} path {'right' if int(snapshot.pc) == pc else 'wrong'}, error {error:.1e}")


def terms(_):
    print(
        "\nHeads m: largest relative error on [0.2, 20] (1 / x) and [0.02, 40] (root); on the machine; and m^-1/2 from m = 8 on"
    )
    first = 0.0
    for m in (8, 16, 32, 64, 128):
        inv, root = SigmoidSum("inv", m, 0.2, 20), SigmoidSum("sqrt", m, 0.02, 40)
        measured = []
        for dtype in (torch.float64, torch.float32):
            x, z = np.geomspace(0.21, 19, 25), np.geomspace(0.021, 38, 25)
            program = assemble_fleq(f"let x = {matrix_text(x)}\nlet z = {matrix_text(z)}\ninv p, x\nsqrt q, z\nhalt")
            run = run_programs(
                machine_for([program], dtype=dtype, blocks=Blocks(("inv", "sqrt"), inv=inv, sqrt=root)), [program]
            )[0]
            measured += [np.abs(run["p"] * x - 1).max(), np.abs(run["q"] / np.sqrt(z) - 1).max()]
        first = first or inv.error
        text = "  ".join(f"{value:.1e}" for value in (inv.error, root.error, *measured, first * math.sqrt(8 / m)))
        print(f"  m {m:3}: exact inv, root; float64 inv, root; float32 inv, root; Barron's rate: {text}")


def sawtooth_square(x, depth):
    """x^2 on [0, 1] by a ReLU network of `depth` layers (Yarotsky, 2017): x - sum_k g_k(x) / 4^k, g_k the k-th sawtooth."""
    out, g = x.copy(), x.copy()
    for k in range(1, depth + 1):
        g = 2 * np.maximum(g, 0) - 4 * np.maximum(g - 0.5, 0)
        out -= g / 4**k
    return out


def square(_):
    print("\nx^2 on [0, 1]: one attention layer (float64), and the depth of a ReLU network that is as exact")
    x = np.linspace(0, 1, 33)
    for how in (
        MatrixProduct("single", 2.0**24, 28),
        MatrixProduct("pair", 2.0**16, 4),
        MatrixProduct("richardson", 2.0**8, 4),
    ):
        programs = [assemble_fleq(f"let x = {value!r}\nmm y, x, x\nhalt") for value in x.tolist()]
        machine = machine_for(programs, blocks=Blocks(("mm",), product=how))
        runs = run_programs(machine, programs)
        error = max(abs(run["y"][0, 0] - value**2) for run, value in zip(runs, x, strict=True))
        fine = np.linspace(0, 1, 100_001)
        depth = next(d for d in range(1, 40) if np.abs(sawtooth_square(fine, d) - fine**2).max() <= error)
        print(f"  {how.form:10} {how.n_heads} heads, 1 layer: error {error:.1e}; ReLU network: {depth} layers")


def transpose(_):
    print("\nTranspose of 30 x 30: one layer")
    print("  Charton (2021), trained: 8 heads, width 256; Giannou et al. (2023): 1 head, width 168")
    for form in ("single", "pair", "richardson"):
        how = default_product(torch.float64, form)
        machine = FleqMachine(30, 8, blocks=Blocks(("mm",), product=how))
        layer = machine.layers[3]
        width = len(
            {
                row
                for head in layer.heads
                for part in (*head.query, *head.key, *(m for move in head.moves for m in move))
                for row in part
            }
        )
        weights = sum(len(terms) for head in layer.heads for part in (head.query, head.key) for terms in part)
        weights += sum(len(source) + len(target) for head in layer.heads for source, target in head.moves)
        head_dim = max(len(layer.heads[0].query), len(layer.heads[0].moves))
        A = np.random.default_rng(0).uniform(-1, 1, (30, 30))
        program = assemble_fleq(f"let A = {matrix_text(A)}\ntranspose B, A\nhalt")
        run = run_programs(machine, [program])[0]
        error = np.abs(run["B"] - A.T).max()
        sizes = f"{len(layer.heads)} heads of {head_dim}, {width} features, {weights} weights that are not 0"
        print(f"  {form:10} {sizes}, error {error:.1e}")


def depth(_):
    print("\nBackpropagation, one epoch of XOR: networks of more layers on one machine")
    X, y = np.array([[0, 0], [0, 1], [1, 0], [1, 1]]), [0, 1, 1, 0]
    rng = np.random.default_rng(0)
    shapes = [(2, 3, 1), (2, 3, 3, 1), (2, 3, 3, 3, 1), (2, 3, 3, 3, 3, 1)]
    programs = []
    for shape in shapes:
        weights = [rng.normal(size=(a + 1, b)) for a, b in itertools.pairwise(shape)]
        programs += [assemble_fleq(network_text(weights, X, y, 1.0, epochs)) for epochs in (1, 2)]
    machine = machine_for(programs, blocks=Blocks(("mm", "add", "sub", "emul", "sig")))
    runs = run_programs(machine, programs)
    print(f"  machine: {len(machine.layers)} layers, {machine.model.config.n_heads} heads, width {machine.layout.width}")
    for i, shape in enumerate(shapes):
        one, two = runs[2 * i : 2 * i + 2]
        error = np.abs(two.memory - run_fleq(programs[2 * i + 1], 100_000)[2]).max()
        n_tokens = machine.n_tokens(programs[2 * i])
        print(f"  {len(shape) - 1} layers: {two.steps - one.steps} loops an epoch, {n_tokens} tokens, error {error:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = dict(noise=noise, precision=precision, terms=terms, square=square, transpose=transpose, depth=depth)
    parser.add_argument("--only", default=",".join(everything))
    parser.add_argument("--loops", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.only.split(","):
        everything[name](options.loops)


if __name__ == "__main__":
    main()
