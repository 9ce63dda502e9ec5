"""Inputs that broke other language models of this kind: lengths, masks, padding, threads, empty batches."""

import threading

import pytest
import torch
from language_models import contracting_lm, left_padded, looped_lm, pair, prompts
from tolerances import EAGER_BATCH, FP32

from looped.lm import LoopedGPT2Config

QUIET = dict(do_sample=False, pad_token_id=0)


# Lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [True, False])
def test_prompt_and_new_tokens_end_where_the_positions_end(use_cache):
    model, calls = looped_lm(n_positions=16), []
    model.transformer.core[0].register_forward_hook(lambda *_: calls.append(1))
    model.transformer.core[0].attn.qkv.register_forward_hook(lambda *_: calls.append(1))
    ids = prompts(1, 5)
    for n_new in (11, 12):  # 17 ids: the last is never fed back
        assert model.generate(ids, max_new_tokens=n_new, use_cache=use_cache, **QUIET).shape == (1, 5 + n_new)
    calls.clear()
    with pytest.raises(ValueError, match=r"18 tokens were asked for.*16 positions, enough for 17"):
        model.generate(ids, max_new_tokens=13, use_cache=use_cache, **QUIET)
    assert model.generate(prompts(1, 16), max_new_tokens=1, use_cache=use_cache, **QUIET).shape == (1, 17)
    calls.clear()
    with pytest.raises(ValueError, match="18 tokens were asked for"):
        model.generate(prompts(1, 17), max_new_tokens=1, use_cache=use_cache, **QUIET)
    with pytest.raises(ValueError, match="row 0 has 17 tokens but the model has 16 positions"):
        model(prompts(2, 17), use_cache=use_cache)
    with pytest.raises(ValueError, match=r"position_ids lie in 5 \.\. 16"):
        model(prompts(1, 3), position_ids=torch.tensor([[5, 9, 16]]), use_cache=use_cache)
    assert not calls  # before any compute


def test_padding_takes_no_positions():
    model = looped_lm(n_positions=16)
    ids, mask = left_padded([[5, 6], [9, 8, 7]])
    wide = torch.cat([torch.zeros(2, 20, dtype=torch.int64), ids], 1)
    mask = torch.cat([torch.zeros(2, 20, dtype=torch.int64), mask], 1)
    out = model.generate(wide, attention_mask=mask, max_new_tokens=14, **QUIET)
    assert torch.equal(out[1, 20:], model.generate(ids[1:], max_new_tokens=14, **QUIET)[0])
    with pytest.raises(ValueError, match="18 tokens were asked for"):
        model.generate(wide, attention_mask=mask, max_new_tokens=15, **QUIET)


def test_a_model_without_positions_has_no_end():
    model = looped_lm(pos_kind="none")
    assert model.generate(prompts(1, 5), max_new_tokens=60, **QUIET).shape == (1, 65)


def test_which_length_counts():
    """max_new_tokens wins over max_length; nothing to do is an error; the default ends where the positions end."""
    model, ids = looped_lm(n_positions=16), prompts(1, 5)
    assert model.generate(ids, max_new_tokens=2, max_length=20, **QUIET).shape == (1, 7)
    for nothing in ({"max_length": 5}, {"max_length": 3}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match=r"max_length|max_new_tokens"):
            model.generate(ids, **nothing, **QUIET)
    with pytest.warns(UserWarning, match="model-agnostic default"):
        assert model.generate(ids, **QUIET).shape == (1, 16)
    with pytest.warns(UserWarning, match="model-agnostic default"):
        assert looped_lm().generate(ids, **QUIET).shape == (1, 25)  # 20 new tokens: transformers' own default
    first = model.generate(ids, max_new_tokens=1, **QUIET)[0, -1].item()
    ended = model.generate(ids, max_new_tokens=8, eos_token_id=first, **QUIET)
    barred = model.generate(ids, max_new_tokens=8, eos_token_id=first, min_new_tokens=3, **QUIET)
    assert ended.shape == (1, 6)
    assert first not in barred[0, 5:8]
    with pytest.raises(ValueError, match="n_loop"):
        model.generate(ids, n_loop=3, **QUIET)
    with pytest.raises(TypeError, match="n_loop"):
        model(ids, n_loop=3)


@pytest.mark.parametrize("n_loops", [0, 1, 3])
def test_any_number_of_loops(n_loops):
    model, ids = looped_lm(n_loops=2), prompts(2, 5)
    out = model.generate(ids, max_new_tokens=4, n_loops=n_loops, return_dict_in_generate=True, output_logits=True, **QUIET)
    with torch.no_grad():
        expected = model.transformer(out.sequences[:, :-1], n_loops=n_loops, backend="eager")[:, 4:]
    assert (torch.stack(out.logits, 1) - expected).abs().max() <= FP32
    assert (model(ids, n_loops=n_loops).n_loops == n_loops).all()


