"""When prompts leave: rules, stalls, resuming, neighbours, non-finite states, and the edges of every count."""

import math
import mmap

import pytest
import torch
from cases_parity import both, pair, prompts_of, relative_error
from models import icl_model, scalar_map, states_model
from tolerances import FP32

import looped
from looped.exits import Absolute, Contraction, Exact, Fixed, Readout, Relative

MAP_NORESERVE = 0x4000  # of Linux; Python names it since 3.12

LENGTHS = [5, 20, 9, 3, 30, 1]

# Each with the rows of a tile: 16 makes long prompts run as row blocks, 32 makes two prompts share a tile and refill its slots.
RULES = [
    (Relative(tol=4e-2), 16),
    (Relative(tol=6e-2, check_every=3, min_loops=5), 32),
    (Relative(tol=math.inf), 32),
    (Absolute(tol=0.5), 32),
    (Contraction(tol=8e-2), 16),
    (Contraction(tol=8e-2), 32),
    (Contraction(tol=0.2, check_every=2), 32),
    (Readout(tol=4e-2), 16),
    (Readout(tol=4e-2), 32),
    (Readout(tol=0.1, patience=2, check_every=2), 32),
    (Contraction(tol=0.0), 32),
    (Fixed(), 16),
]


@pytest.mark.parametrize(("rule", "rows"), RULES, ids=str)
def test_rules(tiles, rule, rows):
    tiles(rows)
    truth, model = pair(std=0.1, n_heads=1)
    want, got = both(truth, model, prompts_of(LENGTHS), n_loops=10, exit=rule)
    assert torch.equal(got.n_loops, want.n_loops)
    assert torch.equal(got.status, want.status)
    assert relative_error(got.y, want.y) <= FP32
    if not rule.is_fixed and rule.tol < math.inf:
        assert rule.check_every > 1 or len(set(got.n_loops.tolist())) > 1  # they left at different loops
        assert (got.status == looped.Status.CONVERGED).any()


@pytest.mark.parametrize("on_stall", ["ignore", "exit", "damp"])
@pytest.mark.parametrize("rows", [16, 32])
def test_stalls(tiles, on_stall, rows):
    tiles(rows)
    truth, model = pair(std=0.9, seed=1)
    rule = Contraction(stall_window=2, tol=1e-6)
    want, got = both(truth, model, prompts_of([5, 20, 9, 6, 7]), n_loops=12, exit=rule, on_stall=on_stall)
    assert torch.equal(got.n_loops, want.n_loops)
    assert torch.equal(got.status, want.status)
    assert on_stall == "ignore" or (got.status == looped.Status.STALLED).any()
    assert relative_error(got.y, want.y) <= 1e-4  # the map does not contract


