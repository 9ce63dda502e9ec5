"""Builds the C++ engine with CMake and Ninja; the metadata stands in pyproject.toml.

The engine links no libtorch, so neither building nor importing it needs torch. Where it cannot be built (no C++ compiler, say)
the package installs without it, and the eager backend gives the same results: `looped info` tells. LOOPED_REQUIRE_ENGINE=1
makes a failed build an error.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, FileError

try:
    import fcntl
except ImportError:  # Windows: builds of one tree are not kept apart
    fcntl = None

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """One extension, configured and built by CMake in its own folder under build/."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(self.build_temp).resolve() / "engine"
        try:
            build.parent.mkdir(parents=True, exist_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            with alone(build.with_suffix(".lock")):
                is_new = not build.exists()
                try:
                    self.run_cmake(build)
                except subprocess.CalledProcessError:
                    if is_new:
                        raise
                    # An earlier build may have been killed, or have used tools that are no longer there.
                    print(f"looped: {build} is of no use; building once more from nothing", file=sys.stderr, flush=True)
                    shutil.rmtree(build)
                    self.run_cmake(build)
                (module,) = (build / "installed").glob(ext.name.rpartition(".")[2] + ".*")
                self.copy_file(str(module), str(target))
        except (OSError, FileError, ImportError, subprocess.CalledProcessError) as error:
            message = f"the C++ engine was not built ({error}); install a C++20 compiler and install looped again"
            if os.environ.get("LOOPED_REQUIRE_ENGINE") == "1":
                raise SystemExit(f"looped: {message}") from error
            raise CompileError(message) from error

    def run_cmake(self, build: Path) -> None:
        """Configures, builds, and leaves the module in build/installed."""
        import pybind11

        configure = [
            "cmake",
            *("-S", str(ROOT / "csrc"), "-B", str(build), "-G", "Ninja"),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            "-DPYBIND11_FINDPYTHON=ON",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DLOOPED_VERSION={self.distribution.get_version()}",
            f"-DCMAKE_INSTALL_PREFIX={build / 'installed'}",
        ]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build)], check=True)
        # CMake holds two files for the same where their times differ by less than a second.
        subprocess.run(["cmake", "--install", str(build)], check=True, env=os.environ | {"CMAKE_INSTALL_ALWAYS": "1"})

    def copy_file(self, infile, outfile, *args, **kwargs):
        """As the command's own, but at once: whoever imports the module meanwhile finds the old one or the new one, whole."""
        beside = f"{outfile}.{os.getpid()}"
        try:
            super().copy_file(infile, beside, *args, **kwargs)
            os.replace(beside, outfile)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
        return outfile, True


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Waits until no other build has the lock. It ends with the process that holds it: a file left over holds nobody up."""
    with open(lock, "a") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"looped: waiting for another build in {lock.parent}", file=sys.stderr, flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


setup(
    ext_modules=[Extension("looped._engine", sources=[], optional=True)],
    cmdclass={"build_ext": CMakeBuild},
)
