"""`LoopedGPT2.generate` beside that of GPT-2 with the same weights, and the behaviours that transformers' own suite checks.

Those behaviours, by the names of tests/generation/test_utils.py of transformers (left), and where they are checked here:

    greedy_generate[_dict_outputs[_use_cache]]               test_same_tokens_and_scores[greedy], test_what_a_dict_holds
    sample_generate[_dict_output]                            test_same_tokens_and_scores[sample...], test_what_a_dict_holds
    beam_search_generate[_dict_output[s_use_cache]]          test_same_tokens_and_scores[beams...], test_what_a_dict_holds
    beam_sample_generate[_dict_output]                       test_same_tokens_and_scores[beam sample]
    generate_without_input_ids, special_tokens_fall_back...  test_generate_from_the_beginning_token
    assisted_decoding_matches_greedy_search, ..._sample      test_assisted_decoding
    prompt_lookup_decoding_matches_greedy_search, stops_...  test_prompt_lookup
    assisted ..._num_assistant_tokens_heuristic_schedule     test_assisted_decoding
    generated_length_assisted_generation                     test_assisted_decoding
    model_kwarg_assisted_decoding_decoder_only               test_assisted_decoding_at_another_loop_count
    left_padding_compatibility                               test_left_padding_is_free
    past_key_values_format                                   test_lm_cache.py: test_a_cache_has_the_shape_of_its_policy
    generate_from_inputs_embeds (greedy, beams)              test_generate_from_embeddings
    max_length_if_input_embeds, min_length_if_input_embeds   test_lengths_count_from_embeddings
    generate_continue_from_past_key_values, ..._embeds       test_generate_continues_from_a_cache
    generate_with_static_cache, _quant_, offloaded           refused: test_caches_of_transformers_are_refused
    generate_compile_model_forward                           nothing to compile without a static cache
    generate_methods_with_logits_to_keep, assisted_...       test_logits_to_keep
    inherits_generation_mixin                                test_generation_is_that_of_transformers
    eager_matches_sdpa / fa2                                 there is one attention; half precision: test_lm_cache.py
    custom_stopping_criteria, stop_strings, per_row_...      test_stopping, test_rows_stop_by_themselves
    custom_logits_processor, logits_processor_not_inplace    test_processors
    compare_/return_unprocessed_logit_scores                 test_what_a_dict_holds
    compute_transition_scores                                test_what_a_dict_holds
    eos_token_id_int_and_list_*                              test_same_tokens_and_scores[eos list], test_rows_stop_by_themselves
    default_max_length_warning, validate_generation_inputs   test_lm_cases.py: lengths
    cfg_mixin (guidance_scale, negative prompts)             test_same_tokens_and_scores[guidance], test_negative_prompts
    watermarking                                             test_same_tokens_and_scores[watermark]
    prefill chunking                                         test_same_tokens_and_scores[chunked prefill]
    streamers                                                test_streamers
    prepare_inputs_for_generation_*                          not overridden; covered by all of the above
    group / constrained beams, contrastive, DoLa             left transformers for code on the Hub
    encoder-decoder, multimodal, multi-GPU                   not this model
"""

import inspect
import warnings

import pytest
import torch
from language_models import gpt2, left_padded, looped_lm, pair, prompts
from tolerances import FP32
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import LogitsProcessor, StoppingCriteria, WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

from looped.lm import LoopedGPT2
from looped.lm.model import CACHE_NAME

CALLS = {
    "greedy": {},
    "greedy without a cache": {"use_cache": False},
    "sample": {"do_sample": True, "top_k": 10, "top_p": 0.9, "temperature": 0.7},
    "sample several": {"do_sample": True, "num_return_sequences": 3},
    "sample min_p": {"do_sample": True, "min_p": 0.05, "typical_p": 0.9, "epsilon_cutoff": 1e-3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beams without a cache": {"num_beams": 3, "num_return_sequences": 2, "use_cache": False},
    "beams short": {"num_beams": 4, "length_penalty": -1.0, "early_stopping": True, "eos_token_id": [3, 17, 40]},
    "beam sample": {"num_beams": 3, "num_return_sequences": 2, "do_sample": True, "top_k": 8},
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeats": {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [9, 3]]},
    "eos list": {"eos_token_id": [7, 11, 16, 30, 49, 54, 95], "pad_token_id": 0},
    "eos at least": {"eos_token_id": [7, 11, 16, 30, 49, 54, 95], "pad_token_id": 0, "min_new_tokens": 4},
    "forced ends": {"forced_eos_token_id": 4, "suppress_tokens": [1, 2], "begin_suppress_tokens": [3]},
    "bias": {"sequence_bias": [[[5], 3.0], [[9, 3], -2.0]], "renormalize_logits": True},
    "decay": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 9, "remove_invalid_values": True},
    "guidance": {"guidance_scale": 1.5},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash", context_width=2)},
    "chunked prefill": {"prefill_chunk_size": 2},
}
SETTINGS = dict(do_sample=False, max_new_tokens=8, pad_token_id=0, return_dict_in_generate=True, output_scores=True)


