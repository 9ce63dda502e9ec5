"""Reading, writing and finding language models: GPT-2 checkpoints, folders, the Auto classes, the evaluation harness."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from language_models import gpt2, looped_lm, pair, prompts
from tolerances import FP32
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, pipeline

import looped
from looped.config import LoopedConfig
from looped.lm import LoopedGPT2, LoopedGPT2Config
from looped.lm.config import MODEL_FIELDS, SHIM_FILE

PYTHON_PATH = os.pathsep.join(path for path in sys.path if path)


def python(code, *arguments):
    """A fresh interpreter; its output."""
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    run = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


# GPT-2 ------------------------------------------------------------------------------------------------------------


def test_a_gpt2_elsewhere_is_an_error_that_says_what_to_do(tmp_path):
    gpt2().save_pretrained(tmp_path)
    for load in (LoopedGPT2.from_pretrained, LoopedGPT2Config.from_pretrained):
        with pytest.raises(ValueError, match=r"this folder is a GPT-2; use LoopedGPT2\.from_gpt2\(folder\)"):
            load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"not downloaded; .*GPT2LMHeadModel\.from_pretrained\('openai-comm"):
        LoopedGPT2.from_gpt2("openai-community/gpt2")


@torch.no_grad()
def test_gpt2_loads_with_one_call_from_wherever_it_stands(tmp_path):
    """Conv1D keeps its weights transposed; square ones would load without a word."""
    theirs, ids = gpt2(), torch.tensor([[9, 8, 7, 6, 5]])
    expected = theirs(ids).logits
    theirs.save_pretrained(tmp_path / "folder")
    torch.save(theirs.state_dict(), tmp_path / "state.pt")
    sources = [
        theirs,
        tmp_path / "folder",
        str(tmp_path / "folder"),
        tmp_path / "folder" / "model.safetensors",
        tmp_path / "state.pt",
    ]
    for source in [*sources, theirs.state_dict(), theirs.transformer.state_dict()]:
        model = LoopedGPT2.from_gpt2(source, **({} if source in sources[:3] else {"n_heads": 4}))
        assert not model.training
        assert (model(ids).logits - expected).abs().max() <= FP32
    looped.save_model(model.transformer, tmp_path / "ours")
    assert torch.equal(LoopedGPT2.from_looped(looped.load_model(tmp_path / "ours"))(ids).logits, model(ids).logits)

    def with_one_transposed(state):
        return {key: value.T if key.endswith("h.0.attn.c_proj.weight") else value for key, value in state.items()}

    wrong = LoopedGPT2.from_gpt2(with_one_transposed(theirs.state_dict()), n_heads=4)
    assert (wrong(ids).logits - expected).abs().max() > 0.01


@torch.no_grad()
def test_nanogpt_loads_with_one_call(tmp_path):
    """A file of its trainer: Linear weights, tied head, containers around the tensors, an activation it does not tell."""
    theirs, ids = gpt2(activation_function="gelu"), prompts()
    state = {}
    for key, value in theirs.state_dict().items():
        is_conv1d = key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        state[f"_orig_mod.{key}"] = value.T.contiguous() if is_conv1d else value
    arguments = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 32, "bias": True, "vocab_size": 61, "dropout": 0.0}
    torch.save({"model": state, "model_args": arguments, "iter_num": 7, "config": {"dataset": "x"}}, tmp_path / "ckpt.pt")
    model = LoopedGPT2.from_gpt2(tmp_path / "ckpt.pt", activation="gelu")
    assert (model(ids).logits - theirs(ids).logits).abs().max() <= FP32
    with pytest.raises(ValueError, match="pass activation="):
        LoopedGPT2.from_gpt2(tmp_path / "ckpt.pt")


def test_prefixes_wrappers_and_keys_that_do_not_fit():
    theirs, ids = gpt2(), prompts()
    state, expected = theirs.state_dict(), LoopedGPT2.from_gpt2(theirs)(ids).logits
    for prefix in ("_orig_mod.", "module.", "module._orig_mod."):
        wrapped = {prefix + key: value for key, value in state.items()}
        for source in (wrapped, {"model": wrapped}, {"model_state_dict": wrapped}, {"state_dict": wrapped}):
            assert torch.equal(LoopedGPT2.from_gpt2(source, n_heads=4)(ids).logits, expected)
    misspelt = {key.replace("h.1.ln_2", "h.1.ln_3"): value for key, value in state.items()}
    with pytest.raises(ValueError, match=r"h\.1\.ln_2\.weight.*h\.1\.ln_3\.weight"):
        LoopedGPT2.from_gpt2(misspelt, n_heads=4)
    with pytest.raises(ValueError, match="surplus"):
        LoopedGPT2.from_gpt2(state | {"surplus": torch.ones(2)}, n_heads=4)


class Opens:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_no_code_of_a_file_is_run(tmp_path):
    flag = tmp_path / "flag"
    torch.save({"model": Opens(flag)}, tmp_path / "evil.pt")
    torch.save({"state_dict": gpt2().state_dict()}, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:2000])
    for name, message in (("evil.pt", "never run"), ("cut.pt", "truncated")):
        with pytest.raises(ValueError, match=message):
            LoopedGPT2.from_gpt2(tmp_path / name, n_heads=4)
    assert not flag.exists()
    LoopedGPT2.from_gpt2(tmp_path / "whole.pt", n_heads=4)


def test_changes_make_a_looped_model_of_gpt2():
    theirs = gpt2("odd", eos_token_id=5)
    model = LoopedGPT2.from_gpt2(theirs, n_loops=4, n_prelude=1, n_coda=1, inject="add", cache_policy="modulo(2)", exit="kl")
    config = model.config
    assert (config.n_loops, config.n_prelude, config.n_core, config.n_coda, config.inject) == (4, 1, 1, 1, "add")
    assert (config.cache_policy, config.exit, config.eos_token_id, config.num_hidden_layers) == ("modulo(2)", "kl", 5, 3)
    assert model.generation_config.eos_token_id == 5
    assert torch.equal(model.transformer.coda[0].mlp.fc.weight, theirs.transformer.h[2].mlp.c_fc.weight.T)
    gated = LoopedGPT2.from_gpt2(theirs, n_loops=2, exit_gate=True)
    assert not gated.exit_gate.weight.is_meta
    assert gated.exit_gate.weight.abs().sum() > 0
    with pytest.raises(ValueError, match="did you mean 'n_loops'"):
        LoopedGPT2.from_gpt2(theirs, n_loop=3)
    with pytest.raises(ValueError, match="leave the argument out"):
        LoopedGPT2.from_gpt2(theirs, d_model=48)
    assert LoopedGPT2.from_gpt2(theirs.double()).dtype == torch.float64


def test_a_looped_transformer_becomes_a_language_model():
    transformer = looped_lm().transformer
    model = LoopedGPT2.from_looped(transformer, eos_token_id=3)
    assert model.transformer is transformer
    assert model.config.looped == transformer.config
    assert model.config.eos_token_id == 3
    with pytest.raises(ValueError, match="a language model needs 'tokens'"):
        LoopedGPT2.from_looped(looped.LoopedTransformer(looped.icl_config(n_dims=3, n_points=4, d_model=16, n_heads=2)))


# Folders ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_saved_folder_is_the_same_model(tmp_path):
    ids = prompts()
    for number, model in enumerate(
        (looped_lm(exit="kl", cache_policy="last_only", exit_gate=True), pair("odd")[1], looped_lm(tie_readout=False))
    ):
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        assert {path.name for path in folder.iterdir()} >= {
            "config.json",
            "model.safetensors",
            "generation_config.json",
            SHIM_FILE,
        }
        for again in (LoopedGPT2.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)):
            assert type(again) is LoopedGPT2
            assert torch.equal(again(ids).logits, model(ids).logits)
            assert again.config.looped == model.config.looped
            assert (again.config.exit, again.config.cache_policy) == (model.config.exit, model.config.cache_policy)
            assert not again.training
        assert AutoConfig.from_pretrained(folder).n_loops == model.config.n_loops
        changed = AutoModelForCausalLM.from_pretrained(folder, n_loops=2, dtype=torch.bfloat16)
        assert changed(ids).n_loops.max() == 2
        assert changed.dtype == torch.bfloat16
        changed.save_pretrained(tmp_path / "again")
        assert LoopedGPT2.from_pretrained(tmp_path / "again").config.n_loops == 2
    written = json.loads((tmp_path / "1" / "config.json").read_text())
    assert set(MODEL_FIELDS) <= set(written)
    assert written["model_type"] == "looped_gpt2"


def test_a_folder_is_found_by_trust_remote_code_where_nobody_imported_looped(tmp_path):
    """And saving it again copies no code of the package."""
    looped_lm().save_pretrained(tmp_path / "model")
    code = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert "looped" in sys.modules
import looped
assert type(model) is looped.LoopedGPT2
assert type(AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)) is looped.LoopedGPT2Config
model.save_pretrained(sys.argv[2])
"""
    python(code, tmp_path / "model", tmp_path / "again")
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("model", "again")]
    assert names[0] == names[1]
    assert (tmp_path / "again" / SHIM_FILE).read_text() == (tmp_path / "model" / SHIM_FILE).read_text()
    assert json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"]


