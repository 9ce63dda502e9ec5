"""The trained models that are shipped in the package: a folder each, with its model card."""

from __future__ import annotations

from pathlib import Path

from looped.checkpoint import load_model
from looped.model import LoopedTransformer
from looped.suggestion import suggestion

FOLDER = Path(__file__).parent


def bundled_models() -> dict[str, str]:
    """The names of the shipped models, and the folder of each."""
    return {folder.parent.name: str(folder.parent) for folder in sorted(FOLDER.glob("*/config.json"))}


def load_pretrained(name: str) -> LoopedTransformer:
    """A shipped model by its name, in float32; of the unlooped ones the files hold weights rounded to float16.

    Raises ValueError that names the nearest, or all, for an unknown one.
    """
    models = bundled_models()
    if name not in models:
        hint = suggestion(name, models, listed=True) or "; this installation has none"
        raise ValueError(f"load_pretrained: no model {name!r} is shipped{hint}")
    return load_model(models[name]).float()
