"""`import looped` and the auto classes of transformers, whichever comes first: each order in a process of its own."""

import subprocess
import sys

import pytest

from looped import LoopedTransformer, gpt2_config
from looped.lm import LoopedGPT2

ORDERS = {
    "looped first": "import looped, sys; assert 'transformers' not in sys.modules; import transformers",
    "transformers first": "import transformers, looped",
    "auto classes first": "from transformers import AutoConfig, AutoModelForCausalLM; import looped, transformers",
    "configuration first": "import looped; from transformers import AutoConfig; import transformers",
    "a model first": "import looped; from transformers import GPT2LMHeadModel, pipeline; import transformers",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    LoopedGPT2.from_looped(LoopedTransformer(gpt2_config(50, 16, 16, 2, 1))).save_pretrained(folder)
    return folder


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("order", ORDERS)
def test_the_auto_classes_know_the_model(folder, order):
    code = f"{ORDERS[order]}\nprint(type(transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})).__name__)"
    assert run(code).split() == ["LoopedGPT2"]


def test_packages_load_on_first_use():
    code = """
import sys, looped
names = "experiments icl lm programs train".split()
print([name for name in names if name not in dir(looped)])
print([name for name in names if getattr(looped, name) is not sys.modules["looped." + name]])
print(looped.programs.run_programs.__name__, looped.train.train.__name__)
"""
    assert run(code).split() == ["[]", "[]", "run_programs", "train"]


def test_transformers_loads_as_ever():
    code = """
import sys, looped
import inspect, transformers
from transformers import GPT2LMHeadModel
assert "class GPT2LMHeadModel" in inspect.getsource(GPT2LMHeadModel)
hooks = [finder for finder in sys.meta_path if type(finder).__module__ == "looped.registration"]
assert "looped.lm" in sys.modules and not hooks  # it is gone once it has done its work
"""
    run(code)


def test_an_import_that_fails_leaves_the_hook(tmp_path):
    code = """
import sys, looped
try:
    import transformers.no_such_module
except ImportError:
    pass
from transformers import AutoModelForCausalLM
assert "looped.lm" in sys.modules
"""
    run(code)
