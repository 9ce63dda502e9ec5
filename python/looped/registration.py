"""The auto classes of transformers know `LoopedGPT2` once looped is imported, whichever of the two is imported first.

`import looped` takes no transformers, which needs seconds. So the classes are registered now where transformers has loaded its
auto classes, and else by an import hook at the end of the import that loads them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

AUTO = "transformers.models.auto.configuration_auto"


def register_with_transformers() -> None:
    """Have the auto classes know `LoopedGPT2`, now or once they are there."""
    if AUTO in sys.modules:
        importlib.import_module("looped.lm")
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Gives modules of transformers their own loader, which counts those that are on the way."""

    n_on_the_way = 0

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "transformers":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self)
        return spec

    def leave(self) -> None:
        """Once the outermost import is done: modules that are on the way could not be imported by ours."""
        if self.n_on_the_way == 0 and AUTO in sys.modules and self in sys.meta_path:
            sys.meta_path.remove(self)
            importlib.import_module("looped.lm")


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, finder: _Finder) -> None:
        super().__init__(name, path)
        self.finder = finder

    def exec_module(self, module: ModuleType) -> None:
        self.finder.n_on_the_way += 1
        try:
            super().exec_module(module)
        finally:
            self.finder.n_on_the_way -= 1
        self.finder.leave()
