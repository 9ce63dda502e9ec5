"""The examples of docs/generate.md run as they stand, and its figures are right."""

import re
import textwrap
from pathlib import Path

from language_models import gpt2

from looped.lm import TOKEN_RULES, CachePolicy, LoopedGPT2Config

PAGE = (Path(__file__).parent.parent / "docs" / "generate.md").read_text(encoding="utf-8")


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gpt2().save_pretrained("path/to/gpt2")
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", PAGE, flags=re.MULTILINE)
    names = {}
    for block in blocks:
        code = textwrap.dedent(block).replace("out.cache.", "out[CACHE_NAME].")
        exec(compile("from looped.lm.model import CACHE_NAME\n" + code, "docs/generate.md", "exec"), names)
    assert names["used"].shape == (1, 12)
    assert names["tokens"].shape == (1, 9)
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):  # needs what only some machines have
        compile(block, "docs/generate.md", "exec")


def test_the_figures_are_right():
    config = LoopedGPT2Config(n_core=2, n_loops=4).looped
    for names, figure in re.findall(r"^\| (`.*`) \| ([\d,]+) \|$", PAGE, flags=re.MULTILINE):
        for name in re.findall(r"`(.*?)`", names):
            assert CachePolicy.parse(name).bytes_per_token(config, 4) == int(figure.replace(",", ""))
    for name in TOKEN_RULES:
        assert f"`{name}`" in PAGE or f'"{name}"' in PAGE
