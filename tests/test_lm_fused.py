"""`LoopedGPT2` on the C++ engine: the eager tokens, whatever `generate` is asked for, and the same bits in any batch."""

import math

import pytest
import torch
from language_models import contracting_lm, looped_lm, pair

from looped.backends import cpu
from looped.lm import LoopedCache

pytestmark = pytest.mark.skipif(not cpu.is_there(), reason="built without the C++ engine")

IDS = torch.tensor([[5, 17, 3, 42, 8, 1], [9, 2, 2, 33, 60, 7]])
PADDED = torch.tensor([[0, 0, 3, 42, 8, 1], [9, 2, 2, 33, 60, 7]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])

WAYS = {
    "greedy": dict(max_new_tokens=12),
    "beams": dict(max_new_tokens=8, num_beams=3, num_return_sequences=2),
    "sampling": dict(max_new_tokens=10, do_sample=True, top_k=20, top_p=0.9, temperature=1.3),
    "penalty and ends": dict(max_new_tokens=12, repetition_penalty=1.4, eos_token_id=[7, 11], pad_token_id=0),
    "several": dict(max_new_tokens=6, do_sample=True, num_return_sequences=3),
    "more loops": dict(max_new_tokens=8, n_loops=7),
    "exit": dict(max_new_tokens=8, exit="relative"),
    "no cache": dict(max_new_tokens=6, use_cache=False),
}


def generated(model, ids, **options):
    torch.manual_seed(3)
    return model.generate(ids, **{"pad_token_id": 0, **options})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", ["small", "odd"])
def test_the_engine_gives_the_eager_tokens(way, size):
    model = looped_lm(size, dtype=torch.float64, n_prelude=int(size == "odd"))
    want = generated(model, IDS, **WAYS[way])
    assert torch.equal(generated(model, IDS, backend="cpu", **WAYS[way]), want)


def test_gpt2_itself():
    theirs, ours = pair("small", dtype=torch.float64)
    want = theirs.generate(IDS, max_new_tokens=12, pad_token_id=0)
    assert torch.equal(ours.generate(IDS, max_new_tokens=12, pad_token_id=0, backend="cpu"), want)


@pytest.mark.parametrize("policy", ["per_loop", "last_only", "modulo(2)", "first_then_shared"])
def test_every_policy_with_left_padding(policy):
    model = looped_lm(dtype=torch.float64, cache_policy=policy)
    want = model.generate(PADDED, attention_mask=MASK, max_new_tokens=8, pad_token_id=0)
    assert torch.equal(model.generate(PADDED, attention_mask=MASK, max_new_tokens=8, pad_token_id=0, backend="cpu"), want)


@torch.no_grad()
def test_logits_states_and_loops_are_those_of_eager():
    model = contracting_lm()
    options = dict(attention_mask=MASK, exit={"rule": "contraction", "tol": 1e-3}, output_hidden_states=True)
    want, got = model(PADDED, **options), model(PADDED, backend="cpu", **options)
    assert torch.equal(got.n_loops, want.n_loops)
    assert want.n_loops[MASK.bool()].unique().numel() > 1
    own = MASK.bool()
    torch.testing.assert_close(got.logits[own], want.logits[own], rtol=0, atol=1e-9)
    for ours, theirs in zip(got.hidden_states, want.hidden_states, strict=True):
        torch.testing.assert_close(ours[own], theirs[own], rtol=0, atol=1e-9)


def test_a_row_alone_has_the_same_bits():
    model = looped_lm(dtype=torch.float32)
    options = dict(
        max_new_tokens=8, backend="cpu", exit="relative", output_logits=True, return_dict_in_generate=True, pad_token_id=0
    )
    both = model.generate(PADDED, attention_mask=MASK, **options)
    for row, (ids, mask) in enumerate(zip(PADDED, MASK, strict=True)):
        alone = model.generate(ids[mask.bool()][None], **options)
        assert torch.equal(both.sequences[row, 6:], alone.sequences[0, int(mask.sum()) :])
        for ours, theirs in zip(both.logits, alone.logits, strict=True):
            assert torch.equal(ours[row], theirs[0])


def test_drafting_gives_the_plain_tokens():
    model = contracting_lm(n_loops=12)
    plain = model.generate(IDS[:1], max_new_tokens=14, pad_token_id=0)
    assert torch.equal(model.generate(IDS[:1], max_new_tokens=14, pad_token_id=0, draft_loops=3, backend="cpu"), plain)


def test_threads_of_torch_are_as_before():
    model, before = looped_lm(), torch.get_num_threads()
    model.generate(IDS, max_new_tokens=3, backend="cpu", pad_token_id=0)
    with pytest.raises(ValueError, match="positions"):
        model.generate(IDS, max_new_tokens=300, backend="cpu", pad_token_id=0)
    assert torch.get_num_threads() == before


def test_a_cache_of_the_engine_goes_on():
    model = looped_lm(dtype=torch.float64)
    cache = model.make_cache(backend="cpu")
    assert isinstance(cache, LoopedCache)
    with torch.no_grad():
        first = model(IDS[:, :4], past_key_values=cache)
        second = model(IDS[:, 4:], past_key_values=cache)
        whole = model(IDS)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole.logits, rtol=0, atol=1e-9)


def test_edited_weights_are_seen_by_the_next_text():
    model = looped_lm(dtype=torch.float64)
    model.generate(IDS, max_new_tokens=4, backend="cpu", pad_token_id=0)
    with torch.no_grad():
        model.transformer.embedding.weight.mul_(-1.5)
    want = model.generate(IDS, max_new_tokens=8, pad_token_id=0)
    assert torch.equal(model.generate(IDS, max_new_tokens=8, backend="cpu", pad_token_id=0), want)


def test_what_a_backend_cannot_do_is_said():
    model = looped_lm()
    with pytest.raises(ValueError, match="run on a GPU and the model is on cpu"):
        model.generate(IDS, max_new_tokens=2, backend="triton", pad_token_id=0)
    with pytest.raises(ValueError, match="not one of cpu, eager, triton"):
        model.generate(IDS, max_new_tokens=2, backend="gpu", pad_token_id=0)
    with pytest.raises(ValueError, match="float32 or float64"):
        model.to(torch.bfloat16).generate(IDS, max_new_tokens=2, backend="cpu", pad_token_id=0)


@torch.no_grad()
def test_loops_that_no_token_runs_take_no_time():
    model, ids = looped_lm(), IDS[:1]
    n_loops = model(ids, n_loops=2**62 - 1, exit={"rule": "relative", "tol": math.inf}, backend="cpu").n_loops
    assert (n_loops == 1).all()
