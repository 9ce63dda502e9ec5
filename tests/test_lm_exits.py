"""Exit while decoding: every rule against the semantics written out token by token, cached and not, alone and in a batch."""

import copy

import language_reference as reference
import pytest
import torch
from language_models import contracting_lm, left_padded, looped_lm, prompts
from tolerances import EAGER_BATCH, FP32, FP64

import looped
from looped.decoding import reads_logits
from looped.exits import Contraction, ExitRule, Relative
from looped.lm import TOKEN_RULES, ArgmaxStable, Gate, LoopedGPT2Config
from looped.lm.exits import token_rule
from looped.lm.model import CACHE_NAME
from looped.loop import LoopSpec

RULES = {
    "relative": ({"tol": 0.02}, reference.relative(0.02)),
    "contraction": ({"tol": 0.02}, reference.contraction(0.02)),
    "entropy": ({"tol": 0.05}, reference.entropy(0.05)),
    "kl": ({"tol": 0.05}, reference.kl(0.05)),
    "argmax": ({"patience": 2}, reference.argmax(2)),
    "gate": ({"threshold": 0.9}, reference.gate(0.9)),
}
SHAPES = {
    "icl": {},
    "two layers": {"n_core": 2},
    "gpt2": dict(pos_when="once", loop_norm="once", inject="none", state_init="embedding", n_core=2, n_loops=6),
    "middle": dict(n_prelude=1, n_coda=2, pos_when="once", loop_norm="once", tie_readout=False, activation="silu_gated"),
    "mul": dict(inject="mul", state_init="ones", norm_kind="rms", bias=False),
}
TOKENS_DIFFER = {("icl", name) for name in RULES} - {("icl", "argmax")} | {("gpt2", "argmax")}


def spec(name, **fields):
    return {"rule": name} | RULES[name][0] | fields


@pytest.fixture(scope="module")
def models():
    return {name: contracting_lm(exit_gate=True, **shape) for name, shape in SHAPES.items()}


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", RULES)
def test_prefill_is_the_semantics_written_out(models, shape, name):
    model, ids = models[shape], prompts(1, 9)
    n_loops = model.config.n_loops
    oracle = reference.Reference(model, n_loops, RULES[name][1])
    logits = oracle.run(ids[0])
    result = model(ids, exit=spec(name))
    assert result.n_loops[0].tolist() == oracle.used
    assert (result.logits[0] - logits).abs().max() <= FP64
    if (shape, name) in TOKENS_DIFFER:
        assert len(set(oracle.used)) > 1


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [*RULES, None])
def test_any_split_into_calls_gives_the_same(models, shape, name):
    model, ids = models[shape], prompts(2, 9)
    exit = None if name is None else spec(name)
    whole = model(ids, exit=exit, use_cache=False)
    assert whole.logits.abs().max() > 0.1
    for cuts in ((1,) * 9, (4, 5), (5, 1, 1, 2)):
        cache, logits, used = model.make_cache(), [], []
        for part in ids.split(cuts, dim=1):
            result = model(part, cache=cache, exit=exit)
            logits.append(result.logits)
            used.append(result.n_loops)
        assert torch.equal(torch.cat(used, 1), whole.n_loops)
        assert torch.equal(cache.n_loops, whole.n_loops)
        assert (torch.cat(logits, 1) - whole.logits).abs().max() <= FP64


@torch.no_grad()
@pytest.mark.parametrize("n_loops", [1, 2, 4])
@pytest.mark.parametrize("n_core", [1, 2])
@pytest.mark.parametrize("exit", [None, {"rule": "relative", "tol": 0.3}])
def test_cached_is_uncached_in_float32(n_loops, n_core, exit):
    model = contracting_lm(n_core=n_core, n_loops=n_loops, tie_readout=False).float()
    ids = prompts(2, 11)
    whole = model(ids, exit=exit, use_cache=False)
    cache = model.make_cache()
    steps = [model(column, cache=cache, exit=exit) for column in ids.split(1, dim=1)]
    assert torch.equal(torch.cat([step.n_loops for step in steps], 1), whole.n_loops)
    assert (torch.cat([step.logits for step in steps], 1) - whole.logits).abs().max() <= FP32
    if exit and n_loops == 4:
        assert len(whole.n_loops.unique()) > 1


