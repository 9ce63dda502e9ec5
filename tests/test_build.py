"""How the engine is built, and what an installation without a working one does."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch
from models import icl_model

import looped

ROOT = Path(__file__).resolve().parent.parent
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
WAIT = 120  # seconds: far more than any build of these takes

try:
    from looped import _engine
except ImportError:
    _engine = None
needs_engine = pytest.mark.skipif(_engine is None, reason="the C++ engine is not built")
needs_objdump = pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")

# Building ---------------------------------------------------------------------------------------------------------------
# setup.py as it is, on a tree whose engine is one small file: what is built does not matter here, but when and where.

STAND_IN_CMAKE = """
cmake_minimum_required(VERSION 3.18)
project(looped_engine LANGUAGES CXX)
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
Python_add_library(_engine MODULE WITH_SOABI engine.cpp)
target_compile_definitions(_engine PRIVATE ANSWER=42)
install(TARGETS _engine LIBRARY DESTINATION .)
"""
STAND_IN_CPP = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_engine", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__engine() {
    PyObject* module = PyModule_Create(&definition);
    PyModule_AddIntConstant(module, "answer", ANSWER);
    return module;
}
"""
# Stands before the compiler: reports when a file is begun and done, and takes its time where a file `slow` is in the tree.
LAUNCHER = """#!{python}
import os, pathlib, subprocess, sys, time
tree = pathlib.Path({tree!r})
is_engine = any(word.endswith("engine.cpp") for word in sys.argv)
def report(what):
    with open(tree / "log", "a") as log:
        log.write(what + "\\n")
if is_engine:
    (tree / "pid").write_text(str(os.getpid()))
    report("begin")
    if (tree / "slow").exists():
        time.sleep(float((tree / "slow").read_text()))
code = subprocess.call(sys.argv[1:])
if is_engine:
    report("end")
sys.exit(code)
"""


@pytest.fixture
def tree(tmp_path):
    pytest.importorskip("pybind11", reason="needs the build requirements; install looped[dev]")
    pytest.importorskip("setuptools", minversion="77", reason="needs the build requirements; install looped[dev]")
    if shutil.which("cmake") is None or shutil.which("ninja") is None:
        for tool in ("cmake", "ninja"):
            pytest.importorskip(tool, reason="needs the build requirements; install looped[dev]")
    tree = tmp_path / "tree"
    (tree / "csrc").mkdir(parents=True)
    (tree / "python" / "looped").mkdir(parents=True)
    (tree / "python" / "looped" / "__init__.py").touch()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "csrc" / "CMakeLists.txt").write_text(STAND_IN_CMAKE)
    (tree / "csrc" / "engine.cpp").write_text(STAND_IN_CPP)
    (tree / "launcher").write_text(LAUNCHER.format(python=sys.executable, tree=str(tree)))
    (tree / "launcher").chmod(0o755)
    return tree


def start(tree, **environment):
    """`setup.py build_ext --inplace`, what an editable install runs, in a process group of its own."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": path, "CMAKE_CXX_COMPILER_LAUNCHER": str(tree / "launcher"), "LOOPED_REQUIRE_ENGINE": "1"}
    return subprocess.Popen(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tree,
        env=os.environ | own | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process, timeout=WAIT):
    """What it printed; it must have ended well, and not hang."""
    try:
        out, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise
    assert process.returncode == 0, out
    return out


def module_of(tree):
    return tree / "python" / "looped" / f"_engine{SUFFIX}"


def build_folder(tree):
    (folder,) = tree.glob("build/temp*/engine")
    return folder


def answer(tree):
    """What the module that was built says."""
    code = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_engine", {str(module_of(tree))!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.answer)
"""
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=WAIT).stdout)


def wait_for(condition):
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def log(tree):
    path = tree / "log"
    return path.read_text().split() if path.exists() else []


def test_a_build_that_was_killed_leaves_nothing_in_the_way(tree):
    (tree / "slow").write_text("600")
    killed = start(tree)
    wait_for(lambda: "begin" in log(tree))  # it holds the lock, and is in the middle of a file
    os.killpg(killed.pid, 9)
    os.kill(int((tree / "pid").read_text()), 9)  # Ninja gives it a group of its own
    killed.communicate(timeout=WAIT)
    (tree / "slow").unlink()
    (lock,) = tree.glob("build/temp*/engine.lock")
    assert lock.exists()
    assert not module_of(tree).exists()
    finish(start(tree))
    assert answer(tree) == 42
    # What a stop in other places, or a tree that was copied with its build folder, leaves.
    folder = build_folder(tree)
    for damage in (
        lambda: (folder / "CMakeCache.txt").write_text("CMAKE_HOME_DIRECTORY:INTERNAL=/another/tree\nCMAKE_CXX_COM"),
        lambda: (folder / "build.ninja").write_text("rule CXX_COMP"),
        lambda: [path.write_bytes(path.read_bytes()[:100]) for path in folder.rglob("*.o")],
    ):
        module_of(tree).unlink()
        damage()
        for built in folder.rglob("*.so"):
            built.unlink()
        finish(start(tree))
        assert answer(tree) == 42
    (tree / "csrc" / "CMakeLists.txt").write_text(STAND_IN_CMAKE.replace("=42", "=43"))
    assert "of no use" not in finish(start(tree))  # a whole folder is used again
    assert answer(tree) == 43


