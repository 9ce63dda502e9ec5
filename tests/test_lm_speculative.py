"""Self-speculative decoding: text, scores and cache are those of plain decoding, and draws have its distribution."""

import copy
import itertools
import math

import pytest
import torch
from language_models import contracting_lm, looped_lm, prompts
from scipy.stats import chi2
from tolerances import FP64
from transformers import GenerationConfig
from transformers.generation import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from looped.exits import Contraction, Fixed
from looped.lm import LoopedGPT2, SpeculativeOutput
from looped.lm.eager import EagerSession
from looped.lm.model import CACHE_NAME
from looped.lm.policy import CachePolicy
from looped.lm.session import SESSIONS
from looped.lm.speculative import accept


class PlainSession(EagerSession):
    """The eager session without `draft`: drafts are extended by and cropped, and their loops are run twice."""

    backend = "plain"
    draft = None


@pytest.fixture(autouse=True)
def plain_session(monkeypatch):
    monkeypatch.setitem(SESSIONS, "plain", PlainSession)


MODELS = {
    "icl": {},
    "two layers": dict(n_core=2, pos_when="once", loop_norm="once"),
    "prelude, coda": dict(n_prelude=1, n_coda=1, loop_norm="once", pos_when="once", tie_readout=False),
    "like gpt2": dict(inject="none", state_init="embedding", loop_norm="once", pos_when="once", n_core=2),
    "mul, no positions": dict(inject="mul", state_init="ones", pos_kind="none"),
    "rms": dict(norm_kind="rms", bias=False),
}
SETTINGS = dict(do_sample=False, max_new_tokens=14, pad_token_id=0, return_dict_in_generate=True, output_scores=True)


def make(name="icl", seed=0, n_loops=6, **changes):
    return looped_lm(seed=seed, n_loops=n_loops, dtype=torch.float64, **(MODELS[name] | changes))


def generate(model, ids, seed=3, **kwargs):
    torch.manual_seed(seed)
    return model.generate(ids, **(SETTINGS | kwargs))


def slots_of(output, n=None):
    """Name of a slot to the keys and values of the row's own tokens."""
    session = output if isinstance(output, EagerSession) else output[CACHE_NAME].session
    n = session.lengths[0] if n is None else n
    return {name: torch.stack([keys[:, :n], values[:, :n]]) for name, (keys, values) in session.slots.pairs.items()}


def assert_same(plain, ours, ulp=FP64):
    """Text, scores and cache: tokens exactly, numbers to rounding (scores are float32)."""
    assert torch.equal(plain.sequences, ours.sequences)
    assert len(plain.scores) == len(ours.scores)
    for a, b in zip(plain.scores, ours.scores, strict=True):
        assert torch.equal(a.isinf(), b.isinf())
        assert (a - b).masked_fill(a.isinf(), 0).abs().max() <= 1e-5
    a, b = plain[CACHE_NAME], ours[CACHE_NAME]
    assert a.get_seq_length() == b.get_seq_length()
    assert a.session.lengths == b.session.lengths
    assert torch.equal(a.own, b.own)
    assert torch.equal(a.n_loops, b.n_loops)
    a, b = slots_of(plain), slots_of(ours)
    assert a.keys() <= b.keys()
    for name in a:
        assert (a[name] - b[name]).abs().max() <= ulp * max(1, a[name].abs().max()), name


# Greedy ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "plain"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_plain_greedy(name, backend):
    rates = []
    for seed in range(3):
        model, ids = make(name, seed), prompts(1, 5, seed=seed)
        plain = generate(model, ids)
        for draft_loops, draft_tokens in [(1, 1), (2, 4), (5, 3), (6, 4), (3, 40)]:
            ours = generate(model, ids, draft_loops=draft_loops, draft_tokens=draft_tokens, backend=backend)
            assert_same(plain, ours)
            rates.append((draft_loops, ours.acceptance_rate))
            assert ours.n_drafted.max() == min(draft_tokens, 12)
            assert (ours.n_accepted <= ours.n_drafted).all()
            assert ours.n_accepted.sum() + len(ours.n_accepted) + 1 == 14  # the prefill's token, and one a round
    assert any(0 < rate < 1 for _, rate in rates)
    assert all(rate == 1 for draft_loops, rate in rates if draft_loops == 6)