@torch.no_grad()
@pytest.mark.parametrize("name", RULES)
def test_a_row_does_not_depend_on_its_neighbours(name):
    """In prefill and in decoding, left-padded or not, whatever order the rows have."""
    model = contracting_lm(exit_gate=True)
    rows = [prompts(1, n, seed=n)[0].tolist() for n in (3, 7, 5, 1)]
    solo = []
    for row in rows:
        result = model.generate(
            torch.tensor([row]),
            max_new_tokens=5,
            do_sample=False,
            exit=spec(name),
            output_logits=True,
            return_dict_in_generate=True,
        )
        solo.append((result.sequences[0, len(row) :], result[CACHE_NAME].n_loops[0], torch.stack(result.logits, 1)[0]))
    for order in ([0, 1, 2, 3], [3, 2, 0, 1], [2, 2, 0]):
        ids, mask = left_padded([rows[i] for i in order])
        result = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=5,
            do_sample=False,
            exit=spec(name),
            output_logits=True,
            return_dict_in_generate=True,
        )
        for place, i in enumerate(order):
            new, used, logits = solo[i]
            assert result.sequences[place, ids.shape[1] :].tolist() == new.tolist()
            assert result[CACHE_NAME].n_loops[place, -len(used) :].tolist() == used.tolist()
            assert not result[CACHE_NAME].n_loops[place, : -len(used)].any()
            assert (torch.stack(result.logits, 1)[place] - logits).abs().max() <= EAGER_BATCH * logits.abs().max()


@torch.no_grad()
def test_a_later_call_with_more_or_fewer_loops_reads_loop_min_t_u():
    """The oracle with other loop counts per call; the cache has been deepened, then used with fewer, then again with more."""
    model, ids = contracting_lm(n_core=2, n_loops=6), prompts(1, 8)
    calls = [(3, 2), (2, 5), (1, 1), (2, 6)]  # tokens, loops
    oracle, expected, place = reference.Reference(model, 0), [], 0
    cache, got = model.make_cache(), []
    for n_tokens, n_loops in calls:
        oracle.n_loops = n_loops
        for _ in range(n_tokens):
            expected.append(oracle.token(int(ids[0, place]), place))
            place += 1
        got.append(model(ids[:, place - n_tokens : place], cache=cache, n_loops=n_loops).logits[0])
    assert (torch.cat(got) - torch.stack(expected)).abs().max() <= FP64
    assert cache.n_loops[0].tolist() == [2, 2, 2, 5, 5, 1, 6, 6]