def generate(model, ids, seed=3, **kwargs):
    torch.manual_seed(seed)
    return model.generate(ids, **(SETTINGS | kwargs))


def assert_same(theirs, ours):
    assert torch.equal(theirs.sequences, ours.sequences)
    for a, b in zip(theirs.scores, ours.scores, strict=True):
        assert torch.equal(a.isinf(), b.isinf())
        assert (a - b).masked_fill(a.isinf(), 0).abs().max() <= FP32
    if getattr(theirs, "sequences_scores", None) is not None:
        assert ((theirs.sequences_scores - ours.sequences_scores) / theirs.sequences_scores).abs().max() <= FP32


@pytest.mark.parametrize("size", ["small", "one layer", "odd"])
@torch.no_grad()
def test_logits_are_those_of_gpt2(size):
    for seed in range(3):
        theirs, ours = pair(size, seed)
        ids = prompts(3, 9, seed=seed)
        a, b = theirs(ids), ours(ids)
        assert a.logits.abs().max() > 1
        assert (a.logits - b.logits).abs().max() <= FP32
        hidden = theirs(ids, output_hidden_states=True).hidden_states, ours(ids, output_hidden_states=True).hidden_states
        assert (hidden[0][-1] - hidden[1][-1]).abs().max() <= FP32
        labels = ids.masked_fill(ids < 9, -100)
        assert (theirs(ids, labels=labels).loss - ours(ids, labels=labels).loss).abs() <= FP32
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        a, b = (model(ids, attention_mask=mask, position_ids=places).logits for model in (theirs, ours))
        assert (a - b)[mask == 1].abs().max() <= FP32
        assert torch.equal(b, ours(ids, attention_mask=mask).logits)  # its own positions are these


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", ["small", "odd"])
def test_same_tokens_and_scores(name, size):
    theirs, ours = pair(size)
    for ids in (prompts(1, 5), prompts(3, 6, seed=1)):
        assert_same(generate(theirs, ids, **CALLS[name]), generate(ours, ids, **CALLS[name]))
    ids, mask = left_padded([prompts(1, n, seed=n)[0].tolist() for n in (3, 7, 5)])
    if name != "chunked prefill":  # a chunk of padding alone: GPT-2 attends to nothing there
        a, b = (generate(model, ids, attention_mask=mask, **CALLS[name]) for model in (theirs, ours))
        assert_same(a, b)
        if name == "greedy":
            assert len(b.sequences[:, 7:].unique()) > 5
        if name == "eos list":
            ends = b.sequences[:, 7:] == 0
            assert ends.any()
            assert not ends.all(1).any()  # rows stopped, not all at once


@pytest.mark.parametrize("n_more", [0, 4])
def test_a_chunk_of_padding_alone(n_more):
    """Of one row, or of all."""
    ids, mask = (torch.cat([torch.zeros(2, n_more, dtype=torch.int64), x], 1) for x in left_padded([[4, 5], [9, 8, 7, 6, 5]]))
    for model in (pair()[1], looped_lm(n_prelude=1, n_coda=1, loop_norm="once", exit="kl")):
        assert_same(*(generate(model, ids, attention_mask=mask, **extra) for extra in ({}, {"prefill_chunk_size": 2})))


@pytest.mark.parametrize(
    "model", [pair()[1], looped_lm(), looped_lm(n_prelude=1, n_coda=1, loop_norm="once", tie_readout=False)]
)
def test_left_padding_is_free(model):
    """Rows in a batch generate what they generate alone, and the ids under the mask are never read."""
    rows = [prompts(1, n, seed=n)[0].tolist() for n in (3, 7, 1)]
    ids, mask = left_padded(rows, pad=10_000)  # no token of any vocabulary
    together = generate(model, ids, attention_mask=mask)
    for row, alone in enumerate(rows):
        solo = generate(model, torch.tensor([alone]))
        assert together.sequences[row, 7:].tolist() == solo.sequences[0, len(alone) :].tolist()
        for a, b in zip(together.scores, solo.scores, strict=True):
            assert (a[row] - b[0]).abs().max() <= FP32


