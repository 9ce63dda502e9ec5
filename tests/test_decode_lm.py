"""The C++ session against the eager one of looped.lm: rules that read the head, and policies."""

import pytest
import torch
from test_decode_engine import language_model, texts

from looped.backends import cpu
from looped.exits import Contraction, Fixed, Readout, Relative

pytest.importorskip("transformers")
lm = pytest.importorskip("looped.lm")
pytestmark = pytest.mark.skipif(not cpu.is_there(), reason="built without the C++ engine")

from looped.backends.decode import CpuSession  # noqa: E402


def gate_of(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    gate = torch.nn.Linear(model.config.d_model, 1, dtype=torch.float64)
    with torch.no_grad():
        gate.weight.copy_(0.1 * torch.randn(gate.weight.shape, generator=generator))
        gate.bias.fill_(-1.5)
    return gate


def eager(model, policy, gate):
    return lm.session.make_session("eager", model, policy, gate)


RULES = {
    "fixed": Fixed(),
    "relative": Relative(tol=0.2),
    "contraction every 2": Contraction(tol=0.4, check_every=2),
    "readout": Readout(tol=0.1, patience=2),
    "entropy": lm.EntropyDifference(tol=0.02),
    "entropy every 3": lm.EntropyDifference(tol=0.05, check_every=3, min_loops=4),
    "kl": lm.KLDivergence(tol=0.01),
    "kl without tolerance": lm.KLDivergence(tol=0),
    "argmax": lm.ArgmaxStable(patience=3),
    "gate": lm.Gate(threshold=0.6),
    "gate every 2": lm.Gate(threshold=0.6, check_every=2),
}
MODELS = {
    "looped": dict(),
    "coda": dict(n_prelude=1, n_core=2, n_coda=1, loop_norm="once"),
}
CALLS = [[12, 5, 0], [1, 1, 3], [1, 0, 1], [7, 2, 4]]


@pytest.mark.parametrize("policy", ["per_loop", "last_only", "modulo(3)", "first_then_shared"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_the_engine_does_what_the_eager_session_does(policy, rule, kind):
    model = language_model(std=0.12, **MODELS[kind])
    gate, policy = gate_of(model), lm.CachePolicy.parse(policy)
    theirs, ours = eager(model, policy, gate), CpuSession(model, policy, gate)
    used = set()
    for seed, counts in enumerate(CALLS):
        embeds = model.embedding(torch.cat(texts(*counts, seed=seed)))
        n_loops = 7 + seed  # later calls run more loops than the cached tokens have
        options = dict(n_loops=n_loops, rule=rule, return_states=True)
        want, got = (session.extend(embeds, counts, **options) for session in (theirs, ours))
        assert got.n_loops.tolist() == want.n_loops.tolist()
        assert len(got.states) == len(want.states)
        for a, b in zip([got.hidden, *got.states], [want.hidden, *want.states], strict=True):
            assert torch.allclose(a, b, rtol=1e-8, atol=1e-9)
        used |= set(got.n_loops.tolist())
        rows = torch.tensor([1, 0, 2]) if seed == 0 else torch.tensor([0, 1, 2])
        theirs.select(rows)
        ours.select(rows)
        if seed == 2:
            theirs.crop([2, 1, 0])
            ours.crop([2, 1, 0])
        assert ours.lengths == theirs.lengths
    if not rule.is_fixed:
        assert len(used) > 1, "no token left by itself: choose another tolerance"
    assert torch.allclose(ours.head(got.hidden), model.head(want.hidden), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("rule", ["entropy", "kl", "argmax", "gate", "readout"])
@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_rules_that_read_the_head_are_the_same_in_any_split(rule, kind):
    model = language_model(torch.float32, std=0.12, **MODELS[kind])
    gate, policy = gate_of(model).float(), lm.CachePolicy.parse("per_loop")
    (row,) = texts(30)
    embeds = model.embedding(row)
    whole = CpuSession(model, policy, gate).extend(embeds, [30], n_loops=9, rule=RULES[rule])
    session = CpuSession(model, policy, gate)
    for i in range(30):
        out = session.extend(embeds[i : i + 1], [1], n_loops=9, rule=RULES[rule])
        assert torch.equal(out.hidden[0], whole.hidden[i])
        assert out.n_loops[0] == whole.n_loops[i]


@torch.no_grad()
def test_checks_of_the_coda_need_keys_of_checks():
    model = language_model(std=0.12, **MODELS["coda"])
    session = CpuSession(model, lm.CachePolicy.parse("per_loop"))
    embeds = model.embedding(texts(4)[0])
    session.extend(embeds, [4], n_loops=4, rule=Fixed())
    with pytest.raises(ValueError, match="runs the coda at every check"):
        session.extend(embeds, [4], n_loops=4, rule=lm.KLDivergence())
    session.reset()
    session.extend(embeds, [4], n_loops=4, rule=lm.KLDivergence(check_every=2))
    session.extend(embeds, [4], n_loops=4, rule=lm.KLDivergence(check_every=2))
    with pytest.raises(ValueError, match="check_every=1"):
        session.extend(embeds, [4], n_loops=4, rule=lm.KLDivergence())
    with pytest.raises(ValueError, match="needs a session with an exit gate"):
        session.extend(embeds, [4], n_loops=4, rule=lm.Gate())
