"""The Triton kernels on a GPU, through `solve`: what a user would notice. `benches/device.sh` checks every launch row."""

import pytest
import torch
from models import icl_model
from tolerances import FP32

import looped
from looped.exits import Contraction

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")

LENGTHS = [41, 5, 17, 64, 82, 1]


def models(**changes):
    fields = dict(std=0.05, d_model=64, n_heads=4, n_points=64) | changes
    return icl_model(**fields).cuda(), icl_model(**fields, dtype=torch.float32).cuda()


def prompts_of(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 3, generator=generator) for n in lengths]


@pytest.mark.parametrize("width", [16, 20, 64, 128, 256])
def test_parity(width):
    truth, model = models(d_model=width)
    want = looped.solve(truth, [p.double() for p in prompts_of(LENGTHS)], n_loops=5, backend="eager")
    got = looped.solve(model, prompts_of(LENGTHS), n_loops=5)
    assert got.backend == "triton"
    for ours, right in zip(got.y, want.y, strict=True):
        assert float((ours.double() - right).norm() / right.norm()) <= FP32


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_the_same_bits_in_any_batch(setting):
    torch.set_float32_matmul_precision(setting)
    try:
        _, model = models()
        options = dict(n_loops=30, exit=Contraction(tol=1e-2))
        batch = looped.solve(model, prompts_of(LENGTHS) * 50, **options)
        for i, prompt in enumerate(prompts_of(LENGTHS)):
            alone = looped.solve(model, [prompt], **options)
            for place in range(i, len(batch), len(LENGTHS)):
                assert torch.equal(batch.y[place], alone.y[0])
                assert batch.n_loops[place] == alone.n_loops[0]
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_call_can_be_captured_in_a_graph():
    _, model = models()
    x = torch.randn(8, 41, 3, device="cuda")
    options = dict(n_loops=4, backend="triton")
    want = looped.solve(model, x, **options).y
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = looped.solve(model, x, **options).y
    graph.replay()
    assert torch.equal(got, want)
