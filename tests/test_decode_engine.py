"""Decoding on the C++ engine against its definition (reference_decode.py), and the invariances of a session."""

import _thread
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import random_weights
from reference_decode import decode_row
from tolerances import FP32, FP64

import looped
from looped.backends import cpu
from looped.exits import Absolute, Contraction, Exact, ExitRule, Fixed, Relative

pytestmark = pytest.mark.skipif(not cpu.is_there(), reason="built without the C++ engine")

from looped.backends import decode as decode_backend  # noqa: E402
from looped.backends.decode import CpuSession  # noqa: E402

VOCABULARY = 37


def policy(kind="per_loop", period=1):
    return SimpleNamespace(kind=kind, period=period)


def language_model(dtype=torch.float64, std=0.2, seed=0, **changes):
    fields = dict(
        input_kind="tokens",
        vocab_size=VOCABULARY,
        readout="vocabulary",
        tie_readout=True,
        d_model=48,
        n_heads=3,
        n_positions=96,
        n_loops=3,
    )
    return random_weights(looped.LoopedTransformer(looped.LoopedConfig(**(fields | changes))), std, seed, dtype).eval()


def texts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


class Decoder:
    """A session fed with rows of token ids."""

    def __init__(self, model, policy=None, session=None):
        self.model = model
        self.session = session or CpuSession(model, policy or globals()["policy"]())

    @torch.no_grad()
    def __call__(self, rows, n_loops=3, rule=None, **options):
        embeds = self.model.embedding(torch.cat(rows)) if len(rows) else torch.zeros(0, self.model.config.d_model)
        return self.session.extend(embeds, [len(row) for row in rows], n_loops=n_loops, rule=rule or Fixed(), **options)

    def in_parts(self, rows, parts, n_loops=3, rule=None):
        """The same rows in several calls: parts is a list of tokens per row of each call. Hidden and loops row by row."""
        hidden, loops, done = [[] for _ in rows], [[] for _ in rows], [0] * len(rows)
        for counts in parts:
            new = [row[at : at + count] for row, at, count in zip(rows, done, counts, strict=True)]
            out = self(new, n_loops, rule)
            for b, (h, n) in enumerate(zip(out.hidden.split(counts), out.n_loops.split(counts), strict=True)):
                hidden[b].append(h)
                loops[b].append(n)
            done = [at + count for at, count in zip(done, counts, strict=True)]
        assert done == [len(row) for row in rows]
        return [torch.cat(h) for h in hidden], [torch.cat(n) for n in loops]


def reference(model, rows, n_loops=3, rule=None):
    exact = language_model(torch.float64, **{k: v for k, v in model.config.to_dict().items()})
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    return [decode_row(exact, exact.embedding(row).detach(), n_loops, rule or Fixed()) for row in rows]


def assert_near(got, want, tolerance):
    error = (got.double() - want).norm() / want.norm().clamp_min(1e-30)
    assert error <= tolerance, float(error)


