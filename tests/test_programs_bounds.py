"""What the functions of a FLEQ machine state of themselves, beside what they do on it."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from programs import EXAMPLES

from looped.backends import cpu
from looped.cli import main
from looped.programs.blocks import MatrixProduct, SigmoidSum
from looped.programs.fleq import FUNCTION_NAMES, Blocks, FleqMachine, default_product
from looped.programs.fleq_text import assemble_fleq
from looped.programs.machines import machine_for
from looped.programs.run import run_programs

F64, F32 = torch.float64, torch.float32
BACKENDS = ["eager", "cpu"] if cpu.is_there() else ["eager"]
ROW = {"add": "add c, a, b", "sub": "sub c, a, b", "emul": "emul c, a, b"}
SIZES = {"mm": (3, 4), "transpose": (3, 2)}


def largest(name, A, B):
    """The number that a function's `valid` and `bound` speak of, and of products the sum of sizes."""
    if name in ("mm", "emul"):
        return np.abs(A.T @ B).max(), (np.abs(A).T @ np.abs(B)).max()
    return ((np.abs(A) + np.abs(B)).max() if name in ("add", "sub") else np.abs(A).max()), None


EXACT = {
    "mm": lambda A, B: A.T @ B,
    "transpose": lambda A, _: A.T,
    "emul": lambda A, B: A * B,
    "perc": lambda A, _: A / 100,
    "add": lambda A, B: A + B,
    "sub": lambda A, B: A - B,
    "inv": lambda A, _: 1 / A,
    "sqrt": lambda A, _: np.sqrt(A),
    "sig": lambda A, _: 1 / (1 + np.exp(-A)),
}


def operands(name, block, part, rng):
    """Two matrices whose sizes are a part of what the function holds for."""
    least, most = block.valid
    if name in ("inv", "sqrt"):
        return np.geomspace(least, most, 6)[None, :] if part == 1 else rng.uniform(
            least, least + part * (most - least), (1, 6)
        ), None
    A, B = rng.uniform(-1, 1, (2, *SIZES.get(name, (1, 6))))
    if name in ("mm", "emul"):
        scale = math.sqrt(part * min(most, 1000) / largest(name, A, B)[0])
        return A * min(scale, 500), B * min(scale, 500)
    top = 0.999 * part * most / (2 if name in ("add", "sub") else 1)
    return A * top, B * top


@pytest.mark.parametrize("form", ["single", "pair", "richardson"])
@pytest.mark.parametrize(("backend", "dtype"), list(itertools.product(BACKENDS, (F64, F32))))
def test_no_result_is_off_by_more_than_its_function_states(backend, dtype, form):
    product, rng = default_product(dtype, form), np.random.default_rng(0)
    blocks = Blocks(FUNCTION_NAMES, product=product, inv=SigmoidSum("inv", 16, 0.2, 20), sqrt=SigmoidSum("sqrt", 16, 0.02, 40))
    stated = FleqMachine(4, 6, blocks=blocks, dtype=dtype).bounds()
    assert set(stated) == set(EXACT)
    cases = []
    for name, part in itertools.product(EXACT, (1.0, 0.01, 1e-5)):
        A, B = operands(name, stated[name], part, rng)
        text = f"{ROW.get(name, 'mm c, a, b' if name == 'mm' else f'{name} c, a')}\nhalt"
        shapes = "\n".join(f"let {key} = ZEROS {M.shape}" for key, M in (("a", A), ("b", B)) if M is not None)
        program = assemble_fleq(f"{shapes}\n{text}", name=name)
        cases.append((name, A, B, program.with_values({key: M for key, M in (("a", A), ("b", B)) if M is not None})))
    machine = machine_for([program for *_, program in cases], blocks=blocks, dtype=dtype)
    eps = torch.finfo(dtype).eps
    for (name, A, B, _), run in zip(cases, run_programs(machine, [case[3] for case in cases], backend=backend), strict=True):
        off, block = np.abs(run["c"] - EXACT[name](A, B)), machine.bounds()[name]
        if name in ("inv", "sqrt"):
            bound = np.array([[block.bound(float(x), machine.width, eps) for x in A[0]]])
        else:
            s, size = largest(name, A, B)
            bound = (block.product if size else block).bound(s, machine.width, eps, *([size] if size else []))
        assert (off <= bound).all(), (name, off.max(), bound)
        assert block.valid[0] <= block.valid[1]


@pytest.mark.parametrize(
    ("form", "sink"), [("single", 8.0), ("single", 20.0), ("pair", 0.0), ("pair", 2.0), ("richardson", 4.0)]
)
@pytest.mark.parametrize("w", [1, 8, 64])
def test_the_bound_of_a_product_holds_for_the_worst_scores(form, sink, w):
    """In exact arithmetic, for all numbers of scores +s, 0 and -s, which are the worst."""
    ups, zeros = np.meshgrid(np.arange(w + 1), np.arange(0, w + 1, max(1, w // 8)))
    ups, zeros = ups[ups + zeros <= w], zeros[ups + zeros <= w]
    place = np.arange(w)
    signs = np.where(place < ups[:, None], 1.0, np.where(place < (ups + zeros)[:, None], 0.0, -1.0))
    for x in (0.5, 0.1, 0.01):
        how = MatrixProduct(form, 1.0, sink)
        off = np.abs(product_of_scores(how, signs * x) - signs * x).max()
        assert off <= how.bound(x, w, 1e-16)
    if (form, sink, w) == ("pair", 2.0, 64):  # where s^3 / 6 kappa^2 would not hold
        assert np.abs(product_of_scores(how, signs * 0.5) - signs * 0.5).max() > 3 * 0.5**3 / 6


def product_of_scores(how, s):
    """The formula of softmax: scores s [cases, w] to results, with the denominator put right."""
    D0 = math.exp(how.sink) + s.shape[1]

    def head(by):
        e = np.exp(by * s)
        return e / (math.exp(how.sink) + e.sum(axis=1, keepdims=True))

    def pair(kappa):
        return kappa * D0 / 2 * (head(1 / kappa) - head(-1 / kappa))

    if how.form == "single":
        return D0 * head(1.0) - 1
    R = pair(1.0) if how.form == "pair" else 4 / 3 * pair(2.0) - pair(1.0) / 3
    return R + R.sum(axis=1, keepdims=True) / math.exp(how.sink)


def test_looped_machine_shows_what_functions_state():
    runner, file = CliRunner(), str(EXAMPLES / "calculator.fleq")
    facts = json.loads(runner.invoke(main, ["machine", file, "--json"]).output)
    assert list(facts["bounds"]) == ["mm", "transpose", "perc", "add", "sub", "inv", "sqrt"]
    assert facts["bounds"]["inv"]["valid"] == [0.2, 20.0]
    assert facts["bounds"]["mm"]["valid"] == [-1024, 1024]
    assert 1e-11 < facts["bounds"]["mm"]["error_at_1"] < 1e-9 < facts["bounds"]["mm"]["error_at_most"] < 1
    output = runner.invoke(main, ["machine", file]).output
    assert "off by at most" in output
    for name, of in (("transpose", "numbers"), ("add", "|a| + |b|"), ("sqrt", "numbers")):
        assert any(name in line and of in line for line in output.splitlines())
