"""A changed weight is noticed, whatever way it was changed: by the packed copies, and by a state that is resumed."""

import copy

import numpy as np
import pytest
import torch
from models import icl_model

import looped
from looped import conversion
from looped.backends import cpu, triton
from looped.weights import checksum, weights_of

needs_engine = pytest.mark.skipif(not cpu.is_there(), reason="the C++ engine is not built")


def prompts():
    return torch.randn(3, 9, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def optimizer_step(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(prompts()).sum().backward()
    optimizer.step()


def new_parameter(model):
    model.core[0].mlp.fc.weight = torch.nn.Parameter(model.core[0].mlp.fc.weight.detach() * 2)


def through_numpy(model):
    model.core[0].mlp.fc.weight.detach().numpy()[3, 4] += 1  # no version counts this


@torch.no_grad()
def in_place(model):
    model.core[0].mlp.fc.weight.mul_(2)


def by_data(model):
    model.core[0].mlp.fc.weight.data.mul_(2)


def other_data(model):
    model.core[0].mlp.fc.weight.data = model.core[0].mlp.fc.weight.data * 2


def rows_change_places(model):
    weight = model.core[0].mlp.fc.weight.data
    weight.copy_(weight.flip(0))


def columns_change_places(model):
    weight = model.core[0].mlp.fc.weight.data
    weight.copy_(weight.flip(1))


@torch.inference_mode()
def in_inference_mode(model):
    model.core[0].mlp.fc.weight.mul_(2)


CHANGES = {
    "in place": in_place,
    ".data": by_data,
    "new .data": other_data,
    "rows": rows_change_places,
    "columns": columns_change_places,
    "NumPy": through_numpy,
    "inference mode": in_inference_mode,
    "load_state_dict": lambda model: model.load_state_dict(icl_model(std=0.1, seed=5).state_dict()),
    "assigned": lambda model: model.load_state_dict(icl_model(std=0.1, seed=5).state_dict(), assign=True),
    "optimizer": optimizer_step,
    "parameter": new_parameter,
    "first parameter": lambda model: setattr(model.read_in, "weight", torch.nn.Parameter(model.read_in.weight.detach() * 2)),
    "tied": lambda model: setattr(model.core[0], "norm_2", model.core[0].norm_1),
}


@needs_engine
@pytest.mark.parametrize("name", CHANGES)
def test_the_engine_sees_every_change(name):
    model, x = icl_model(std=0.1), prompts()
    before = looped.solve(model, x, backend="cpu").y
    assert torch.equal(looped.solve(model, x, backend="cpu").y, before)
    CHANGES[name](model)
    after = looped.solve(model, x, backend="cpu").y
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, looped.solve(model, x, backend="eager").y)


@needs_engine
def test_one_weight_in_two_places_is_one_change_in_both():
    model, x = icl_model(std=0.1, n_core=2), prompts()
    model.core[1] = model.core[0]
    for _ in range(2):
        torch.testing.assert_close(looped.solve(model, x, backend="cpu").y, looped.solve(model, x, backend="eager").y)
        in_place(model)


@needs_engine
def test_the_dtype_may_change():
    model, x = icl_model(std=0.1), prompts()
    for dtype in (torch.float64, torch.float32, torch.float64):
        assert looped.solve(model.to(dtype), x, backend="cpu").y.dtype == dtype


@pytest.fixture
def made(monkeypatch):
    """One entry for each time that weights are packed."""
    made = []
    engine = cpu._engine.Engine

    class Counted:
        def __new__(cls, *arguments):
            made.append(1)
            return engine(*arguments)

    monkeypatch.setattr(cpu._engine, "Engine", Counted)
    return made


@needs_engine
def test_models_that_share_their_first_weight_are_packed_once_each(made):
    model, x = icl_model(std=0.1), prompts()
    others = [icl_model(std=0.1, seed=seed) for seed in (1, 2)]
    for other in others:
        other.read_in.weight = model.read_in.weight
    for _ in range(3):
        for one in (model, *others):
            want = looped.solve(one, x, backend="eager").y
            torch.testing.assert_close(looped.solve(one, x, backend="cpu").y, want)
    assert len(made) == 3
    for n in range(3):  # old selves are not kept
        in_place(others[0])
        looped.solve(others[0], x, backend="cpu")
        looped.solve(model, x, backend="cpu")
        assert len(made) == 4 + n
        assert len(cpu._packed[model.read_in.weight]) == 3


@needs_engine
def test_a_model_in_another_dtype_is_packed_once(made):
    n_before, n_copies = len(cpu._packed), len(conversion._converted)
    model, x = icl_model(std=0.1, dtype=torch.float32), prompts()
    want = looped.solve(copy.deepcopy(model).double(), x, backend="cpu").y
    made.clear()
    for _ in range(3):
        assert torch.equal(looped.solve(model, x, dtype=torch.float64, backend="cpu").y, want)
        looped.solve(model, x, backend="cpu")
    assert len(made) == 2
    for n in range(3):
        in_place(model)
        got = looped.solve(model, x, dtype=torch.float64, backend="cpu").y
        torch.testing.assert_close(got, looped.solve(model, x, dtype=torch.float64, backend="eager").y)
        assert len(made) == 3 + n
        assert len(conversion._converted[model.read_in.weight]) == 1
    del model
    assert len(cpu._packed) <= n_before
    assert len(conversion._converted) <= n_copies


@pytest.mark.parametrize("backend", ["eager", pytest.param("cpu", marks=needs_engine)])
@pytest.mark.parametrize("name", CHANGES)
def test_converted_weights_follow_every_change(name, backend):
    model, x = icl_model(std=0.1), prompts()
    options = dict(dtype=torch.float32, backend=backend)
    before = looped.solve(model, x, **options).y
    assert torch.equal(looped.solve(model, x, **options).y, before)
    CHANGES[name](model)
    after = looped.solve(model, x, **options).y
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, looped.solve(copy.deepcopy(model).float(), x, backend="eager").y)