def test_greedy_in_float32_where_there_are_no_ties():
    n = 0
    for seed in range(12):
        model, ids = looped_lm(seed=seed, n_loops=6), prompts(1, 5, seed=seed)
        plain = generate(model, ids)
        top = torch.cat(plain.scores).topk(2).values
        if (top[:, 0] - top[:, 1]).min() > 1e-3:
            ours = generate(model, ids, draft_loops=2)
            assert_same(plain, ours, ulp=1e-5)
            n += 1
    assert n > 6


def test_more_and_fewer_loops_than_the_configuration_says():
    model, ids = make(), prompts(1, 5)
    for n_loops in (1, 3, 9):
        plain = generate(model, ids, n_loops=n_loops)
        for draft_loops in {1, n_loops}:
            ours = generate(model, ids, n_loops=n_loops, draft_loops=draft_loops)
            assert_same(plain, ours)
            assert (ours[CACHE_NAME].n_loops == n_loops).all()


def test_loops_of_a_draft_are_not_run_again(monkeypatch):
    """A round of K drafts runs the loops of K + 1 tokens with `draft`, and the draft's K more without."""
    n_run = []

    def count(self, t, run):
        n_run.append(run.moving.n_tokens)
        return loop(self, t, run)

    loop = EagerSession._loop
    monkeypatch.setattr(EagerSession, "_loop", count)
    model, ids, L, d = make(), prompts(1, 5), 6, 2
    for backend, twice in (("eager", 0), ("plain", d)):
        n_run.clear()
        out = generate(model, ids, draft_loops=d, backend=backend)
        fed = out.n_drafted.sum().item() + len(out.n_drafted)
        assert sum(n_run) == 5 * L + fed * L + out.n_drafted.sum().item() * twice


# Exits ----------------------------------------------------------------------------------------------------------------

EXITS = {
    "contraction": {"rule": "contraction", "tol": 0.1},
    "relative": {"rule": "relative", "tol": 0.15, "min_loops": 3},
    "readout": {"rule": "readout", "tol": 0.1},
    "entropy": {"rule": "entropy", "tol": 1e-2},
    "kl": {"rule": "kl", "tol": 1e-3, "check_every": 2},
    "argmax": {"rule": "argmax", "patience": 3},
    "gate": {"rule": "gate", "threshold": 0.9},
    "fixed": "fixed",
}


@pytest.mark.parametrize("coda", [0, 1])
@pytest.mark.parametrize("name", EXITS)
def test_exits_while_drafting_and_verifying(name, coda):
    model = contracting_lm(n_loops=12, exit_gate=True, n_coda=coda, loop_norm="once" if coda else "each")
    early = 0
    for seed, draft_loops in ((0, 1), (0, 5), (1, 3), (1, 8)):
        ids = prompts(1, 5, seed=seed)
        plain = generate(model, ids, exit=EXITS[name])
        for backend in ("eager", "plain"):
            ours = generate(model, ids, exit=EXITS[name], draft_loops=draft_loops, backend=backend)
            assert_same(plain, ours)
        early += int((ours[CACHE_NAME].n_loops <= draft_loops).sum())
    if name != "fixed" and not (name == "contraction" and coda):  # without a norm between loops the state only grows
        assert plain[CACHE_NAME].n_loops.unique().numel() > 1
        assert early > 0


def test_a_token_that_exits_in_its_draft_is_done(monkeypatch):
    """With every token at rest after its draft, verifying runs no loop but those of the one token that was not drafted."""
    n_run, loop = [], EagerSession._loop
    monkeypatch.setattr(EagerSession, "_loop", lambda self, t, run: n_run.append(run.moving.n_tokens) or loop(self, t, run))
    model, ids = contracting_lm(n_loops=30), prompts(1, 5)
    exit = {"rule": "relative", "tol": 0.1}
    plain = generate(model, ids, exit=exit)
    loops_of_plain, most = sum(n_run), int(plain[CACHE_NAME].n_loops.max())
    assert most < 12
    n_run.clear()
    ours = generate(model, ids, exit=exit, draft_loops=most, draft_tokens=3)
    assert ours.acceptance_rate == 1
    last = ours.n_drafted[-1].item()
    assert last == 0 or ours.n_accepted[-1] == last
    assert sum(n_run) == loops_of_plain  # nothing was rejected and nothing run twice


