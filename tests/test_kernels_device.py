"""The Triton kernels on a GPU, through `solve`: what a user would notice. `benches/device.sh` checks every launch row."""

import pytest
import torch
from models import icl_model
from tolerances import FP32

import looped
from looped.exits import Contraction, Readout

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
    truth, model = models(d_model=width, n_heads=8 if width == 256 else 4)
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


def test_float32_products_are_not_rounded_to_tf32():
    from loopkernels.linear import linear

    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(512, 512, generator=generator).cuda() for _ in range(2))
    w *= 512**-0.5
    got, want = x, x.double()
    for _ in range(12):
        got, want = linear(got, w, None), want @ w.double().T
    assert float((got.double() - want).norm() / want.norm()) <= FP32
    assert torch.equal(
        linear(torch.full((3, 512), 1024.5).cuda(), torch.eye(512).cuda(), None).cpu(), torch.full((3, 512), 1024.5)
    )


@pytest.mark.parametrize("options", [
    dict(exit=Contraction(tol=1e-2), on_stall="exit"),
    dict(exit=Readout(tol=1e-2, check_every=3)),
    dict(exit=Contraction(stall_window=2, tol=1e-7), on_stall="damp"),
    dict(exit=None),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("n_prompts", [1, 6, 100])
def test_a_graph_of_ordinary_kernels(options, n_prompts):
    """Wider than the fused kernels: numbers and counts of eager float64, and graphs that are used again, and shrink."""
    truth, model = models(d_model=320, std=0.03)
    prompts = (prompts_of(LENGTHS) * 20)[:n_prompts]
    how = dict(n_loops=40, return_predictions=True, **options)
    want = looped.solve(truth, [p.double() for p in prompts], backend="eager", **how)
    for _ in range(2):
        got = looped.solve(model, prompts, **how)
        assert got.backend == "graph"
        assert "320 wide" in got.reason
        assert (got.n_loops == want.n_loops).float().mean() >= 0.9
        for ours, right, n, wanted in zip(got.y, want.y, got.n_loops, want.n_loops, strict=True):
            if n == wanted:
                assert float((ours.double() - right).norm() / right.norm()) <= 10 * FP32
    fewer = looped.solve(model, prompts, **(how | dict(n_loops=5)))
    resumed = looped.solve(model, prompts, state=fewer.state, **how)
    assert (resumed.n_loops == got.n_loops).float().mean() >= 0.9


def test_a_graph_reads_the_weights_where_they_lie():
    _, model = models(d_model=320)
    x = torch.randn(4, 9, 3, device="cuda")
    first = looped.solve(model, x, n_loops=6).y
    with torch.no_grad():
        model.core[0].mlp.proj.weight.mul_(1.5)
    changed, want = looped.solve(model, x, n_loops=6).y, looped.solve(model, x, n_loops=6, backend="eager").y
    assert not torch.equal(changed, first)
    torch.testing.assert_close(changed, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [64, 320])
def test_a_forward_pass_is_the_operator(width):
    _, model = models(d_model=width)
    x = torch.randn(8, 41, 3, device="cuda")
    with torch.no_grad():
        want = looped.solve(model, x, n_loops=4)
        got = model(x, n_loops=4)
        assert torch.equal(got, want.prediction)
        assert torch.equal(torch.compile(model, fullgraph=True)(x, n_loops=4), got)
        torch.testing.assert_close(got, model(x, n_loops=4, backend="eager"), rtol=1e-3, atol=1e-3)


def test_few_prompts_may_be_given_to_a_graph():
    _, model = models(d_model=256, n_heads=8)
    x = torch.randn(1, 41, 3, device="cuda")
    fixed, free = looped.solve(model, x, n_loops=4), looped.solve(model, x, n_loops=4, allow_batch_dependent=True)
    assert fixed.backend == "triton"
    assert free.backend == "triton" or "allow_batch_dependent" in free.reason
    torch.testing.assert_close(free.y, fixed.y, rtol=1e-4, atol=1e-4)
