""".ci/run where the header of the C++ tests is not there: with programs that stand in for make, apt-get and id."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEADER = "/usr/include/doctest/doctest.h"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def ci(tmp_path):
    """ci(is_root, apt_get, waives): the exit status of .ci/run, what it made, and what it said. apt_get: a shell command that
    installs, or None where there is no such program."""
    header = tmp_path / "doctest.h"
    script = (ROOT / ".ci/run").read_text()
    assert HEADER in script
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/run").write_text(script.replace(HEADER, str(header)))
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname", "touch"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))

    def program(name, text):
        path = tmp_path / "bin" / name
        path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
        path.chmod(0o755)

    def run(is_root=True, apt_get=None, **environment):
        program("make", f'echo "$1" >> {tmp_path}/made')
        program("id", f"echo {0 if is_root else 1000}")
        if apt_get is not None:
            program("apt-get", apt_get.format(header=header))
        environment = {"PATH": str(tmp_path / "bin")} | environment
        done = subprocess.run(
            [shutil.which("bash"), str(tmp_path / ".ci/run")], env=environment, capture_output=True, text=True, cwd=os.sep
        )
        return done.returncode, (tmp_path / "made").read_text().split(), done.stdout + done.stderr

    return run


def test_the_header_is_installed_where_it_can_be(ci):
    assert ci(apt_get="touch {header}")[:2] == (0, ["check", "cpp", "test"])


@pytest.mark.parametrize("apt_get", [None, "exit 100"])
def test_a_machine_that_cannot_have_it_says_so_and_goes_on(ci, apt_get):
    status, made, said = ci(apt_get=apt_get)
    assert (status, made) == (0, ["check", "test"])
    assert "THE C++ TESTS DO NOT RUN" in said


def test_a_machine_that_could_have_it_fails(ci):
    status, made, said = ci(is_root=False, apt_get="touch {header}")
    assert (status, made) == (1, ["check"])
    assert "apt-get install doctest-dev, or set LOOPED_WITHOUT_DOCTEST=1" in said


def test_an_install_without_the_header_fails(ci):
    assert ci(apt_get="exit 0")[:2] == (1, ["check"])


def test_a_variable_waives_it(ci):
    status, made, said = ci(is_root=False, apt_get="touch {header}", LOOPED_WITHOUT_DOCTEST="1")
    assert (status, made) == (0, ["check", "test"])
    assert "THE C++ TESTS DO NOT RUN" in said
