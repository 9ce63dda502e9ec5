"""The functions of the C++ engine one by one, on one thread: pytest benches (needs the extra: pip install 'looped[bench]').

Every case states what it does in one call, operations or bytes, and `peak_fraction`: its operations as a share of the FMA peak
measured at the start, or its bytes as a share of the rate at which this machine copies as many. benches/peers.py compares.
"""

import time

import numpy as np
import pytest
import torch

from looped.backends.cpu import spec_values
from looped.bench.shapes import operations, random_model, shape_sizes
from looped.exits import Fixed
from looped.loop import LoopSpec

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed: pip install 'looped[bench]'")
_engine = pytest.importorskip("looped._engine", reason="the C++ engine is not built")
kernels = _engine.kernels

SHAPES = ("C256H8T82", "C128H4T41", "C64H4T22")
by_shape = pytest.mark.parametrize("shape", SHAPES)
dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@pytest.fixture(scope="module")
def peak():
    """GFLOP/s of fused multiply-adds on one thread, by dtype."""
    return {dtype: _engine.fma_peak(1, 0.3, dtype is np.float64) for dtype in (np.float32, np.float64)}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(*shape, dtype):
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def empty(n_rows, width, dtype):
    return (kernels.Matrix32 if dtype is np.float32 else kernels.Matrix64)(n_rows, width)


def state_operations(benchmark, n_operations, peak_gflops):
    median = benchmark.stats.stats.median
    benchmark.extra_info |= dict(flops=n_operations, gflops=n_operations / median / 1e9)
    benchmark.extra_info["peak_fraction"] = benchmark.extra_info["gflops"] / peak_gflops


def state_bytes(benchmark, n_bytes):
    """n_bytes: read and written in one call. Beside them the rate of a plain copy that reads half and writes half."""
    median = benchmark.stats.stats.median
    source, target = np.ones(n_bytes // 2, np.uint8), np.zeros(n_bytes // 2, np.uint8)
    seconds = []
    for _ in range(50):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    rate, copy = n_bytes / median / 1e9, n_bytes / np.median(seconds) / 1e9
    benchmark.extra_info |= dict(bytes=n_bytes, gbytes_per_s=rate, copy_gbytes_per_s=copy, peak_fraction=rate / copy)


@dtypes
@by_shape
@pytest.mark.parametrize("which", ["qkv", "proj", "fc", "down"])
def test_gemm(benchmark, peak, which, shape, dtype):
    C, _, T = shape_sizes(shape)
    n_in, n_out = {"qkv": (C, 3 * C), "proj": (C, C), "fc": (C, 4 * C), "down": (4 * C, C)}[which]
    a, out = kernels.matrix(draw(T, n_in, dtype=dtype)), empty(T, n_out, dtype)
    w = kernels.pack(draw(n_out, n_in, dtype=dtype), draw(n_out, dtype=dtype))
    benchmark(kernels.product, a, w, out)
    state_operations(benchmark, 2 * T * n_in * n_out, peak[dtype])


@by_shape
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_attention(benchmark, peak, is_causal, shape):
    C, H, T = shape_sizes(shape)
    rows, panel = kernels.tile()
    n_keys = -(-T // panel) * panel
    qkv, out = kernels.matrix(draw(T, 3 * C, dtype=np.float32)), empty(T, C, np.float32)
    keys, scores = empty(C // H, n_keys, np.float32), empty(rows, n_keys, np.float32)
    benchmark(kernels.attend, qkv, out, keys, scores, H, 0, is_causal)
    state_operations(benchmark, (2 * T * (T + 1) if is_causal else 4 * T * T) * C, peak[np.float32])


@by_shape
def test_norm(benchmark, shape):
    C, _, T = shape_sizes(shape)
    x, out = kernels.matrix(draw(T, C, dtype=np.float32)), empty(T, C, np.float32)
    benchmark(kernels.normalize, x, out, 1e-5)
    state_bytes(benchmark, 2 * 4 * T * C)


@by_shape
def test_gelu(benchmark, shape):
    """GELU as it is run: on the register tile of a product, here one that multiplies by 1."""
    C, _, T = shape_sizes(shape)
    a, w, out = (
        kernels.matrix(draw(T, 1, dtype=np.float32)),
        kernels.pack(np.ones((4 * C, 1), np.float32)),
        empty(T, 4 * C, np.float32),
    )
    benchmark(kernels.product, a, w, out, "gelu_tanh")
    state_bytes(benchmark, 2 * 4 * T * 4 * C)


@by_shape
def test_one_block(benchmark, peak, shape):
    """One prompt through 20 loops of the engine, which are 20 blocks; the figures are of all 20."""
    _, _, T = shape_sizes(shape)
    model = random_model(shape)
    engine = _engine.Engine(model.config.to_dict(), {name: w.numpy() for name, w in model.state_dict().items()})
    signal = engine.embed(draw(1, T, 20, dtype=np.float32), None, 1)
    spec = spec_values(LoopSpec(n_loops=20, rule=Fixed()), torch.float32)
    benchmark(engine.run, signal, np.zeros_like(signal), None, spec)
    state_operations(benchmark, 20 * operations(model, T), peak[np.float32])


@by_shape
def test_packing(benchmark, shape):
    C, _, _ = shape_sizes(shape)
    weight = draw(4 * C, C, dtype=np.float32)
    benchmark(kernels.pack, weight)
    state_bytes(benchmark, 2 * weight.nbytes)