def test_generate_from_embeddings():
    for num_beams in (1, 3):
        theirs, ours = pair()
        ids = prompts(2, 5)
        embeds = ours.get_input_embeddings()(ids)
        extra = {"num_beams": num_beams}
        from_ids = generate(ours, ids, **extra)
        assert_same(from_ids, generate(ours, ids, inputs_embeds=embeds, **extra))
        alone = generate(ours, None, inputs_embeds=embeds, **extra)
        assert torch.equal(from_ids.sequences[:, 5:], alone.sequences)
        assert_same(generate(theirs, None, inputs_embeds=embeds, **extra), alone)
        other = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
        assert_same(generate(theirs, None, inputs_embeds=other, **extra), generate(ours, None, inputs_embeds=other, **extra))
        mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
        poisoned = other.masked_fill(mask[..., None] == 0, torch.nan)
        assert_same(*(generate(ours, None, inputs_embeds=x, attention_mask=mask, **extra) for x in (other, poisoned)))


def test_lengths_count_from_embeddings():
    theirs, ours = pair()
    embeds = ours.get_input_embeddings()(prompts(1, 5))
    for model in (theirs, ours):
        assert model.generate(inputs_embeds=embeds, max_length=12, do_sample=False, pad_token_id=0).shape == (1, 7)
        assert model.generate(inputs_embeds=embeds, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (1, 4)
        assert model.generate(
            inputs_embeds=embeds, min_length=9, eos_token_id=list(range(1, 61)), max_length=12, do_sample=False, pad_token_id=0
        ).shape == (1, 5)


def test_generate_continues_from_a_cache():
    model = looped_lm(n_loops=3)
    rows, mask = left_padded([prompts(1, n, seed=n)[0].tolist() for n in (3, 6)])
    whole = generate(model, rows, attention_mask=mask, max_new_tokens=7)
    first = generate(model, rows, attention_mask=mask, max_new_tokens=3)
    grown = torch.cat([mask, mask.new_ones(2, 3)], 1)
    rest = generate(model, first.sequences, attention_mask=grown, max_new_tokens=4, **{CACHE_NAME: first[CACHE_NAME]})
    assert torch.equal(whole.sequences, rest.sequences)
    assert (whole.scores[-1] - rest.scores[-1]).abs().max() <= FP32
    assert rest[CACHE_NAME] is first[CACHE_NAME]

    plain, ids = pair()[1], prompts(2, 5)  # without a mask, and only the new tokens passed on
    first = generate(plain, ids, max_new_tokens=3)
    rest = generate(plain, first.sequences, max_new_tokens=4, **{CACHE_NAME: first[CACHE_NAME]})
    assert torch.equal(rest.sequences, generate(plain, ids, max_new_tokens=7).sequences)


def test_what_a_dict_holds():
    model, ids = looped_lm(n_loops=3), prompts(2, 5)
    extra = dict(output_logits=True, output_hidden_states=True)
    for num_beams, several, use_cache in ((1, 1, True), (1, 1, False), (3, 2, True), (3, 2, False)):
        out = generate(model, ids, num_beams=num_beams, num_return_sequences=several, use_cache=use_cache, **extra)
        assert out.sequences.shape == (2 * several, 13)
        for scores in (out.scores, out.logits):
            assert [tuple(x.shape) for x in scores] == [(2 * num_beams, 61)] * 8
        assert [len(x) for x in out.hidden_states] == [5] * 8  # Y_0 .. Y_3 and what the head reads
        lengths = [5, *([1] * 7 if use_cache else range(6, 13))]
        assert [x[-1].shape[1] for x in out.hidden_states] == lengths
        assert (out.get(CACHE_NAME) is None) == (not use_cache)
        if use_cache:
            assert out[CACHE_NAME].n_loops.shape == (2 * num_beams, 12)
        if num_beams == 1:
            scores = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
            step = out.scores[2].log_softmax(-1).gather(1, out.sequences[:, 7:8])
            assert (scores[:, 2:3] - step).abs().max() <= FP32
            with torch.no_grad():
                assert (model(ids).logits[:, -1] - out.logits[0]).abs().max() <= FP32
        else:
            scores = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
            assert (scores.sum(1) / 8 - out.sequences_scores).abs().max() <= FP32
    with pytest.raises(ValueError, match="attention weights"):
        model.generate(ids, output_attentions=True, return_dict_in_generate=True)


def test_generate_from_the_beginning_token():
    theirs, ours = pair(bos_token_id=4, eos_token_id=6)
    assert (ours.config.bos_token_id, ours.config.eos_token_id, ours.generation_config.bos_token_id) == (4, 6, 4)
    a, b = (model.generate(do_sample=False, max_new_tokens=6, pad_token_id=0) for model in (theirs, ours))
    assert torch.equal(a, b)
    assert b[0, 0] == 4
    own = GenerationConfig(bos_token_id=9, do_sample=False, max_new_tokens=2, pad_token_id=0)
    assert ours.generate(generation_config=own)[0, 0] == 9
    with pytest.raises(ValueError, match="bos_token_id"):
        pair()[1].generate()


def test_assisted_decoding():
    theirs, ours = pair("small")
    ids = prompts(1, 6)
    assert looped_lm().config.vocab_size == ours.config.vocab_size
    plain = generate(ours, ids, max_new_tokens=12)
    for assistant in (gpt2("one layer", seed=5), looped_lm(seed=5), ours, theirs):
        for schedule in ("constant", "heuristic"):
            assistant.generation_config.num_assistant_tokens = 3
            assistant.generation_config.num_assistant_tokens_schedule = schedule
            out = generate(ours, ids, max_new_tokens=12, assistant_model=assistant)
            assert torch.equal(out.sequences, plain.sequences)
            assert max((a - b).abs().max() for a, b in zip(out.scores, plain.scores, strict=True)) <= FP32
            cache = out[CACHE_NAME]
            assert cache.get_seq_length() == cache.session.lengths[0] == out.sequences.shape[1] - 1
        sampled = generate(ours, ids, max_new_tokens=12, assistant_model=assistant, do_sample=True)
        assert sampled.sequences.shape == (1, 18)
    helped = generate(theirs, ids, max_new_tokens=12, assistant_model=looped_lm(seed=5))  # and it assists others
    assert torch.equal(helped.sequences, plain.sequences)


def test_assisted_decoding_at_another_loop_count():
    """The assistant is a model with fewer loops and the same weights."""
    model, draft, ids = looped_lm(n_loops=6), looped_lm(n_loops=2), prompts(1, 6)
    assert torch.equal(model.transformer.embedding.weight, draft.transformer.embedding.weight)
    plain = generate(model, ids, max_new_tokens=14)
    assert torch.equal(generate(model, ids, max_new_tokens=14, assistant_model=draft).sequences, plain.sequences)


def test_prompt_lookup():
    ours, ids = pair()[1], torch.tensor([[5, 9, 8, 5, 9, 8, 5, 9]])
    never = next(i for i in range(61) if i not in generate(ours, ids, max_new_tokens=12).sequences)
    plain = generate(ours, ids, max_new_tokens=12, eos_token_id=never)
    out = generate(ours, ids, max_new_tokens=12, prompt_lookup_num_tokens=3, eos_token_id=never)
    assert torch.equal(out.sequences, plain.sequences)
    end = plain.sequences[0, 10].item()
    stopped = generate(ours, ids, max_new_tokens=12, prompt_lookup_num_tokens=3, eos_token_id=end)
    assert torch.equal(stopped.sequences, generate(ours, ids, max_new_tokens=12, eos_token_id=end).sequences)


@pytest.mark.parametrize("helper", ["assistant_model", "prompt_lookup_num_tokens"])
def test_assistants_that_would_change_the_text_are_refused(helper):
    """Verified in one pass, tokens read other keys than one by one where loops share slots, and start warm elsewhere."""
    ids, by = prompts(1, 6), {helper: looped_lm(seed=5) if helper == "assistant_model" else 3}
    for policy in ("last_only", "modulo(2)", "first_then_shared"):
        with pytest.raises(ValueError, match="assisted decoding needs the cache policy per_loop"):
            generate(looped_lm(cache_policy=policy), ids, max_new_tokens=4, **by)
        model = looped_lm()
        with pytest.raises(ValueError, match="assisted decoding needs the cache policy per_loop"):
            generate(model, ids, max_new_tokens=4, **{CACHE_NAME: model.make_cache(policy)}, **by)
    for model, asked in ((looped_lm(), {"warm_start": True}), (looped_lm(warm_start=True), {})):
        with pytest.raises(ValueError, match="one of assisted decoding and warm_start"):
            generate(model, ids, max_new_tokens=4, **asked, **by)


def test_logits_to_keep():
    theirs, ours = pair()
    ids = prompts(2, 6)
    for keep in (0, 1, 3, torch.tensor([1, 4])):
        with torch.no_grad():
            a, b = theirs(ids, logits_to_keep=keep).logits, ours(ids, logits_to_keep=keep).logits
        assert a.shape == b.shape
        assert (a - b).abs().max() <= FP32
    assert_same(generate(ours, ids), generate(ours, ids, logits_to_keep=0))
    with pytest.raises(ValueError, match="leave out logits_to_keep"):
        ours(ids, labels=ids, logits_to_keep=1)


def test_caches_of_transformers_are_refused():
    from transformers import DynamicCache

    model, ids = pair()[1], prompts(1, 4)
    for kind in ("static", "offloaded", "quantized"):
        with pytest.raises(ValueError, match="not offered"):
            model.generate(ids, cache_implementation=kind, max_new_tokens=2)
    with pytest.raises(TypeError, match=r"make one with make_cache\(\)"):
        model.generate(ids, **{CACHE_NAME: DynamicCache()}, max_new_tokens=2)


def test_generation_is_that_of_transformers():
    assert GenerationMixin in LoopedGPT2.__bases__
    own = [name for name in vars(LoopedGPT2) if name in vars(GenerationMixin) and not name.startswith("__")]
    assert own == ["generate", "_assisted_decoding", "_prepare_cache_for_generation"]  # the first two for draft_loops
    assert "kwargs" not in inspect.signature(LoopedGPT2.forward).parameters


def test_stopping():
    theirs, ours = pair()
    ids = prompts(2, 5)

    class AfterNine(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 9)

    out = generate(ours, ids, stopping_criteria=[AfterNine()], eos_token_id=60)
    assert out.sequences.shape == (2, 9)
    assert torch.equal(out.sequences, generate(theirs, ids, stopping_criteria=[AfterNine()], eos_token_id=60).sequences)
    assert generate(ours, ids, max_time=0.0).sequences.shape == (2, 6)


def test_rows_stop_by_themselves():
    """After its end a row gets padding; the call ends when the last row has ended; every id of a list ends a row."""
    model = pair()[1]
    ids, mask = left_padded([[5, 6, 7], [9, 8, 7, 6, 5]])
    free = generate(model, ids, attention_mask=mask, max_new_tokens=4).sequences[:, 5:]
    first, other = free[0, 0].item(), free[1, 2].item()
    assert first not in free[1]
    one = generate(model, ids, attention_mask=mask, max_new_tokens=4, eos_token_id=first).sequences[:, 5:]
    assert one[0].tolist() == [first, 0, 0, 0]
    assert one[1].tolist() == free[1].tolist()
    several = generate(model, ids, attention_mask=mask, max_new_tokens=4, eos_token_id=[first, other]).sequences[:, 5:]
    n_steps = free[1].tolist().index(other) + 1
    assert several[0].tolist() == [first] + [0] * (n_steps - 1)
    assert several[1].tolist() == free[1, :n_steps].tolist()  # and no step after that
    padded = generate(model, ids, attention_mask=mask, max_new_tokens=4, eos_token_id=[first], pad_token_id=first).sequences[
        :, 5:
    ]
    assert padded[0].tolist() == [first] * 4


def test_processors():
    class Only(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([7]), 0.0)

    model, ids = pair()[1], prompts(1, 4)
    out = generate(model, ids, logits_processor=[Only()], output_logits=True)
    assert (out.sequences[:, 4:] == 7).all()
    assert out.logits[0].isfinite().all()
    allowed = generate(model, ids, prefix_allowed_tokens_fn=lambda row, sequence: [3, 5])
    assert set(allowed.sequences[0, 4:].tolist()) <= {3, 5}


def test_negative_prompts():
    theirs, ours = pair()
    ids, other = prompts(1, 5), prompts(1, 3, seed=8)
    extra = dict(guidance_scale=1.5, negative_prompt_ids=other, negative_prompt_attention_mask=torch.ones_like(other))
    a, b = generate(theirs, ids, **extra), generate(ours, ids, **extra)
    assert_same(a, b)
    assert not torch.equal(a.scores[0], generate(ours, ids).scores[0])


def test_streamers():
    class Kept(BaseStreamer):
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    streamer, model, ids = Kept(), looped_lm(), prompts(1, 5)
    out = generate(model, ids, streamer=streamer)
    assert streamer.tokens == out.sequences[0].tolist()
    assert streamer.ended


def test_nothing_is_warned_of():
    """Not by a call that says all it wants, on any version of transformers."""
    model = looped_lm()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(prompts(), max_new_tokens=3, do_sample=False, pad_token_id=0, n_loops=2, exit="relative")
        model(prompts(), use_cache=True)
