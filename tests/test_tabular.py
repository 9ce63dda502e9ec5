"""Real tables as prompts: the bundled ones, a folder in scikit-learn's cache layout, the filters, and how prompts are drawn."""

import gzip
import hashlib
import io
import json
import math
import os
import shlex
import urllib.request
from http.client import IncompleteRead

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import looped
from looped.checkpoint import load_training_state, write_training_state
from looped.cli import main
from looped.experiments import Lab, run_experiment
from looped.experiments import tabular as experiment
from looped.experiments.catalog import models_of
from looped.experiments.measure import Measured, single
from looped.experiments.tabular import run_without
from looped.icl import tabular
from looped.icl.curves import RunningCurve
from looped.icl.tabular import (
    CACHE,
    Table,
    TabularTask,
    digest_of,
    listed_ids,
    load_tables,
    queries,
    read_openml,
    why_left_out,
    without_replacement,
)
from looped.icl.tasks import make_task
from looped.train import TrainConfig, preset, train
from looped.train.trainer import Run


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_bundled_tables_are_binary_and_real():
    tables = {table.name: table for table in load_tables()}
    shapes = {name: table.X.shape for name, table in tables.items()}
    assert shapes == {
        "breast_cancer": (569, 30),
        "wine": (178, 13),
        "digits": (1797, 64),
        "iris": (150, 4),
        "diabetes": (442, 10),
    }
    ones = {name: int(table.y.sum()) for name, table in tables.items()}
    assert ones == {"breast_cancer": 212, "wine": 71, "digits": 906, "iris": 50, "diabetes": 221}
    assert tables["iris"].majority == pytest.approx(2 / 3)


@pytest.mark.parametrize("n_dims", [10, 20])
def test_rows_are_standardised_and_padded_on_the_left(n_dims):
    for table in load_tables():
        X, y = table.rows(n_dims)
        n_kept = min(n_dims, int((table.X.std(axis=0) > 0).sum()))
        assert X.shape == (len(table.y), n_dims)
        assert (X[:, : n_dims - n_kept] == 0).all()
        np.testing.assert_allclose(X[:, n_dims - n_kept :].mean(dim=0), 0, atol=1e-4)
        np.testing.assert_allclose(X[:, n_dims - n_kept :].std(dim=0, correction=0), 1, rtol=1e-3)
        assert torch.equal(y, torch.from_numpy(table.y).float())
    plain = Table("two", np.array([[1.0, 5, 0], [3, 5, 2], [5, 5, 1]]), np.array([0, 1, 1])).rows(4)[0]
    scale = np.sqrt(8 / 3)
    np.testing.assert_allclose(plain[:, 2], np.array([-2, 0, 2]) / scale, rtol=1e-6)  # the constant column is gone
    assert (plain[:, :2] == 0).all()


def test_components_are_those_of_the_standardised_features():
    table = load_tables()[0]
    X = table.rows(5)[0].double().numpy()
    Z = (table.X - table.X.mean(axis=0)) / table.X.std(axis=0)
    U = np.linalg.svd(Z, full_matrices=False)[0][:, :5] * np.sqrt(len(Z))
    np.testing.assert_allclose(np.abs((X * U).mean(axis=0)), 1, rtol=1e-4)


def test_draws_without_replacement_are_even_in_every_order():
    u = np.random.default_rng(0).random((60_000, 3))
    drawn = without_replacement(u, 4)
    assert all(len(set(row)) == 3 for row in drawn[:200].tolist())
    codes = drawn @ np.array([16, 4, 1])
    counts = np.bincount(codes, minlength=64)
    assert (counts > 0).sum() == 24
    np.testing.assert_allclose(counts[counts > 0] / 60_000, 1 / 24, rtol=0.07)
    assert without_replacement(np.array([[0.0, 0.0, 0.0], [0.99, 0.99, 0.99]]), 3).tolist() == [[0, 1, 2], [2, 1, 0]]
    with pytest.raises(ValueError, match="4 points needs a table of as many rows, and one has 3"):
        without_replacement(np.zeros((1, 4)), 3)


