"""Parity with the eager model in float64: shapes, kinds of blocks, precisions."""

import pytest
import torch
from models import icl_model, random_weights, states_model
from tolerances import FP32

import looped


def pair(std=0.15, seed=0, **changes):
    """The same model in float64 and float32."""
    truth = icl_model(std=std, seed=seed, n_points=64, **changes)
    return truth, icl_model(std=std, seed=seed, n_points=64, dtype=torch.float32, **changes)


def prompts_of(lengths, width=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, width, generator=generator, dtype=torch.float64) for n in lengths]


def padded(prompts):
    """A batch whose padding is NaN, and the lengths."""
    lengths = [len(prompt) for prompt in prompts]
    batch = torch.full((len(prompts), max(lengths), prompts[0].shape[1]), torch.nan, dtype=torch.float64)
    for row, prompt in zip(batch, prompts, strict=True):
        row[: len(prompt)] = prompt
    return batch, torch.tensor(lengths)


def both(truth, model, prompts, **options):
    """Results of eager float64 and of the kernels, on a batch padded with NaN."""
    batch, lengths = padded(prompts)
    want = looped.solve(truth, batch, lengths=lengths, backend="eager", **options)
    got = looped.solve(model, batch.float(), lengths=lengths, backend="triton", **options)
    assert got.backend == "triton"
    return want, got


def relative_error(got, want):
    return float((got.double() - want).norm() / want.norm())


def assert_same(got, want, tol=FP32):
    assert not got.y.isnan().any()
    assert relative_error(got.y, want.y) <= tol
    assert relative_error(got.prediction, want.prediction) <= 3 * tol
    assert torch.equal(got.n_loops, want.n_loops)
    assert torch.equal(got.status, want.status)
    torch.testing.assert_close(got.residual, want.residual, rtol=1e-2 if tol > 1e-4 else 1e-4, atol=tol)


# Tokens, width, heads, prompts, loops, kernel: off the grid of tiles, and any two values of two columns meet in some row, with
# at least one loop where loops are not one of the two. 20 loops and resident weights (R) are there up to width 64.
COVER = [
    (1, 16, 4, 3, 1, "R"), (5, 16, 3, 7, 20, "S"), (41, 16, 8, 1, 1, "R"), (82, 16, 1, 1, 1, "R"),
    (101, 16, 1, 3, 2, "R"), (1, 20, 3, 3, 2, "R"), (5, 20, 1, 1, 1, "S"), (5, 20, 8, 3, 0, "R"),
    (41, 20, 1, 1, 1, "R"), (82, 20, 4, 1, 20, "R"), (101, 20, 8, 7, 1, "R"), (1, 48, 3, 1, 0, "R"),
    (1, 48, 1, 1, 1, "R"), (5, 48, 4, 7, 1, "R"), (41, 48, 1, 3, 20, "R"), (82, 48, 8, 3, 2, "S"),
    (101, 48, 3, 1, 20, "R"), (1, 64, 8, 1, 20, "S"), (5, 64, 4, 3, 1, "R"), (41, 64, 3, 1, 2, "R"),
    (82, 64, 1, 7, 1, "R"), (82, 64, 4, 1, 0, "R"), (101, 64, 1, 1, 1, "R"), (1, 96, 1, 3, 1, "S"),
    (1, 96, 1, 1, 0, "S"), (5, 96, 3, 1, 1, "S"), (41, 96, 4, 7, 1, "S"), (82, 96, 8, 1, 1, "S"),
    (101, 96, 4, 1, 2, "S"), (1, 128, 1, 7, 2, "S"), (5, 128, 3, 3, 1, "S"), (41, 128, 1, 7, 0, "S"),
    (41, 128, 8, 1, 1, "S"), (82, 128, 4, 1, 1, "S"), (101, 128, 1, 1, 1, "S"), (1, 256, 1, 7, 1, "S"),
    (5, 256, 8, 3, 2, "S"), (41, 256, 4, 1, 1, "S"), (82, 256, 3, 1, 1, "S"), (101, 256, 1, 1, 0, "S"),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "width", "heads", "n_prompts", "loops", "kernel"), COVER)