@pytest.mark.parametrize("options", [
    dict(exit=None),
    dict(exit=Contraction(tol=5e-2)),
    dict(exit=Readout(tol=3e-2)),
    dict(exit=Contraction(stall_window=2, tol=1e-6), on_stall="damp"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("rows", [16, 32])
def test_resuming_gives_the_same_bits(tiles, options, rows):
    tiles(rows, precision="bf16x3")
    is_damped = options.get("on_stall") == "damp"
    _, model = pair(std=0.9, seed=1) if is_damped else pair(std=0.1, n_heads=1)
    prompts = [p.float() for p in prompts_of([5, 20, 9])]
    whole = looped.solve(model, prompts, n_loops=7, backend="triton", return_predictions=True, **options)
    state = None
    for n in (1, 4, 6, 7):
        part = looped.solve(model, prompts, n_loops=n, backend="triton", state=state, return_predictions=True, **options)
        state = part.state
    for got, want in zip(part.y, whole.y, strict=True):
        assert torch.equal(got, want)
    assert not is_damped or part.state.memory["damped"].any()
    for name in ("n_loops", "status", "residual"):
        assert torch.equal(getattr(part, name), getattr(whole, name))
    for i in range(3):
        torch.testing.assert_close(part.predictions[i], whole.predictions[i][6:], rtol=0, atol=0, equal_nan=True)


def test_resuming_what_another_backend_left(tiles):
    tiles(16)
    truth, model = pair(std=0.1, n_heads=1)
    prompts = [p.float() for p in prompts_of([5, 20])]
    rule = Contraction(tol=1e-2)
    begun = looped.solve(model, prompts, n_loops=3, exit=rule, backend="eager")
    got = looped.solve(model, prompts, n_loops=12, exit=rule, backend="triton", state=begun.state)
    want = looped.solve(truth, [p.double() for p in prompts], n_loops=12, exit=rule, backend="eager")
    assert torch.equal(got.n_loops, want.n_loops)
    back = looped.solve(model, prompts, n_loops=14, exit=rule, backend="eager", state=got.state)
    assert torch.equal(back.status, looped.solve(model, prompts, n_loops=14, exit=rule, backend="eager").status)


def test_a_state_under_another_rule_counts_afresh(tiles):
    tiles(16)
    _, model = pair(std=0.1, n_heads=1)
    prompts = [p.float() for p in prompts_of([5, 9])]
    loose = looped.solve(model, prompts, n_loops=20, exit=Relative(tol=0.5), backend="triton")
    assert (loose.n_loops < 20).all()
    all_loops = looped.solve(model, prompts, n_loops=20, backend="triton", state=loose.state)
    assert (all_loops.n_loops == 20).all()
    for got, want in zip(all_loops.y, looped.solve(model, prompts, n_loops=20, backend="triton").y, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("precision", ["bf16", "bf16x3"])
@pytest.mark.parametrize("rows", [16, 64])
def test_neighbours_change_no_bit(tiles, precision, rows):
    tiles(rows, precision=precision)
    _, model = pair(std=0.1, n_heads=1)
    prompts = [p.float() for p in prompts_of([5, 20, 9, 16, 3, 33, 1])]
    options = dict(n_loops=4, exit=Relative(tol=0.15), backend="triton")
    batch = looped.solve(model, prompts, **options)
    for order in ([6, 5, 4, 3, 2, 1, 0], [3], [5], [0], [2, 2, 2, 2, 2]):
        got = looped.solve(model, [prompts[i] for i in order], **options)
        for place, i in enumerate(order):
            assert torch.equal(got.y[place], batch.y[i])
            assert got.n_loops[place] == batch.n_loops[i]
            assert got.residual[place] == batch.residual[i]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("changes", [dict(), dict(n_core=2, mask_kind="full")], ids=str)
def test_a_state_that_is_not_finite_harms_no_neighbour(tiles, poison, changes):
    tiles(64, precision="bf16")
    _, model = pair(std=0.1, n_heads=1, **changes)
    prompts = [p.float() for p in prompts_of([5, 9, 7, 16])]
    options = dict(n_loops=8, exit=Relative(tol=1e-2), backend="triton")
    clean = looped.solve(model, prompts, **options)
    for where in (slice(0, 1), slice(0, None)):
        prompts[1] = prompts[1].clone()
        prompts[1][where] = poison
        got = looped.solve(model, prompts, **options)
        assert got.status[1] == looped.Status.NONFINITE
        assert got.n_loops[1] == 1
        for i in (0, 2, 3):
            assert torch.equal(got.y[i], clean.y[i])
            assert got.n_loops[i] == clean.n_loops[i]


def test_a_state_that_is_zero_is_at_rest(tiles):
    tiles(16)
    model = states_model(d_model=16).float()
    got = looped.solve(model, [torch.zeros(3, 16)], n_loops=50, exit="contraction", backend="triton")
    assert (got.status[0], got.n_loops[0], got.residual[0]) == (looped.Status.CONVERGED, 1, 0.0)
    assert (got.y[0] == 0).all()


def test_counts_at_their_edges(tiles):
    tiles(16)
    _, model = pair(std=0.1, n_heads=1)
    prompts = [p.float() for p in prompts_of([5, 20])]
    none = looped.solve(model, prompts, n_loops=0, backend="triton", return_predictions=True)
    want = looped.solve(model, prompts, n_loops=0, backend="eager", return_predictions=True)
    for got, right in zip((*none.y, *none.predictions), (*want.y, *want.predictions), strict=True):
        assert torch.equal(got, right)
    assert torch.equal(none.n_loops, want.n_loops)
    assert none.residual.isnan().all()
    assert torch.equal(none.status, want.status)
    with pytest.raises(ValueError, match="min_loops"):
        looped.solve(model, prompts, n_loops=2, exit=Relative(min_loops=3), backend="triton")
    with pytest.raises(ValueError, match="0 or more"):
        looped.solve(model, prompts, n_loops=-1, backend="triton")
    done = looped.solve(model, prompts, n_loops=2, backend="triton")
    again = looped.solve(model, prompts, n_loops=1, backend="triton", state=done.state)
    assert (again.n_loops == 2).all()
    assert torch.equal(again.y[1], done.y[1])


def test_rules_on_known_maps(tiles):
    """A state that merely grows passes relative and never contraction; z <- -0.5 z + 1 ends where eager does."""
    tiles(16)
    grows = states_model().float()
    ones = [torch.ones(1, 1)]
    assert looped.solve(grows, ones, n_loops=40, exit=Relative(tol=0.049), backend="triton").n_loops[0] == 21
    stalled = looped.solve(grows, ones, n_loops=40, exit=Contraction(tol=0.049), on_stall="exit", backend="triton")
    assert stalled.status[0] == looped.Status.STALLED
    # Y <- a (Y + P) with a = -0.5 and P = -2 is z <- -0.5 z + 1
    model = scalar_map(-0.5).float()
    prompt = [torch.full((1, 1), -2.0)]
    for rule in (Relative(tol=0.05), Absolute(tol=0.05), Absolute(tol=0.03)):
        want = looped.solve(scalar_map(-0.5), [p.double() for p in prompt], exit=rule, backend="eager")
        assert looped.solve(model, prompt, exit=rule, backend="triton").n_loops[0] == want.n_loops[0]


def test_exact_compares_bits(tiles):
    """A halted program is a fixed point; one that counts for ever never is."""
    tiles(16)

    def halts(model):  # Y <- relu(P): at rest from the second loop on
        model.core[0].mlp.fc.weight[:16] = -torch.eye(16)
        model.core[0].mlp.fc.weight[16:32] = torch.eye(16)
        model.core[0].mlp.proj.weight[:, :16] = torch.eye(16)
        model.core[0].mlp.proj.weight[:, 16:32] = -torch.eye(16)

    model = states_model(halts, d_model=16, activation="relu").float()
    got = looped.solve(model, [torch.randn(4, 16), torch.randn(20, 16)], n_loops=9, exit=Exact(), backend="triton")
    assert got.status.tolist() == [looped.Status.CONVERGED] * 2
    assert got.n_loops.tolist() == [1, 1]
    counts = looped.solve(states_model(d_model=16).float(), [torch.ones(3, 16)], n_loops=9, exit=Exact(), backend="triton")
    assert (counts.status[0], counts.n_loops[0]) == (looped.Status.MAX_LOOPS, 9)


def test_empty_prompts_and_empty_batches(tiles):
    tiles(16)
    _, model = pair(std=0.1, n_heads=1)
    lengths = [0, 1, 0, 3]
    prompts = [p.float() for p in prompts_of(lengths)]
    got = looped.solve(model, prompts, n_loops=3, exit="contraction", backend="triton")
    want = looped.solve(model, prompts, n_loops=3, exit="contraction", backend="eager")
    assert [len(y) for y in got.y] == lengths
    assert torch.equal(got.n_loops, want.n_loops)
    assert torch.equal(got.status, want.status)
    solo = looped.solve(model, [prompts[3]], n_loops=3, exit="contraction", backend="triton")
    assert torch.equal(solo.y[0], got.y[3])
    assert looped.solve(model, [], n_loops=3, backend="triton").y == []
    assert looped.solve(model, torch.zeros(0, 4, 3), n_loops=3, backend="triton").y.shape == (0, 4, 16)
    assert looped.solve(model, torch.zeros(2, 0, 3), n_loops=3, backend="triton").y.shape == (2, 0, 16)


def test_weights_that_changed_are_packed_again(tiles):
    tiles(16)
    _, model = pair(std=0.1, n_heads=1)
    prompts = [torch.randn(5, 3)]

    def agrees():
        got = looped.solve(model, prompts, n_loops=2, backend="triton").y[0]
        want = looped.solve(model, prompts, n_loops=2, backend="eager").y[0]
        return bool(torch.allclose(got, want, atol=1e-5))

    assert agrees()
    with torch.no_grad():
        model.core[0].mlp.proj.weight.mul_(2)
    assert agrees()
    model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})
    assert agrees()
    model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()}, assign=True)
    assert agrees()
    model.bfloat16().float()
    assert agrees()
    # Other numbers in a parameter of the same version, in memory at an address that was given back.
    place = bytearray(model.core[0].mlp.proj.weight.nbytes)
    for scale in (1.0, 3.0):
        numbers = torch.frombuffer(place, dtype=torch.float32).view_as(model.core[0].mlp.proj.weight)
        numbers.copy_(scale * torch.randn(numbers.shape, generator=torch.Generator().manual_seed(0)))
        model.core[0].mlp.proj.weight.data = numbers
        assert agrees()