def test_converted_weights_are_the_same_tensors_and_the_rest_is_new(monkeypatch):
    model = icl_model(std=0.1, n_core=2)
    model.core[1].attn = model.core[0].attn  # one weight in two places
    first, second = (conversion.in_dtype(model, torch.float32) for _ in range(2))
    other = conversion.in_dtype(model, torch.bfloat16)
    for copied in (first, second):
        assert copied.core[1].attn.qkv.weight is copied.core[0].attn.qkv.weight
        assert {weight.dtype for weight in weights_of(copied).values()} == {torch.float32}
    assert all(a is b for a, b in zip(weights_of(first).values(), weights_of(second).values(), strict=True))
    assert triton.marks_of(weights_of(first)) == triton.marks_of(weights_of(second))
    assert {weight.dtype for weight in weights_of(other).values()} == {torch.bfloat16}
    assert {weight.dtype for weight in weights_of(model).values()} == {torch.float64}
    model.core[0].mlp.register_forward_hook(lambda module, inputs, output: output * 2)
    assert conversion.in_dtype(model, torch.float32).why_not_as_configured() == "a module has hooks"
    assert first.why_not_as_configured() is None
    looped.repack(model)
    assert conversion.in_dtype(model, torch.float32).read_in.weight is not first.read_in.weight


@needs_engine
def test_weights_are_packed_once_and_go_with_their_model(made):
    n_before = len(cpu._packed)
    model, other, x = icl_model(std=0.1), icl_model(std=0.2), prompts()
    for _ in range(3):
        looped.solve(model, x, backend="cpu")
        looped.solve(other, x, backend="cpu")
    with torch.no_grad():
        model(x)
    assert len(made) == 2
    del model, other
    assert len(cpu._packed) <= n_before


@needs_engine
@torch.no_grad()
def test_a_compiled_model_uses_the_same_packed_weights(monkeypatch):
    torch._dynamo.reset()
    model, x = icl_model(std=0.1), prompts()
    want, compiled = model(x), torch.compile(model, fullgraph=True)
    monkeypatch.setattr(cpu._engine, "Engine", None)
    assert torch.equal(compiled(x), want)