# Sampling -------------------------------------------------------------------------------------------------------------


def scores_of(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log().float()


@pytest.mark.parametrize(
    ("q", "p"),
    [
        ((0.25, 0.25, 0.25, 0.25), (0.1, 0.2, 0.3, 0.4)),
        ((0.9, 0.05, 0.03, 0.02), (0.02, 0.03, 0.05, 0.9)),
        ((0.5, 0.5, 0.0, 0.0), (0.0, 0.0, 0.3, 0.7)),
        ((1.0, 0.0, 0.0, 0.0), (0.5, 0.5, 0.0, 0.0)),
        ((0.4, 0.3, 0.2, 0.1), (0.4, 0.3, 0.2, 0.1)),
        ((0.4, 0.3, 0.2, 0.1), (0.0, 0.0, 1.0, 0.0)),
    ],
)
def test_the_rule_of_acceptance(q, p):
    """The token has the distribution p, and a draft is kept with the probability sum(min(p, q))."""
    torch.manual_seed(0)
    n, from_q, from_p = 5_000, scores_of(*q), scores_of(*p)
    drafts = torch.multinomial(torch.tensor(q), n, replacement=True)
    results = [accept(draft, from_q, from_p) for draft in drafts.split(1)]
    counts = torch.bincount(torch.cat([token for token, _ in results]), minlength=4)
    assert_drawn_from(counts, torch.tensor(p, dtype=torch.float64))
    kept, expected = sum(kept for _, kept in results) / n, torch.minimum(torch.tensor(p), torch.tensor(q)).sum().item()
    assert abs(kept - expected) <= 4.5 * math.sqrt(expected * (1 - expected) / n) + 1e-4  # float32 scores of equal q and p


def test_equal_distributions_never_reject():
    """Also where rounding leaves nothing of max(p - q, 0)."""
    q = scores_of(0.4, 0.3, 0.2, 0.1)
    assert all(accept(torch.tensor([2]), q, q)[1] for _ in range(500))
    assert not accept(torch.tensor([0]), scores_of(1.0, 0.0), scores_of(0.0, 1.0))[1]


def assert_drawn_from(counts, p):
    """Pearson's test at 1e-4, cells with fewer than 5 expected draws put together; nothing where p is 0."""
    n = counts.sum()
    assert not counts[p == 0].any()
    expected = n * p / p.sum()
    rare = expected < 5
    pairs = [(counts[~rare].double(), expected[~rare]), (counts[rare].sum()[None].double(), expected[rare].sum()[None])]
    seen, wanted = (torch.cat(x) for x in zip(*pairs, strict=True))
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    if len(wanted) > 1:
        statistic = ((seen - wanted) ** 2 / wanted).sum().item()
        assert statistic <= chi2.ppf(1 - 1e-4, len(wanted) - 1), (statistic, len(wanted))


TINY = dict(vocab_size=5, d_model=16, n_heads=2, n_positions=16)


@torch.no_grad()
def chances(model, ids, n_new, warp=None, end=None):
    """The probability of every continuation by n_new tokens under plain sampling, by its number in base V.

    end: an eos id, which is followed by itself.
    """
    V = model.config.vocab_size
    result = torch.ones(1, dtype=torch.float64)
    for n in range(n_new):
        rows = torch.tensor(list(itertools.product(range(V), repeat=n)), dtype=torch.int64).reshape(V**n, n)
        inputs = torch.cat([ids.expand(V**n, -1), rows], dim=1)
        scores = model(inputs).logits[:, -1].float()
        scores = scores if warp is None else warp(inputs, scores)
        p = torch.softmax(scores.double(), -1)
        if end is not None:
            ended = (rows == end).any(1)
            p[ended] = torch.nn.functional.one_hot(torch.tensor(end), V).double()
        result = (result[:, None] * p).flatten()
    return result


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6, "top_k": 3},
        {"repetition_penalty": 1.6, "top_p": 0.9},
        {"eos_token_id": 3},
        {"assistant_confidence_threshold": 0.35},
    ],
    ids=str,
)
def test_samples_have_the_distribution_of_plain_sampling(settings):
    model, ids = looped_lm(n_loops=4, seed=5, **TINY), torch.tensor([[1, 4, 2]])
    n, n_new, V = 300, 3, 5
    end = settings.get("eos_token_id")
    plain = {name: value for name, value in settings.items() if name != "assistant_confidence_threshold"}
    config = GenerationConfig(do_sample=True, **({"top_k": 0} | plain))
    warp = model._get_logits_processor(model._prepare_generation_config(config)[0])
    p = chances(model, ids, n_new, warp, end)
    drafted = chances(at_one_loop(model), ids, n_new, warp, end)
    assert (p - drafted).abs().sum() / 2 > 0.3  # a draft taken for the truth would show
    torch.manual_seed(7)
    counts = torch.zeros(V**n_new, dtype=torch.int64)
    for _ in range(n):
        new = model.generate(
            ids,
            do_sample=True,
            max_new_tokens=n_new,
            pad_token_id=0,
            draft_loops=1,
            draft_tokens=2,
            **({"top_k": 0} | settings),
        )[0, 3:].tolist()
        new += [end] * (n_new - len(new))
        counts[sum(token * V ** (n_new - 1 - i) for i, token in enumerate(new))] += 1
    assert_drawn_from(counts, p)