@torch.no_grad()
def test_tokens_that_have_left_are_not_computed():
    """Early exit skips work: the core's MLP sees only tokens that move."""
    model, ids = contracting_lm(), prompts(3, 8)
    seen = []
    model.transformer.core[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    used = model(ids, exit=spec("relative")).n_loops
    assert seen == [int((used >= t).sum()) for t in range(1, int(used.max()) + 1)]


@torch.no_grad()
def test_check_every_and_min_loops_hold_for_tokens(models):
    ids = prompts(2, 9)
    for name in RULES:
        for shape in ("icl", "middle"):
            model = models[shape]
            used = model(ids, exit=spec(name, check_every=3)).n_loops
            assert ((used % 3 == 0) | (used == model.config.n_loops)).all()
            late = model(ids, exit=spec(name, min_loops=7)).n_loops
            assert int(late.min()) >= 7
            cache = model.make_cache()
            steps = [model(column, cache=cache, exit=spec(name, check_every=3)).n_loops for column in ids.split(1, dim=1)]
            assert torch.equal(torch.cat(steps, 1), used)


@torch.no_grad()
def test_between_checks_and_after_the_last_the_coda_keeps_the_last_check(models):
    model, ids, exit = models["middle"], prompts(1, 4), {"rule": "kl", "tol": 1e-300, "check_every": 3}
    cache = model.make_cache()
    model(ids, cache=cache, exit=exit, n_loops=9)
    model(ids[:, :2], cache=cache, exit=exit, n_loops=5)  # checks at loop 3 alone, where later tokens read checks 3, 6 and 9
    for layer in range(2):
        keys = [cache.session.slots.pairs["check", t - 1, layer][0][0] for t in (3, 6, 9)]
        assert keys[0][4:6].abs().sum() > 0
        assert torch.equal(keys[1][4:6], keys[0][4:6])
        assert torch.equal(keys[2][4:6], keys[0][4:6])
        assert not torch.equal(keys[1][:4], keys[0][:4])


@torch.no_grad()
def test_a_token_that_holds_nan_runs_all_loops():
    model = contracting_lm(n_loops=4, tie_readout=False)
    model.transformer.embedding.weight[7] = torch.nan
    ids = torch.tensor([[3, 7, 5], [3, 4, 5]])
    for name in ("relative", "contraction", "entropy", "kl"):
        result = model(ids, exit={"rule": name, "tol": 1e6})
        assert result.n_loops[0, 1] == 4
        assert result.n_loops[1].max() < 4
        assert result.logits[0, 1].isnan().all()
        assert result.logits[1].isfinite().all()


@torch.no_grad()
def test_rules_that_read_logits_need_the_checks_of_the_whole_text_where_there_is_a_coda(models):
    model, ids = models["middle"], prompts(1, 4)
    cache = model.make_cache()
    model(ids, cache=cache)
    with pytest.raises(ValueError, match="start a new cache"):
        model(ids[:, :1], cache=cache, exit="kl")
    assert cache.get_seq_length() == 4
    model(ids[:, :1], cache=cache, exit="relative")
    cache.reset()
    model(ids, cache=cache, exit="kl")
    with pytest.raises(ValueError, match="check_every=2"):
        model(ids[:, :1], cache=cache, exit={"rule": "entropy", "check_every": 2})


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_calls_that_end_before_the_first_check_leave_no_keys_of_checks(models, backend):
    model, ids, exit = models["middle"], prompts(1, 5), {"rule": "kl", "check_every": 4}
    cache = model.make_cache(backend=backend)
    plain = model(ids[:, :3], n_loops=3).logits
    assert (model(ids[:, :3], cache=cache, exit=exit, n_loops=3).logits - plain).abs().max() <= FP64
    with pytest.raises(ValueError, match="check_every=4"):
        model(ids[:, 3:], cache=cache, exit=exit, n_loops=8)
    model(ids[:, 3:], cache=cache, exit=exit, n_loops=3)  # nor do they read any
    cache.reset()
    model(ids[:, :4], cache=cache, exit=exit, n_loops=8)
    cache.crop(-1)
    cache.session.extend(torch.zeros(0, 32, dtype=torch.float64), [0], n_loops=1, rule=Relative(scope="token"))  # no token
    model(ids[:, 3:4], cache=cache, exit=exit, n_loops=8)
    model(ids[:, 4:], cache=cache, exit=exit, n_loops=3)
    cache.crop(-1)  # and the token that lacked them is gone
    model(ids[:, 4:], cache=cache, exit=exit, n_loops=8)
    model(ids[:, :1], cache=cache, exit=exit, n_loops=3)
    with pytest.raises(ValueError, match="check_every=4"):
        model(ids[:, :1], cache=cache, exit=exit, n_loops=8)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("policy", ["per_loop", "last_only", "first_then_shared", "modulo(30)", "modulo(2)", "modulo(3)"])
def test_one_pass_with_an_exit_is_what_the_policies_say(models, policy, backend):
    """Loop u of a token that left, under all but modulo(N): there the last of its loops that is t modulo N."""
    model, ids, (rule, stops) = models["icl"], prompts(1, 9), RULES["relative"]
    period = int(policy[7:-1]) if policy.startswith("modulo") else None
    out = model(ids, cache=model.make_cache(policy, backend=backend), exit={"rule": "relative"} | rule)
    oracle, exact = (reference.Reference(model, model.config.n_loops, stops, of) for of in (period, None))
    expected, unshared = oracle.run(ids[0]), exact.run(ids[0])
    assert out.n_loops[0].tolist() == oracle.used
    assert len(set(oracle.used)) > 1
    assert (out.logits[0] - expected).abs().max() <= FP64
    assert ((expected - unshared).abs().max() > 1e-6) == (policy in ("modulo(2)", "modulo(3)"))


@torch.no_grad()
def test_slots_are_made_as_loops_come_to_them():
    """Far more loops than tokens that leave early run, in later calls too."""
    model, ids, exit = contracting_lm(), prompts(1, 9), {"rule": "relative", "tol": 0.02}
    cache, whole = model.make_cache(), model(ids, exit=exit, n_loops=500)
    parts = [model(part, cache=cache, exit=exit, n_loops=500) for part in ids.split([4, 1, 3, 1], dim=1)]
    assert (torch.cat([part.logits for part in parts], 1) - whole.logits).abs().max() <= FP64
    assert torch.equal(cache.n_loops, whole.n_loops)
    assert len(cache.session.slots.pairs) == whole.n_loops.max() < 40


@torch.no_grad()
@pytest.mark.parametrize("name", ["relative", "contraction", "entropy", "kl"])
def test_no_tolerance_means_all_loops(name):
    """Rounding may make a divergence negative, or a step zero."""
    model, ids = contracting_lm(n_loops=100).float(), prompts()
    assert (model(ids, exit={"rule": name, "tol": 0}).n_loops == 100).all()


@torch.no_grad()
def test_a_rule_of_ones_own():
    class AfterTwo(ExitRule):
        def update(self, memory, step):
            assert step.predict().shape == (len(step.g), 1, 61)
            return step.t >= 2

    used = contracting_lm()(prompts(), exit=AfterTwo()).n_loops
    assert (used == 2).all()


def test_exits_by_name_mapping_and_object():
    assert token_rule(None).is_fixed
    assert token_rule("contraction") == Contraction(scope="token")
    assert token_rule({"rule": "relative", "tol": 0.1}) == token_rule(Relative(tol=0.1)) == Relative(tol=0.1, scope="token")
    assert all(token_rule(name).scope == "token" for name in TOKEN_RULES)
    assert [name for name in TOKEN_RULES if reads_logits(token_rule(name))] == ["readout", "entropy", "kl", "argmax"]
    with pytest.raises(ValueError, match="did you mean 'contraction'"):
        token_rule("contractoin")
    with pytest.raises(ValueError, match="no 'tolerance'; did you mean 'tol'"):
        token_rule({"rule": "kl", "tolerance": 1})
    with pytest.raises(ValueError, match="stops by itself"):
        token_rule(Contraction(scope="prefix"))
    with pytest.raises(TypeError, match="got int"):
        token_rule(3)
    for wrong in ({"rule": "kl", "tol": -1}, {"rule": "argmax", "patience": 0}, {"rule": "gate", "threshold": "x"}):
        with pytest.raises(ValueError, match="at least"):
            token_rule(wrong)
    with pytest.raises(ValueError, match="scope must be 'token'"):
        ArgmaxStable(scope="prompt")
    with pytest.raises(ValueError, match="language models"):
        LoopSpec(n_loops=3, rule=Contraction(scope="token"))
    with pytest.raises(ValueError, match="language models"):
        looped.solve(looped_lm().transformer, prompts(), exit=Contraction(scope="token"))


def test_exits_of_a_call_are_checked_before_it_computes():
    model = looped_lm()
    for call in (model, model.generate):
        with pytest.raises(ValueError, match="exit_gate=True"):
            call(prompts(), exit="gate")
        with pytest.raises(ValueError, match="min_loops=9"):
            call(prompts(), exit={"rule": "kl", "min_loops": 9})
        with pytest.raises(ValueError, match="0 or more"):
            call(prompts(), n_loops=-1)
        with pytest.raises(TypeError, match=r"4\.0"):
            call(prompts(), n_loops=4.0)
    with pytest.raises(ValueError, match="exit gate"):
        LoopedGPT2Config(exit="gate")
    with pytest.raises(ValueError, match="mapping"):
        LoopedGPT2Config(exit=Gate())


@torch.no_grad()
def test_the_configuration_has_an_exit_of_its_own():
    model = contracting_lm(exit={"rule": "relative", "tol": 0.02})
    ids = prompts()
    assert model(ids).n_loops.max() < 30
    assert (model(ids, exit="fixed").n_loops == 30).all()
    assert torch.equal(model(ids).n_loops, contracting_lm()(ids, exit={"rule": "relative", "tol": 0.02}).n_loops)


@torch.no_grad()
def test_warm_start_begins_where_the_last_token_ended():
    model, ids = contracting_lm(), prompts(2, 6)
    cold, warm = model.make_cache(), model.make_cache()
    for cache in (cold, warm):
        model(ids[:, :5], cache=cache)
    before = model(ids[:, :5], output_hidden_states=True).hidden_states[-2][:, -1]
    twin = copy.deepcopy(warm)
    states = model(ids[:, 5:], cache=warm, warm_start=True, output_hidden_states=True).hidden_states
    assert torch.equal(states[0][:, 0], before)
    assert (model(ids[:, 5:], cache=cold, output_hidden_states=True).hidden_states[0] == 0).all()
    assert not torch.allclose(states[1], model(ids[:, 5:], cache=twin, output_hidden_states=True).hidden_states[1])
    reordered = copy.deepcopy(warm)
    reordered.reorder_cache(torch.tensor([1, 0]))
    again = model(ids[:, 5:], cache=reordered, warm_start=True, output_hidden_states=True).hidden_states
    assert torch.equal(again[0][:, 0], states[-2][:, 0].flip(0))
    with pytest.raises(ValueError, match="injects"):
        looped_lm(inject="none", state_init="embedding")(ids, warm_start=True)
    with pytest.raises(ValueError, match="injects"):
        LoopedGPT2Config(warm_start=True)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_after_crop_a_row_starts_cold_until_it_has_a_token_of_its_own(backend):
    model, ids = contracting_lm(), prompts(2, 6)
    cache = model.make_cache(backend=backend)
    model(ids, cache=cache)
    cache.crop(-1)
    only_first = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    last = model(ids[:, 5:], attention_mask=only_first, cache=cache, output_hidden_states=True).hidden_states[-2]
    both = torch.cat([only_first, torch.ones(2, 1, dtype=torch.int64)], 1)
    first = model(ids[:, :1], attention_mask=both, cache=cache, warm_start=True, output_hidden_states=True).hidden_states[0]
    assert torch.equal(first[0], last[0])
    assert (first[1] == 0).all()


@torch.no_grad()
def test_hidden_states_hold_still_after_an_exit(models):
    model, ids = models["icl"], prompts(2, 9)
    result = model(ids, exit=spec("relative"), output_hidden_states=True)
    states, used = torch.stack(result.hidden_states), result.n_loops
    assert len(states) == model.config.n_loops + 2  # Y_0 .. Y_n, and what the head reads
    for row in range(2):
        for token in range(9):
            of = states[:-1, row, token]
            assert (of[int(used[row, token]) :] == of[-1]).all()
            assert not torch.equal(of[int(used[row, token]) - 1], of[-1])
    full = models["icl"](ids, output_hidden_states=True)
    assert torch.equal(full.hidden_states[-1], torch.stack(full.hidden_states)[-2])  # loop_norm="each": the state itself


@pytest.mark.parametrize(
    ("exit", "message"),
    [
        ({"rule": "argmax", "patience": 10**30}, "patience"),
        ({"rule": "kl", "tol": 10**400}, "tol is more than a float holds"),
        ({"rule": "gate", "threshold": 10**400}, "threshold is more than a float holds"),
        ({"rule": ["kl"]}, "is not a rule"),
    ],
)
def test_numbers_that_no_engine_holds_are_refused(exit, message):
    with pytest.raises(ValueError, match=message):
        token_rule(exit)