def test_prompts_are_rows_of_one_table_that_is_not_left_out():
    task = make_task("tabular", 10, leave_out="digits")
    assert [table.name for table in task.tables] == ["breast_cancer", "wine", "iris", "diabetes"]
    pairs = task.sample(400, 6, generator=seeded())
    places = []
    for table in load_tables():
        X, y = table.rows(10)
        same = (pairs.xs[:, :, None] == X).all(dim=3)  # [B, n, N]
        is_row = same.any(dim=2).all(dim=1)
        places.append(is_row)
        for b in is_row.nonzero()[:20, 0]:
            rows = torch.tensor([int(same[b, i].nonzero()[0, 0]) for i in range(6)])
            assert torch.equal(y[rows], pairs.ys[b])
    counts = torch.stack(places).sum(dim=1).tolist()
    assert counts[2] == 0
    assert sum(counts) == 400
    assert min(count for i, count in enumerate(counts) if i != 2) > 70
    parts = [task.sample(size, 6, generator=g) for g in [seeded()] for size in (150, 250)]
    assert torch.equal(torch.cat([part.xs for part in parts]), pairs.xs)


def test_shuffled_prompts_have_columns_and_labels_of_their_own():
    """Of every prompt, one order and signs of the columns give a table's rows back, with its labels or all of them swapped."""
    task = make_task("tabular", 4, leave_out="wine", shuffled=True)
    pairs = task.sample(200, 5, generator=seeded())
    tables = {table.name: table.rows(4) for table in task.tables}
    orders, signs, swapped = [], [], []
    for x, y in zip(pairs.xs, pairs.ys, strict=True):
        found = None
        for X, labels in tables.values():
            sizes = {tuple(sorted(row)): i for i, row in enumerate(X.abs().tolist())}
            rows = [sizes.get(tuple(sorted(row))) for row in x.abs().tolist()]
            if None not in rows and len(set(X[rows[0]].abs().tolist())) == 4:
                found = X[rows], labels[rows]
        if found is None:  # iris has rows that come twice, and equal sizes
            continue
        order = [found[0][0].abs().tolist().index(size) for size in x[0].abs().tolist()]
        sign = (x[0] * found[0][0][order]).sign()
        assert torch.equal(x, found[0][:, order] * sign)
        assert torch.equal(y, found[1]) or torch.equal(y, 1 - found[1])
        orders.append(tuple(order)), signs.append(sign), swapped.append(not torch.equal(y, found[1]))
    assert len(orders) > 150
    assert len(set(orders)) > 15
    assert 0.4 < torch.stack(signs).eq(1).double().mean() < 0.6
    assert 0.35 < sum(swapped) / len(swapped) < 0.65
    parts = [task.sample(size, 5, generator=g) for g in [seeded()] for size in (150, 50)]
    assert torch.equal(torch.cat([part.xs for part in parts]), pairs.xs)


def test_queries_are_rows_asked_once_among_others():
    table = load_tables()[1]
    X, y = table.rows(13)
    batches = list(queries(table, 13, 5, n_queries=1000, seed=3, batch_size=50))
    xs, ys = torch.cat([b.xs for b in batches]), torch.cat([b.ys for b in batches])
    assert len(xs) == 178, "every row once"
    rows = (xs[:, :, None] == X).all(dim=3).long().argmax(dim=2)
    assert sorted(rows[:, -1].tolist()) == list(range(178))
    assert all(len(set(row)) == 5 for row in rows.tolist()), "the row asked for is not among its examples"
    assert torch.equal(ys, y[rows])
    again = next(queries(table, 13, 5, n_queries=1000, seed=3, batch_size=50))
    assert torch.equal(again.xs, batches[0].xs)
    assert len(torch.cat([b.ys for b in queries(table, 13, 5, n_queries=7, seed=3, batch_size=5)])) == 7


def test_a_row_is_asked_again_with_other_examples():
    table = load_tables()[1]
    once = list(queries(table, 13, 5, n_queries=7, seed=3, batch_size=5))
    batches = list(queries(table, 13, 5, n_queries=7, seed=3, batch_size=5, n_repeats=3))
    assert [len(b.ys) for b in batches] == [15, 6]
    xs = torch.cat([b.xs for b in batches]).reshape(7, 3, 5, 13)
    assert torch.equal(xs[:, :, -1], torch.cat([b.xs for b in once])[:, None, -1].expand(7, 3, 13))
    assert not torch.equal(xs[:, 0, :-1], xs[:, 1, :-1])