def at_one_loop(model):
    other = copy.deepcopy(model)
    other.config.n_loops = 1
    return other


def test_sampling_takes_its_seed_from_torch():
    model, ids = make(), prompts(1, 5)
    a, b, c = (generate(model, ids, do_sample=True, draft_loops=2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a.sequences, b.sequences)
    assert not torch.equal(a.sequences, c.sequences)


# What generate does besides -------------------------------------------------------------------------------------------

CALLS = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeats": {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [9, 3]]},
    "eos list": {"eos_token_id": [7, 11, 16, 30, 49, 54]},
    "eos at least": {"eos_token_id": [7, 11, 16, 30, 49, 54], "min_new_tokens": 6},
    "forced ends": {"forced_eos_token_id": 4, "suppress_tokens": [1, 2], "begin_suppress_tokens": [3]},
    "bias": {"sequence_bias": [[[5], 3.0], [[9, 3], -2.0]], "renormalize_logits": True},
    "watermark": {"watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash", "context_width": 2}},
    "chunked prefill": {"prefill_chunk_size": 2},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
}


@pytest.mark.parametrize("name", CALLS)
def test_processors_and_ends(name):
    ended = False
    for seed in range(4):
        model, ids = make(seed=seed), prompts(1, 5, seed=seed)
        plain = generate(model, ids, **CALLS[name])
        ended |= plain.sequences.shape[1] < 19
        for draft_loops in (2, 6):
            assert_same(plain, generate(model, ids, draft_loops=draft_loops, **CALLS[name]))
    assert ended == (name in ("eos list", "eos at least", "one token", "two tokens"))


class Recorder(StoppingCriteria):
    """Stops at some tokens, and keeps what it was asked."""

    def __init__(self, *ends):
        self.ends, self.asked = ends, []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append((input_ids[0].tolist(), len(scores)))
        return torch.tensor([input_ids[0, -1].item() in self.ends])


class Sink(BaseStreamer):
    def __init__(self, fails_at=None):
        self.got, self.fails_at = [], fails_at

    def put(self, value):
        self.got.append(value.clone())
        if len(self.got) == self.fails_at:
            raise RuntimeError("the terminal is gone")

    def end(self):
        self.got.append("end")


