"""The engine's kernels one by one against NumPy in float64, at odd sizes, on every instruction set of this machine."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest

try:
    from looped import _engine
except ImportError:
    _engine = pytest.importorskip("_engine", reason="the C++ engine is not built")

kernels = _engine.kernels
SIZES = (1, 5, 17, 48, 113)  # below, between and above the panels and tiles of every instruction set
BOUND = {np.float32: 4e-7, np.float64: 2e-15}  # of the values' scale, times the square root of the terms of a sum
both = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def draw(*shape, dtype, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def empty(n_rows, width, dtype):
    """A matrix of NaN, which shows where nothing is written."""
    return (kernels.Matrix32 if dtype == np.float32 else kernels.Matrix64)(n_rows, width)


def assert_close(got, want, dtype, n_terms=1):
    assert got.dtype == dtype
    scale = max(1.0, np.abs(want).max(initial=0.0))
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=BOUND[dtype] * scale * n_terms**0.5)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / 2**0.5))


def relu(x):
    return np.maximum(x, 0)


@both
@pytest.mark.parametrize("n_out", SIZES)
@pytest.mark.parametrize("n_in", [1, 5, 113])
def test_product(n_in, n_out, dtype):
    w, bias = draw(n_out, n_in, dtype=dtype, seed=1), draw(n_out, dtype=dtype, seed=2)
    packed, plain = kernels.pack(w, bias), kernels.pack(w)
    assert (packed.n_in, packed.n_out) == (n_in, n_out)
    for n_rows in SIZES:
        a, out = kernels.matrix(draw(n_rows, n_in, dtype=dtype)), empty(n_rows, n_out, dtype)
        linear = a.array.astype(np.float64) @ w.astype(np.float64).T + bias
        for name, function in (("none", lambda x: x), ("relu", relu), ("gelu_tanh", gelu_tanh), ("gelu", gelu)):
            out.array[:] = np.nan
            kernels.product(a, packed, out, activation=name)
            assert_close(out.array, function(linear), dtype, n_in)
        before = out.array.astype(np.float64)
        kernels.product(a, packed, out, adds_to_out=True)
        assert_close(out.array, before + linear, dtype, n_in)
        kernels.product(a, plain, out)
        assert_close(out.array, linear - bias, dtype, n_in)


@both
def test_gelu_over_its_whole_range(dtype):
    x = np.concatenate([np.linspace(-12, 12, 4801), [0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4]]).astype(dtype)[:, None]
    w = kernels.pack(np.ones((17, 1), dtype))  # a product with 1 is the number itself
    out = empty(len(x), 17, dtype)
    kernels.product(kernels.matrix(x), w, out, activation="gelu_tanh")
    want = gelu_tanh(x.astype(np.float64)).repeat(17, axis=1)
    error = np.abs(out.array - want)
    assert (error <= 6 * np.finfo(dtype).eps * np.abs(want) + 2 * np.finfo(dtype).eps * np.abs(x)).all()
    poison = kernels.matrix(np.array([[np.nan], [-np.inf], [np.inf]], dtype))
    out = empty(3, 17, dtype)
    kernels.product(poison, w, out, activation="gelu_tanh")
    assert np.isnan(out.array[0]).all()
    assert not np.isfinite(out.array[2]).any()


def attention(qkv, n_heads, is_causal):
    """Softmax of base 2 over scores that are scaled already: [T, H head_dim] in float64."""
    T = len(qkv)
    q, k, v = (part.reshape(T, n_heads, -1).transpose(1, 0, 2) for part in np.split(qkv.astype(np.float64), 3, axis=1))
    scores = q @ k.transpose(0, 2, 1)  # [H, T, T]
    if is_causal:
        scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
    weights = np.exp2(scores - scores.max(-1, keepdims=True))
    return ((weights / weights.sum(-1, keepdims=True)) @ v).transpose(1, 0, 2).reshape(T, -1)


def run_attention(qkv, n_heads, first=0, is_causal=True, end=None):
    n_tokens, width = qkv.shape[0], qkv.shape[1] // 3
    rows, panel = kernels.tile(double=qkv.dtype == np.float64)
    n_keys = -(-n_tokens // panel) * panel
    out, dtype = empty(n_tokens, width, qkv.dtype), qkv.dtype
    kernels.attend(
        kernels.matrix(qkv),
        out,
        empty(width // n_heads, n_keys, dtype),
        empty(rows, n_keys, dtype),
        n_heads,
        first=first,
        is_causal=is_causal,
        end=end,
    )
    return out.array


@both
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("n_tokens", SIZES)
def test_attend(n_tokens, is_causal, dtype):
    for n_heads, head_dim in ((1, 1), (2, 5), (3, 16), (1, 48)):
        qkv = draw(n_tokens, 3 * n_heads * head_dim, dtype=dtype)
        want = attention(qkv, n_heads, is_causal)
        assert_close(run_attention(qkv, n_heads, 0, is_causal), want, dtype, head_dim * n_tokens)
        for first in {n_tokens // 2, n_tokens - 1, n_tokens}:  # a frozen prefix is seen and not written
            got = run_attention(qkv, n_heads, first, is_causal)
            assert np.isnan(got[:first]).all()
            assert_close(got[first:], want[first:], dtype, head_dim * n_tokens)
            for end in {first, (first + n_tokens) // 2, n_tokens}:  # a share of a team: seen whole, written up to its end
                share = run_attention(qkv, n_heads, first, is_causal, end)
                np.testing.assert_array_equal(share[first:end], got[first:end])
                assert np.isnan(share[:first]).all()
                assert np.isnan(share[end:]).all()


@both
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_token_is_seen_by_none_before_it(bad, dtype):
    qkv = draw(33, 3 * 2 * 5, dtype=dtype)
    want = run_attention(qkv, 2)
    for place in (0, 1, 12, 32):
        broken = qkv.copy()
        broken[place, 20:] = bad  # its values
        got = run_attention(broken, 2)
        assert got[:place].tobytes() == want[:place].tobytes()
        assert not np.isfinite(got[place:]).any()


def test_scores_far_apart_do_not_overflow():
    qkv = 40 * draw(17, 3 * 16, dtype=np.float32)
    got, want = run_attention(qkv, 1), attention(qkv, 1, True)
    # A score of 1e4 is rounded to 5e-4, and so is the exponent.
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-3 * np.abs(want).max())


@both
@pytest.mark.parametrize("width", SIZES)
def test_normalize(width, dtype):
    gain, shift = draw(width, dtype=dtype, seed=1), draw(width, dtype=dtype, seed=2)
    for n_rows in SIZES:
        x = (3 + 2 * draw(n_rows, width, dtype=dtype)).astype(dtype)
        exact = x.astype(np.float64)
        want = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-5)
        out = empty(n_rows, width, dtype)
        kernels.normalize(kernels.matrix(x), out, 1e-5)
        assert_close(out.array, want, dtype, 30 * width)  # near-equal numbers of a narrow row cancel
        out = empty(n_rows, width, dtype)
        kernels.normalize(kernels.matrix(x), out, 1e-5, gain, shift)
        assert_close(out.array, want * gain + shift, dtype, 30 * width)
        kernels.normalize(kernels.matrix(x), out, 1e-5, gain, norm="rms")
        assert_close(out.array, exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * gain, dtype, 30 * width)


@both
@pytest.mark.parametrize("width", SIZES)
def test_inject(width, dtype):
    state, signal, positions = (draw(7, width, dtype=dtype, seed=seed) for seed in range(3))
    for how, mixed in (("add", state + signal), ("mul", state * signal), ("none", state)):
        for place in (None, positions):
            out = empty(7, width, dtype)
            matrices = [kernels.matrix(state), kernels.matrix(signal), None if place is None else kernels.matrix(place)]
            kernels.inject(how, *matrices, out)
            np.testing.assert_array_equal(out.array, mixed if place is None else mixed + place)


@both
@pytest.mark.parametrize("width", SIZES)
def test_squares(width, dtype):
    a, b = draw(5, width, dtype=dtype, seed=1), draw(5, width, dtype=dtype, seed=2)
    of_difference, of_a = kernels.squares(kernels.matrix(a), kernels.matrix(b))
    apart, own = (a - b).astype(np.float64), a.astype(np.float64)
    np.testing.assert_allclose(of_difference, (apart**2).sum(-1), rtol=1e-12)
    np.testing.assert_allclose(of_a, (own**2).sum(-1), rtol=1e-12)


@both
def test_a_rows_bits_do_not_depend_on_its_tile(dtype):
    w = kernels.pack(draw(48, 33, dtype=dtype, seed=1), draw(48, dtype=dtype, seed=2))
    rows = draw(29, 33, dtype=dtype)
    whole, alone = empty(29, 48, dtype), empty(1, 48, dtype)
    kernels.product(kernels.matrix(rows), w, whole, activation="gelu_tanh")
    for i in range(29):
        kernels.product(kernels.matrix(rows[i : i + 1]), w, alone, activation="gelu_tanh")
        np.testing.assert_array_equal(alone.array[0], whole.array[i])


def test_wrong_shapes_are_refused():
    f = np.float32
    a, w = empty(3, 5, f), kernels.pack(draw(4, 6, dtype=f))
    with pytest.raises(ValueError, match=r"kernels.product: a must be \[3, 6\], got \[3, 5\]"):
        kernels.product(a, w, empty(3, 4, f))
    with pytest.raises(ValueError, match=r"out must be \[3, 4\], got \[2, 4\]"):
        kernels.product(empty(3, 6, f), w, empty(2, 4, f))
    with pytest.raises(ValueError, match="activation='tanh' is not one of none, relu, gelu_tanh"):
        kernels.product(empty(3, 6, f), w, empty(3, 4, f), activation="tanh")
    with pytest.raises(ValueError, match="keys must be"):
        kernels.attend(empty(3, 12, f), empty(3, 4, f), empty(1, 1, f), empty(1, 1, f), 2)
    for end in (0, 4):
        with pytest.raises(ValueError, match=rf"end must lie in first .. 3, got {end}"):
            kernels.attend(empty(3, 12, f), empty(3, 4, f), empty(1, 1, f), empty(1, 1, f), 2, first=1, end=end)
    with pytest.raises(ValueError, match="must divide by n_heads"):
        kernels.attend(empty(3, 12, f), empty(3, 4, f), empty(1, 1, f), empty(1, 1, f), 3)
    with pytest.raises(ValueError, match="gain must be C-contiguous float32"):
        kernels.normalize(a, a, 1e-5, np.ones(4, f), np.ones(5, f))
    with pytest.raises(ValueError, match="how='sub'"):
        kernels.inject("sub", a, a, None, a)
    with pytest.raises(TypeError):
        kernels.normalize(a, empty(3, 5, np.float64), 1e-5)


def test_the_peak_of_more_threads_than_cores_is_that_of_the_cores():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    alone = max(_engine.fma_peak(1, 0.05) for _ in range(12))  # one at least that no neighbour disturbs
    assert 0 < _engine.fma_peak(6 * cores, 0.2) < 1.5 * cores * alone
    for seconds in (float("inf"), float("nan"), 0.0, -1.0, 61.0):
        with pytest.raises(ValueError, match="seconds must lie above 0 and be at most 60"):
            _engine.fma_peak(1, seconds)
    with pytest.raises(ValueError, match="n_threads must be at least 1"):
        _engine.fma_peak(0)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "neon"])
def test_on_every_instruction_set_of_this_machine(isa):
    if _engine.isa() == isa:
        pytest.skip(f"{isa} is what the tests above ran on")
    paths = f"import sys; sys.path[:0] = {sys.path!r}\n"
    known = subprocess.run(
        [sys.executable, "-c", paths + "from test_kernels import _engine; _engine.isa()"],
        env=os.environ | {"LOOPED_ISA": isa},
        capture_output=True,
        text=True,
    )
    if "is not an instruction set of this machine" in known.stderr:
        pytest.skip(f"{isa} is not an instruction set of this machine")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "not instruction_set"],
        env=os.environ | {"LOOPED_ISA": isa, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert "passed" in run.stdout