def test_tokens_that_ran_no_loop_are_not_mixed_with_those_that_did():
    model, ids = looped_lm(), prompts(1, 4)
    cache = model.make_cache()
    model(ids, cache=cache, n_loops=0)
    model(ids[:, :1], cache=cache, n_loops=0)
    with pytest.raises(ValueError, match="n_loops=0 have no keys"):
        model(ids[:, :1], cache=cache, n_loops=2)


# Masks and padding ------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_what_is_under_the_mask_is_never_read():
    for model in (looped_lm(n_loops=3), contracting_lm(exit={"rule": "relative", "tol": 0.05}), pair()[1]):
        ids, mask = left_padded([[5, 6, 7], [9, 8, 7, 6, 5]])
        other = ids.masked_fill(mask == 0, 42)
        a, b = model(ids, attention_mask=mask), model(other, attention_mask=mask)
        assert torch.equal(a.logits, b.logits)
        assert (a.logits[mask == 0] == 0).all()
        assert (a.n_loops[mask == 0] == 0).all()
        hole = torch.tensor([[1, 0, 1, 1]])
        a = model(torch.tensor([[5, 6, 7, 8]]), attention_mask=hole)
        b = model(torch.tensor([[5, 9, 7, 8]]), attention_mask=hole)
        assert torch.equal(a.logits, b.logits)
        alone = model(torch.tensor([[5, 7, 8]])).logits  # a hole is no token: the text without it
        assert (a.logits[:, hole[0] == 1] - alone).abs().max() <= FP32
        right = torch.tensor([[5, 7, 8, 60], [1, 2, 3, 4]])
        a = model(right, attention_mask=torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])).logits
        assert (a[0, :3] - alone[0]).abs().max() <= FP32


@torch.no_grad()
def test_a_row_does_not_wait_for_its_neighbours_or_take_from_them():
    """An easy row and a hard one, in every arrangement: the loops and the logits that each has alone."""
    model = contracting_lm(exit={"rule": "relative", "tol": 1e-3})
    with torch.no_grad():
        model.transformer.embedding.weight[1:4] *= 5
    easy, hard = [1, 2, 3], [9, 8, 7]
    solo = {name: model(torch.tensor([row])) for name, row in (("E", easy), ("H", hard))}
    assert solo["E"].n_loops.max() < solo["H"].n_loops.max()
    for order in ("EH", "HE", "EEEEEEEH"):
        rows = torch.tensor([easy if name == "E" else hard for name in order])
        padded = torch.cat([torch.full((len(order), 2), 60), rows], 1), torch.tensor([[0, 0, 1, 1, 1]] * len(order))
        for ids, mask in ((rows, None), padded):
            out = model(ids, attention_mask=mask)
            for row, name in enumerate(order):
                assert torch.equal(out.n_loops[row, -3:], solo[name].n_loops[0])
                assert (out.logits[row, -3:] - solo[name].logits[0]).abs().max() <= EAGER_BATCH


def test_empty_batches_rows_and_texts():
    model = looped_lm()
    for ids in (torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match="at least one row of one token"):
            model(ids)
        with pytest.raises(ValueError, match=r"at least one row of one token|row 0 has no token"):
            model.generate(ids, max_new_tokens=2, **QUIET)
    mask = torch.tensor([[1, 1, 1], [0, 0, 0], [0, 1, 1]])
    with pytest.raises(ValueError, match="row 1 has no token"):
        model.generate(prompts(3, 3), attention_mask=mask, max_new_tokens=2, **QUIET)
    with torch.no_grad():
        logits = model(prompts(3, 3), attention_mask=mask).logits
        assert (logits[1] == 0).all()
        assert (logits[0] - model(prompts(3, 3)[:1]).logits[0]).abs().max() <= FP32
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match=r"row 1 has the token id 61, but ids lie in 0 .. 60"):
        model(torch.tensor([[1, 2], [3, 61]]))
    with pytest.raises(ValueError, match="row 0 has the token id -1"):
        model.generate(torch.tensor([[1, -1]]), max_new_tokens=1, **QUIET)
    with pytest.raises(ValueError, match=r"position_ids has shape \[3\]"):
        model(prompts(1, 3), position_ids=torch.arange(3))


