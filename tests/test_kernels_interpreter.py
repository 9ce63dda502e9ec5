"""The Triton kernels in Triton's interpreter: the numbers, on a machine without a GPU.

The interpreter is chosen when a kernel is decorated, so its tests (tests/interpreter) run in a process of their own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "interpreter"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("cases", sorted(path.name for path in CASES.glob("cases_*.py")))
def test_in_the_interpreter(cases):
    environment = dict(os.environ, TRITON_INTERPRET="1")
    command = [sys.executable, "-m", "pytest", "-W", "ignore", "-p", "no:cacheprovider", "-x", str(CASES / cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
