"""Real tables as in-context classification: prompts of rows with labels 0 and 1 (Yang et al., 2024, section 6.3).

Sources: ``"bundled"``, five tables that come with scikit-learn; ``"openml"``, tables of openml.org by the authors' filters,
downloaded; or a folder in the layout of `sklearn.datasets.fetch_openml(data_home=FOLDER)`, which needs no network.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import logging
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from looped.checkpoint import write_atomically
from looped.icl.openml_files import CACHE, ids_in, whole_copy
from looped.icl.tasks import Pairs, Task

log = logging.getLogger(__name__)

LISTING = (
    "https://www.openml.org/api/v1/json/data/list/status/active/number_missing_values/0"
    "/number_instances/1000..10000/number_features/5..20/number_classes/2/limit/10000"
)
N_TABLES = 10  # the authors found ten; of more, those with the smallest ids are taken


@dataclass(frozen=True, eq=False)
class Table:
    """A table of N rows: X float64 [N, f], numeric features; y int64 [N], 0 or 1.

    n_columns: all columns of the source, those that are not numeric and the label among them; None: those of X and the label.
    """

    name: str
    X: np.ndarray
    y: np.ndarray
    n_columns: int | None = None

    @property
    def majority(self) -> float:
        """The share of the more frequent label."""
        share = float(self.y.mean())
        return max(share, 1 - share)

    def rows(self, n_dims: int) -> tuple[Tensor, Tensor]:
        """Standardised features float32 [N, n_dims], padded with zeros on the left, and labels float32 [N].

        Features of no variance are dropped. More than n_dims of them become their first n_dims principal components,
        standardised again; neither step sees a label.
        """
        X = _standardised(self.X[:, self.X.std(axis=0) > 0])
        if X.shape[1] > n_dims:
            from sklearn.decomposition import PCA

            X = _standardised(PCA(n_dims, svd_solver="full").fit_transform(X))
        padded = np.zeros((len(X), n_dims), dtype=np.float32)
        padded[:, n_dims - X.shape[1] :] = X
        return torch.from_numpy(padded), torch.from_numpy(self.y.astype(np.float32))


def _standardised(X: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = (X - X.mean(axis=0)) / X.std(axis=0)
    return scaled


# Sources ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def load_tables(source: str = "bundled") -> tuple[Table, ...]:
    """The tables of a source, in order. Raises ValueError where it has fewer than two, OSError where one cannot be read."""
    if source == "bundled":
        return _bundled()
    if source == "openml":
        from sklearn.datasets import get_data_home

        folder = Path(get_data_home())
        ids = _listed(folder)
    else:
        folder = Path(source)
        ids = ids_in(folder)
        if not ids:
            raise ValueError(
                f"load_tables: {folder} has no {CACHE}/ID.gz; pass a data_home of sklearn.datasets.fetch_openml, "
                '"openml" to download one, or "bundled"'
            )
    tables: list[Table] = []
    level = logging.INFO if source == "openml" else logging.WARNING  # of many there, and of one's own few
    for data_id in ids:
        try:
            table = read_openml(data_id, folder) if source == "openml" else read_folder(data_id, folder)
        except ValueError as error:  # text columns, sparse data
            log.log(level, "table %d is left out: %s", data_id, error)
            continue
        if why := why_left_out(table, [known.name for known in tables]):
            log.log(level, "table %d (%s) is left out: %s", data_id, table.name, why)
        else:
            tables.append(table)
        if len(tables) == N_TABLES:
            break
    if len(tables) < 2:
        raise ValueError(f"load_tables: {source} has {len(tables)} tables that pass the filters; leaving one out needs two")
    return tuple(tables)


@functools.lru_cache(maxsize=8)
def digest_of(tables: tuple[Table, ...]) -> str:
    """Of the names and numbers of tables, in order: alike where they are, in whatever folder."""
    digest = hashlib.sha256()
    for table in tables:
        digest.update(json.dumps([table.name, *table.X.shape]).encode())
        digest.update(np.ascontiguousarray(table.X, dtype="<f8").tobytes() + np.asarray(table.y, dtype="<i8").tobytes())
    return digest.hexdigest()[:16]


def _bundled() -> tuple[Table, ...]:
    """scikit-learn's real tables, made binary: 212 malignant of 569 tumours; wine of the second cultivar; odd digits; iris
    virginica; diabetes that progressed by more than the median."""
    from sklearn import datasets

    cancer, wine, digits, iris, diabetes = (
        getattr(datasets, f"load_{name}")() for name in ("breast_cancer", "wine", "digits", "iris", "diabetes")
    )
    return (
        Table("breast_cancer", cancer.data, (cancer.target == 0).astype(np.int64)),
        Table("wine", wine.data, (wine.target == 1).astype(np.int64)),
        Table("digits", digits.data, digits.target % 2),
        Table("iris", iris.data, (iris.target == 2).astype(np.int64)),
        Table("diabetes", diabetes.data, (diabetes.target > np.median(diabetes.target)).astype(np.int64)),
    )


def read_openml(data_id: int, folder: Path) -> Table:
    """One table of openml.org through scikit-learn, from the folder's cache, which is filled where it lacks it.

    Columns that are not numeric are dropped; y numbers the labels in their order, and is -1 where they are numeric. Raises
    OSError where it must be downloaded and cannot be.
    """
    from sklearn.datasets import fetch_openml

    bunch = fetch_openml(data_id=data_id, data_home=str(folder), as_frame=False, parser="liac-arff", n_retries=1)
    numeric = [i for i, name in enumerate(bunch.feature_names) if name not in (bunch.categories or {})]
    if not isinstance(bunch.data, np.ndarray) or bunch.target is None:
        raise ValueError(f"read_openml: table {data_id} is sparse or has no target; looped reads dense ones with labels")
    labels = np.asarray(bunch.target)
    y = np.unique(labels.astype(str), return_inverse=True)[1].astype(np.int64)
    if labels.dtype.kind == "f":  # a numeric target is no label
        y = np.full(len(labels), -1)
    X = np.asarray(bunch.data, dtype=np.float64)[:, numeric]
    return Table(bunch.details["name"], X, y, _n_columns(data_id, folder))


def read_folder(data_id: int, folder: Path) -> Table:
    """`read_openml` of what a folder holds: nothing is downloaded, and the folder is left as it is.

    Raises OSError that names the table and the file where one is missing or damaged.
    """
    with whole_copy(data_id, folder) as home:
        return read_openml(data_id, home)


def _n_columns(data_id: int, folder: Path) -> int:
    """All columns of a cached table, as openml.org's NumberOfFeatures counts them: with label, nominal ones and row numbers."""
    with gzip.open(folder / CACHE / "features" / f"{data_id}.gz") as file:
        return len(json.load(file)["data_features"]["feature"])