@pytest.mark.parametrize("backend", ["eager", pytest.param("cpu", marks=needs_engine)])
@pytest.mark.parametrize("name", CHANGES)
def test_a_state_does_not_go_on_under_other_weights(backend, name):
    model, x = icl_model(std=0.1), prompts()
    state = looped.solve(model, x, n_loops=3, backend=backend).state
    looped.solve(model, x, n_loops=6, state=state.select([0, 1, 2]), backend="eager")
    CHANGES[name](model)
    with pytest.raises(ValueError, match="state was made with other weights than the model has now; start without state"):
        looped.solve(model, x, n_loops=6, state=state, backend=backend)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (5, 3), (64, 64), (300, 33), (2049, 17), (0, 4)])
def test_every_number_and_its_place_counts(shape, dtype):
    weight = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)[1]
    weight = weight if weight.dim() > 1 else weight[None]
    mark = checksum([weight])
    assert checksum([weight.clone()]) == checksum([weight.mT.contiguous().mT]) == mark
    assert checksum([weight.flatten()]) != mark
    n = weight.numel()
    for i in {0, n // 3, n - 1} if n else ():
        changed = weight.clone()
        changed.view(-1)[i] = -changed.view(-1)[i]
        assert checksum([changed]) != mark
        moved = weight.clone().view(-1)
        j = (i + n // 2 + 1) % n
        moved[i], moved[j] = weight.reshape(-1)[j], weight.reshape(-1)[i]
        assert checksum([moved.view(weight.shape)]) != mark


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_and_columns_that_change_places_count(dtype):
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    others = [weight, weight.flip(0), weight.flip(1), weight.roll(1, 0), weight.roll(4, 1), weight.roll(256, 1)]
    assert len({checksum([other]) for other in others}) == len(others)
    assert checksum([weight, others[1]]) != checksum([others[1], weight])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [2, 64, 512])
def test_what_keeps_the_sums_of_rows_and_columns_counts(n, dtype):
    eye = torch.eye(n, dtype=dtype)
    rolled = [eye.roll(shift, 0) for shift in range(min(n, 9))]
    assert len({checksum([weight]) for weight in rolled}) == len(rolled)
    weight = torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=dtype)
    weight[:2, -2:] = torch.tensor([[1.5, -2.5], [-2.5, 1.5]])
    mirrored = weight.clone()
    mirrored[:2, -2:] = torch.tensor([[-2.5, 1.5], [1.5, -2.5]])
    assert checksum([weight]) != checksum([mirrored])


def test_a_state_does_not_go_on_under_a_mirrored_block():
    model, x = icl_model(std=0.1), prompts()
    weight = model.core[0].mlp.fc.weight.data
    weight[:2, :2] = torch.tensor([[0.5, -0.5], [-0.5, 0.5]])
    state = looped.solve(model, x, n_loops=3).state
    weight[:2, :2] *= -1
    with pytest.raises(ValueError, match="state was made with other weights"):
        looped.solve(model, x, n_loops=6, state=state)


def test_both_names_of_a_shared_weight_are_there():
    model = icl_model(n_core=2)
    model.core[1] = model.core[0]
    assert list(weights_of(model)) == list(model.state_dict())


@needs_engine
def test_the_fingerprint_of_memory_counts_every_bit_and_piece():
    data = np.random.default_rng(0).integers(0, 2**64, 24, dtype=np.uint64)

    def of(*pieces):
        return cpu._engine.fingerprint([(piece.ctypes.data, piece.nbytes) for piece in pieces])

    marks = {of(data)}
    for word in range(len(data)):
        for bit in range(64):
            changed = data.copy()
            changed[word] ^= np.uint64(1 << bit)
            marks.add(of(changed))
    assert len(marks) == 1 + 64 * len(data)
    changed = data.copy()
    changed[0] ^= np.uint64(1 << 63)
    changed[8] ^= np.uint64(1 << 28)  # word 8 follows word 0 in its lane
    assert of(changed) not in marks
    tail = data.view(np.uint8)[:77]
    orders = [of(data, tail), of(tail, data), of(data), of(tail), of(tail, tail), of(tail[:76]), of(tail[:76], tail[76:])]
    assert len(set(orders)) == len(orders)