def test_strides_of_the_input_do_not_matter(tiles):
    tiles(16)
    _, model = pair(std=0.1, n_heads=1)
    whole = torch.randn(8, 2, 6).transpose(0, 1)
    view = whole[:, ::2, :3]
    kept = view.clone()
    got = looped.solve(model, view, n_loops=2, backend="triton")
    assert torch.equal(got.y, looped.solve(model, view.contiguous(), n_loops=2, backend="triton").y)
    assert torch.equal(view, kept)
    assert got.y.is_contiguous()


def test_what_the_kernels_do_not_run_is_named():
    model = icl_model(dtype=torch.float32)
    prompts = [torch.randn(4, 3)]
    with pytest.raises(ValueError, match="Anderson"):
        looped.solve(model, prompts, exit="contraction", accelerate="anderson", backend="triton")
    with pytest.raises(ValueError, match="whole prompts"):
        looped.solve(model, prompts, exit=Contraction(scope="prefix"), backend="triton")
    with pytest.raises(ValueError, match="float64"):
        looped.solve(model.double(), [p.double() for p in prompts], backend="triton")
    wide = icl_model(dtype=torch.float32, d_model=512, n_heads=8)
    with pytest.raises(ValueError, match="512 wide"):
        looped.solve(wide, prompts, backend="triton")