def why_left_out(table: Table, known: list[str]) -> str | None:
    """Why the authors' filters leave a table out; None where it passes.

    5 numeric features or more, 20 columns or fewer with the label and those that are not numeric, 1,000 to 10,000 rows, two
    classes, the smaller at least half of the larger, nothing missing, a name of its own without "fri" (families of synthetic
    tables).
    """
    n_rows, n_numeric = table.X.shape
    n_columns = n_numeric + 1 if table.n_columns is None else table.n_columns
    counts = np.bincount(np.maximum(table.y, 0), minlength=2)
    if table.name in known or "fri" in table.name:
        return "its name is known, or one of the synthetic fri tables"
    if n_numeric < 5:
        return f"it has {n_numeric} numeric features, not 5 or more"
    if n_columns > 20:
        return f"it has {n_columns} columns with its label, not 20 or fewer"
    if not 1000 <= n_rows <= 10_000:
        return f"it has {n_rows} rows, not 1,000 to 10,000"
    if (table.y < 0).any() or len(counts) != 2:
        return "its target is not one of two classes"
    if 2 * counts.min() < counts.max():
        return f"its classes have {counts.min()} and {counts.max()} rows: one is less than half of the other"
    return "values are missing" if not np.isfinite(table.X).all() else None


def _listed(folder: Path) -> list[int]:
    """Ids of active tables of openml.org whose listed qualities pass the filters; the list is kept in the folder.

    A list is kept only when it has been read, and one that cannot be read is downloaded again. Raises OSError where the
    answer is no list of tables.
    """
    kept = folder / "openml" / "looped_list.json"
    if kept.exists():
        try:
            return listed_ids(json.loads(kept.read_bytes()))
        except (ValueError, TypeError, KeyError) as error:
            log.warning("the list of tables in %s is damaged (%r) and is downloaded again", kept, error)
    try:
        with urllib.request.urlopen(LISTING, timeout=60) as answer:
            content = answer.read()
        ids = listed_ids(json.loads(content))
    except (ValueError, TypeError, KeyError, HTTPException) as error:
        raise OSError(f"load_tables: openml.org did not answer with a list of tables ({error!r}); try again later") from error
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, content)
    return ids