def test_weights_that_a_file_lacks_are_drawn_as_gpt2_draws_them(tmp_path):
    pair()[1].save_pretrained(tmp_path)
    model, info = LoopedGPT2.from_pretrained(tmp_path, exit_gate=True, output_loading_info=True)
    assert set(info["missing_keys"]) == {"exit_gate.weight", "exit_gate.bias"}
    assert 0 < model.exit_gate.weight.std() < 0.1
    assert (model.exit_gate.bias == 0).all()
    assert torch.equal(model.transformer.embedding.weight, pair()[1].transformer.embedding.weight)  # what it has is kept
    fresh = LoopedGPT2(LoopedGPT2Config(vocab_size=400, n_positions=64, d_model=128, n_heads=4, n_core=4, bias=False))
    assert abs(fresh.transformer.core[0].mlp.fc.weight.std() / 0.02 - 1) < 0.05
    assert abs(fresh.transformer.core[0].mlp.proj.weight.std() / (0.02 / 8**0.5) - 1) < 0.05
    assert not any(parameter.is_meta for parameter in fresh.parameters())


def test_the_vocabulary_can_be_resized():
    for model in (looped_lm(), looped_lm(tie_readout=False)):
        ids, before = prompts(), model(prompts()).logits
        model.resize_token_embeddings(70)
        after = model(ids).logits
        assert after.shape[-1] == 70
        assert (after[..., :61] - before).abs().max() <= FP32
        assert model.transformer.config.vocab_size == model.config.vocab_size == 70
        assert model(torch.tensor([[69]])).logits.shape == (1, 1, 70)
    with pytest.raises(ValueError, match="the head is the embedding"):
        looped_lm().set_output_embeddings(torch.nn.Linear(32, 61))