def test_criteria_and_streamers_see_what_they_see_in_plain_decoding():
    """Token by token, also where the text ends in the middle of accepted drafts."""
    inside = 0
    for seed in range(3):
        model, ids = make(seed=seed), prompts(1, 5, seed=seed)
        free = generate(model, ids).sequences[0, 5:].tolist()
        for n in (n for n in range(2, 12) if free[n] not in free[:n]):
            calls = []
            for draft_loops in (None, 6, 3):
                criterion, sink = Recorder(free[n]), Sink()
                out = generate(model, ids, stopping_criteria=[criterion], streamer=sink, draft_loops=draft_loops)
                assert out.sequences[0, 5:].tolist() == free[: n + 1]
                calls.append((criterion.asked, [x if isinstance(x, str) else x.tolist() for x in sink.got]))
                if draft_loops is None:
                    plain = out
                else:
                    assert_same(plain, out)
                if draft_loops == 6:
                    inside += bool(out.n_accepted[-1] < out.n_drafted[-1])
            assert calls[0] == calls[1] == calls[2]
    assert inside > 2


def test_what_a_dict_holds():
    model, ids = make("prelude, coda"), prompts(1, 5)
    asks = dict(output_logits=True, output_hidden_states=True)
    plain, ours = generate(model, ids, **asks), generate(model, ids, draft_loops=3, **asks)
    assert_same(plain, ours)
    assert isinstance(ours, SpeculativeOutput)
    assert ours.n_drafted.dtype == ours.n_accepted.dtype == torch.int64
    assert ours.acceptance_rate == pytest.approx((ours.n_accepted.sum() / ours.n_drafted.sum()).item())
    assert max((a - b).abs().max() for a, b in zip(plain.logits, ours.logits, strict=True)) <= 1e-5
    for a, b in zip(plain.hidden_states, ours.hidden_states, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.shape == y.shape
            assert (x - y).abs().max() <= FP64 * 10
    few = model.generate(ids, max_new_tokens=5, do_sample=False, draft_loops=2, return_dict_in_generate=True)
    assert few.scores is few.logits is few.hidden_states is None
    assert torch.is_tensor(model.generate(ids, max_new_tokens=5, do_sample=False, draft_loops=2))
    assert math.isnan(generate(model, ids, draft_loops=2, max_new_tokens=1).acceptance_rate)


def test_padding_embeddings_positions_and_a_cache_to_go_on_from():
    model, ids = make(), prompts(1, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    assert_same(generate(model, ids, attention_mask=mask), generate(model, ids, attention_mask=mask, draft_loops=3))
    with torch.no_grad():
        embeds = model.transformer.embedding(ids)
    assert_same(generate(model, None, inputs_embeds=embeds), generate(model, None, inputs_embeds=embeds, draft_loops=3))
    for backend in ("eager", "plain"):
        where = dict(position_ids=torch.arange(8, 14)[None])
        plain = generate(model, ids, **where)
        assert not torch.equal(plain.sequences, generate(model, ids).sequences)
        assert_same(plain, generate(model, ids, draft_loops=3, backend=backend, **where))
        last = dict(position_ids=torch.arange(13, 19)[None])  # the last token fed has the last of 32 positions
        assert_same(generate(model, ids, **last), generate(model, ids, draft_loops=3, draft_tokens=9, backend=backend, **last))
        beyond, n_new = dict(position_ids=torch.arange(16, 22)[None]), []
        for seed in range(3):  # 14 tokens are asked for, which the table does not hold: the text ends before it does
            text = prompts(1, 6, seed=seed)
            new = generate(model, text, max_new_tokens=8, **beyond).sequences[0, 6:].tolist()
            n_new.append(max(i for i, token in enumerate(new) if token not in new[:i]) + 1)
            ends = dict(eos_token_id=new[n_new[-1] - 1], **beyond)
            plain, drafted = generate(model, text, **ends), generate(model, text, draft_loops=3, backend=backend, **ends)
            assert_same(plain, drafted)
            assert drafted.sequences.shape[1] == 6 + n_new[-1]
        assert max(n_new) > 2
    whole, plain, drafted = (generate(model, ids, **x) for x in ({"max_new_tokens": 18}, {}, {"draft_loops": 3}))
    for begun in (plain, drafted):
        for extra in ({}, {"draft_loops": 3}, {"draft_loops": 6}):
            cache = copy.copy(begun[CACHE_NAME])
            out = generate(model, begun.sequences, max_new_tokens=4, **{CACHE_NAME: cache}, **extra)
            assert_same(whole, dict_like(out, scores=(*begun.scores, *out.scores)))


def dict_like(output, **changes):
    output = copy.copy(output)
    for name, value in changes.items():
        output[name] = value
    return output


def test_no_positions_and_position_ids_that_say_so():
    model, ids = make("mul, no positions"), prompts(1, 5)
    where = dict(position_ids=torch.arange(4, 9)[None])
    assert_same(generate(model, ids, **where), generate(model, ids, draft_loops=3, **where))


def test_names_of_transformers():
    """assistant_early_exit and num_assistant_tokens say the same, in a call, in a GenerationConfig and in the model's own."""
    model, ids = make(), prompts(1, 5)
    named = generate(model, ids, draft_loops=2, draft_tokens=3)
    theirs = dict(assistant_early_exit=2, num_assistant_tokens=3, assistant_confidence_threshold=0.0)
    assert torch.equal(generate(model, ids, **theirs).n_drafted, named.n_drafted)
    config = GenerationConfig(**SETTINGS, **theirs)
    assert torch.equal(model.generate(ids, config).n_drafted, named.n_drafted)
    plain = GenerationConfig(**SETTINGS)
    before = plain.to_dict()
    assert torch.equal(model.generate(ids, generation_config=plain, draft_loops=2, draft_tokens=3).n_drafted, named.n_drafted)
    assert plain.to_dict() == before
    model.generation_config.update(**theirs)
    assert torch.equal(generate(model, ids).n_drafted, named.n_drafted)
    assert not isinstance(generate(model, ids, assistant_early_exit=None), SpeculativeOutput)


def test_schedule_and_confidence():
    model, ids = make(), prompts(1, 5)
    plain = generate(model, ids, max_new_tokens=26)
    for draft_loops, changes in ((6, {2}), (1, {-1, 0, 2})):
        out = generate(
            model,
            ids,
            max_new_tokens=26,
            draft_loops=draft_loops,
            draft_tokens=3,
            num_assistant_tokens_schedule="heuristic_transient",
        )
        assert_same(plain, out)
        n, all_kept = out.n_drafted.tolist(), (out.n_accepted == out.n_drafted).tolist()
        left = [26 - 1 - sum(out.n_accepted[:i].tolist()) - i - 1 for i in range(len(n))]
        wanted = 3
        for i in range(len(n)):
            assert n[i] == min(wanted, left[i])
            wanted = wanted + 2 if all_kept[i] else max(1, wanted - 1)
        assert {b - a for a, b in itertools.pairwise(n[:3])} <= changes
    flat = generate(model, ids, draft_loops=3, assistant_confidence_threshold=1.0)
    assert set(flat.n_drafted.tolist()) <= {0, 1}
    some = generate(model, ids, draft_loops=3, draft_tokens=9, assistant_confidence_threshold=0.2)
    assert_same(generate(model, ids), some)
    assert 1 < some.n_drafted.max() < 9


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (dict(draft_loops=0), r"draft_loops .*at least 1, got 0"),
        (dict(draft_loops=2.0), r"draft_loops .*integer"),
        (dict(draft_loops=True), r"draft_loops .*integer"),
        (dict(draft_loops=7), r"draft_loops=7 is more than n_loops=6"),
        (dict(draft_loops=3, n_loops=2), r"draft_loops=3 is more than n_loops=2"),
        (dict(draft_loops=2, draft_tokens=0), r"draft_tokens .*at least 1, got 0"),
        (dict(draft_tokens=3), r"draft_tokens=3 says nothing without draft_loops"),
        (dict(draft_loops=2, num_beams=3), r"greedy decoding and sampling, got num_beams=3"),
        (dict(draft_loops=2, use_cache=False), r"needs a cache, got use_cache=False"),
        (dict(draft_loops=2, warm_start=True), r"leave one of draft_loops and warm_start out"),
        (dict(draft_loops=2, num_return_sequences=2, do_sample=True), r"num_return_sequences"),
        (dict(draft_loops=2, guidance_scale=1.5), r"UnbatchedClassifierFree.* counts its calls"),
        (dict(draft_loops=2, prompt_lookup_num_tokens=2), r"prompt_lookup_num_tokens is another way"),
        (
            dict(draft_loops=2, num_assistant_tokens_schedule="heuristic"),
            r"'heuristic' is not one of constant, heuristic_transient",
        ),
        (dict(draft_loops=2, exit={"rule": "kl", "min_loops": 9}), r"min_loops=9"),
    ],
)
def test_what_is_refused(call, match):
    model = make()
    with pytest.raises(ValueError, match=match):
        generate(model, prompts(1, 5), **call)