def listed_ids(listing: dict[str, Any]) -> list[int]:
    """Ids, in order, whose qualities pass the filters that a list can tell."""
    ids = []
    for entry in listing["data"]["dataset"]:
        quality = {item["name"]: float(item["value"]) for item in entry["quality"] if item["value"] not in ("", None)}
        needed = ("NumberOfNumericFeatures", "NumberOfFeatures", "NumberOfInstances", "MinorityClassSize", "MajorityClassSize")
        if not set(needed) <= set(quality) or quality.get("NumberOfMissingValues", 0) > 0:
            continue
        numeric, features, rows, minority, majority = (quality[name] for name in needed)
        if (
            numeric >= 5
            and features <= 20
            and 1000 <= rows <= 10_000
            and 2 * minority >= majority
            and "fri" not in entry["name"]
        ):
            ids.append(int(entry["did"]))
    return sorted(ids)


# Prompts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TabularTask(Task):
    """Prompts of rows of one table each, drawn without replacement; y is 0 or 1. Every table but `leave_out` is as likely.

    digest: `digest_of` the source's tables, or None for any. shuffled: every prompt has the columns in an order and with signs
    of its own, and its labels as they are or swapped, so that rows learned by heart say nothing and its examples all (as Kirsch
    et al., 2022, project images at random). Nothing is read before the tables or prompts are asked for.
    """

    source: str = "bundled"
    leave_out: str | None = None
    digest: str | None = None
    shuffled: bool = False
    name: ClassVar[str] = "tabular"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("source", "leave_out", "digest"):
            value = getattr(self, field)
            if not isinstance(value, str) and (value is not None or field == "source"):
                raise ValueError(f"tabular: {field}={value!r} must be a text{'' if field == 'source' else ', or None'}")
        if not isinstance(self.shuffled, bool):
            raise ValueError(f"tabular: shuffled={self.shuffled!r} must be true or false")

    @property
    def error_scale(self) -> float:
        return 0.25  # the variance of a fair label

    @property
    def tables(self) -> tuple[Table, ...]:
        """Those that prompts are drawn from. Raises as `load_tables`, and ValueError where they are others than asked for."""
        every = load_tables(self.source)
        known = [table.name for table in every]
        if self.leave_out is not None and self.leave_out not in known:
            raise ValueError(f"tabular: leave_out={self.leave_out!r} is none of the tables {', '.join(known)}")
        if self.digest is not None and (found := digest_of(every)) != self.digest:
            raise ValueError(
                f"tabular: the tables of {self.source} have the digest {found}, not {self.digest}: they are others, or have "
                "changed; pass the ones that were trained on"
            )
        return tuple(table for table in every if table.name != self.leave_out)

    @property
    def content(self) -> str | None:
        """The digest of all tables of the source; None of the bundled ones, whose name says it. Raises as `tables`."""
        return digest_of(load_tables(self.source)) if self.tables and self.source != "bundled" else None

    def sample(self, n_prompts: int, n_points: int, *, generator: torch.Generator, n_live: int | None = None) -> Pairs:
        """As in `Task.sample`; n_live, if given, must be n_dims. Raises ValueError where a table has fewer rows than points."""
        if n_live not in (None, self.n_dims):
            raise ValueError(f"tabular: n_live={n_live} must be n_dims={self.n_dims}; tables have no curriculum of dimensions")
        if n_prompts < 0 or n_points < 0:
            raise ValueError(f"tabular: n_prompts={n_prompts} and n_points={n_points} must not be negative")
        rows = [_rows_of(self.source, table.name, self.n_dims) for table in self.tables]
        n_numbers = 1 + n_points + (2 * self.n_dims + 1) * self.shuffled  # of each prompt, so that batches may be cut anywhere
        uniforms = torch.rand(n_prompts, n_numbers, dtype=torch.float64, generator=generator).numpy()
        which = np.minimum((uniforms[:, 0] * len(rows)).astype(int), len(rows) - 1)
        xs, ys = torch.zeros(n_prompts, n_points, self.n_dims), torch.zeros(n_prompts, n_points)
        for t, (X, y) in enumerate(rows):
            prompts = np.flatnonzero(which == t)
            chosen = torch.from_numpy(without_replacement(uniforms[prompts, 1 : 1 + n_points], len(y)))
            xs[prompts], ys[prompts] = X[chosen], y[chosen]
        return _shuffled(xs, ys, torch.from_numpy(uniforms[:, 1 + n_points :])) if self.shuffled else Pairs(xs, ys)