# Configuration ----------------------------------------------------------------------------------------------------


def test_the_configuration_is_that_of_the_one_model():
    fields = {field: getattr(LoopedGPT2Config(), field) for field in MODEL_FIELDS}
    assert LoopedConfig(**fields) == looped.gpt2_config(50257, 1024, 768, 12, 12)
    config = LoopedGPT2Config(
        d_model=48, n_heads=3, eos_token_id=[3, 4], name_or_path="x", output_hidden_states=True, num_labels=3
    )
    assert (config.hidden_size, config.max_position_embeddings, config.num_attention_heads) == (48, 1024, 3)
    assert (config.head_dim, config.d_ff, config.eos_token_id, config.num_labels) == (16, 192, [3, 4], 3)
    again = LoopedGPT2Config.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    assert config.tie_word_embeddings
    assert not LoopedGPT2Config(tie_readout=False).tie_word_embeddings


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_embd": 3}, "did you mean 'd_model'"),
        ({"hidden_size": 3}, "did you mean 'd_model'"),
        ({"n_layer": 3}, "did you mean 'n_core'"),
        ({"n_loop": 3}, "did you mean 'n_loops'"),
        ({"cache_polcy": "x"}, "did you mean 'cache_policy'"),
        ({"max_position_embedding": 3}, "unknown key"),
        ({"temperature": 0.5}, "unknown key 'temperature'"),  # of a GenerationConfig: it would be dropped
        ({"input_kind": "states"}, "a language model needs 'tokens'"),
        ({"mask_kind": "full"}, "needs 'causal'"),
        ({"state_init": "given"}, "use zeros, ones or embedding"),
        ({"inject": "add", "state_init": "nought"}, "not one of zeros"),
        ({"n_loops": -1}, "at least 0"),
        ({"d_model": 50}, "does not divide"),
        ({"exit": "klm"}, "did you mean 'kl'"),
        ({"exit_gate": "yes"}, "true or false"),
        ({"tie_word_embeddings": False}, "contradicts tie_readout"),
    ],
)
def test_what_no_configuration_may_say(fields, message):
    with pytest.raises(ValueError, match=message):
        LoopedGPT2Config(**fields)