def test_shapes(tiles, tokens, width, heads, n_prompts, loops, kernel):
    tiles(64, resident=kernel == "R", tma=kernel == "S")
    head_dim = max(1, width // heads)
    truth, model = pair(std=0.5 / width**0.5, d_model=width, n_heads=heads, head_dim=head_dim)
    lengths = [max(1, tokens - 3 * i) for i in range(n_prompts)]
    want, got = both(truth, model, prompts_of(lengths), n_loops=loops)
    if loops:
        assert_same(got, want)
    else:
        assert torch.equal(got.y.double(), want.y)
        assert torch.equal(got.n_loops, want.n_loops)
        torch.testing.assert_close(got.prediction.double(), want.prediction, rtol=FP32, atol=FP32)


@pytest.mark.parametrize(("width", "heads", "lengths"), [(16, 4, [41, 5, 1]), (64, 4, [5, 7, 1, 16, 2, 3, 9]), (96, 12, [7])])
def test_shapes_of_unequal_prompts(tiles, width, heads, lengths):
    """Slots of several sizes, and more heads than lanes of a tile."""
    tiles(64)
    truth, model = pair(std=0.6 / width**0.5, d_model=width, n_heads=heads)
    want, got = both(truth, model, prompts_of(lengths), n_loops=1)
    assert_same(got, want)


@pytest.mark.parametrize(("lengths", "rows"), [([82], 64), ([101], 128)])
def test_the_papers_own_width(tiles, lengths, rows):
    tiles(rows)
    truth, model = pair(std=0.04, d_model=256, n_heads=8)
    want, got = both(truth, model, prompts_of(lengths), n_loops=1)
    assert_same(got, want)


def test_the_longest_prompt_of_the_kernels_is_256_tokens_long(tiles):
    tiles(64)
    truth, model = pair(n_positions=257)
    want, got = both(truth, model, prompts_of([256, 129]), n_loops=1)
    assert_same(got, want)


@pytest.mark.parametrize(("width", "heads", "changes"), [
    (64, 4, dict()),
    (20, 1, dict(n_core=2)),
    (20, 1, dict(activation="silu_gated")),
    (16, 2, dict(activation="gelu", n_core=2)),
])  # fmt: skip
def test_resident_weights_give_the_same_bits_as_streamed_ones(tiles, width, heads, changes):
    _, model = pair(std=0.6 / width**0.5, d_model=width, n_heads=heads, **changes)
    prompts = prompts_of([5, 16, 20])
    results = []
    for resident in (True, False):
        tiles(64, precision="bf16", resident=resident)
        results.append(looped.solve(model, [p.float() for p in prompts], n_loops=2, backend="triton"))
    for held, streamed in zip(results[0].y, results[1].y, strict=True):
        assert torch.equal(held, streamed)


BLOCKS = [
    dict(mask_kind="full"),
    dict(mask_kind="full", n_core=2, inject="mul", state_init="ones"),
    dict(n_core=3),
    dict(inject="none", state_init="embedding"),
    dict(pos_when="once", loop_norm="once"),
    dict(pos_kind="none", n_positions=0, loop_norm="none"),
    dict(activation="relu", bias=False),
    dict(activation="gelu"),
    dict(activation="silu_gated", d_ff=50),
    dict(norm_kind="none", loop_norm="none"),
    dict(inject="mul", state_init="ones", pos_when="each_loop"),
    dict(head_dim=5, d_ff=50),
    dict(readout="classes", n_classes=3),
    dict(readout="none", n_prelude=1),
    dict(loop_norm="once", n_coda=1, n_prelude=1),
    dict(norm_kind="rms"),
]


@pytest.mark.parametrize("changes", BLOCKS, ids=str)
@pytest.mark.parametrize(("rows", "tma"), [(16, False), (32, True)])
def test_kinds_of_blocks(tiles, changes, rows, tma):
    """Row blocks (16) and a tile of several prompts (32)."""
    tiles(rows, tma=tma)
    small = dict(std=0.05, norm_kind="none") if changes.get("norm_kind") == "none" else {}
    truth, model = pair(**(dict(n_heads=2) | small | changes))
    want, got = both(truth, model, prompts_of([20, 5, 9]), n_loops=2)
    assert_same(got, want)


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "silu_gated"])
@pytest.mark.parametrize(("rows", "lengths"), [(64, [41, 5, 16, 9]), (16, [20])])
def test_bf16_is_at_most_twice_as_wrong_as_torch(tiles, rows, lengths, activation):
    tiles(rows, precision="bf16")
    truth, model = pair(std=0.1, d_model=64, n_heads=4, activation=activation)
    want, got = both(truth, model, prompts_of(lengths), n_loops=4)
    batch, own = padded(prompts_of(lengths))
    theirs = looped.solve(truth, batch, lengths=own, backend="eager", dtype=torch.bfloat16, n_loops=4)
    limit = 2 * relative_error(theirs.y, want.y)
    error = relative_error(got.y, want.y)
    assert 1e-4 < error <= limit  # above 1e-4: it was bfloat16