def test_wrong_uses_are_named(tmp_path):
    with pytest.raises(ValueError, match="leave_out='iri' is none of the tables breast_cancer"):
        TabularTask(10, leave_out="iri").sample(2, 3, generator=seeded())
    with pytest.raises(ValueError, match="leave_out='iri' is none of the tables breast_cancer"):
        train(preset("tiny", "tabular", task_options={"leave_out": "iri"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    wrong = {
        "source": "source=3 must be a text",
        "leave_out": "leave_out=3 must be a text, or",
        "shuffled": "shuffled=3 must be",
    }
    for options, message in (({name: 3}, message) for name, message in wrong.items()):
        with pytest.raises(ValueError, match=message):
            preset("tiny", "tabular", task_options=options)
    with pytest.raises(ValueError, match="tables have no curriculum"):
        TabularTask(10).sample(2, 3, generator=seeded(), n_live=5)
    with pytest.raises(ValueError, match="has no openml"):
        load_tables(str(tmp_path))


# OpenML


def write_cached(folder, data_id, name, n_rows, n_features=6, classes=("N", "P"), share=0.5, nominal=0, ignored=False):
    """A table as `fetch_openml` caches it; ignored: its nominal columns are marked as not to be used."""
    rng = np.random.default_rng(data_id)
    X = rng.normal(size=(n_rows, n_features)).round(4)
    labels = np.where(np.arange(n_rows) < share * n_rows, classes[0], classes[-1])
    columns = [f"x{i}" for i in range(n_features)]
    arff = [f"@relation {name}", *(f"@attribute {column} numeric" for column in columns)]
    colours = [f"colour{i}" for i in range(nominal)]
    arff += [f"@attribute {colour} {{red,blue}}" for colour in colours]
    arff += ["@attribute class {" + ",".join(classes) + "}", "@data"]
    arff += [",".join([*map(str, row), *["red"] * nominal, label]) for row, label in zip(X, labels, strict=True)]
    content = "\n".join(arff).encode()

    def feature(i, column, kind, target="false", ignore="false"):
        told = dict(index=str(i), name=column, data_type=kind, is_target=target)
        return told | dict(is_ignore=ignore, is_row_identifier="false", number_of_missing_values="0")

    features = [feature(i, column, "numeric") for i, column in enumerate(columns)]
    features += [feature(n_features + i, colour, "nominal", ignore=str(ignored).lower()) for i, colour in enumerate(colours)]
    features.append(feature(len(features), "class", "nominal", "true"))
    description = dict(id=str(data_id), name=name, version="1", format="ARFF", status="active", description="by hand")
    description |= dict(file_id=str(data_id), md5_checksum=hashlib.md5(content).hexdigest())
    description["url"] = f"https://www.openml.org/data/v1/download/{data_id}/{name}.arff"
    files = {
        CACHE / str(data_id): {"data_set_description": description},
        CACHE / "features" / str(data_id): {"data_features": {"feature": features}},
        CACHE / "qualities" / str(data_id): {
            "data_qualities": {"quality": [{"name": "NumberOfInstances", "value": str(float(n_rows))}]}
        },
    }
    for path, value in files.items():
        _gzip(folder / f"{path}.gz", json.dumps(value).encode())
    _gzip(folder / f"openml/openml.org/data/v1/download/{data_id}/{name}.arff.gz", content)
    return X, labels


def _gzip(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content))


REAL_URLOPEN = urllib.request.urlopen


@pytest.fixture
def cache(tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise OSError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    monkeypatch.setattr("sklearn.datasets._openml.urlopen", no_network)
    load_tables.cache_clear()
    return tmp_path


def test_a_folder_of_scikit_learns_cache_is_read_without_a_network(cache):
    X, labels = write_cached(cache, 7, "good", 1000, nominal=1)
    write_cached(cache, 12, "wide", 1200, share=0.4)
    write_cached(cache, 13, "small", 500)
    write_cached(cache, 14, "lopsided", 1000, share=0.8)
    write_cached(cache, 15, "fri_c0", 1000)
    write_cached(cache, 16, "three", 1000, classes=("a", "b"), n_features=3)
    write_cached(cache, 17, "good", 1000)
    write_cached(cache, 18, "many", 1000, n_features=8, nominal=30)
    write_cached(cache, 19, "ignored", 1000, n_features=8, nominal=12, ignored=True)  # openml.org counts them too
    write_cached(cache, 20, "full", 1000, nominal=13)
    tables = load_tables(str(cache))
    assert [(table.name, table.n_columns) for table in tables] == [("good", 8), ("wide", 7), ("full", 20)]
    np.testing.assert_allclose(tables[0].X, X)  # the nominal column is dropped
    assert tables[0].y.tolist() == (labels == "P").astype(int).tolist()
    pairs = make_task("tabular", 8, source=str(cache), leave_out="good").sample(3, 4, generator=seeded())
    assert (pairs.xs[..., :2] == 0).all()
    with pytest.raises(OSError, match="no network"), pytest.warns(RuntimeWarning, match="Invalid cache"):
        read_openml(99, cache)


def test_a_table_of_ones_own_that_cannot_be_used_is_missed_aloud(cache, caplog):
    for data_id, name, n_rows in ((7, "good", 1000), (12, "wide", 1000), (13, "aimless", 1000), (14, "small", 900)):
        write_cached(cache, data_id, name, n_rows)
    features = cache / "openml/openml.org/api/v1/json/data/features/13.gz"
    told = json.loads(gzip.decompress(features.read_bytes()))
    for feature in told["data_features"]["feature"]:
        feature["is_target"] = "false"
    _gzip(features, json.dumps(told).encode())
    assert [table.name for table in load_tables(str(cache))] == ["good", "wide"]
    missed = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in missed] == ["WARNING", "WARNING"]
    assert [text.partition(":")[0] for _, text in missed] == ["table 13 is left out", "table 14 (small) is left out"]


DATA = "openml/openml.org/data/v1/download/12/wide.arff.gz"
DAMAGED_FILES = [
    (DATA, lambda content: content[:-200], "cannot be read .Compressed file ended"),
    (DATA, lambda content: b"", "cannot be read"),
    (DATA, lambda content: b"plain text", "cannot be read .Not a gzipped file"),
    (DATA, lambda content: None, "cannot be read .it is missing"),
    (DATA, lambda content: gzip.compress(b"@relation other"), "its MD5 is [0-9a-f]{32}, not [0-9a-f]{32}"),
    (f"{CACHE}/features/12.gz", lambda content: None, "it is missing"),
    (f"{CACHE}/features/12.gz", lambda content: gzip.compress(b'{"data_features": {}}'), "is no table as .*KeyError"),
    (f"{CACHE}/qualities/12.gz", lambda content: content[:20], "cannot be read"),
    (f"{CACHE}/12.gz", lambda content: content[:-9], "cannot be read"),
    (f"{CACHE}/12.gz", lambda content: gzip.compress(b"{}"), "it is no JSON with 'data_set_description'"),
    (f"{CACHE}/12.gz", lambda content: gzip.compress(b"<html>"), "it is no JSON with 'data_set_description'"),
    (f"{CACHE}/12.gz", lambda content: gzip.compress(b'{"data_set_description": []}'), "is list, not an object"),
    (
        f"{CACHE}/12.gz",
        lambda content: gzip.compress(b'{"data_set_description": {"url": "https://x/../../../escaped"}}'),
        "its url or file_id leads out of the folder",
    ),
]


@pytest.mark.parametrize(("name", "change", "why"), DAMAGED_FILES)
def test_a_damaged_file_of_a_folder_is_named_and_neither_removed_nor_downloaded(cache, name, change, why):
    for data_id, table in ((7, "good"), (12, "wide"), (13, "more")):
        write_cached(cache, data_id, table, 1000)
    content = change((cache / name).read_bytes())
    (cache / name).unlink() if content is None else (cache / name).write_bytes(content)
    before = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    with pytest.raises(
        OSError, match=rf"load_tables: table 12: .*{why}.*; restore it, or remove .*12\.gz to do without"
    ) as caught:
        load_tables(str(cache))
    assert "network" not in str(caught.value)
    assert {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("content", [b"@relation wide\n@attribute x numeric\n@data\nred\n", b"\xff\xfe", b""])
def test_a_whole_file_that_is_no_table_is_named_too(cache, monkeypatch, content, recwarn):
    def of_files(request, urlopen=REAL_URLOPEN):
        assert request.full_url.startswith("file:"), "it goes to the network"
        return urlopen(request)

    monkeypatch.setattr("sklearn.datasets._openml.urlopen", of_files)
    for data_id, table in ((7, "good"), (12, "wide"), (13, "more")):
        write_cached(cache, data_id, table, 1000)
    _gzip(cache / DATA, content)
    description = json.loads(gzip.decompress((cache / CACHE / "12.gz").read_bytes()))
    description["data_set_description"]["md5_checksum"] = hashlib.md5(content).hexdigest()
    _gzip(cache / CACHE / "12.gz", json.dumps(description).encode())
    before = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    with pytest.raises(OSError, match=r"load_tables: table 12: .*wide\.arff\.gz cannot be read \(it is no table as "):
        load_tables(str(cache))
    assert not [str(warning.message) for warning in recwarn if "network" in str(warning.message)]
    assert {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()} == before


def test_the_list_is_downloaded_once_and_its_tables_fetched(cache, monkeypatch):
    write_cached(cache, 7, "good", 1000)
    write_cached(cache, 12, "wide", 1200)
    asked = []

    def answer(url, timeout):
        asked.append(url)
        return io.BytesIO(json.dumps({"data": {"dataset": [entry(12), entry(7), entry(8, rows=999)]}}).encode())

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    monkeypatch.setattr("sklearn.datasets.get_data_home", lambda: str(cache))
    assert [table.name for table in load_tables("openml")] == ["good", "wide"]
    load_tables.cache_clear()
    load_tables("openml")
    assert len(asked) == 1
    assert asked[0].startswith("https://www.openml.org/api/v1/json/data/list/status/active")


BROKEN = [b'{"data": {"dataset": [{"did": 7, "na', b'{"error": "busy"}', b"[]", b"<html>", IncompleteRead(b"{")]


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_answer_is_not_kept(cache, monkeypatch, content):
    write_cached(cache, 7, "good", 1000)
    write_cached(cache, 12, "wide", 1200)
    answers = [content, json.dumps({"data": {"dataset": [entry(12), entry(7)]}}).encode()]

    class Answer(io.BytesIO):
        def read(self):
            if isinstance(content, Exception) and len(answers) == 1:
                raise content
            return super().read()

    def answer(url, timeout):
        now = answers.pop(0)
        return Answer(b"" if isinstance(now, Exception) else now)

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    monkeypatch.setattr("sklearn.datasets.get_data_home", lambda: str(cache))
    kept = cache / "openml" / "looped_list.json"
    with pytest.raises(OSError, match="did not answer with a list of tables"):
        load_tables("openml")
    assert not kept.exists()
    assert [table.name for table in load_tables("openml")] == ["good", "wide"]
    if isinstance(content, bytes):  # and what an older version kept is downloaded again
        load_tables.cache_clear()
        whole = kept.read_bytes()
        kept.write_bytes(content)
        answers.append(whole)
        assert [table.name for table in load_tables("openml")] == ["good", "wide"]
        assert kept.read_bytes() == whole


def test_a_full_disk_leaves_no_half_of_a_list(cache, monkeypatch):
    def full(descriptor):
        raise OSError("disk full")

    content = json.dumps({"data": {"dataset": [entry(12), entry(7)]}}).encode()
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(content))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        tabular._listed(cache)
    assert list((cache / "openml").iterdir()) == []


def entry(did, name=None, **changes):
    values = dict(numeric=6, features=7, rows=3000, minority=1400, majority=1600, missing=0) | changes
    names = ("NumberOfNumericFeatures", "NumberOfFeatures", "NumberOfInstances", "MinorityClassSize", "MajorityClassSize")
    quality = [dict(name=n, value=str(v)) for n, v in zip((*names, "NumberOfMissingValues"), values.values(), strict=True)]
    return {"did": did, "name": name or f"table{did}", "quality": quality}


def test_the_filters_of_the_list():
    entries = [
        entry(9),
        entry(3),
        entry(4, numeric=4),
        entry(5, features=21),
        entry(6, rows=10_001),
        entry(7, minority=700, majority=1500),
        entry(8, missing=1),
        entry(10, name="fri_c2"),
        {"did": 11, "name": "bare", "quality": []},
    ]
    assert listed_ids({"data": {"dataset": entries}}) == [3, 9]


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (Table("t", np.zeros((1000, 4)), np.arange(1000) % 2), "4 numeric features"),
        (Table("t", np.zeros((1000, 20)), np.arange(1000) % 2), "21 columns with its label, not 20"),
        (Table("t", np.zeros((1000, 19)), np.arange(1000) % 2), None),
        (Table("t", np.zeros((1000, 8)), np.arange(1000) % 2, 39), "39 columns"),
        (Table("t", np.zeros((1000, 8)), np.arange(1000) % 2, 20), None),
        (Table("t", np.zeros((999, 5)), np.arange(999) % 2), "999 rows"),
        (Table("t", np.zeros((1000, 5)), np.arange(1000) % 3), "one of two classes"),
        (Table("t", np.zeros((1000, 5)), np.full(1000, -1)), "one of two classes"),
        (Table("t", np.zeros((1000, 5)), (np.arange(1000) % 4 == 0).astype(int)), "less than half"),
        (Table("t", np.full((1000, 5), np.nan), np.arange(1000) % 2), "missing"),
        (Table("known", np.zeros((1000, 5)), np.arange(1000) % 2), "its name"),
        (Table("t", np.zeros((1000, 5)), np.arange(1000) % 2), None),
    ],
)
def test_the_filters_of_a_table(table, reason):
    found = why_left_out(table, ["known"])
    assert (found is None) if reason is None else (reason in found)