def test_importing_looped_takes_no_transformers():
    code = """
import sys, looped
assert "transformers" not in sys.modules
assert "LoopedGPT2" in dir(looped) and "LoopedGPT2" in looped.__all__
try:
    looped.LoopedGPT3
except AttributeError as error:
    assert "LoopedGPT3" in str(error)
assert looped.LoopedGPT2.__module__ == "looped.lm.model"
assert "transformers" in sys.modules
from looped import LoopedGPT2Config, lm
print(LoopedGPT2Config.model_type)
"""
    assert python(code) == "looped_gpt2\n"


# Others' programs -------------------------------------------------------------------------------------------------


def tokenizer_folder(folder):
    """A tokenizer of single letters, made here."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(32, 32 + 59)]
    vocabulary = {"<end>": 0, "<unk>": 1} | {letter: i + 2 for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<unk>")
    fast.save_pretrained(folder)
    return fast


def test_the_text_generation_pipeline_takes_it(tmp_path):
    tokenizer = tokenizer_folder(tmp_path)
    model = looped_lm(n_positions=64)
    settings = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    text = generator(["HELLO", "A"], batch_size=2, generation_config=settings)
    for prompt, answer in zip(["HELLO", "A"], text, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        new = tokenizer.decode(expected[0, len(prompt) :], skip_special_tokens=True)
        assert answer[0]["generated_text"].replace(" ", "") == prompt + new.replace(" ", "")


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed (the extra `lm`)")
class TestEvaluationHarness:
    """One tiny local task, offline: multiple choice, loglikelihoods of text, and generation."""

    TASKS = """
task: tiny_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
{extra}
metadata: {{version: 1}}
"""

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
        documents = [{"question": f"WHAT IS {i}?", "choices": ["ONE", "TWO", "MORE"], "answer": i % 3} for i in range(6)]
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
        (tmp_path / "tasks").mkdir()
        for kind, target, extra in (
            ("multiple_choice", "answer", 'doc_to_choice: "{{choices}}"'),
            ("generate_until", '"{{choices[answer]}}"', "generation_kwargs: {until: ['?'], max_gen_toks: 6, do_sample: false}"),
        ):
            text = self.TASKS.format(kind=kind, data=tmp_path / "data.jsonl", target=target, extra=extra)
            (tmp_path / "tasks" / f"{kind}.yaml").write_text(text)
        tokenizer_folder(tmp_path / "model")
        looped_lm(n_positions=128, n_loops=3).save_pretrained(tmp_path / "model")
        return tmp_path

    def test_from_python(self, folder):
        import lm_eval
        from lm_eval.tasks import TaskManager

        results = {}
        for n_loops in (1, 3):
            results[n_loops] = lm_eval.simple_evaluate(
                model="hf",
                model_args={"pretrained": str(folder / "model"), "n_loops": n_loops, "dtype": "float32"},
                tasks=["tiny_multiple_choice", "tiny_generate_until"],
                task_manager=TaskManager(include_path=str(folder / "tasks")),
                batch_size=2,
                device="cpu",
                bootstrap_iters=0,
            )
        samples = {n: result["samples"]["tiny_multiple_choice"] for n, result in results.items()}
        assert len(samples[3]) == 6
        assert samples[1][0]["resps"] != samples[3][0]["resps"]
        model = LoopedGPT2.from_pretrained(folder / "model")
        tokenizer = tokenizer_folder(folder / "other")
        for sample in samples[3]:
            context = tokenizer(sample["doc"]["question"]).input_ids
            for choice, response in zip(sample["doc"]["choices"], sample["resps"], strict=True):
                ids = torch.tensor([context + tokenizer(" " + choice).input_ids])
                with torch.no_grad():
                    logits = model(ids).logits[0, :-1].log_softmax(-1)
                expected = logits.gather(1, ids[0, 1:, None])[len(context) - 1 :].sum()
                assert abs(float(response[0][0]) - float(expected)) <= 1e-3

    def test_from_the_command_line(self, folder):
        environment = os.environ | {
            "PYTHONPATH": PYTHON_PATH,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(folder / "cache"),
        }
        arguments = f"pretrained={folder / 'model'},trust_remote_code=True,n_loops=2,dtype=float32"
        command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", arguments, "--device", "cpu"]
        command += ["--tasks", "tiny_multiple_choice", "--include_path", str(folder / "tasks"), "--batch_size", "2"]
        command += ["--trust_remote_code", "--output_path", str(folder / "results")]
        run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
        assert run.returncode == 0, run.stderr
        assert "tiny_multiple_choice" in run.stdout
        assert list(Path(folder / "results").rglob("results_*.json"))