def test_what_is_refused_of_other_models():
    model, ids = make(), prompts(1, 5)
    with pytest.raises(ValueError, match=r"takes one row, .* got 2"):
        generate(model, prompts(2, 5), draft_loops=2)
    with pytest.raises(ValueError, match="with an assistant_model"):
        generate(model, ids, draft_loops=2, assistant_model=looped_lm(seed=5))
    for policy in ("last_only", "modulo(2)", "first_then_shared"):
        with pytest.raises(ValueError, match="needs the cache policy per_loop, got"):
            generate(make(cache_policy=policy), ids, draft_loops=2)
        with pytest.raises(ValueError, match="needs the cache policy per_loop, got"):
            generate(model, ids, draft_loops=2, **{CACHE_NAME: model.make_cache(policy)})
    with pytest.raises(ValueError, match="attention weights"):
        generate(model, ids, draft_loops=2, output_attentions=True)


class Stop(LogitsProcessor):
    """Raises at its n-th call."""

    def __init__(self, n):
        self.n, self.calls = n, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == self.n:
            raise KeyboardInterrupt
        return scores


@pytest.mark.parametrize("backend", ["eager", "plain"])
def test_an_interrupt_leaves_model_and_cache_usable(backend, monkeypatch):
    model, ids = make(), prompts(1, 5)
    plain = generate(model, ids)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    extend, calls = EagerSession.extend, []

    def interrupted(self, *args, **kwargs):
        """After the session has changed, before anyone has counted it."""
        out = extend(self, *args, **kwargs)
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return out

    ways = [dict(logits_processor=[Stop(n)]) for n in range(2, 16, 3)] + [dict(streamer=Sink(n)) for n in (3, 6, 9)] + [{}]
    for way in ways:
        cache = model.make_cache(backend=backend)
        with monkeypatch.context() as patch:
            patch.setattr(EagerSession, "extend", extend if way else interrupted)
            with pytest.raises((KeyboardInterrupt, RuntimeError)):
                generate(model, ids, draft_loops=3, **{CACHE_NAME: cache}, **way)
        n = cache.get_seq_length()
        assert n >= 5
        assert cache.session.lengths == [n]
        kept, truth = slots_of(cache.session), slots_of(plain, n)
        assert max((kept[name] - truth[name]).abs().max() for name in truth) <= FP64 * 10
        rest = generate(model, plain.sequences[:, : n + 1], max_new_tokens=18 - n, draft_loops=3, **{CACHE_NAME: cache})
        assert torch.equal(rest.sequences, plain.sequences)
        assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert_same(plain, generate(model, ids))