# Training and the experiment


def test_tables_are_trained_on_as_classes(tmp_path):
    config = run_without(Lab("tiny", tmp_path), load_tables()[3], unlooped=False)
    assert config.task_options == {"source": "bundled", "leave_out": "iris"}
    assert (config.model.readout, config.model.n_classes) == ("classes", 2)
    run = Run.start(config)
    losses = [run.advance()["loss"] for _ in range(3)]
    assert all(0.3 < loss < 2 for loss in losses)
    paper = preset("paper", "tabular")
    assert (paper.batch_size, paper.n_steps, paper.dims.start, paper.points.start, paper.loops.end) == (40, 100_000, 20, 41, 30)
    model = looped.LoopedTransformer(paper.model)
    assert sum(p.numel() for p in model.parameters()) == 847_873 + 257  # one more logit


def copies_the_last_label(config):
    """A model whose last token attends to the one before it, the last label, and answers with that.

    Channels: 0 .. n - 1 say the position, the next one holds a token's label as -1 or 1, and the last one the copy.
    """
    model = looped.LoopedTransformer(config)
    n, head_dim = 2 * 5 - 1, config.d_model // config.n_heads
    q, k, v = 0, config.d_model, 2 * config.d_model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        model.read_in.weight[n, 0], model.read_in.bias[n] = 2.0, -1.0
        attention = model.core[0].attn
        assert n < head_dim
        for t in range(n):
            model.positions.weight[t, t] = 10.0
            attention.qkv.weight[q + t, t] = 3.0
            if t + 1 < n:
                attention.qkv.weight[k + t + 1, t] = 3.0
        attention.qkv.weight[v, n] = 1.0
        attention.proj.weight[-1, 0] = 10.0
        model.read_out.weight[1, -1] = 1.0
    return model


