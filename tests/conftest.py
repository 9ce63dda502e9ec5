import importlib
import os
import signal

import pytest
import torch

if os.environ.get("LOOPED_REQUIRE_ENGINE") == "1":  # no test is skipped for the lack of it
    importlib.import_module("looped._engine")

collect_ignore = ["interpreter"]  # tests/test_kernels_interpreter.py runs it in processes of its own


@pytest.fixture(autouse=True)
def _seed_and_threads():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the experiments of a file train their models, which they share."""
    return tmp_path_factory.mktemp("experiments")


@pytest.fixture(scope="session", autouse=True)
def interrupts_are_heeded():
    """A shell may have them ignored for background jobs; tests of Ctrl-C would then run for ever."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
