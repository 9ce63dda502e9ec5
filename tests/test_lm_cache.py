"""The looped cache: policies, what generate does to it, and that it changes nothing that it should not."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from language_models import contracting_lm, left_padded, looped_lm, pair, prompts
from tolerances import FP32, FP64
from torch.overrides import TorchFunctionMode

from looped.exits import Absolute, Fixed
from looped.lm import CachePolicy
from looped.lm.model import CACHE_NAME
from looped.lm.policy import POLICIES
from looped.lm.rows import Chunk
from looped.lm.slots import Slots

NAMES = ["per_loop", "last_only", "modulo(1)", "modulo(2)", "modulo(3)", "modulo(9)", "first_then_shared"]


def decode(model, ids, cache, **kwargs):
    """Logits [B, T, V], one column a call."""
    return torch.cat([model(column, cache=cache, **kwargs).logits for column in ids.split(1, dim=1)], 1)


# Policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_has_the_shape_of_its_policy(name):
    model = looped_lm(n_prelude=1, n_core=2, n_coda=1, n_loops=5, loop_norm="once")
    cache, ids = model.make_cache(name), prompts(3, 6)
    model(ids, cache=cache)
    policy = CachePolicy.parse(name)
    n_slots = {"per_loop": 5, "last_only": 1, "first_then_shared": 2}.get(name) or min(int(name[7:-1]), 5)
    pairs = cache.session.slots.pairs
    assert len(pairs) == 2 + 2 * n_slots == 2 + 2 * policy.n_slots(5)
    assert {pair[0].shape[0::2] for pair in pairs.values()} == {(3, 4)}
    assert policy.bytes_per_token(model.transformer.config, 5) == len(pairs) * 2 * 32 * 4
    assert policy.bytes_per_token(model.transformer.config, 5, torch.bfloat16) == len(pairs) * 2 * 32 * 2
    assert str(policy) == name


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_what_a_policy_keeps_is_what_its_table_says(name):
    """Keys in each slot against those of a per_loop cache: the last loop that writes there; and one pass over all is exact."""
    model, ids = looped_lm(n_core=2, n_loops=5, dtype=torch.float64), prompts(2, 6)
    exact, cache = model.make_cache("per_loop"), model.make_cache(name)
    assert torch.equal(model(ids, cache=exact).logits, model(ids, cache=cache).logits)
    last = {"last_only": {0: 5}, "modulo(1)": {0: 5}, "modulo(2)": {0: 5, 1: 4}, "modulo(3)": {0: 4, 1: 5, 2: 3}}
    last |= {
        "first_then_shared": {0: 1, 1: 5},
        "per_loop": {i: i + 1 for i in range(5)},
        "modulo(9)": {i: i + 1 for i in range(5)},
    }
    for slot, loop in last[name].items():
        for layer in range(2):
            for got, kept in zip(
                cache.session.slots.pairs["core", slot, layer], exact.session.slots.pairs["core", loop - 1, layer], strict=True
            ):
                assert torch.equal(got[:, :6], kept[:, :6])
    # A token that follows reads them: loop t reads the slot that t writes. The eager model, fed such keys, is the oracle.
    nxt = prompts(2, 1, seed=9)
    logits = model(nxt, cache=cache).logits
    forged = model.make_cache("per_loop")
    model(ids, cache=forged)
    policy = CachePolicy.parse(name)
    for t in range(1, 6):
        for layer in range(2):
            source = exact.session.slots.pairs["core", last[name][policy.slot(t)] - 1, layer]
            forged.session.slots.pairs["core", t - 1, layer] = tuple(tensor.clone() for tensor in source)
    assert (model(nxt, cache=forged).logits - logits).abs().max() <= FP64
    if policy.is_exact or name == "modulo(9)":
        assert (logits - model(torch.cat([ids, nxt], 1)).logits[:, -1:]).abs().max() <= FP64
    else:
        assert (logits - model(torch.cat([ids, nxt], 1)).logits[:, -1:]).abs().max() > 1e-4  # stated as not exact


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlyFirst(Absolute):
    """Lets the first of two tokens go, in the loops while both are there."""

    def update(self, memory, step):
        return super().update(memory, step) & (torch.arange(len(step.g)) == 0) & (len(step.g) == 2)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_left_early_fill_what_they_skipped(name):
    """A token decoded with few loops is, to later ones, as if its last loop had been repeated."""
    model, ids = looped_lm(n_loops=5, dtype=torch.float64), prompts(1, 4)
    for n_loops, by_rule in ((1, False), (2, False), (3, False), (1, True), (3, True), (4, True)):
        cache = model.make_cache(name)
        model(ids, cache=cache)
        two = torch.cat([ids[:, :1], ids[:, :1]], 1)  # the second runs on where a rule decides
        if by_rule:
            model(two, cache=cache, exit=OnlyFirst(tol=math.inf, min_loops=n_loops))
        else:
            model(two, cache=cache, n_loops=n_loops)
        assert cache.n_loops[0, 4:].tolist() == [n_loops, 5 if by_rule else n_loops]
        policy, slots = cache.session.policy, cache.session.slots
        for slot in range(policy.n_slots(5)):
            writers = [t for t in range(1, n_loops + 1) if policy.slot(t) == slot]
            loop = max(writers, default=n_loops)  # the last that wrote there, or the last of all
            kept = slots.pairs["core", policy.slot(loop), 0]
            assert torch.equal(slots.pairs["core", slot, 0][0][:, 4], kept[0][:, 4])
            assert slots.pairs["core", slot, 0][0][:, 4].abs().sum() > 0


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_a_token_that_left_does_not_lose_the_loops_it_ran(name):
    """The first token of a text sees itself alone, so its keys of each loop are the same under every policy."""
    model, ids = looped_lm(n_loops=6, dtype=torch.float64), prompts(1, 2)
    exact = model.make_cache("per_loop")
    model(ids, cache=exact)
    for used in range(1, 6):
        cache = model.make_cache(name)
        model(ids, cache=cache, exit=OnlyFirst(tol=math.inf, min_loops=used))
        assert cache.n_loops[0].tolist() == [used, 6]
        policy = cache.session.policy
        for slot in range(policy.n_slots(6)):
            loop = max((t for t in range(1, used + 1) if policy.slot(t) == slot), default=used)
            keys, expected = (c.session.slots.pairs["core", s, 0][0][0, 0] for c, s in ((cache, slot), (exact, loop - 1)))
            assert (keys - expected).abs().max() <= FP64


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_generates(name):
    model = contracting_lm(n_loops=6, cache_policy=name)
    ids, mask = left_padded([prompts(1, n, seed=n)[0].tolist() for n in (3, 6)])
    for extra in ({}, {"num_beams": 3}, {"exit": "relative"}, {"do_sample": True}):
        out = model.generate(ids, attention_mask=mask, max_new_tokens=5, **({"do_sample": False, "pad_token_id": 0} | extra))
        assert out.shape == (2, 11)


def test_policies_are_named():
    for wrong in ("per-loop", "modulo", "modulo(0)", "modulo(-1)", "", 3):
        with pytest.raises(ValueError, match="per_loop, last_only"):
            CachePolicy.parse(wrong)
    with pytest.raises(ValueError, match="cache_policy"):
        looped_lm(cache_policy="newest")
    with pytest.raises(ValueError, match="cache_policy=''"):
        looped_lm().make_cache("")
    with pytest.raises(ValueError, match="backend=''"):
        looped_lm().make_cache(backend="")
    assert POLICIES == ("per_loop", "last_only", "modulo(N)", "first_then_shared")


# Slots ------------------------------------------------------------------------------------------------------------


def test_one_slot_per_loop_and_layer_and_never_another_loop_in_it():
    """Caches that know the layer alone let later loops overwrite earlier ones."""
    for n_core in (1, 2):
        model, ids = looped_lm(n_core=n_core, n_loops=4), torch.tensor([[9, 8, 7, 6, 5]])
        cache = model.make_cache()
        model(ids, cache=cache)
        assert len(cache.session.slots.pairs) == 4 * n_core
        out = [
            model.generate(
                ids, max_new_tokens=6, do_sample=False, use_cache=use, output_logits=True, return_dict_in_generate=True
            )
            for use in (True, False)
        ]
        assert torch.equal(out[0].sequences, out[1].sequences)
        for a, b in zip(out[0].logits, out[1].logits, strict=True):
            assert (a - b).abs().max() <= FP32


def test_two_writes_to_one_loop_and_layer_in_one_step_are_an_error():
    for policy in ("per_loop", "last_only"):
        slots, chunk, x = Slots(CachePolicy.parse(policy)), Chunk([0, 0], [2, 1], torch.device("cpu")), torch.ones(3, 4, 8)
        slots.begin()
        slots.write("core", 1, 0, x, x, chunk)
        slots.write("core", 2, 0, x, x, chunk)
        slots.write("core", 1, 1, x, x, chunk)
        with pytest.raises(RuntimeError, match="layer 0 of the core is written twice at loop 2"):
            slots.write("core", 2, 0, x, x, chunk)
        slots.begin()
        slots.write("core", 2, 0, x, x, Chunk([2, 1], [1, 2], torch.device("cpu")))


@torch.no_grad()
def test_room_grows():
    model = looped_lm(n_positions=300, n_loops=2)
    ids = prompts(2, 280)
    cache = model.make_cache()
    logits = torch.cat([model(part, cache=cache).logits for part in ids.split([60, 3, 1, 1, 70, 1, 144], dim=1)], 1)
    assert (logits - model(ids, use_cache=False).logits).abs().max() <= FP32


# What generate does -----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_rows_are_reordered_repeated_and_selected():
    model = contracting_lm(exit={"rule": "relative", "tol": 0.02})
    rows = [prompts(1, n, seed=n)[0].tolist() for n in (3, 6, 1)]
    ids, mask = left_padded(rows)
    nxt = prompts(3, 1, seed=9)
    for change, order in (
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    ):
        cache = model.make_cache()
        model(ids, attention_mask=mask, cache=cache)
        used = cache.n_loops.clone()
        change(cache)
        assert torch.equal(cache.n_loops, used[order])
        assert cache.batch_size == len(order)
        grown = torch.cat([mask, mask.new_ones(3, 1)], 1)
        got = model(nxt[order], attention_mask=grown[order], cache=cache)
        for place, row in enumerate(order):
            alone = model(torch.tensor([[*rows[row], int(nxt[row])]]))
            assert (got.logits[place, -1] - alone.logits[0, -1]).abs().max() <= FP64
            assert got.n_loops[place, -1] == alone.n_loops[0, -1]


@torch.no_grad()
def test_crop_forgets():
    model = looped_lm(n_loops=3, dtype=torch.float64)
    rows = [prompts(1, n, seed=n)[0].tolist() for n in (3, 6)]
    ids, mask = left_padded(rows)
    more = prompts(2, 3, seed=5)
    grown = torch.cat([mask, mask.new_ones(2, 3)], 1)
    expected = model(torch.cat([ids, more], 1), attention_mask=grown).logits[:, -3:]
    for n_columns in (-2, 0, -9, 8, 6):  # positive: what older versions of transformers ask for
        cache = model.make_cache()
        model(torch.cat([ids, more], 1), attention_mask=grown, cache=cache)
        cache.crop(n_columns)
        left = {-2: 7, 0: 9, -9: 0, 8: 8, 6: 6}[n_columns]
        assert cache.get_seq_length() == left
        assert cache.session.lengths == grown[:, :left].sum(1).tolist()
        if n_columns == 0:
            continue
        again = model(torch.cat([ids, more], 1)[:, left:], attention_mask=grown, cache=cache).logits[:, -1:]
        assert (again - expected[:, -1:]).abs().max() <= FP64


@torch.no_grad()
def test_crop_where_a_slot_has_not_grown_with_the_others():
    """Calls without checks, or without loops, write fewer slots."""
    model = looped_lm(n_prelude=1, n_coda=1, n_positions=200, loop_norm="once", dtype=torch.float64)
    first, more = prompts(2, 5), prompts(2, 90, seed=1)
    for rest in ({}, {"n_loops": 0}):
        cache = model.make_cache()
        model(first, cache=cache, exit="kl")
        model(more, cache=cache, **rest)
        cache.crop(-3)
        again = model(more[:, -3:], cache=cache, **rest).logits
        twin = model.make_cache()
        model(first, cache=twin, exit="kl")
        assert (again - model(more, cache=twin, **rest).logits[:, -3:]).abs().max() <= FP64


@torch.no_grad()
def test_what_a_row_lost_is_not_read():
    """A rejected draft that held NaN leaves no trace, in rows of different lengths neither."""
    model = looped_lm(n_loops=2, tie_readout=False, dtype=torch.float64)
    model.transformer.embedding.weight[60] = torch.nan
    ids, mask = left_padded([[5, 6], [9, 8, 7, 6, 5]])
    cache = model.make_cache()
    model(ids, attention_mask=mask, cache=cache)
    bad = torch.tensor([[1, 60], [60, 60]])
    model(bad, attention_mask=torch.cat([mask, mask.new_ones(2, 2)], 1), cache=cache)
    cache.crop(-2)
    good, grown = torch.tensor([[3], [4]]), torch.cat([mask, mask.new_ones(2, 1)], 1)
    expected = model(torch.cat([ids, good], 1), attention_mask=grown).logits[:, -1]
    assert (model(good, attention_mask=grown, cache=cache).logits[:, -1] - expected).abs().max() <= FP64


@torch.no_grad()
def test_copies_go_on_independently():
    model, ids = looped_lm(), prompts(2, 5)
    cache = model.make_cache()
    model(ids, cache=cache)
    twin = copy.deepcopy(cache)
    assert twin.session.model is cache.session.model
    a = decode(model, prompts(2, 3, seed=1), cache)
    assert twin.get_seq_length() == 5
    assert torch.equal(decode(model, prompts(2, 3, seed=1), twin), a)
    assert copy.copy(cache).session is not cache.session
    cache.reset()
    assert (cache.get_seq_length(), cache.is_initialized, cache.session.lengths) == (0, False, [])
    assert torch.equal(model(ids, cache=cache).logits, model(ids).logits)


def test_what_transformers_asks_a_cache():
    cache = looped_lm().make_cache()
    assert (cache.get_seq_length(), cache.get_max_length(), len(cache), cache.is_compileable) == (0, -1, 1, False)
    assert cache.get_mask_sizes(4, 0) == (4, 0)
    model = looped_lm()
    model(prompts(2, 3), cache=(used := model.make_cache()))
    assert used.get_mask_sizes(4, 0) == (7, 0)
    assert used.is_croppable
    assert not any(used.is_linear + used.is_sliding + used.is_dummy)
    assert "2 rows of 3 columns" in repr(used)
    with pytest.raises(TypeError, match=r"LoopedGPT2.forward alone"):
        used.update(torch.zeros(1), torch.zeros(1), 0)
    with pytest.raises(TypeError, match="made beforehand"):
        used.early_initialization(1, 4, 8, torch.float32, torch.device("cpu"))


# The cache changes nothing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_changes_nothing(dtype):
    model = looped_lm(n_core=2, n_loops=3).to(dtype)
    for ids, mask in (
        left_padded([prompts(1, 6)[0].tolist()]),
        left_padded([prompts(1, n, seed=n)[0].tolist() for n in (3, 6)]),
    ):
        out = [
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=8,
                do_sample=False,
                pad_token_id=0,
                use_cache=use,
                output_logits=True,
                return_dict_in_generate=True,
            )
            for use in (True, False, True)
        ]
        for a, b in zip(out[0].logits, out[1].logits, strict=True):
            assert a.isfinite().all()
            scale = {torch.float32: FP32, torch.bfloat16: 0.2, torch.float16: 0.02}[
                dtype
            ]  # 3 loops of 2 layers at 8 and 11 bits
            assert (a - b).abs().max() <= scale
            if dtype != torch.float32 and not torch.equal(a.argmax(-1), b.argmax(-1)):
                break  # from here on the texts differ
        if dtype == torch.float32:
            assert torch.equal(out[0].sequences, out[1].sequences)
        assert torch.equal(out[0].sequences, out[2].sequences)  # the second call is not affected by the first


@torch.no_grad()
def test_a_call_that_failed_leaves_its_cache_as_it_was():
    model, ids = looped_lm(n_loops=3), prompts(2, 5)
    cache = model.make_cache()
    model(ids, cache=cache)
    expected = model(torch.cat([ids, prompts(2, 2, seed=1)], 1)).logits[:, -2:]

    def fail(module, inputs, output):
        raise KeyboardInterrupt

    hook = model.transformer.core[0].mlp.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(prompts(2, 4, seed=7), cache=cache)
    hook.remove()
    with pytest.raises(ValueError, match="3 rows"):
        model(prompts(3, 1), cache=cache)
    with pytest.raises(ValueError, match="the token id 99"):
        model(torch.tensor([[1], [99]]), cache=cache)
    assert cache.get_seq_length() == 5
    assert (model(prompts(2, 2, seed=1), cache=cache).logits - expected).abs().max() <= FP32


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("n_before", [0, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, TimeoutError, MemoryError])
def test_an_interrupt_after_the_work_of_a_call_leaves_its_cache_as_it_was(backend, n_before, error, monkeypatch):
    """Ctrl-C, what another signal's handler raises, and the end of memory."""
    model, ids = looped_lm(n_loops=3), prompts(2, 5)
    cache = model.make_cache(backend=backend)
    if n_before:
        model(ids[:, :n_before], cache=cache)
    extend = cache.session.extend

    def fail(*args):
        raise RuntimeError("can't allocate memory")

    def extend_and_fail(*args, **how):
        extend(*args, **how)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(cache.session, "extend", extend_and_fail)
        with pytest.raises(error):
            model(prompts(2, 3, seed=7), cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "append", fail)
        with pytest.raises(RuntimeError, match="can't allocate"):
            model(prompts(2, 3, seed=7), cache=cache)
    assert cache.get_seq_length() == n_before
    assert (model(ids[:, n_before:], cache=cache).logits - model(ids).logits[:, n_before:]).abs().max() <= FP32


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("n_before", [0, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
@pytest.mark.parametrize("where", ["head_of", "next_token_loss", "LoopedOutput"])
def test_a_head_that_failed_leaves_its_cache_as_it_was(backend, n_before, error, where, monkeypatch):
    """The head, the loss and the output come after the session's work; a call that failed in them can be made again."""
    model, ids = looped_lm(n_loops=3), prompts(2, 7)
    cache = model.make_cache(backend=backend)
    if n_before:
        model(ids[:, :n_before], cache=cache)

    def fail(*args, **kwargs):
        raise error("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(f"looped.lm.model.{where}", fail)
        with pytest.raises(error, match="no memory"):
            model(ids[:, n_before:], labels=ids[:, n_before:], cache=cache)
    assert cache.get_seq_length() == n_before
    assert cache.session.lengths in ([n_before] * 2, [])
    assert (model(ids[:, n_before:], cache=cache).logits - model(ids).logits[:, n_before:]).abs().max() <= FP32


@torch.no_grad()
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
@pytest.mark.parametrize("then", ["nothing", "copy", "reorder", "crop", "fail again"])
def test_what_a_failed_call_wrote_is_not_read(error, then):
    """The first row of the call is NaN; later a longer call of the second row passes over the places behind the first."""
    model, new = looped_lm(n_core=2), prompts(2, 5, seed=7)
    mask = torch.tensor([[1] * 5 + [0] * 4, [1] * 9])
    cache = model.make_cache()
    model(prompts(2, 4), cache=cache)
    kept = copy.deepcopy(cache)

    def fail(module, inputs, output):
        raise error("no memory")

    hook = model.transformer.core[1].mlp.register_forward_hook(fail)
    for n_tokens in (5, 2) if then == "fail again" else (5,):
        embeds = torch.randn(2, n_tokens, 32)
        embeds[0] = math.nan
        with pytest.raises(error, match="no memory"):
            model(inputs_embeds=embeds, cache=cache)
    hook.remove()
    if then == "copy":
        cache = copy.deepcopy(cache)
    for each in (cache, kept):
        if then == "reorder":
            each.reorder_cache(torch.tensor([0, 0]))
        if then == "crop":
            each.crop(-1)
    mask = mask[:, : cache.get_seq_length() + 5]
    expected = model(new, attention_mask=mask, cache=kept).logits
    assert torch.equal(model(new, attention_mask=mask, cache=cache).logits, expected)
    assert expected.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("where", ["in the session", "after it"])
def test_a_warm_start_after_a_failed_call_is_warm(backend, where, monkeypatch):
    model, new = looped_lm(n_loops=3), prompts(2, 3, seed=7)
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])  # the second row has no new token
    cache = model.make_cache(backend=backend)
    model(prompts(2, 3), cache=cache)
    model(prompts(2, 2, seed=1), cache=cache, warm_start=True)
    kept = copy.deepcopy(cache)
    expected = model(new, cache=copy.deepcopy(kept), warm_start=True).logits
    cold = model(new, cache=copy.deepcopy(kept)).logits
    assert (expected - cold).abs().max() > 1e-2

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    for repeats in range(2):
        with monkeypatch.context() as patch:
            owner = cache.session if where == "in the session" else cache
            patch.setattr(owner, "extend" if where == "in the session" else "append", fail)
            with pytest.raises(KeyboardInterrupt):
                model(prompts(2, 3, seed=9), attention_mask=mask if repeats else None, cache=cache, warm_start=True)
        assert cache.session.lengths == [5, 5]
        again = model(new, cache=copy.deepcopy(cache), warm_start=True).logits
        assert torch.equal(again, expected)
    if backend == "eager":  # a call that is cold is taken back as well
        with monkeypatch.context() as patch:
            patch.setattr(cache, "append", fail)
            with pytest.raises(KeyboardInterrupt):
                model(prompts(2, 3, seed=9), cache=cache)
        assert torch.equal(model(new, cache=copy.deepcopy(cache), warm_start=True).logits, expected)
    for each in (cache, kept):
        each.crop(-1)
    again, expected = (model(new, cache=each, warm_start=True).logits for each in (cache, kept))
    assert torch.equal(again, expected)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_what_is_taken_back_is_the_last_call_and_nothing_else(backend):
    model, embeds = looped_lm(n_loops=3), torch.randn(4, 32)
    session = model.make_cache(backend=backend).session
    how = dict(n_loops=3, rule=Fixed(), warm_start=True)
    session.extend(embeds, [4], **how)
    warm = session.copy().extend(embeds, [4], **how).hidden
    cropped = session.copy()
    cropped.crop([1])
    shorter = cropped.extend(embeds, [4], **how).hidden
    session.extend(embeds, [4], **how)
    other = session.copy()
    other.extend(embeds, [4], **how)
    other.take_back([4])
    other.select(torch.tensor([0]))
    other.take_back([5])  # more than one call: a crop
    assert other.lengths == [3]
    assert torch.equal(other.extend(embeds, [4], **how).hidden, shorter)
    session.take_back([4])
    assert torch.equal(session.extend(embeds, [4], **how).hidden, warm)


def test_a_session_at_work_for_another_thread_is_not_settled(monkeypatch):
    """The call that came in between is refused, and the other one's session is left alone."""
    model, ids = looped_lm(n_loops=3), prompts(2, 5)
    cache = model.make_cache()

    def busy(*args, **how):
        raise RuntimeError("the session is at work for another thread")

    with monkeypatch.context() as patch:
        patch.setattr(cache.session, "extend", busy)
        patch.setattr(cache, "settle", None)
        with pytest.raises(RuntimeError, match="another thread"):
            model(ids, cache=cache)


@torch.no_grad()
@pytest.mark.parametrize("n_done", [0, 1, 3])
def test_a_first_call_that_failed_leaves_an_empty_cache(n_done):
    model, calls = looped_lm(n_core=2, n_loops=4), []
    cache = model.make_cache()

    def fail(module, inputs, output):
        calls.append(module)
        if len(calls) > n_done:
            raise RuntimeError("out of memory")

    hook = model.transformer.core[0].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(prompts(2, 7), cache=cache)
    hook.remove()
    ids = prompts(3, 5)
    assert (model(ids, n_loops=7, cache=cache).logits - model(ids, n_loops=7).logits).abs().max() <= FP32


class NoMemory(TorchFunctionMode):
    """The n-th call of a function of PyTorch, from 0, finds no memory."""

    def __init__(self, name, n, error=MemoryError):
        super().__init__()
        self.name, self.n, self.error = name, n, error

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == self.name:
            self.n -= 1
            if self.n < 0:
                raise self.error(self.name)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("n_done", [0, 1, 2, 3, 5])
def test_no_memory_for_deeper_slots_leaves_the_cache_as_it_was(n_done, error):
    """Two layers and two more loops: eight clones."""
    model, new = looped_lm(n_core=2), prompts(1, 3, seed=7)
    cache = model.make_cache()
    model(prompts(1, 6), cache=cache, n_loops=4)
    expected = model(new, cache=copy.deepcopy(cache), n_loops=6).logits
    with pytest.raises(error), NoMemory("clone", n_done, error):
        model(new, cache=cache, n_loops=6)
    assert torch.equal(model(new, cache=cache, n_loops=6).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("n_done", [0, 1, 5, 16])
def test_no_memory_to_reorder_rows_leaves_the_cache_as_it_was(n_done):
    """The last states and the keys and values of two layers and four loops: 17 selections."""
    model, new = looped_lm(n_core=2), prompts(2, 2, seed=7)
    cache = model.make_cache()
    model(prompts(2, 5), cache=cache)
    expected = model(new, cache=copy.deepcopy(cache), warm_start=True).logits
    with pytest.raises(MemoryError), NoMemory("index_select", n_done):
        cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(model(new, cache=copy.deepcopy(cache), warm_start=True).logits, expected)
    with pytest.raises(MemoryError), NoMemory("__getitem__", n_done % 2):
        cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(model(new, cache=cache, warm_start=True).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_rows_that_a_cache_does_not_have_are_named(backend):
    model = looped_lm()
    cache = model.make_cache(backend=backend)
    model(prompts(2, 5), cache=cache)
    for indices, message in (
        (torch.tensor([2]), "no row 2 among 2"),
        (torch.tensor([-1]), "no row -1 among 2"),
        (torch.ones(3, dtype=torch.bool), r"must be \[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.batch_select_indices(indices)
    model(prompts(2, 1), cache=cache)
    cache.crop(-6)
    with pytest.raises(ValueError, match="3 rows, but the cache holds 2"):
        model(prompts(3, 1), cache=cache)
    cache.batch_repeat_interleave(2)
    ids = prompts(4, 3)
    assert (model(ids, cache=cache).logits - model(ids).logits).abs().max() <= FP32


def test_a_cache_begun_in_inference_mode_goes_on_outside():
    model, ids = looped_lm(), prompts(2, 5)
    with torch.inference_mode():
        cache = model(ids)[CACHE_NAME]
    with torch.no_grad():
        logits = model(ids[:, :1], cache=cache).logits
        assert (logits - model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]).abs().max() <= FP32


def test_gradients_flow_with_a_cache_and_without():
    ids = prompts(2, 6)
    grads = []
    for use_cache, training in ((False, True), (True, True), (None, True), (None, False)):
        model = looped_lm(n_core=2, n_loops=3, dtype=torch.float64).train(training)
        out = model(ids, labels=ids, use_cache=use_cache)
        assert (out.get(CACHE_NAME) is not None) == bool(use_cache or (use_cache is None and not training))
        out.loss.backward()
        if out.get(CACHE_NAME) is not None:
            with torch.no_grad():
                model(ids[:, :1], **{CACHE_NAME: out[CACHE_NAME]})
        grads.append([parameter.grad for parameter in model.parameters()])
    plain = looped_lm(n_core=2, n_loops=3, dtype=torch.float64)
    logits = plain.transformer(ids, backend="eager")
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for grad in grads:
        for a, b in zip(grad, (p.grad for p in plain.parameters()), strict=True):
            assert torch.allclose(a, b, atol=FP32 * 0.1)


def test_an_attention_mask_is_that_of_all_columns_and_does_not_change_its_mind():
    model = looped_lm()
    ids, mask = left_padded([[5, 6], [9, 8, 7]])
    cache = model.make_cache()
    model(ids, attention_mask=mask, cache=cache)
    one = torch.tensor([[1], [2]])
    with pytest.raises(ValueError, match=r"must be \[2, 4\]: 3 cached columns and 1 new"):
        model(one, attention_mask=torch.ones(2, 1), cache=cache)
    with pytest.raises(ValueError, match="differs from that of the cached columns"):
        model(one, attention_mask=torch.ones(2, 4), cache=cache)
    with pytest.raises(ValueError, match="1 at tokens and 0 at padding"):
        model(one, attention_mask=torch.full((2, 4), 0.5), cache=cache)
    with pytest.raises(ValueError, match="must be"):
        model(ids, attention_mask=torch.ones(2, 1, 3, 3))
    a = model(one, cache=copy.deepcopy(cache)).logits  # none: the cache knows its own padding
    assert torch.equal(a, model(one, attention_mask=torch.cat([mask, mask.new_ones(2, 1)], 1), cache=cache).logits)


def test_both_names_of_the_cache_are_taken():
    model, ids = pair()[1], prompts(1, 4)
    cache = model.make_cache()
    model(ids, cache=cache)
    model(ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 5
    with pytest.raises(ValueError, match="two names of one argument"):
        model(ids, cache=cache, past_key_values=cache)
    with pytest.raises(ValueError, match="backend='nothing' is not one of"):
        model(ids, backend="nothing")
    with pytest.raises(ValueError, match="the cache was made for 'eager'"):
        model(ids, cache=cache, backend="nothing")


@torch.no_grad()
def test_models_are_copied_and_pickled_without_their_caches():
    model, ids = looped_lm(), prompts(2, 5)
    logits = model(ids).logits
    twin = copy.deepcopy(model)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids).logits, logits)
    twin.transformer.embedding.weight.zero_()
    assert torch.equal(model(ids).logits, logits)
    assert not torch.equal(twin(ids).logits, logits)