# The session ----------------------------------------------------------------------------------------------------------


def session_of(model, ids, n_loops=6, rule=None):
    session = EagerSession(model.transformer, CachePolicy())
    with torch.no_grad():
        embeds = model.transformer.embedding(ids[0])
        session.extend(embeds[:4], [4], n_loops=n_loops, rule=rule or Fixed())
    return session, embeds[4:]


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_session_goes_on_from_its_drafts(name):
    model, ids = make(name), prompts(1, 10)
    for rule in (Fixed(), Contraction(tol=0.2, scope="token")):
        (plain, new), (ours, _) = session_of(model, ids, rule=rule), session_of(model, ids, rule=rule)
        truth = plain.extend(new, [6], n_loops=6, rule=rule)
        for token in new[:3].split(1):
            ours.draft(token, n_loops=2, rule=rule)
        assert ours.lengths == [4]
        out = ours.extend(new, [6], n_loops=6, rule=rule)
        assert (truth.hidden - out.hidden).abs().max() <= FP64 * 10
        assert torch.equal(truth.n_loops, out.n_loops)
        a, b = slots_of(plain), slots_of(ours)
        assert max((a[slot] - b[slot]).abs().max() for slot in a) <= FP64 * 10


@torch.no_grad()
def test_drafts_are_forgotten_where_something_else_follows():
    model, ids = make(), prompts(1, 10)
    rule, other = Fixed(), Contraction(tol=0.2, scope="token")
    ways = {
        "other tokens": lambda s, new: s.extend(new.flip(0), [6], n_loops=6, rule=rule),
        "fewer tokens": lambda s, new: s.extend(new[:1], [1], n_loops=6, rule=rule),
        "fewer loops": lambda s, new: s.extend(new, [6], n_loops=1, rule=rule),
        "more loops": lambda s, new: s.extend(new, [6], n_loops=8, rule=rule),
        "other rule": lambda s, new: s.extend(new, [6], n_loops=6, rule=other),
        "other places": lambda s, new: s.extend(new, [6], n_loops=6, rule=rule, positions=torch.arange(7, 13)),
        "states": lambda s, new: s.extend(new, [6], n_loops=6, rule=rule, return_states=True),
        "warm start": lambda s, new: s.extend(new, [6], n_loops=6, rule=rule, warm_start=True),
        "crop": lambda s, new: (s.crop([1]), s.extend(new, [6], n_loops=6, rule=rule))[1],
        "select": lambda s, new: (s.select(torch.tensor([0, 0])), s.extend(new, [2, 4], n_loops=6, rule=rule))[1],
        "copy": lambda s, new: s.copy().extend(new, [6], n_loops=6, rule=rule),
        "reset": lambda s, new: (s.reset(), s.extend(new, [6], n_loops=6, rule=rule))[1],
    }
    for name, way in ways.items():
        (plain, new), (ours, _) = session_of(model, ids), session_of(model, ids)
        for token in new[:2].split(1):
            ours.draft(token, n_loops=2, rule=rule)
        a, b = way(plain, new), way(ours, new)
        assert (a.hidden - b.hidden).abs().max() <= FP64 * 10, name
        assert torch.equal(a.n_loops, b.n_loops), name
        assert (a.states is None) == (b.states is None)
        assert plain.lengths == ours.lengths