def _shuffled(xs: Tensor, ys: Tensor, uniforms: Tensor) -> Pairs:
    """Prompts xs [B, n, d], ys [B, n], the columns of each in an order and with signs of its own, its labels swapped or not; by
    uniforms [B, 2 d + 1]."""
    n_dims = xs.shape[2]
    order, signs = uniforms[:, :n_dims].argsort(dim=1), torch.where(uniforms[:, n_dims:-1] < 0.5, -1.0, 1.0).to(xs.dtype)
    is_swapped = uniforms[:, -1:] < 0.5
    return Pairs(xs.gather(2, order[:, None].expand_as(xs)) * signs[:, None], torch.where(is_swapped, 1 - ys, ys))


@functools.lru_cache(maxsize=256)
def _rows_of(source: str, name: str, n_dims: int) -> tuple[Tensor, Tensor]:
    return next(table for table in load_tables(source) if table.name == name).rows(n_dims)


def without_replacement(uniforms: np.ndarray, n_rows: int) -> np.ndarray:
    """int64 [B, n]: for each row of uniforms [B, n] in [0, 1), n different numbers below n_rows, every order as likely.

    The j-th is drawn among the n_rows - j that are left: its rank is counted up past each smaller one taken before.
    """
    n = uniforms.shape[1]
    if n > n_rows:
        raise ValueError(
            f"tabular: a prompt of {n} points needs a table of as many rows, and one has {n_rows}; take fewer points"
        )
    left = n_rows - np.arange(n)
    ranks = np.minimum((uniforms * left).astype(np.int64), left - 1)
    chosen = np.empty_like(ranks)
    taken = np.empty((len(ranks), 0), dtype=np.int64)  # in order
    for j in range(n):
        value = ranks[:, j].copy()
        for i in range(j):
            value += value >= taken[:, i]
        chosen[:, j] = value
        taken = np.sort(np.column_stack([taken, value]), axis=1)
    return chosen


def queries(
    table: Table, n_dims: int, n_points: int, *, n_queries: int, seed: int, batch_size: int, n_repeats: int = 1
) -> Iterator[Pairs]:
    """Test prompts of one table: each of n_queries different rows (all, if there are fewer), last in a prompt after n_points -
    1 other rows drawn at random. Each row is asked n_repeats times in a row, with other examples; batch_size counts rows."""
    X, y = table.rows(n_dims)
    rng = np.random.default_rng([seed, 0x7AB])
    asked = rng.permutation(len(y))[:n_queries]
    for start in range(0, len(asked), batch_size):
        last = asked[start : start + batch_size].repeat(n_repeats)
        others = without_replacement(rng.random((len(last), n_points - 1)), len(y) - 1)
        others += others >= last[:, None]
        rows = torch.from_numpy(np.column_stack([others, last]))
        yield Pairs(X[rows], y[rows])
