"""Builds the C++ engine with CMake and Ninja; the metadata stands in pyproject.toml.

The engine links no libtorch, so neither building nor importing it needs torch. Where it cannot be built (no C++ compiler, say)
the package installs without it, and the eager backend gives the same results: `looped info` tells. LOOPED_REQUIRE_ENGINE=1
makes a failed build an error.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """One extension, configured and built by CMake in its own folder under build/."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(self.build_temp).resolve() / "engine"
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            *("-S", str(ROOT / "csrc"), "-B", str(build), "-G", "Ninja"),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            "-DPYBIND11_FINDPYTHON=ON",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DLOOPED_VERSION={self.distribution.get_version()}",
            f"-DCMAKE_INSTALL_PREFIX={target.parent}",
        ]
        try:
            subprocess.run(configure, check=True)
            subprocess.run(["cmake", "--build", str(build)], check=True)
            subprocess.run(["cmake", "--install", str(build)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            message = f"the C++ engine was not built ({error}); install a C++20 compiler and install looped again"
            if os.environ.get("LOOPED_REQUIRE_ENGINE") == "1":
                raise SystemExit(f"looped: {message}") from error
            raise CompileError(message) from error


setup(
    ext_modules=[Extension("looped._engine", sources=[], optional=True)],
    cmdclass={"build_ext": CMakeBuild},
)