@pytest.mark.parametrize(("rows", "lengths"), [(64, [41, 5, 16, 9]), (16, [20])])
def test_bf16x3_is_as_good_as_float32(tiles, rows, lengths):
    tiles(rows, precision="bf16x3")
    truth, model = pair(std=0.1, d_model=64, n_heads=4)
    want, got = both(truth, model, prompts_of(lengths), n_loops=4)
    assert_same(got, want)


def test_a_model_in_bfloat16_keeps_its_state_in_float32(tiles):
    truth, _ = pair(std=0.1)
    model = random_weights(looped.LoopedTransformer(truth.config), 0.1, 0, torch.bfloat16)
    prompts = [p.bfloat16() for p in prompts_of([9, 20])]
    whole = looped.solve(model, prompts, n_loops=6, backend="triton")
    half = looped.solve(model, prompts, n_loops=2, backend="triton")
    resumed = looped.solve(model, prompts, n_loops=6, backend="triton", state=half.state)
    assert whole.y[0].dtype == torch.bfloat16
    assert torch.equal(whole.y[1], resumed.y[1])
    assert torch.equal(whole.state.memory["F32"], resumed.state.memory["F32"])


def test_norms_over_padded_lanes(tiles):
    """Width 48 in 64 lanes, with a mean far from zero: padding lanes must not enter the variance."""
    tiles(32)
    truth, model = [random_weights(states(48, dtype), 0.05, 3, dtype) for dtype in (torch.float64, torch.float32)]
    prompt = (2 + torch.arange(48) / 48).repeat(33, 1).double()
    want = looped.solve(truth, [prompt], n_loops=1, backend="eager")
    got = looped.solve(model, [prompt.float()], n_loops=1, backend="triton")
    assert relative_error(got.y[0], want.y[0]) <= FP32


def states(width, dtype, **changes):
    config = dict(input_kind="states", readout="none", d_model=width, n_heads=3, pos_kind="none", n_loops=1)
    return looped.LoopedTransformer(looped.LoopedConfig(**(config | changes))).to(dtype)


def test_an_identity_keeps_bits_that_tf32_would_drop(tiles):
    """1024.5 through an identity in the MLP; fp32 products must not be rounded to 10 bits, nor bf16x3 to 8."""
    for precision in ("fp32", "bf16x3"):
        tiles(16, precision=precision)

        def weights(model):
            model.core[0].mlp.fc.weight[:16] = torch.eye(16)
            model.core[0].mlp.proj.weight[:, :16] = torch.eye(16)

        model = states_model(weights, d_model=16, activation="relu").float()
        got = looped.solve(model, [torch.full((3, 16), 1024.5)], n_loops=1, backend="triton")
        assert torch.equal(got.y[0], torch.full((3, 16), 2049.0))


def test_predictions_after_every_loop(tiles):
    for changes in (dict(), dict(readout="classes", n_classes=3), dict(loop_norm="once"), dict(loop_norm="once", n_coda=1)):
        for rows in (16, 32):
            tiles(rows)
            truth, model = pair(**changes)
            want, got = both(truth, model, prompts_of([20, 5, 9]), n_loops=3, return_predictions=True)
            assert got.predictions.shape == want.predictions.shape
            torch.testing.assert_close(got.predictions.double(), want.predictions, rtol=1e-4, atol=1e-5)
