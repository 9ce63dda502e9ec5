"""The examples of README.md, docs/calls.md, docs/exits.md and docs/programs.md run as they stand; those of the other pages have
tests beside what they tell of."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from models import icl_model

from looped.backends import cpu

ROOT = Path(__file__).parent.parent


def page(name):
    return (ROOT / name).read_text(encoding="utf-8")


def python_blocks(name):
    return re.findall(r"```python\n(.*?)```", page(name), flags=re.DOTALL)


def test_the_readme():
    (code,) = python_blocks("README.md")
    names = {}
    torch.manual_seed(0)  # the example draws data of its own
    exec(compile(code, "README.md", "exec"), names)
    assert names["result"].finished.all()
    assert (names["deeper"].n_loops == 200).all()
    torch.testing.assert_close(
        names["asked"], names["own_xs"][10] @ torch.tensor([1.0, -2, 0, 0.5, 1]), rtol=0, atol=0.3
    )  # four of the root of 0.0013 * 5


def test_the_page_on_calls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, lengths = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([5, 3])
    names = dict(model=icl_model(dtype=torch.float32), prompts=x, lengths=lengths, torch=torch)
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", page("docs/calls.md"), flags=re.MULTILINE)
    code = [textwrap.dedent(block) for block in blocks if not block.lstrip().startswith("looped::loop(")]
    assert len(code) == 3
    for block in code:
        exec(compile("import looped\n" + block, "docs/calls.md", "exec"), names)
    assert names["done"].all()
    assert names["result"].n_loops.tolist() == [20_000, 20_000]
    assert names["y"].shape == (2, 5, 16)
    assert (names["n_loops"] <= 100).all()


def test_the_page_on_exits():
    (code,) = python_blocks("docs/exits.md")
    names = {}
    exec(compile(code, "docs/exits.md", "exec"), names)
    least, most, backend = re.search(r'# (\d+) to (\d+); "(\w+)"', code).groups()
    n_loops = names["result"].n_loops
    assert backend == names["result"].backend
    assert abs(int(least) - n_loops.min()) <= 1
    assert abs(int(most) - n_loops.max()) <= 1


@pytest.mark.skipif(not cpu.is_there(), reason="the C++ engine is not built")
def test_the_page_on_programs(monkeypatch):
    monkeypatch.chdir(ROOT)
    many, power = python_blocks("docs/programs.md")
    names = {}
    exec(compile(many.replace("range(1000)", "range(13)"), "docs/programs.md", "exec"), names)
    run = names["runs"][12]
    said = re.search(r'runs\[12\]\["z"\], .*  # (\d+), (\d+), (\d+)', many)
    assert [run["z"], run.steps, run.n_loops] == [int(number) for number in said.groups()]
    *lines, last = power.strip().splitlines()
    call, said = last.split("  # ")
    exec(compile("\n".join([*lines, f"found = {call}"]), "docs/programs.md", "exec"), names)
    np.testing.assert_allclose(names["found"], eval(said), atol=5e-4)