def test_accuracy_of_a_model_that_copies_the_last_label(tmp_path, monkeypatch):
    monkeypatch.setattr(tabular, "_bundled", lambda: _easy())
    monkeypatch.setitem(experiment.REPEATS, "tiny", 3)
    load_tables.cache_clear()
    tables, config = load_tables(), Lab("tiny", tmp_path).config("tabular")
    looped.save_model(copies_the_last_label(config.model), tmp_path / "copies")
    given = {f"tabular_bundled_without_{name}": str(tmp_path / "copies") for name in "ab"}
    outcome = run_experiment("tabular", Lab("tiny", tmp_path, given=given, n_steps=12, n_prompts=50, progress=False))
    load_tables.cache_clear()
    rows = {row[0]: row for row in outcome.sheet.rows}
    assert set(rows) == {"a", "b"}
    assert rows["a"][-1] > 0.95, "ridge separates what is separable"
    assert rows["a"][3] == 0.5
    assert all(0 <= cell <= 1 for cell in rows["b"][4:])
    line = next(line for line in outcome.panels[0].lines if line.label == "looped")
    for i, table in enumerate(tables):
        (pairs,) = queries(table, 2, 5, n_queries=50, seed=0, batch_size=128, n_repeats=3)
        is_right = (pairs.ys[:, -2] == pairs.ys[:, -1]).double()
        assert 0.3 < is_right.mean() < 0.7
        assert rows[table.name][4] == pytest.approx(is_right.mean().item())
        by_row = RunningCurve()  # 50 rows, each with the share of its repeats: not 150 prompts
        by_row.add(is_right.reshape(50, 3).mean(dim=1, keepdim=True))
        expected = by_row.curve()
        assert (line.curve.n_prompts, line.curve.low[i], line.curve.high[i]) == (50, expected.low[0], expected.high[0])
    n_better = sum(row[4] >= row[5] for row in rows.values())
    (claim,) = outcome.claims
    assert all(max(row[4:6]) > row[3] for row in rows.values()), "else the claim is of fewer tables"
    assert (claim.measured, claim.holds) == (f"{n_better} of 2", n_better == 2)