WRONG = {
    "labels of another shape": (ValueError, r"labels are \[2, 2\]", lambda ids: dict(labels=ids[:, 1:])),
    "labels that are no tokens": (ValueError, "labels hold 61", lambda ids: dict(labels=ids * 0 + 61)),
    "float labels": (ValueError, r"labels are torch.float32", lambda ids: dict(labels=ids.float())),
    "labels of a part": (ValueError, "leave out logits_to_keep", lambda ids: dict(labels=ids, logits_to_keep=2)),
    "logits of nothing": (ValueError, "logits_to_keep=-2", lambda ids: dict(logits_to_keep=-2)),
    "logits beyond": (ValueError, r"1 \.\. 3, but the call has 3", lambda ids: dict(logits_to_keep=torch.tensor([1, 3]))),
    "logits by a mask": (TypeError, "must be an integer", lambda ids: dict(logits_to_keep=torch.tensor([True, False, True]))),
    "logits by truth": (TypeError, "must be an integer", lambda ids: dict(logits_to_keep=True)),
    "float ids": (ValueError, r"torch.float32, but must be \[B, T\]", lambda ids: dict(input_ids=ids.float())),
    "wide embeddings": (ValueError, r"\[2, 3, 16\]", lambda ids: dict(input_ids=None, inputs_embeds=torch.zeros(2, 3, 16))),
    "whole embeddings": (ValueError, "floats", lambda ids: dict(input_ids=None, inputs_embeds=ids[..., None].repeat(1, 1, 32))),
    "float positions": (ValueError, "position_ids are torch.float32", lambda ids: dict(position_ids=torch.arange(3.0)[None])),
    "a warm start in words": (TypeError, "warm_start must be True or False", lambda ids: dict(warm_start="no")),
    "true loops": (TypeError, "n_loops must be an integer, got True", lambda ids: dict(n_loops=True)),
}


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_before_the_cache_grows(name, backend):
    model, ids = looped_lm(), prompts(2, 3)
    kind, message, changes = WRONG[name]
    cache = model.make_cache(backend=backend)
    model(ids, cache=cache)
    with pytest.raises(kind, match=message):
        model(**(dict(input_ids=ids, cache=cache) | changes(ids)))
    assert cache.get_seq_length() == 3
    assert cache.session.lengths == [3, 3]


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_integers_of_other_widths_are_taken(backend):
    model, ids, places = looped_lm(), prompts(2, 3), torch.tensor([[3, 9, 1]])
    want = model(ids, position_ids=places, labels=ids)
    got = model(ids.int(), position_ids=places.int(), labels=ids.int(), backend=backend)
    assert (got.logits - want.logits).abs().max() <= FP32
    assert (got.loss - want.loss).abs() <= FP32
    read = model(ids, position_ids=places, logits_to_keep=torch.tensor([-1, 0], dtype=torch.int32), backend=backend).logits
    assert (read - want.logits[:, [2, 0]]).abs().max() <= FP32


def test_arguments_of_another_kind_are_named():
    model = looped_lm()
    with pytest.raises(ValueError, match=r"embeds are torch.bfloat16 but the weights are torch.float32"):
        model(inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.bfloat16), backend="cpu")
    with pytest.raises(TypeError, match=r"must be a torch.nn.Embedding, got Linear"):
        model.set_input_embeddings(torch.nn.Linear(3, 4))
    with pytest.raises(ValueError, match="did you mean 'n_loops'"):
        LoopedGPT2Config(_n_loops=3)


@torch.no_grad()
def test_positions_of_ones_own():
    theirs, ours = pair()
    ids, places = prompts(2, 4), torch.tensor([[3, 9, 1, 1], [0, 5, 6, 30]])
    assert (theirs(ids, position_ids=places).logits - ours(ids, position_ids=places).logits).abs().max() <= FP32
    assert (theirs(ids, position_ids=places[:1]).logits - ours(ids, position_ids=places[:1]).logits).abs().max() <= FP32
    model = looped_lm(n_loops=3)  # where positions enter every loop
    usual = model(ids, position_ids=torch.arange(4)[None]).logits
    assert torch.equal(usual, model(ids).logits)
    assert (model(ids, position_ids=torch.arange(4)[None] + 1).logits - usual).abs().max() > 0.01
    cache = model.make_cache()
    shifted = torch.cat([model(ids[:, i : i + 1], position_ids=places[:, i : i + 1], cache=cache).logits for i in range(4)], 1)
    assert (shifted - model(ids, position_ids=places).logits).abs().max() <= FP32


# Calls side by side -----------------------------------------------------------------------------------------------


def test_calls_from_several_threads_keep_to_themselves():
    model = contracting_lm(n_loops=8).float()
    settings = model.config.to_dict(), model.generation_config.to_dict()
    jobs = [dict(n_loops=2 + i % 3, exit=[None, "relative", {"rule": "kl", "tol": 0.1}][i % 3]) for i in range(4)]
    rows = [prompts(1 + i % 2, 4 + i, seed=i) for i in range(4)]
    serial = [model.generate(row, max_new_tokens=4, **job, **QUIET) for row, job in zip(rows, jobs, strict=True)]
    wrong, failures = [], []

    def work(i):
        for turn in range(12):
            if not torch.equal(model.generate(rows[i], max_new_tokens=4, **jobs[i], **QUIET), serial[i]):
                wrong.append((i, turn))
            if i == 3:
                try:
                    model(torch.tensor([[99]]))
                except ValueError as error:
                    failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(failures) == 12
    assert (model.config.to_dict(), model.generation_config.to_dict()) == settings
    assert not model.training
    model.train()
    model.generate(rows[0], max_new_tokens=2, **QUIET)
    assert model.training


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_a_cache_of_another_model_is_refused(backend):
    one, other = looped_lm(seed=1), looped_lm(seed=2)
    ids = torch.tensor([[3, 1, 4]])
    cache = one.make_cache(backend=backend)
    one(ids, cache=cache)
    with pytest.raises(ValueError, match="another model"):
        other(ids, cache=cache)
    one(ids, cache=cache)