SHAPES = {
    "GPT-2": dict(inject="none", state_init="embedding", pos_when="once", loop_norm="once", n_core=3),
    "looped": dict(),
    "mul from ones": dict(inject="mul", state_init="ones"),
    "from the embedding": dict(state_init="embedding", pos_when="once"),
    "prelude and coda": dict(n_prelude=2, n_core=2, n_coda=2, loop_norm="once"),
    "no norm": dict(norm_kind="none", loop_norm="none", n_coda=1),
    "rms, gated": dict(norm_kind="rms", activation="silu_gated", d_ff=37, bias=False),
    "rms once": dict(norm_kind="rms", loop_norm="once", n_coda=1, activation="relu"),
    "gelu": dict(activation="gelu", pos_kind="none"),
    "width 20, heads of 5": dict(d_model=20, n_heads=4, d_ff=19),
    "heads of 48": dict(d_model=64, n_heads=2, head_dim=48),
    "one head of 96": dict(d_model=96, n_heads=1),
    "width 64": dict(d_model=64, n_heads=4, tie_readout=False),
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_every_kind_of_model_agrees_with_the_definition(changes, dtype):
    std = 0.05 if changes.get("norm_kind") == "none" else 0.2
    model = language_model(dtype, std=std, **changes)
    rows = texts(70, 1, 33)
    for n_loops in (1, 2, 4):
        out = Decoder(model)(rows, n_loops)
        for hidden, (want, n_used, _) in zip(out.hidden.split([70, 1, 33]), reference(model, rows, n_loops), strict=True):
            assert_near(hidden, want, FP32 if dtype == torch.float32 else FP64)
            assert n_used.tolist() == [n_loops] * len(n_used)


RULES = {
    "fixed": Fixed(),
    "contraction": Contraction(tol=0.4),
    "contraction every 2": Contraction(tol=0.6, check_every=2),
    "relative": Relative(tol=0.2),
    "relative, late": Relative(tol=0.2, min_loops=6),
    "absolute": Absolute(tol=1.0),
    "exact": Exact(),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("shape", ["looped", "prelude and coda", "from the embedding"])
def test_tokens_leave_by_their_own_rule(rule, shape):
    model = language_model(std=0.12, **SHAPES[shape])
    rows = texts(21, 3, 8)
    hidden, loops = Decoder(model).in_parts(rows, [[20, 1, 0], [1, 2, 8]], 9, rule)
    seen = set()
    for got, n, (want, n_used, _) in zip(hidden, loops, reference(model, rows, 9, rule), strict=True):
        assert n.tolist() == n_used.tolist()
        assert_near(got, want, FP64)
        seen |= set(n_used.tolist())
    if not rule.is_fixed and not isinstance(rule, Exact) and (shape != "prelude and coda" or rule == RULES["relative"]):
        assert len(seen) > 1, seen  # tokens differ


def test_states_of_every_loop():
    model = language_model(std=0.08)
    rows, rule = texts(12), Relative(tol=0.2)
    got = Decoder(model)(rows, 6, rule, return_states=True).states
    want = reference(model, rows, 6, rule)[0][2]
    assert len(got) == 7
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


# Bits --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["GPT-2", "prelude and coda", "rms, gated", "width 20, heads of 5", "one head of 96"])
@pytest.mark.parametrize("rule", ["fixed", "relative"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_cached_is_uncached_bit_for_bit(shape, rule, dtype):
    model = language_model(dtype, std=0.1, **SHAPES[shape])
    rows = texts(70, 5, 41, seed=3)
    whole = Decoder(model)(rows, 5, RULES[rule])
    wholes = list(zip(whole.hidden.split([70, 5, 41]), whole.n_loops.split([70, 5, 41]), strict=True))
    ways = [
        [[1, 1, 1]] * 5 + [[1, 0, 1]] * 36 + [[1, 0, 0]] * 29,
        [[33, 0, 1], [1, 5, 7], [36, 0, 33]],
        [[60, 4, 41], [10, 1, 0]],
    ]
    for parts in ways:
        hidden, loops = Decoder(model).in_parts(rows, parts, 5, RULES[rule])
        for b, (h, n) in enumerate(wholes):
            assert torch.equal(hidden[b], h)
            assert torch.equal(loops[b], n)
    for b, row in enumerate(rows):  # alone
        out = Decoder(model)([row], 5, RULES[rule])
        assert torch.equal(out.hidden, wholes[b][0])


@pytest.mark.parametrize("n_rows", [1, 2, 3, 7, 8, 15, 16, 30, 49])
def test_a_row_has_the_same_bits_in_a_batch_of_any_size_and_at_any_thread_count(n_rows, monkeypatch):
    model = language_model(torch.float32, std=0.1, d_model=96, n_heads=3)
    rows = texts(*[1 + (5 * b) % 9 for b in range(n_rows)])
    alone = [Decoder(model)([row]).hidden for row in rows]
    for n_threads in (1, 2, 3, 8):
        monkeypatch.setattr(cpu, "thread_count", lambda n=n_threads: n)
        decoder = Decoder(model)
        hidden, _ = decoder.in_parts(rows, [[1] * n_rows, [len(row) - 1 for row in rows]])
        for got, want in zip(hidden, alone, strict=True):
            assert torch.equal(got, want), n_threads
        last = torch.stack([h[-1] for h in hidden])
        logits = decoder.session.head(last)
        for b in range(n_rows):
            assert torch.equal(logits[b], decoder.session.head(last[b : b + 1])[0])
        want = (last.double() @ model.embedding.weight.double().T).detach()
        assert_near(logits, want, FP32)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_way_to_a_row_gives_its_bits(data):
    """Calls of any sizes, rows dropped, repeated and reordered, tokens cropped and put back, copies that go their own way."""
    shape = data.draw(st.sampled_from(sorted(SHAPES)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    rule = data.draw(st.sampled_from([Fixed(), Relative(tol=0.3)]))
    n_loops = data.draw(st.integers(1, 4))
    model = language_model(dtype, std=0.05, **SHAPES[shape])
    n_rows = data.draw(st.integers(1, 4))
    rows, have = [torch.zeros(0, dtype=torch.int64)] * n_rows, [0] * n_rows
    decoder = Decoder(model)
    for _ in range(data.draw(st.integers(1, 6))):
        kind = data.draw(st.sampled_from(["extend", "extend", "select", "crop", "copy"]))
        if kind == "extend" or not any(have):
            counts = [data.draw(st.integers(0, min(40, 90 - n))) for n in have]
            new = texts(*counts, seed=data.draw(st.integers(0, 9)))
            decoder(new, n_loops, rule)
            rows = [torch.cat(pair) for pair in zip(rows, new, strict=True)]
        elif kind == "select":
            chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=4))
            decoder.session.select(torch.tensor(chosen))
            rows = [rows[i] for i in chosen]
        elif kind == "crop":
            dropped = [data.draw(st.integers(0, len(row))) for row in rows]
            decoder.session.crop(dropped)
            rows = [row[: len(row) - n] for row, n in zip(rows, dropped, strict=True)]
        else:
            old = decoder
            decoder = Decoder(model, session=decoder.session.copy())
            if any(len(row) for row in rows):
                old([torch.ones(1, dtype=torch.int64)] * len(rows), n_loops, rule)
        have = [len(row) for row in rows]
        assert decoder.session.lengths == have
    last = texts(*[1] * len(rows), seed=11)
    got = decoder(last, n_loops, rule)
    for b, row in enumerate(rows):
        want = Decoder(model)([torch.cat([row, last[b]])], n_loops, rule)
        assert torch.equal(got.hidden[b], want.hidden[-1])
        assert got.n_loops[b] == want.n_loops[-1]


def test_rows_that_were_one_go_their_own_ways():
    model = language_model()
    row, a, b, c = texts(40, 3, 3, 3)
    decoder = Decoder(model)
    decoder([row])
    decoder.session.select(torch.tensor([0, 0]))
    third = Decoder(model, session=decoder.session.copy())
    for i in range(3):  # what one writes, the others must not read at the next token
        out = decoder([a[i : i + 1], b[i : i + 1]])
        other = third([c[i : i + 1], c[i : i + 1]])
    for got, more in [(out.hidden[0], a), (out.hidden[1], b), (other.hidden[0], c), (other.hidden[1], c)]:
        assert torch.equal(got, Decoder(model)([torch.cat([row, more])]).hidden[-1])


def test_more_loops_than_the_cached_tokens_ran():
    """A cached token answers later loops with the keys of its last."""
    model = language_model(std=0.1)
    row, more = texts(40, 2)
    decoder = Decoder(model)
    decoder([row], 2)
    out = decoder([more], 5)

    want = mixed_depths(model, torch.cat([row, more]), [2] * 40 + [5] * 2)
    assert_near(out.hidden, want[-2:], FP64)


def mixed_depths(model, ids, depths):
    """Hidden states of a row whose token i runs depths[i] loops."""
    depths = torch.tensor(depths)

    class AtItsDepth(ExitRule):
        def start(self, g):
            return {"depth": depths}

        def update(self, memory, step):
            return step.t >= memory["depth"]

    return decode_row(model, model.embedding(ids).detach(), int(depths.max()), AtItsDepth())[0]


@pytest.mark.parametrize("kind", [("last_only", 1), ("modulo", 2), ("first_then_shared", 1)])
def test_shared_slots_are_exact_within_one_call_and_differ_between_calls(kind):
    model = language_model(std=0.1)
    rows = texts(40, 7)
    exact = Decoder(model)(rows, 4)
    shared = Decoder(model, policy(*kind))
    assert torch.equal(shared(rows, 4).hidden, exact.hidden)
    apart = shared([texts(1)[0]] * 2, 4).hidden
    whole = Decoder(model)([torch.cat([row, texts(1)[0]]) for row in rows], 4).hidden.split([41, 8])
    for got, want in zip(apart, whole, strict=True):
        assert not torch.equal(got, want[-1])
    one_loop = Decoder(model, policy(*kind)).in_parts(rows, [[39, 0], [1, 7]], 1)[0]
    assert torch.equal(torch.cat(one_loop), Decoder(model)(rows, 1).hidden)


@pytest.mark.parametrize("kind", [("last_only", 1), ("modulo", 2), ("modulo", 3), ("first_then_shared", 1), ("per_loop", 1)])
def test_what_a_policy_lets_a_token_read(kind):
    """Two calls against the definition: loop t of the second reads, of a cached token, the loop that its slot holds."""
    model = language_model(std=0.15, n_core=2)
    row, more = texts(9, 1)
    n_loops = 5
    decoder = Decoder(model, policy(*kind))
    decoder([row], n_loops)
    got = decoder([more], n_loops).hidden
    slot_holds = {
        "per_loop": lambda t: t,
        "last_only": lambda t: n_loops,
        "first_then_shared": lambda t: 1 if t == 1 else n_loops,
        "modulo": lambda t: max(u for u in range(1, n_loops + 1) if (u - t) % kind[1] == 0),
    }[kind[0]]
    assert_near(got, read_at(model, row, more, n_loops, slot_holds), FP64)


@torch.no_grad()
def read_at(model, row, more, n_loops, slot_holds):
    """Hidden state of one more token whose loop t sees the keys that loop slot_holds(t) of the row made."""
    from reference_decode import empty, layer

    T, config = len(row), model.config
    every, last = torch.arange(T), torch.tensor([T])
    kept, states = {}, model.initial_state(model.embedding(row))
    P = model.embedding(row)
    for t in range(1, n_loops + 1):
        X = model.inject(states, P) + model.positions.weight[:T]
        kept[t] = empty(config, config.n_core, T + 1, X.dtype)
        for block, pair in zip(model.core, kept[t], strict=True):
            X = layer(block, X, every, pair)
        states = model.final_norm(X)
    P = model.embedding(more)
    state = model.initial_state(P)
    for t in range(1, n_loops + 1):
        X = model.inject(state, P) + model.positions.weight[T : T + 1]
        for block, (keys, values) in zip(model.core, kept[slot_holds(t)], strict=True):
            X = layer(block, X, last, (keys.clone(), values.clone()))
        state = model.final_norm(X)
    return state


# Options -----------------------------------------------------------------------------------------------------------------


def test_positions_of_the_callers():
    model = language_model()
    rows = texts(6, 4)
    places = torch.tensor([7, 8, 9, 3, 50, 95, 0, 0, 1, 2])
    out = Decoder(model)(rows, positions=places)
    for row, at, hidden in zip(rows, places.split([6, 4]), out.hidden.split([6, 4]), strict=True):
        assert_near(hidden, decode_row(model, model.embedding(row).detach(), 3, Fixed(), positions=at)[0], FP64)


def test_a_warm_start_begins_where_the_last_token_left():
    model = language_model(std=0.1)
    decoder = Decoder(model)
    row, more = texts(5, 2)
    before = decoder([row, row[:0]], warm_start=True)  # without cached tokens: cold
    assert torch.equal(before.hidden, Decoder(model)([row]).hidden)
    out = decoder([more, more], warm_start=True, return_states=True)
    last = Decoder(model)([row], return_states=True).states[-1][-1]
    assert torch.equal(out.states[0][0], last)
    assert torch.equal(out.states[0][1], last)
    assert not out.states[0][2:].any()  # the row that had none
    decoder.session.crop([1, 0])  # what it left with is gone
    assert not decoder([more[:1], more[:1]], warm_start=True, return_states=True).states[0].any()


def test_a_model_of_states():
    model = language_model(std=0.1, input_kind="states", readout="none", vocab_size=None, tie_readout=False)
    embeds = torch.randn(9, 48, dtype=torch.float64)
    out = CpuSession(model, policy()).extend(embeds, [9], n_loops=3, rule=Fixed())
    assert_near(out.hidden, decode_row(model, embeds, 3, Fixed())[0], FP64)


def test_rows_without_tokens_and_calls_without_any():
    model = language_model()
    decoder = Decoder(model)
    nothing = decoder([torch.zeros(0, dtype=torch.int64)] * 2)
    assert nothing.hidden.shape == (0, 48)
    assert decoder.session.lengths == [0, 0]
    rows = texts(3, 0)
    assert torch.equal(decoder(rows).hidden, Decoder(model)(rows[:1]).hidden)
    assert decoder.session.lengths == [3, 0]


def test_no_loops_at_all():
    model = language_model(state_init="embedding", loop_norm="once")
    rows = texts(3)
    decoder = Decoder(model)
    out = decoder(rows, 0)
    assert_near(out.hidden, model.final_norm(model.embedding(rows[0])).detach(), FP64)
    with pytest.raises(ValueError, match="n_loops=0 have no keys"):
        decoder(rows, 1)


def test_an_edit_shows_where_rows_begin_anew():
    model = language_model()
    rows = texts(4)
    decoder = Decoder(model)
    decoder(rows)
    with torch.no_grad():
        model.core[0].mlp.fc.weight.data.mul_(1.5)
    decoder.session.reset()
    assert torch.equal(decoder(rows).hidden, Decoder(model)(rows).hidden)
    logits = decoder.session.copy().head(torch.ones(1, 48, dtype=torch.float64))
    assert_near(logits, model.embedding.weight.sum(1)[None].detach(), FP64)


def test_values_that_are_not_finite_stay_in_their_row():
    model = language_model(torch.float32, std=0.1)
    rows = texts(20, 20)
    want = Decoder(model)(rows[1:]).hidden
    embeds = model.embedding(torch.cat(rows)).detach()
    embeds[7] = torch.nan
    session = CpuSession(model, policy())
    out = session.extend(embeds, [20, 20], n_loops=3, rule=Relative(tol=1e-9)).hidden
    assert torch.equal(out[20:], want)
    assert torch.equal(out[:7], Decoder(model)([rows[0][:7]]).hidden)  # nor do earlier tokens see it
    assert out[7:20].isnan().all()
    session.crop([13, 0])  # what is left in the pages weighs nothing
    again = session.extend(model.embedding(rows[0][7:]).detach(), [13, 0], n_loops=3, rule=Fixed()).hidden
    assert torch.equal(again, Decoder(model)(rows[:1]).hidden[7:])


# Errors, interrupts, threads ---------------------------------------------------------------------------------------------


class OwnRule(ExitRule):
    pass


def test_what_is_refused_changes_nothing():
    model = language_model()
    decoder = Decoder(model)
    rows = texts(90, 2)
    before = decoder(rows)
    session, embeds = decoder.session, torch.zeros(2, 48, dtype=torch.float64)
    common, beyond = dict(n_loops=3, rule=Fixed()), torch.tensor([0, 96])
    cases = [
        (ValueError, "row 0 has 97 tokens but the model has 96 positions", lambda: decoder([texts(7)[0], rows[1]])),
        (
            ValueError,
            "position 96 does not lie in 0 .. 95",
            lambda: session.extend(embeds, [1, 1], positions=beyond, **common),
        ),
        (ValueError, "lengths are of 1 rows, but the session has 2", lambda: session.extend(embeds, [2], **common)),
        (ValueError, "lengths must sum to the 2 rows", lambda: session.extend(embeds, [2, 1], **common)),
        (ValueError, "row 1 has length -1", lambda: session.extend(embeds, [3, -1], **common)),
        (ValueError, r"but the weights are torch.float64", lambda: session.extend(embeds.float(), [1, 1], **common)),
        (ValueError, r"got float64 \[2, 40\]", lambda: session.extend(embeds[:, :40], [1, 1], **common)),
        (ValueError, "records no gradient", lambda: session.extend(embeds.requires_grad_(), [1, 1], **common)),
        (ValueError, "n_loops and tol must be at least 0", lambda: decoder(rows, -1)),
        (NotImplementedError, "no exit rule OwnRule", lambda: decoder(rows, rule=OwnRule())),
        (ValueError, "row 1 has 2 tokens, so 3 of them", lambda: session.crop([0, 3])),
        (ValueError, "numbers for 1 rows", lambda: session.crop([0])),
        (ValueError, "there is no row 2 among 2", lambda: session.select(torch.tensor([0, 2]))),
    ]
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()
        assert session.lengths == [90, 2]
    session.crop([5, 2])
    assert torch.equal(decoder([rows[0][85:], rows[1]]).hidden, torch.cat([before.hidden[85:90], before.hidden[90:]]))


def test_models_that_cannot_decode_are_refused():
    for changes, message in [(dict(mask_kind="full"), "causal"), (dict(state_init="given"), "state_init='given'")]:
        with pytest.raises(ValueError, match=message):
            CpuSession(language_model(**changes), policy())
    with pytest.raises(ValueError, match="float32 or float64"):
        CpuSession(language_model().bfloat16(), policy())
    with pytest.raises(ValueError, match="policy='first' is not one of"):
        Decoder(language_model(), policy("first"))(texts(1))


def test_an_interrupt_leaves_the_rows_as_they_were():
    model = language_model(torch.float32, d_model=96, n_heads=3, std=0.05)
    decoder = Decoder(model, policy("last_only"))
    rows = texts(10, 3)
    decoder(rows)
    threading.Timer(0.3, _thread.interrupt_main).start()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        decoder(texts(80, 80), 10**7)
    assert time.perf_counter() - start < 5
    assert decoder.session.lengths == [10, 3]
    more = texts(1, 1)
    undisturbed = Decoder(model, policy("last_only"))
    undisturbed(rows)
    assert torch.equal(decoder(more).hidden, undisturbed(more).hidden)


def test_slots_are_made_as_loops_come_to_them():
    """As many loops as nobody has memory for, of which tokens that leave early run a few."""
    model = language_model(std=0.08)
    rows, rule = texts(30), Relative(tol=0.2)
    out = Decoder(model)(rows, 10**6, rule)
    assert_near(out.hidden, reference(model, rows, 40, rule)[0][0], FP64)
    late = Relative(tol=0.9, min_loops=37)  # beyond the slots that are made at first
    hidden, loops = Decoder(model).in_parts(rows, [[20], [1], [9]], 10**6, late)
    whole = reference(model, rows, 50, late)[0]
    assert loops[0].tolist() == whole[1].tolist()
    assert_near(hidden[0], whole[0], FP64)


def test_two_threads_at_once_are_told_and_copies_serve_them():
    model = language_model(torch.float32)
    decoder = Decoder(model)
    decoder(texts(4))
    copies = [Decoder(model, session=decoder.session.copy()) for _ in range(4)]
    want = Decoder(model, session=decoder.session.copy())(texts(30, seed=5), 50).hidden
    got = [None] * 4

    def work(i):
        got[i] = copies[i](texts(30, seed=5), 50).hidden

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(hidden, want) for hidden in got)

    told = []

    def meddle():
        """Until it is told, which ends the call that would go on for days."""
        try:
            for _ in range(500):
                time.sleep(0.05)
                decoder.session.select(torch.tensor([0]))
        except RuntimeError as error:
            told.append(str(error))
        _thread.interrupt_main()

    meddler = threading.Thread(target=meddle)
    meddler.start()
    with pytest.raises(KeyboardInterrupt):
        decoder(texts(80), 10**9, Relative(tol=1e-300))
    meddler.join()
    assert len(told) == 1
    assert "at work for another thread" in told[0]
    assert decoder.session.lengths == [4]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_session_goes_on_in_a_child_of_a_fork(monkeypatch):
    monkeypatch.setattr(cpu, "thread_count", lambda: 2)
    model = language_model(torch.float32, d_model=96, n_heads=3)
    decoder = Decoder(model)
    rows, more = texts(30, 12), texts(20, 20, seed=1)
    decoder(rows)
    want = decoder.session.copy().extend(model.embedding(torch.cat(more)).detach(), [20, 20], n_loops=3, rule=Fixed()).hidden
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if torch.equal(decoder(more).hidden, want) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(decoder(more).hidden, want)


def test_pytorch_can_be_kept_from_spinning_beside_a_session(monkeypatch):
    monkeypatch.setattr(cpu, "thread_count", torch.get_num_threads)
    torch.set_num_threads(3)

    def fail():
        with decode_backend.torch_on_one_thread():
            assert torch.get_num_threads() == 1
            with decode_backend.torch_on_one_thread():
                raise KeyError(decode_backend.thread_count())

    with pytest.raises(KeyError, match="3"):
        fail()
    assert torch.get_num_threads() == 3
    assert decode_backend.thread_count() == 3


def test_a_thread_that_begins_beside_another_ones_loop_has_all_threads(monkeypatch):
    """A thread that asks PyTorch for its number while that is 1 keeps the 1, so it is not asked."""
    monkeypatch.setattr(cpu, "n_cores", lambda: 8)
    torch.set_num_threads(3)
    counts, is_out = [], threading.Event()

    def other():
        counts.append(cpu.thread_count())
        assert is_out.wait(60)
        counts.append(cpu.thread_count())

    thread = threading.Thread(target=other)
    with decode_backend.torch_on_one_thread():
        thread.start()
        while not counts and thread.is_alive():
            thread.join(0.01)
    is_out.set()
    thread.join()
    assert counts == [3, 3]
    assert cpu.thread_count() == 3


def test_two_threads_beside_each_other_leave_pytorch_its_threads(monkeypatch):
    """The second comes while the first is inside, and leaves after it."""
    monkeypatch.setattr(cpu, "thread_count", torch.get_num_threads)
    torch.set_num_threads(3)
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
    seen = {}

    def first():
        with decode_backend.torch_on_one_thread():
            first_is_in.set()
            assert second_is_in.wait(60)
        seen["first"] = torch.get_num_threads()
        first_is_out.set()

    def second():
        assert first_is_in.wait(60)
        with decode_backend.torch_on_one_thread():
            second_is_in.set()
            assert first_is_out.wait(60)
            seen["inside"] = torch.get_num_threads(), decode_backend.thread_count()
        seen["second"] = torch.get_num_threads()

    def later():
        seen["later"] = torch.get_num_threads(), decode_backend.thread_count()

    both = [threading.Thread(target=work) for work in (first, second)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    third = threading.Thread(target=later)
    third.start()
    third.join()
    assert seen == {"first": 3, "inside": (1, 3), "second": 3, "later": (3, 3)}
    assert torch.get_num_threads() == 3


def test_the_bandwidth_is_measured():
    bandwidth = cpu._engine.read_bandwidth(n_threads=1, bytes=1 << 22, seconds=0.05)
    assert 0.1 < bandwidth < 10_000
    for bad in (dict(n_threads=0), dict(bytes=100), dict(seconds=0), dict(seconds=np.nan)):
        with pytest.raises(ValueError, match="must"):
            cpu._engine.read_bandwidth(**bad)


def test_readout_needs_no_language_model_package():
    program = """
import sys
from looped.exits import Readout
from test_decode_engine import Decoder, language_model, texts

out = Decoder(language_model(std=0.08))(texts(12), 12, Readout(tol=0.2, patience=2))
assert 2 < out.n_loops.float().mean() < 12
print(*{"transformers", "looped.lm"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