@pytest.mark.parametrize(
    ("better", "n_tables", "measured", "holds"),
    [
        ([True, True, False], 3, "2 of 3", True),
        ([True, False], 2, "1 of 2", False),
        ([True], 5, "1 of 1 (1 of 5 tables measured)", None),
        ([True, True, True], 5, "3 of 3 (3 of 5 tables measured)", None),
        ([False, False, False, True], 5, "1 of 4 (4 of 5 tables measured)", False),
        ([], 5, "- (0 of 5 tables measured)", None),
    ],
)
def test_most_tables_are_of_all_tables(better, n_tables, measured, holds):
    def accuracy(value):
        return Measured(single([value]), [[value]], 0.0)

    found = {str(i): {"looped": accuracy(0.6), "unlooped": accuracy(0.5 if one else 0.7)} for i, one in enumerate(better)}
    majority = {name: 0.55 for name in [*found, *"abcde"[len(found) : n_tables]]}
    claim = experiment._claim(found | {"alone": {"looped": accuracy(0.9)}}, majority)
    assert (claim.measured, claim.holds) == (measured, holds)
    hard = experiment._claim(found, majority | dict.fromkeys(found, 0.7))
    assert hard.holds is None
    if found:
        assert hard.measured.startswith(f"-; on {len(found)} neither is more accurate than that")


