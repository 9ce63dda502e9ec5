"""Real tables: trained on all but one, tested on rows of that one (OpenML in the paper)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from urllib.parse import quote

from torch import Tensor

from looped.engine import solve
from looped.experiments.lab import Lab, Run
from looped.experiments.measure import BATCH, Measured, Way, Ways, kind_of, line_of_last, measure, sound
from looped.experiments.outcome import Cell, Claim, Outcome, Panel, Sheet
from looped.experiments.verdict import for_most, part_of
from looped.icl.baselines import Baseline, KNearestNeighbours, Ridge
from looped.icl.prompts import interleave
from looped.icl.tabular import Table, load_tables, queries
from looped.icl.tasks import Pairs
from looped.model import LoopedTransformer
from looped.train import TrainConfig

STEPS = {"tiny": 2000, "small": 4000, "paper": 100_000}
REPEATS = {"tiny": 1, "small": 5, "paper": 5}  # draws of the examples around each test row
MODELS = ("looped", "unlooped")


def runs(lab: Lab) -> dict[tuple[str, str], Run]:
    """The models, by the table that training leaves out, and kind. Reads the tables."""
    wanted: dict[tuple[str, str], Run] = {}
    for table in load_tables(lab.data):
        for kind in MODELS:
            unlooped = kind == "unlooped"
            wanted[table.name, kind] = (
                name_without(lab.data, table.name, unlooped=unlooped),
                run_without(lab, table, unlooped=unlooped),
            )
    return wanted


def name_without(source: str, table: str, *, unlooped: bool) -> str:
    """The name of the model of a source's tables but one: of the bundled ones, or of any that come from openml.org.

    Other characters of a table's name than letters, digits and ``_.-~`` are written as in a URL, and so is what would read as
    the kind of a model, so that no looped model has the name of an unlooped one.
    """
    kind = "bundled" if source == "bundled" else "openml"
    of_table = quote(table, safe="").replace("_unlooped", "%5Funlooped")
    return f"tabular_{kind}_without_{of_table}" + ("_unlooped" if unlooped else "")


def run(lab: Lab) -> Outcome:
    tables, wanted = load_tables(lab.data), runs(lab)
    repeats = REPEATS[lab.preset]
    found: dict[str, dict[str, Measured]] = {}
    n_dims, n_points = 0, 0
    for table in tables:
        models = {kind: lab.models(*wanted[table.name, kind]) for kind in MODELS}
        config = wanted[table.name, "looped"][1]
        n_dims, n_points = config.dims.end, config.points.end
        if not any(models.values()):
            continue
        ways: dict[str, Sequence[Way]] = {
            kind: Ways.of(some, lambda model: _by_model(model, repeats)) for kind, some in models.items()
        }
        ways |= {
            "3 nearest neighbours": [_by_baseline(KNearestNeighbours(), repeats)],
            "ridge": [_by_baseline(Ridge(), repeats)],
        }
        options = dict(n_queries=lab.n_prompts, seed=lab.seed, batch_size=BATCH, n_repeats=repeats)
        found[table.name] = measure(
            lab.watched(table.name, queries(table, n_dims, n_points, **options), repeats * min(lab.n_prompts, len(table.X))),
            ways,
        )
    names = [*MODELS, "3 nearest neighbours", "ridge"]
    rows: list[list[Cell]] = []
    for table in tables:
        if table.name in found:
            accuracy = [_accuracy(found[table.name], name) for name in names]
            rows.append([table.name, *(int(n) for n in table.X.shape), table.majority, *accuracy])
    lines = []
    for name in names:
        places = [i for i, one in enumerate(found.values()) if name in one]
        if places:
            lines.append(line_of_last(name, places, [one[name] for one in found.values() if name in one], kind_of(name)))
    title = "accuracy on the table left out: " + ", ".join(f"{i} {name}" for i, name in enumerate(found))
    panel = Panel(title, "table", "accuracy", lines, log="")
    columns = ["table", "rows", "features", "majority", *names]
    settings = dict(data=lab.data, n_dims=n_dims, n_points=n_points, repeats=repeats)
    sheet = Sheet(f"accuracy with {n_points - 1} examples of a table that training did not see", columns, rows)
    claims = [_claim(found, {table.name: table.majority for table in tables})]
    variant = {"bundled": "", "openml": "_openml"}.get(lab.data, "_folder")
    return Outcome("tabular", "Table 1 (OpenML)", lab.preset, settings, [panel], sheet, claims, variant=variant)


def run_without(lab: Lab, table: Table, *, unlooped: bool) -> TrainConfig:
    """The run on every table but one, as published: no loss but the window's, no loops beyond b."""
    config = lab.config("tabular", unlooped=unlooped, n_steps=STEPS[lab.preset], rest_weight=0.0, extra_loops=0)
    options = {"source": lab.data, "leave_out": table.name}
    return dataclasses.replace(config, task_options=options).with_data_named()


def _by_model(model: LoopedTransformer, repeats: int) -> Way:
    def rows(pairs: Pairs) -> Tensor:
        logits = solve(model, interleave(*pairs)).prediction
        assert isinstance(logits, Tensor)
        last = logits[:, -1].cpu()
        is_right = (last.argmax(dim=-1) == pairs.ys[:, -1]).double()
        return _by_row(is_right.masked_fill(~last.isfinite().all(dim=-1), math.inf), repeats)  # as `errors_of_model`

    return rows


def _by_baseline(baseline: Baseline, repeats: int) -> Way:
    """Labels as -1 and 1; the sign of what the baseline says of the last row."""

    def rows(pairs: Pairs) -> Tensor:
        said = baseline.predict(pairs.xs, 2 * pairs.ys - 1, progress=lambda *_: None)[:, -1]
        return _by_row(((said > 0) == (pairs.ys[:, -1] > 0)).double(), repeats)

    return rows


def _by_row(is_right: Tensor, repeats: int) -> Tensor:
    """The share of right answers [B, 1] of each row asked for: its repeats are no prompts of their own for the interval."""
    return is_right.reshape(-1, repeats).mean(dim=1, keepdim=True)


def _accuracy(measured: dict[str, Measured], name: str) -> float | None:
    return measured[name].curve.mean[0] if name in measured else None


def _claim(found: dict[str, dict[str, Measured]], majority: dict[str, float]) -> Claim:
    """majority: of every table, the accuracy of naming its larger class. Where no model has more, neither is the better."""
    text = (
        "the looped model is as accurate as the unlooped one or more on most tables (paper: 6 of 10 higher, 1 equal; here: of "
        "tables where one of them is more accurate than naming the larger class)"
    )
    both = {table: one for table, one in ((table, sound(one)) for table, one in found.items()) if set(MODELS) <= set(one)}
    accuracy = {table: [one[kind].curve.mean[0] for kind in MODELS] for table, one in both.items()}
    learned = {table: pair for table, pair in accuracy.items() if max(pair) > majority[table]}
    as_good = [looped >= unlooped for looped, unlooped in learned.values()]
    measured = f"{sum(as_good)} of {len(learned)}" if learned else "-"
    if len(learned) < len(both):
        measured += f"; on {len(both) - len(learned)} neither is more accurate than that"
    return Claim("Table 1", text, measured + part_of(len(both), len(majority), "tables"), for_most(as_good, len(majority)))