@torch.no_grad()
def test_what_a_draft_wrote_goes_with_it():
    """Other rows may become longer than this one; what stands behind its end has no weight there, but 0 * NaN is NaN."""
    model, ids = make(), prompts(1, 10)
    session, new = session_of(model, ids)
    session.draft(torch.full_like(new[:3], torch.nan), n_loops=2, rule=Fixed())
    session.select(torch.tensor([0, 0]))
    out = session.extend(new[:5], [4, 1], n_loops=6, rule=Fixed())
    assert out.hidden.isfinite().all()


@torch.no_grad()
def test_where_no_draft_can_be():
    model, ids = make(), prompts(1, 6)
    session, new = session_of(model, ids)
    session.select(torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="one row and the policy per_loop, got 2 rows"):
        session.draft(new[:1], n_loops=2, rule=Fixed())
    session = EagerSession(model.transformer, CachePolicy.parse("last_only"))
    session.extend(new, [2], n_loops=2, rule=Fixed())
    with pytest.raises(ValueError, match="got 1 rows and last_only"):
        session.draft(new[:1], n_loops=2, rule=Fixed())


def test_it_is_one_model():
    """Nothing of another model is needed, and a saved setting comes back with the model."""
    model = make()
    assert isinstance(model, LoopedGPT2)
    model.generation_config.update(assistant_early_exit=2)
    out = generate(model, prompts(1, 5), assistant_confidence_threshold=0.0)
    assert isinstance(out, SpeculativeOutput)
    assert out.n_drafted.max() == 12  # transformers' own default is 20 tokens