def test_no_verdict_rests_on_classes_that_are_not_finite(tmp_path, monkeypatch):
    monkeypatch.setattr(tabular, "_bundled", lambda: _easy())
    load_tables.cache_clear()
    model = copies_the_last_label(Lab("tiny", tmp_path).config("tabular").model)
    with torch.no_grad():
        model.read_out.bias.fill_(math.nan)
    looped.save_model(model, tmp_path / "nan")
    given = {f"tabular_bundled_without_{name}": str(tmp_path / "nan") for name in "ab"}
    outcome = run_experiment("tabular", Lab("tiny", tmp_path, given=given, n_steps=4, n_prompts=20, progress=False))
    load_tables.cache_clear()
    assert [(claim.measured, claim.holds) for claim in outcome.claims] == [("- (0 of 2 tables measured)", None)]
    assert any(note.startswith("looped: not finite for 20 of 20 prompts") for note in outcome.notes)


def test_each_table_has_its_own_number_of_prompts(tmp_path, monkeypatch):
    a, b = _easy()
    monkeypatch.setattr(tabular, "_bundled", lambda: (a, Table("b", b.X[:30], b.y[:30])))
    load_tables.cache_clear()
    lab = Lab("tiny", tmp_path)
    looped.save_model(copies_the_last_label(lab.config("tabular").model), tmp_path / "looped")
    looped.save_model(looped.LoopedTransformer(lab.config("tabular", unlooped=True).model), tmp_path / "unlooped")
    given = {"tabular_bundled_without_a": "looped", "tabular_bundled_without_b_unlooped": "unlooped"}
    given = {name: str(tmp_path / folder) for name, folder in given.items()}
    lab = Lab("tiny", tmp_path, given=given, may_train=False, n_prompts=50)
    outcome = run_experiment("tabular", lab)
    load_tables.cache_clear()
    lines = {line.label: line for line in outcome.panels[0].lines}
    assert (list(lines["ridge"].xs), lines["ridge"].prompts_at, lines["ridge"].models_at) == ([0, 1], [50, 30], [0, 0])
    assert (lines["looped"].xs, lines["looped"].prompts_at, lines["looped"].models_at) == ([0], [50], [1])
    assert (lines["unlooped"].xs, lines["unlooped"].prompts_at, lines["unlooped"].models_at) == ([1], [30], [1])


def _easy():
    rng = np.random.default_rng(0)
    tables = []
    for name in "ab":
        X = rng.normal(size=(200, 2))
        y = np.arange(200) % 2
        X[:, 0] = (2 * y - 1) * (3 + 0.1 * X[:, 0])
        tables.append(Table(name, X, y))
    return tuple(tables)


def test_a_run_is_of_its_tables_wherever_they_lie(cache, monkeypatch):
    """The folder may be spelled otherwise, moved or gone; its content may not change."""
    monkeypatch.chdir(cache)
    for data_id, name in ((7, "good"), (12, "wide")):
        write_cached(cache / "om", data_id, name, 1000)
    options = {"out": cache / "out", "n_steps": 2, "n_prompts": 2, "progress": False}

    def places(lab):
        return [place for _, _, place in lab.inventory(experiment.runs(lab).values())]

    def learn(source, **how):
        config = preset("tiny", "tabular", n_steps=2, task_options={"source": str(source), "leave_out": "good"})
        return train(config, cache / "alone", progress=False, **how)

    learn("om")
    run_experiment("tabular", Lab("tiny", data="om", **options))
    done = places(Lab("tiny", data="om", **options))
    assert all(place.startswith("trained: tabular_openml_without_") for place in done)
    assert places(Lab("tiny", data=str(cache / "om"), **options)) == done
    (cache / "om").rename(cache / "moved")
    load_tables.cache_clear()
    assert places(Lab("tiny", data="moved", **options)) == done
    learn(cache / "moved", resume=True)
    outcome = run_experiment("tabular", Lab("tiny", data=str(cache / "moved"), **options))
    assert not any("source" in note or "digest" in note for note in outcome.notes)

    write_cached(cache / "moved", 12, "wide", 1001)
    load_tables.cache_clear()
    with pytest.raises(ValueError, match="has another task_options"):
        learn("moved", resume=True)
    assert places(Lab("tiny", data="moved", **options)) == [None] * 4


