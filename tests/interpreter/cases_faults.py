"""Small inputs that broke other engines of this kind, on the fused kernels and on the graph of ordinary ones."""

import copy
import pickle

import pytest
import torch
from cases_parity import both, pair, prompts_of, relative_error, states
from models import icl_model, random_weights
from tolerances import FP32

import looped
from looped.exits import Relative

BACKENDS = ["triton", "graph"]


@pytest.mark.parametrize("width", [3, 17, 20, 96])
def test_padding_lanes_in_the_variance_and_tail_rows(tiles, width):
    """33 rows of a mean far from zero, in lanes padded to a power of two."""
    tiles(32)
    prompt = (2 + torch.arange(width) / width).repeat(33, 1).double()
    truth, model = (
        random_weights(states(width, dtype, n_heads=1, head_dim=4), 0.05, 3, dtype) for dtype in (torch.float64, torch.float32)
    )
    want = looped.solve(truth, [prompt], n_loops=1, backend="eager")
    got = looped.solve(model, [prompt.float()], n_loops=1, backend="triton")
    assert relative_error(got.y[0], want.y[0]) <= FP32


@pytest.mark.parametrize(("tokens", "width", "heads"), [(1, 16, 4), (3, 20, 4), (82, 64, 4), (5, 48, 3), (7, 96, 12)])
def test_tiny_and_odd_tiles(tiles, tokens, width, heads):
    tiles(64)
    truth, model = pair(std=0.6 / width**0.5, d_model=width, n_heads=heads)
    want, got = both(truth, model, prompts_of([tokens]), n_loops=1)
    assert relative_error(got.y, want.y) <= FP32


@pytest.mark.parametrize("width", [512, 1024])
def test_wide_blocks(width):
    """Refused by the fused kernels with the reason, and run by ordinary ones."""
    truth, model = (icl_model(std=0.5 / width**0.5, d_model=width, n_heads=8, dtype=d) for d in (torch.float64, torch.float32))
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=f"take widths up to 256 in bf16x3 and the model is {width} wide"):
        looped.solve(model, x, n_loops=2, backend="triton")
    got = looped.solve(model, x, n_loops=3, exit="contraction", backend="graph")
    want = looped.solve(truth, x.double(), n_loops=3, exit="contraction", backend="eager")
    assert relative_error(got.y, want.y) <= FP32
    assert torch.equal(got.n_loops, want.n_loops)


def test_float32_products_are_not_rounded_to_tf32():
    """Once here, where products are float32 whatever is asked for; twelve times on a device (tests/test_kernels_device.py)."""
    from loopkernels.linear import linear

    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(33, 512, generator=generator), torch.randn(100, 512, generator=generator) * 512**-0.5
    assert relative_error(linear(x, w, None), x.double() @ w.double().T) <= FP32
    assert torch.equal(linear(torch.full((3, 70), 1024.5), torch.eye(70), None), torch.full((3, 70), 1024.5))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_its_neighbours(tiles, backend):
    tiles(64)
    _, model = pair(std=0.1, n_heads=1)
    easy, hard = torch.zeros(4, 3), 3 * torch.randn(9, 3, generator=torch.Generator().manual_seed(2))
    how = dict(n_loops=12, exit=Relative(tol=5e-2), backend=backend)
    solo = [looped.solve(model, [prompt], **how) for prompt in (easy, hard)]
    for order in ([0, 1], [1, 0], [0] * 7 + [1]):
        got = looped.solve(model, [(easy, hard)[i] for i in order], **how)
        for place, i in enumerate(order):
            assert got.n_loops[place] == solo[i].n_loops[0]
            torch.testing.assert_close(got.y[place], solo[i].y[0], rtol=1e-6, atol=0 if backend == "triton" else 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_of_inputs_and_weights(tiles, backend):
    tiles(16)
    _, model = pair(std=0.1, n_heads=1)
    whole = torch.randn(8, 2, 6, generator=torch.Generator().manual_seed(0))
    views = [whole.permute(1, 0, 2)[:, ::2, :3], whole[..., :3].transpose(0, 1), torch.randn(1, 8, 3).expand(2, 8, 3)]
    for view in views:
        kept = view.clone()
        got = looped.solve(model, view, n_loops=2, backend=backend).y
        assert torch.equal(got, looped.solve(model, view.contiguous(), n_loops=2, backend=backend).y)
        assert got.is_contiguous()
        assert torch.equal(view, kept)
    want = looped.solve(model, views[0], n_loops=2, backend=backend).y
    qkv, up = model.core[0].attn.qkv, model.core[0].mlp.fc
    qkv.weight = torch.nn.Parameter(qkv.weight.detach().t().contiguous().t())  # as a Conv1D would hold it
    up.weight = torch.nn.Parameter(torch.cat([up.weight.detach(), torch.full((64, 3), torch.nan)], dim=1)[:, :16])
    got = looped.solve(model, views[0], n_loops=2, backend=backend).y
    torch.testing.assert_close(got, want, rtol=0 if backend == "triton" else 1e-5, atol=0 if backend == "triton" else 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_have_weights_of_their_own(tiles, backend):
    tiles(16)
    _, model = pair(std=0.1, n_heads=1)
    x = torch.randn(1, 5, 3, generator=torch.Generator().manual_seed(0))

    def run(one):
        return looped.solve(one, x, n_loops=2, backend=backend).y

    want = run(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.core[0].mlp.proj.weight.mul_(0)
    assert not torch.equal(run(twin), want)
    assert torch.equal(run(model), want)
    assert torch.equal(run(pickle.loads(pickle.dumps(model))), want)
    torch.testing.assert_close(run(twin), looped.solve(twin, x, n_loops=2, backend="eager").y, rtol=1e-5, atol=1e-6)
