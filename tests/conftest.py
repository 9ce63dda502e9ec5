import importlib
import os

import pytest
import torch

if os.environ.get("LOOPED_REQUIRE_ENGINE") == "1":  # no test is skipped for the lack of it
    importlib.import_module("looped._engine")

collect_ignore = ["interpreter"]  # tests/test_kernels_interpreter.py runs it in processes of its own


@pytest.fixture(autouse=True)
def _seed_and_threads():
    torch.manual_seed(0)
    torch.set_num_threads(1)