def test_a_run_from_before_tables_had_a_digest_goes_on_where_they_lie(cache):
    for data_id, name in ((7, "good"), (12, "wide")):
        write_cached(cache, data_id, name, 1000)
    config = preset("tiny", "tabular", n_steps=2, task_options={"source": str(cache), "leave_out": "good"})
    train(config, cache / "run", progress=False)
    state = load_training_state(cache / "run" / "state.pt")
    assert state["config"]["task_options"].pop("digest") == digest_of(load_tables(str(cache)))
    write_training_state(cache / "run" / "state.pt", state)
    train(config, cache / "run", resume=True, progress=False)
    with pytest.raises(ValueError, match="has another task_options"):
        train(preset("tiny", "tabular", n_steps=2, task_options={"leave_out": "iris"}), cache / "run", resume=True)


def test_a_description_of_a_run_is_read_without_its_tables(monkeypatch, tmp_path):
    def read(*_):
        raise AssertionError("tables are read")

    monkeypatch.setattr(tabular, "load_tables", read)
    config = preset("tiny", "tabular", task_options={"source": "openml", "leave_out": "wide"})
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_tables_of_other_content_are_refused():
    task = make_task("tabular", 10, digest="0" * 16)
    with pytest.raises(ValueError, match=r"the tables of bundled have the digest [0-9a-f]{16}, not 0000000000000000: they are"):
        task.sample(2, 3, generator=seeded())
    assert make_task("tabular", 10, digest=digest_of(load_tables("bundled"))).tables == load_tables("bundled")


def test_tables_of_like_names_have_models_of_their_own(cache):
    names = ["a-b", "a_b", "a.b"]
    for data_id, name in enumerate(names):
        write_cached(cache, data_id + 1, name, 1000)
    lab = Lab("tiny", cache / "out", data=str(cache))
    assert len({name for name, _ in experiment.runs(lab).values()}) == 2 * len(names)
    assert len(models_of("tabular", lab)) == 2 * len(names)
    assert experiment.name_without("bundled", "breast_cancer", unlooped=False) == "tabular_bundled_without_breast_cancer"
    assert experiment.name_without("x", "a b/c=d", unlooped=True) == "tabular_openml_without_a%20b%2Fc%3Dd_unlooped"
    both = (False, True)
    names = {experiment.name_without("x", one, unlooped=kind) for one in ("a", "a_unlooped", "a%5Funlooped") for kind in both}
    assert len(names) == 6


def test_training_says_how_its_model_is_scored(cache):
    """And where it names a command, that command takes the model."""

    tmp_path = cache / "with a space"
    tmp_path.mkdir()

    def train(*options):
        place = tmp_path / f"run_{len(list(tmp_path.iterdir()))}"
        arguments = ["train", "--preset", "tiny", "--set", "n_steps=2", "--out", str(place), *options]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        return result.stderr.rpartition("score it with: ")[2].strip()

    assert train("--task", "decision_tree").startswith(f"looped eval '{tmp_path}")
    assert "left one table out" in train("--task", "tabular")
    said = train("--task", "tabular", "--set", 'task_options={"leave_out": "iris"}')
    assert said.startswith("looped experiment tabular --preset tiny --models 'tabular_bundled_without_iris=")
    for data_id, name in ((7, "good"), (12, "wide")):
        write_cached(cache / "my tables", data_id, name, 1000)
    options = json.dumps({"source": str(cache / "my tables"), "leave_out": "good"})
    of_folder = train("--task", "tabular", "--set", f"task_options={options}")
    unlooped = train("--task", "tabular", "--unlooped", "--set", f"task_options={options}")
    assert "tabular_openml_without_good_unlooped=" in unlooped
    for command in (said, of_folder, unlooped):
        run = [*shlex.split(command)[1:], "--no-train", "--prompts", "2", "--out", str(tmp_path / "out")]
        result = CliRunner().invoke(main, run)
        assert result.exit_code == 0, result.output
