"""What an experiment gives: `Outcome`, the numbers behind one plot, one table and its claims."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from looped.checkpoint import write_atomically
from looped.icl.curves import Curve

Cell = str | float | int | None


@dataclass(frozen=True)
class Line:
    """A curve of a panel: `curve` over `xs`. kind: ``"looped"``, ``"twin"`` (tied, unlooped) or ``"baseline"``.

    by_seed: the means of each of several models over whose mean `curve` is. prompts_at, models_at: how many prompts and models
    are behind each place; by default the curve's prompts, and no models, as for a baseline.
    """

    label: str
    xs: Sequence[float]
    curve: Curve
    kind: str = "looped"
    by_seed: Sequence[Sequence[float]] = ()
    prompts_at: Sequence[int] = ()
    models_at: Sequence[int] = ()

    def __post_init__(self) -> None:
        n = len(self.xs)
        if n != len(self.curve.mean):
            raise ValueError(f"Line: {self.label} has {n} places and {len(self.curve.mean)} values")
        for name, default in (("prompts_at", self.curve.n_prompts), ("models_at", 0)):
            given = list(getattr(self, name)) or [default] * n
            if len(given) != n:
                raise ValueError(f"Line: {self.label} has {n} places and {len(given)} {name}")
            object.__setattr__(self, name, given)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with those of the curve among them."""
        own = {"label": self.label, "kind": self.kind, "xs": list(self.xs), "by_seed": [list(one) for one in self.by_seed]}
        return own | self.curve.to_dict() | {"prompts_at": self.prompts_at, "models_at": self.models_at}


@dataclass(frozen=True)
class Panel:
    """One pair of axes. log: which of them are logarithmic. marks: places on the x axis, each with its text."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log: str = "y"
    marks: Sequence[tuple[float, str]] = ()


def lines_not_finite(panels: Sequence[Panel]) -> list[str]:
    """Of each label whose lines have predictions that are not finite: where there are the most, and how many."""
    found: dict[str, list[tuple[int, str]]] = {}
    for panel in panels:
        for line in panel.lines:
            if not line.curve.is_finite:
                at = line.curve.least_finite
                n_lost, where = line.curve.n_not_finite[at], f"{line.xs[at]:g} {panel.x} ({panel.title})"
                found.setdefault(line.label, []).append((n_lost, f"{n_lost} of {line.prompts_at[at]} prompts at {where}"))
    remarks = []
    for label, some in found.items():
        most = max(some, key=lambda one: one[0])[1]
        more = f", and in {len(some) - 1} more of the panels" if len(some) > 1 else ""
        remarks.append(f"{label}: not finite for {most}{more}; its means are of the others, and no verdict rests on these")
    return remarks


@dataclass(frozen=True)
class Sheet:
    """The table."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Claim:
    """What the paper says, what was measured for it, and whether it holds at this size (None: not measured)."""

    figure: str
    text: str
    measured: str
    holds: bool | None


@dataclass(frozen=True)
class Outcome:
    """One run of an experiment. models: by name, where each came from and what it is. notes: what was left out, and why.

    variant: what a quick look, or one on other tables than the bundled ones, has in the names of its files, so that it takes no
    other measurement's place; else "".
    """

    experiment: str
    figures: str
    preset: str
    settings: dict[str, Any]
    panels: Sequence[Panel]
    sheet: Sheet
    claims: Sequence[Claim] = ()
    notes: Sequence[str] = ()
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    variant: str = ""

    @property
    def stem(self) -> str:
        """The name of its files."""
        return self.experiment + self.variant

    @property
    def is_measured(self) -> bool:
        """Whether there was any model: one that is not there, or has diverged, has no parameters."""
        return any("n_parameters" in model for model in self.models.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; NaN and infinity are null."""
        panels = [
            {"title": panel.title, "x": panel.x, "y": panel.y, "lines": [line.to_dict() for line in panel.lines]}
            for panel in self.panels
        ]
        head = {name: getattr(self, name) for name in ("experiment", "figures", "preset", "settings", "models", "seconds")}
        sheet = {"title": self.sheet.title, "columns": list(self.sheet.columns), "rows": [list(row) for row in self.sheet.rows]}
        claims = [vars(claim) for claim in self.claims]
        whole: dict[str, Any] = _plain(head | {"table": sheet, "claims": claims, "notes": list(self.notes), "panels": panels})
        return whole

    def to_csv(self) -> str:
        """One row per panel, line and place: panel, line, kind, at, mean, low, high, n_prompts, n_models."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["panel", "line", "kind", "at", "mean", "low", "high", "n_prompts", "n_models"])
        for panel in self.panels:
            for line in panel.lines:
                curve = line.curve.to_dict()
                parts = (curve["mean"], curve["low"], curve["high"], line.prompts_at, line.models_at)
                for at, *row in zip(line.xs, *parts, strict=True):
                    writer.writerow([panel.title, line.label, line.kind, at, *row])
        return text.getvalue()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `stem`.json and `stem`.csv into a folder, which is made if missing."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{self.stem}.json", json.dumps(self.to_dict(), indent=1).encode())
        write_atomically(folder / f"{self.stem}.csv", self.to_csv().encode())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
