import importlib
import os

import pytest
import torch

if os.environ.get("LOOPED_REQUIRE_ENGINE") == "1":  # no test is skipped for the lack of it
    importlib.import_module("looped._engine")


@pytest.fixture(autouse=True)
def _seed_and_threads():
    torch.manual_seed(0)
    torch.set_num_threads(1)