def test_two_builds_of_one_tree_do_not_meet(tree):
    finish(start(tree))
    whole = module_of(tree).stat().st_size
    (tree / "csrc" / "CMakeLists.txt").write_text(STAND_IN_CMAKE.replace("=42", "=44"))
    (tree / "log").unlink()
    (tree / "slow").write_text("2")
    builds = [start(tree) for _ in range(2)]
    sizes = set()
    while any(build.poll() is None for build in builds):
        sizes.add(module_of(tree).stat().st_size)  # there is a module all the time, and it is whole
        time.sleep(0.001)
    said = [finish(build) for build in builds]
    assert min(sizes) > 0.9 * whole
    assert "begin" in log(tree)
    assert log(tree) == ["begin", "end"] * (len(log(tree)) // 2)  # one after the other
    assert sum("waiting for another build" in text for text in said) == 1
    assert answer(tree) == 44
    assert sorted(path.name for path in module_of(tree).parent.iterdir()) == ["__init__.py", module_of(tree).name]


@pytest.mark.parametrize("missing", ["everything", "ninja", "compiler"])
def test_without_the_tools_the_package_installs_and_says_why(tree, missing, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for tool in {"everything": (), "ninja": ("cmake", "c++"), "compiler": ("cmake", "ninja")}[missing]:
        if found := shutil.which(tool, path=path):
            (tools / tool).symlink_to(found)
    lacking = {"PATH": str(tools), "CXX": "", "CMAKE_CXX_COMPILER_LAUNCHER": ""}
    said = finish(start(tree, **lacking, LOOPED_REQUIRE_ENGINE="0"))
    assert len(re.findall(r"the C\+\+ engine was not built \(.+\); install a C\+\+20 compiler", said)) == 1
    assert "Traceback" not in said
    assert not module_of(tree).exists()
    required = start(tree, **lacking)
    said, _ = required.communicate(timeout=WAIT)
    assert required.returncode != 0
    assert "looped: the C++ engine was not built" in said
    assert "Traceback" not in said
    finish(start(tree))  # and once they are there
    assert answer(tree) == 42


def test_no_home_is_needed_to_build(tree, home):
    finish(start(tree, **home))
    assert answer(tree) == 42


def no_home():
    if not Path("/proc/self").exists():
        pytest.skip("needs /proc")
    return {"HOME": "/proc/home", "XDG_CACHE_HOME": "/proc/home/.cache", "XDG_CONFIG_HOME": "/proc/home/.config"}


# Loading ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["no home", "no cache"])
def home(request, tmp_path):
    """The environment of a user whose home, or its .cache, takes no files: not even those of root."""
    if request.param == "no home":
        return no_home()
    for name in (".cache", ".config", ".triton"):
        (tmp_path / name).touch(mode=0o444)
    return {"HOME": str(tmp_path), "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": ""}


def installation(tmp_path, engine):
    """The package in a folder of its own, with these bytes for an engine, or without one; to stand first on the path."""
    package = tmp_path / "installed" / "looped"
    package.mkdir(parents=True)
    for path in (ROOT / "python" / "looped").iterdir():
        if not path.name.startswith(("_engine", "__pycache__")):
            (package / path.name).symlink_to(path)
    if engine is not None:
        (package / f"_engine{SUFFIX}").write_bytes(engine)
    return package.parent


SOLVE = """
import logging, sys
sys.path[:0] = {path!r}
# That of an editable install would find the engine in the source tree.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
import torch, looped
assert looped.__file__.startswith({path!r}[0])
from looped.backends import cpu
from models import icl_model
x = torch.randn(3, 9, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
model = icl_model(std=0.15)
results = [looped.solve(model, x, n_loops=9) for _ in range(2)]
refused = "nothing"
try:
    looped.solve(model, x, n_loops=9, backend="cpu")
except ValueError as error:
    refused = str(error)
assert results[0].reason in (cpu.describe(), "the fastest that runs this model on a CPU")
print(results[0].backend, refused)
torch.save(results[1].y, {out!r})
"""

DAMAGE = {
    "missing": lambda engine: None,
    "cut short": lambda engine: engine[: len(engine) // 2],  # within a part that is mapped: the loader would die of SIGBUS
    "empty": lambda engine: b"",
    "text": lambda engine: b"version https://git-lfs.github.com/spec/v1\n" * 9,
    "another machine": lambda engine: engine[:18] + b"\xf7" + engine[19:],
    "another Python": lambda engine: engine.replace(b"PyCapsule_New\0", b"PyCapsule_Old\0"),  # a symbol this one lacks
    "another module": lambda engine: engine.replace(b"PyInit__engine\0", b"PyInit__motor_\0"),
}


@needs_engine
@pytest.mark.skipif(sys.platform != "linux", reason="ELF files")
@pytest.mark.parametrize("what", DAMAGE)
def test_an_engine_that_does_not_load_is_as_good_as_none(what, tmp_path):
    good = Path(_engine.__file__).read_bytes()
    damaged = DAMAGE[what](good)
    assert damaged != good
    path = installation(tmp_path, damaged)
    out = tmp_path / "y.pt"
    code = SOLVE.format(path=[str(path), str(ROOT / "tests")], out=str(out))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT)
    assert run.returncode == 0, (run.returncode, run.stderr)
    assert run.stderr == ""
    why, last = run.stdout.splitlines()  # said once
    verb = "is not in this installation" if what == "missing" else "does not load"
    reason = rf"the C\+\+ engine {verb} \(.+\); install looped again where a C\+\+20 compiler is"
    assert re.fullmatch(f"solve: the eager backend runs this: {reason}", why)
    assert last.startswith('eager solve: backend="cpu" cannot run this: the C++ engine')
    x = torch.randn(3, 9, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = looped.solve(icl_model(std=0.15), x, n_loops=9, backend="cpu").y
    torch.testing.assert_close(torch.load(out), want, rtol=1e-9, atol=1e-9)


@needs_engine
def test_no_home_is_needed_to_run(home, tmp_path):
    environment = os.environ | home | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    out = tmp_path / "out"
    options = ["--prompts", "4", "--points", "3", "--loops", "2", "--no-settling", "--no-baselines", "--threads", "1"]
    run = subprocess.run(
        [sys.executable, "-m", "looped.cli", "eval", *options, "--out", str(out), "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)
    assert list(out.glob("*.png"))
    assert "Traceback" not in run.stderr


# Instruction sets -------------------------------------------------------------------------------------------------------


def wide_functions(path):
    """Names of the functions with instructions that not every x86-64 processor has: those of AVX, and those of AVX-512."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(path)]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    name, avx, avx512 = "", set(), set()
    for line in listing.splitlines():
        if line.endswith(">:"):
            name = line.partition("<")[2][:-2]
        elif re.search(r"%zmm|%xmm(1[6-9]|2\d|3[01])|%ymm(1[6-9]|2\d|3[01])|%k[0-7]", line):
            avx512.add(name)
        elif re.match(r"\s*[0-9a-f]+:\s+(\{\w+\} )?v(?!err|erw)", line):  # all have that letter, whatever their width
            avx.add(name)
    return avx, avx512


@needs_engine
@needs_objdump
def test_wide_instructions_stand_only_in_kernels_that_are_chosen_at_run_time():
    avx, avx512 = wide_functions(_engine.__file__)
    assert not [name for name in avx | avx512 if "avx" not in name.lower()]
    assert not [name for name in avx512 if "avx512" not in name.lower()]
    assert len(avx) > 50 or platform.machine() not in ("x86_64", "AMD64")
    assert len(avx512) > 50 or not avx


@pytest.mark.slow
@needs_objdump
def test_two_builds_of_the_whole_engine_and_their_objects(tree, tmp_path):
    for name in ("csrc", "python/looped"):
        shutil.copytree(ROOT / name, tree / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    builds = [start(tree, CMAKE_CXX_COMPILER_LAUNCHER="", **no_home()) for _ in range(2)]
    said = [finish(build, timeout=3600) for build in builds]
    assert sum("waiting for another build" in text for text in said) == 1
    assert not [text for text in said if "warning:" in text]
    x = torch.randn(3, 9, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out = tmp_path / "y.pt"
    code = SOLVE.format(path=[str(tree / "python"), str(ROOT / "tests")], out=str(out))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT)
    want = looped.solve(icl_model(std=0.15), x, n_loops=9, backend="eager").y
    torch.testing.assert_close(torch.load(out), want, rtol=1e-9, atol=1e-9)
    objects = list(build_folder(tree).rglob("*.o"))
    assert len(objects) > 10
    for path in objects:
        # A function that another object has, too, such as one of the standard library, may be the one that is linked.
        (isa,) = re.findall(r"kernels_(avx2|avx512)", path.stem) or ("baseline",)
        avx, avx512 = wide_functions(path)
        assert not [name for name in avx | avx512 if isa == "baseline" or isa not in name.lower()], path
        assert isa == "avx512" or not avx512, path


@needs_engine
@needs_objdump
def test_the_engine_needs_no_torch():
    headers = subprocess.run(["objdump", "-p", _engine.__file__], check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"NEEDED\s+(\S+)", headers)
    assert needed
    assert not [library for library in needed if re.search("torch|c10|python", library)]
