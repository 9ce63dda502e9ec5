"""`make sdist`: builds an sdist, and installs it where there is no torch; the engine must be in it and work.

Needs PyPI, for the build requirements of pyproject.toml, and a C++ compiler. Not collected by pytest.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

USE_ENGINE = """
import importlib.util, pathlib, sys, sysconfig
assert importlib.util.find_spec("torch") is None, "torch is in this environment"
found = list((pathlib.Path(sysconfig.get_path("platlib")) / "looped").glob("_engine*.so"))
assert len(found) == 1, found
spec = importlib.util.spec_from_file_location("_engine", found[0])
engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engine)
print(found[0].name, "version", engine.version, "on", engine.isa(), f"{engine.fma_peak(1, 0.05):.0f} GFLOP/s")
assert not [name for name in sys.modules if name.startswith("torch")]
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "build", "--sdist", "--outdir", folder, str(ROOT)], check=True)
        (sdist,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            built = [name for name in archive.getnames() if name.endswith((".so", ".pyc", ".o"))]
        assert not built, f"the sdist holds what was built here: {built}"
        environment = Path(folder) / "venv"
        venv.create(environment, with_pip=True)
        python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        install = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", sdist]
        subprocess.run(install, check=True, env=clean | {"LOOPED_REQUIRE_ENGINE": "1"})
        subprocess.run([python, "-c", USE_ENGINE], check=True, env=clean, cwd=folder)


if __name__ == "__main__":
    main()
