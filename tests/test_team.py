"""One prompt on several threads: used where there are fewer prompts than threads, and the same bits at any number."""

import os
import sys

import pytest
import torch
from models import icl_model
from test_cpu_engine import Cpu

from looped.exits import Contraction, Exact, Readout, Relative

MODES = {
    "all loops": dict(),
    "contraction": dict(exit=Contraction(tol=1e-2)),
    "prefix": dict(exit=Contraction(tol=1e-2, scope="prefix")),
    "prefix by read-out": dict(exit=Readout(tol=1e-2, scope="prefix")),
    "exact": dict(exit=Exact()),
    "read-out": dict(exit=Readout(tol=1e-2), return_predictions=True),
    "damped": dict(exit=Relative(tol=1e-9, stall_window=2), on_stall="damp"),
    "Anderson": dict(exit=Contraction(tol=1e-4), depth=2),
}


def wide(dtype=torch.float32, **changes):
    """Wide enough that a thread is worth its waking for four tokens."""
    return Cpu(icl_model(std=0.06, dtype=dtype, d_model=64, n_heads=4, n_points=20, **changes))


def bits_of(result):
    arrays = {name: result[name] for name in ("y", "prediction", "predictions") if name in result} | result["memory"]
    return {name: array.tobytes() for name, array in arrays.items()}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("n_tokens", [1, 4, 9, 17, 40])
def test_the_number_of_threads_changes_no_bit(mode, n_tokens):
    cpu = wide()
    x = torch.randn(1, n_tokens, 3, generator=torch.Generator().manual_seed(n_tokens))
    alone = bits_of(cpu(x, n_loops=25, n_threads=1, **mode))
    for n_threads in (2, 3, 7, 100):
        assert bits_of(cpu(x, n_loops=25, n_threads=n_threads, **mode)) == alone, n_threads


@pytest.mark.parametrize(
    "changes",
    [
        dict(n_prelude=2, n_core=3, n_coda=2, loop_norm="once"),
        dict(mask_kind="full"),
        dict(loop_norm="once"),
        dict(norm_kind="none", loop_norm="none", n_coda=1),
        dict(pos_when="once", n_prelude=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_part_of_a_model_may_be_shared(changes, dtype):
    cpu = wide(dtype, **changes)
    x = torch.randn(1, 33, 3, generator=torch.Generator().manual_seed(0), dtype=dtype)
    alone = cpu(x, n_loops=5, n_threads=1, return_predictions=True)
    assert torch.isfinite(torch.from_numpy(alone["y"])).all()
    for n_threads in (2, 5):
        assert bits_of(cpu(x, n_loops=5, n_threads=n_threads, return_predictions=True)) == bits_of(alone), n_threads


def test_a_bad_token_is_as_bad_on_any_number_of_threads():
    cpu = wide(n_coda=1, loop_norm="once")
    x = torch.randn(1, 33, 3, generator=torch.Generator().manual_seed(0))
    x[0, 17] = torch.nan
    alone = cpu(x, n_loops=3, n_threads=1)
    assert torch.from_numpy(alone["y"]).isnan().any(-1)[0].tolist() == [t >= 17 for t in range(33)]
    for n_threads in (2, 3, 8):
        assert bits_of(cpu(x, n_loops=3, n_threads=n_threads)) == bits_of(alone), n_threads


def test_fewer_prompts_than_threads_share_them():
    cpu = wide()
    x = torch.randn(3, 40, 3, generator=torch.Generator().manual_seed(1))
    lengths = [40, 3, 21]
    alone = bits_of(cpu(x, lengths, n_loops=25, n_threads=1, exit=Contraction(tol=1e-3)))
    for n_threads in (2, 3, 4, 5, 11):
        assert bits_of(cpu(x, lengths, n_loops=25, n_threads=n_threads, exit=Contraction(tol=1e-3))) == alone, n_threads


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_a_prompt_alone_gets_all_the_threads():
    cpu = wide()
    x = torch.randn(1, 40, 3)
    n_before = len(os.listdir("/proc/self/task"))

    def threads_beside_the_caller(n_threads):
        seen = []

        def look(_):
            seen.append(len(os.listdir("/proc/self/task")) - n_before)
            raise InterruptedError

        with pytest.raises(InterruptedError):
            cpu(x, n_loops=10**9, n_threads=n_threads, progress=look)
        return seen[0]

    assert [threads_beside_the_caller(n) for n in (1, 2, 4)] == [0, 1, 3]