@pytest.mark.parametrize(("kernel", "length"), [("loop_tile", 41), ("loop_blocks", 70)])
def test_offsets_beyond_32_bits(tiles, monkeypatch, kernel, length):
    """The prompt whose numbers begin beyond 2^31 of them, in memory of which only its own pages are ever touched."""
    from loopkernels import launch

    tiles(64)
    _, model = pair(std=0.1, n_heads=1)
    prompt = prompts_of([length])[0].float()
    want = looped.solve(model, [prompt], n_loops=2, backend="triton").y[0]
    per_prompt = length * 16
    last = 2**31 // per_prompt + 1

    def sparse(own, dtype):
        size = own.numel() * (last + 1)
        pages = mmap.mmap(-1, size * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        whole = torch.frombuffer(pages, dtype=dtype).view(last + 1, *own.shape)
        whole[last] = own
        return whole

    real, seen = getattr(launch, kernel), []

    class Far:
        def __getitem__(self, grid):
            def run(prompts, start, final, going, before, ints, floats, order, lengths, *rest, **constants):
                far = [sparse(x[0], torch.float32) for x in (prompts, start, final)]
                memory = sparse(ints[0], torch.int32), sparse(floats[0], torch.float32)
                order, lengths = torch.full_like(order, last), sparse(lengths[0], torch.int32)
                real[grid](*far, far[2], before, *memory, order, lengths, *rest, **constants)
                final.copy_(far[2][last:])
                seen.append(far[2].numel())

            return run

    monkeypatch.setattr(launch, kernel, Far())
    got = looped.solve(model, [prompt], n_loops=2, backend="triton").y[0]
    assert seen[0] > 2**31
    assert torch.equal(got, want)


def test_the_watchdog_ends_a_loop_whose_counter_never_moves(tiles):
    """max_steps bounds a program's loops whatever the memory says."""
    from loopkernels import launch

    assert launch.most_steps(3, 10) == 31
    assert launch.most_steps(2**20, 2**20) == 2**31 - 1
