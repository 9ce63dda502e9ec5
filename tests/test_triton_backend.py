"""The Triton backend where no GPU is: what it says, and what it leaves alone."""

import subprocess
import sys

import pytest
import torch
from models import icl_model

import looped
from looped.backends import triton as backend


def test_importing_the_package_imports_no_triton():
    code = "import sys, looped; sys.exit(any(name.split('.')[0] in ('triton', 'loopkernels') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_the_device_is_named_where_it_is_no_gpu():
    model = icl_model(dtype=torch.float32)
    with pytest.raises(ValueError, match="run on a GPU and the model is on cpu"):
        looped.solve(model, [torch.randn(4, 3)], backend="triton")
    assert looped.solve(model, [torch.randn(4, 3)]).backend in ("cpu", "eager")


def test_the_state_of_the_backend_is_reported():
    assert backend.describe()


def test_repack_takes_any_model():
    looped.repack(icl_model())
