"""Where experiments get models and numbers from: the lab, measuring, outcomes, and the command."""

import dataclasses
import json
import math

import numpy as np
import pytest
import scipy.stats
import torch
from click.testing import CliRunner
from models import icl_model

import looped
from looped.cli import main
from looped.experiments import EXPERIMENTS, Lab, Outcome, functions, run_experiment
from looped.experiments import lab as lab_module
from looped.experiments.catalog import models_of
from looped.experiments.given import apart
from looped.experiments.lab import Models
from looped.experiments.measure import (
    by_examples,
    by_loops,
    first_of,
    fresh,
    joined,
    kind_of,
    line,
    line_of_last,
    mean_ratio,
    measure,
    n_loops_tested,
    of_baseline,
    on_shared,
    single,
)
from looped.experiments.outcome import Line, Panel, Sheet
from looped.icl.baselines import LeastSquares
from looped.icl.curves import CONFIDENCE, N_RESAMPLES, RunningCurve
from looped.icl.prompts import interleave
from looped.icl.shifts import make_shift, random_rotation
from looped.icl.tasks import DecisionTree, LinearRegression, Pairs
from looped.report.outcomes import cell_text, outcome_tables, plot_outcome
from looped.train import Ramp, preset, train
from looped.train.trainer import Run


def quick(tmp_path, preset_name="tiny", **options):
    """A lab whose trainings take twelve steps."""
    return Lab(preset_name, tmp_path, **(dict(n_steps=12, n_prompts=8, progress=False) | options))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def must_not_train(*args, **kwargs):
    raise AssertionError("a model that is there was trained again")


# The lab


def test_bundled_models_are_used_where_they_are_the_very_run(tmp_path, monkeypatch):
    monkeypatch.setattr(lab_module, "train", must_not_train)
    lab = Lab("small", tmp_path)
    (found,) = lab.models("linear_regression", lab.config())
    assert torch.equal(weights(found), weights(looped.load_pretrained("linear_regression")))
    assert lab.used["linear_regression"]["source"] == "bundled: linear_regression"
    (tied,) = lab.models("any", lab.config(tied=True))
    assert torch.equal(weights(tied), weights(looped.load_pretrained("linear_regression_tied")))
    with pytest.raises(AssertionError, match="trained again"):
        lab.models("linear_regression", dataclasses.replace(lab.config(), lr=2e-3))


def test_a_missing_model_is_left_out_when_training_is_not_wanted(tmp_path):
    lab = Lab("small", tmp_path, may_train=False)
    assert lab.models("other", lab.config(n_steps=123)) == []
    assert "other is left out" in lab.notes[0]
    assert not (tmp_path / "models").exists()


def test_models_are_trained_once_and_found_again(tmp_path, monkeypatch):
    lab = quick(tmp_path)
    (first,) = lab.models("one", lab.config())
    assert lab.used["one"] == {
        "source": "trained: one_steps_12",
        "n_steps": 12,
        "n_parameters": sum(p.numel() for p in first.parameters()),
        "n_loops": 4,
        "window": 2,
        "n_layers": 1,
    }
    monkeypatch.setattr(lab_module, "train", must_not_train)
    (again,) = quick(tmp_path).models("one", lab.config())
    assert torch.equal(weights(first), weights(again))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="already holds a run, of other settings; choose another folder or remove it"):
        quick(tmp_path).models("one", dataclasses.replace(lab.config(), lr=2e-3))


def test_a_run_of_other_steps_does_not_stand_in_the_way_of_the_whole_one(tmp_path):
    config = dataclasses.replace(quick(tmp_path).config(), n_steps=5)
    for n_steps, folder in ((12, "one_steps_12"), (13, "one_steps_13"), (0, "one")):
        lab = quick(tmp_path, n_steps=n_steps)
        lab.models("one", config)
        assert lab.used["one"]["source"] == f"trained: {folder}"
        assert json.loads((tmp_path / "models" / folder / "train.json").read_text())["n_steps"] == (n_steps or 5)
    assert quick(tmp_path, seeds=[7]).run_folder("one", 7).name == "one_steps_12_seed_7"


def test_stopped_trainings_need_resume_and_end_the_same(tmp_path):
    lab = quick(tmp_path)
    config = dataclasses.replace(lab.config(), n_steps=12)
    (whole,) = lab.models("whole", config)
    with pytest.MonkeyPatch.context() as patch:
        from looped.train.trainer import Run

        advance = Run.advance

        def stop(self):
            if self.step == 7:
                raise KeyboardInterrupt
            return advance(self)

        patch.setattr(Run, "advance", stop)
        with pytest.raises(KeyboardInterrupt):
            train(dataclasses.replace(config, save_every=5), tmp_path / "models" / "cut", progress=False)
    config = dataclasses.replace(config, save_every=5)
    with pytest.raises(ValueError, match="resume"):
        quick(tmp_path, n_steps=0).models("cut", config)
    (resumed,) = quick(tmp_path, n_steps=0, resume=True).models("cut", config)
    assert torch.equal(weights(resumed), weights(whole))


def test_a_model_cut_short_is_made_again_and_a_broken_file_is_named(tmp_path):
    lab = quick(tmp_path)
    config = lab.config()
    (whole,) = lab.models("one", config)
    folder = tmp_path / "models" / "one_steps_12"
    for lost in (["config.json"], ["model.safetensors"], ["config.json", "model.safetensors"]):
        for name in lost:
            (folder / "model" / name).unlink()
        assert quick(tmp_path).inventory([("one", config)]) == [("one", 12, None)]
        (again,) = quick(tmp_path, resume=True).models("one", config)
        assert torch.equal(weights(again), weights(whole))
    for content in ("", "[" * 100_000):
        (folder / "train.json").write_text(content)
        with pytest.raises(ValueError, match=r"one_steps_12/train\.json is not JSON .*; restore it"):
            quick(tmp_path, resume=True).models("one", config)


def test_a_model_beside_the_record_of_another_run_is_not_taken(tmp_path, monkeypatch):
    lab = quick(tmp_path)
    lab.models("one", lab.config())
    folder = tmp_path / "models" / "one_steps_12"
    looped.save_model(icl_model(n_dims=2, n_points=5), folder / "model")
    for ask in (lambda lab, run: lab.models(*run), lambda lab, run: lab.inventory([run])):
        with pytest.raises(ValueError, match=r"one_steps_12/model is another model than .*train\.json describes; remove"):
            ask(quick(tmp_path), ("one", lab.config()))


def test_each_seed_is_a_model_of_its_own(tmp_path):
    lab = quick(tmp_path, seeds=[42, 7])
    one, two = lab.models("m", lab.config())
    assert not torch.equal(weights(one), weights(two))
    assert list(lab.used) == ["m", "m, seed 7"]
    assert (tmp_path / "models" / "m_steps_12_seed_7" / "model").is_dir()


def test_seeds_that_are_missing_are_told(tmp_path, monkeypatch):
    config = quick(tmp_path).config()
    quick(tmp_path, seeds=[43]).models("m", config)
    quick(tmp_path, seeds=[43]).models("decision_tree", quick(tmp_path).config("decision_tree"))
    lab = quick(tmp_path, seeds=[42, 43, 44], may_train=False)
    assert len(lab.models("m", config)) == 1
    assert [note for note in lab.notes if "left out" not in note] == [
        "m: its numbers are of 1 of 3 seeds, without 42, 44, and no verdict rests on it"
    ]
    assert {label: one["source"] for label, one in lab.used.items()} == {
        "m": "not there",
        "m, seed 43": "trained: m_steps_12_seed_43",
        "m, seed 44": "not there",
    }
    assert len(lab.models("decision_tree", lab.config("decision_tree"), optional=True)) == 1
    assert lab.notes[-1].startswith("decision_tree: its numbers are of 1 of 3")

    def diverge(config, folder, **how):
        raise FloatingPointError("train: the loss has exploded at step 9")

    monkeypatch.setattr(lab_module, "train", diverge)
    lab = quick(tmp_path, seeds=[43, 44])
    assert len(lab.models("m", config)) == 1
    assert lab.used["m, seed 44"]["source"] == "diverged"
    assert lab.notes[-1].endswith("of 1 of 2 seeds, without 44, and no verdict rests on it")
    report = run_experiment("fixed-point", quick(tmp_path, seeds=[7, 8], may_train=False)).to_dict()
    assert not any(line["models_at"][0] for panel in report["panels"] for line in panel["lines"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(seeds=[]), r"seeds=\[\] must be one or more"),
        (dict(seeds=[1, 1]), "each once"),
        (dict(seeds=[1, -1]), r"seeds=-1 must be an integer in 0 \.\. 2\^32 - 1"),
        (dict(seed=-1), "seed=-1 must be an integer"),
        (dict(seed=2**32), "seed=4294967296 must be"),
        (dict(seed=1.0), "seed=1.0 must be an integer"),
        (dict(n_prompts=-1), "n_prompts=-1 must be 1 or more"),
        (dict(n_steps=-1), "n_steps=-1 must be 1 or more"),
        (
            dict(given={"a": "/no/such"}),
            "'/no/such' for a is neither a folder nor a bundled model .decision_tree, linear_regression, ",
        ),
        (dict(given={"a": ""}), "the model '' for a is neither"),
    ],
)
def test_wrong_settings_are_refused_by_the_lab_itself(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        quick(tmp_path, **options)


def test_a_given_model_is_read_before_anything_is_trained(tmp_path):
    (tmp_path / "bad").mkdir()
    with pytest.raises(FileNotFoundError):
        quick(tmp_path, given={"a": str(tmp_path / "bad")})


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_an_experiment_refuses_models_that_it_does_not_ask_for(tmp_path, monkeypatch, name):
    monkeypatch.setattr(lab_module, "train", must_not_train)
    looped.save_model(icl_model(n_dims=3, n_points=5), tmp_path / "three")
    wanted = list(models_of(name, quick(tmp_path)))
    known = wanted[-1]
    for run in (models_of, run_experiment):
        with pytest.raises(ValueError, match=f"{name} uses no model '{known}x'; did you mean '{known}'"):
            run(name, quick(tmp_path, given={f"{known}x": str(tmp_path / "three")}))
        with pytest.raises(ValueError, match=f"for {known} has n_dims=3, and preset tiny needs 2"):
            run(name, quick(tmp_path, given={known: str(tmp_path / "three")}))


def test_an_experiment_says_all_the_models_that_it_uses(tmp_path, monkeypatch):
    """What `runs` names is what is asked for, and nothing else."""
    for name in EXPERIMENTS:
        asked = {}
        monkeypatch.setattr(
            Lab, "models", lambda self, name, config, asked=asked, **how: asked.update({name: config}) or Models()
        )
        lab = quick(tmp_path)
        wanted = models_of(name, lab)
        run_experiment(name, lab)
        assert asked == wanted, name


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "tabular"])
def test_tables_are_refused_where_none_are_read(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} reads no tables, and data='openml' is for the experiment tabular"):
        run_experiment(name, quick(tmp_path, data="openml"))


def test_given_models_come_first_and_must_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(lab_module, "train", must_not_train)
    looped.save_model(icl_model(n_dims=2, n_points=5), tmp_path / "mine")
    looped.save_model(icl_model(n_dims=2, n_points=3), tmp_path / "short")
    lab = quick(tmp_path, given={"a": str(tmp_path / "mine"), "b": "linear_regression", "c": str(tmp_path / "short")})
    (found,) = lab.models("a", lab.config())
    assert torch.equal(weights(found), weights(icl_model(n_dims=2, n_points=5, dtype=torch.float64).float()))
    with pytest.raises(ValueError, match="for b has n_dims=5, and preset tiny needs 2"):
        lab.models("b", lab.config())
    with pytest.raises(ValueError, match="for c has 7 positions, and preset tiny needs 9"):
        lab.models("c", lab.config())


@pytest.mark.parametrize(
    ("experiment", "name", "model", "message"),
    [
        ("sparsity", "sparse_linear_regression_s4", "sparse_linear_regression", "sparsity=2, and the name is of sparsity=4"),
        ("loops-and-window", "linear_regression_b8_T4", "linear_regression", "n_loops=30, and the name is of n_loops=8"),
        ("loops-and-window", "linear_regression_b30_T4", "linear_regression", "window=15, and the name is of window=4"),
        ("fixed-point", "linear_regression_tied", "linear_regression", "inject='add', and preset small needs 'none'"),
        ("fixed-point", "linear_regression", "linear_regression_tied", "inject='none', and preset small needs 'add'"),
        ("fixed-point", "linear_regression", "linear_regression_unlooped", "n_core=12, and preset small needs 1"),
        ("shift", "linear_regression_unlooped_L4", "linear_regression_unlooped", "n_core=12, and preset small needs 4"),
        ("shift", "linear_regression_unlooped_L1", "linear_regression_tied", "n_loops=30, and preset small needs 1"),
        (
            "architecture",
            "linear_regression_b30_T15_d_model32",
            "linear_regression",
            "d_model=64, and the name is of d_model=32",
        ),
        ("sample-efficiency", "set_of_300_d5_looped_lr0.001", "linear_regression", "n_distinct=None, and"),
        ("fixed-point", "linear_regression", "{noisy}", "task=noisy_linear_regression, and the name is of task=lin"),
    ],
)
def test_a_given_model_is_what_its_name_says(tmp_path, monkeypatch, experiment, name, model, message):
    monkeypatch.setattr(lab_module, "train", must_not_train)
    if model == "{noisy}":
        model = str(tmp_path / "noisy")
        looped.save_model(looped.load_pretrained("linear_regression"), model)
        noisy = preset("small", "noisy_linear_regression")
        (tmp_path / "noisy" / "train.json").write_text(json.dumps(noisy.to_dict()))
    lab = Lab("small", tmp_path, given={name: model}, n_prompts=4)
    for run in (models_of, run_experiment):
        with pytest.raises(ValueError, match=rf"the model {model} for {name} has {message}"):
            run(experiment, lab)


def test_what_sets_the_runs_of_an_experiment_apart(tmp_path):
    expected = {
        "loops-and-window": ["n_loops", "window"],
        "sample-efficiency": ["lr", "n_distinct"],
        "sparsity": ["sparsity"],
        "architecture": ["d_model", "n_core", "n_heads"],
        "tabular": ["leave_out"],
    }
    for name in EXPERIMENTS:
        found = apart(models_of(name, Lab("small", tmp_path)))
        beside = {()} if name in ("loops-and-window", "architecture") else set()  # the unlooped model, which has no rival
        assert {tuple(sorted(traits)) for traits in found.values()} == (
            {tuple(expected[name])} | beside if name in expected else {(), ("n_core",)} if name == "shift" else {()}
        )


def test_what_a_given_model_is_unlike_its_name_is_noted(tmp_path):
    """A larger model or another recipe are the user's business; that nobody knows the task is told too."""
    wanted = Lab("small", tmp_path, n_prompts=4)
    same, own = (
        Lab("small", tmp_path, given={"linear_regression": source}, n_prompts=4, seeds=seeds, may_train=False)
        for source, seeds in (("linear_regression", [42]), ("sparse_linear_regression", [42, 7]))
    )
    same.models("linear_regression", wanted.config())
    assert same.notes == []
    assert (same.used["linear_regression"]["n_steps"], same.used["linear_regression"]["window"]) == (16_000, 15)
    with pytest.raises(ValueError, match="n_dims=8, and preset small needs 5"):
        own.models("linear_regression", wanted.config())
    config = wanted.config("sparse_linear_regression", task_options={"sparsity": 4}, lr=3e-4, window=6, dims=Ramp(8, 8))
    own.given, own.loaded = ({"s": store["linear_regression"]} for store in (own.given, own.loaded))
    (found,) = own.models("s", config)
    assert found is own.loaded["s"].model
    assert own.notes == [
        "s is sparse_linear_regression, which has sparsity=2, not 4; window=12, not 6; dims=2..8 by 1 every 1000, not 8; "
        "lr=0.001, not 0.0003",
        "s is sparse_linear_regression: one model stands for all 2 seeds",
    ]


def test_a_larger_model_may_be_given_and_its_run_may_be_unknown(tmp_path):
    larger = preset("tiny", n_steps=3, seed=1)
    larger = dataclasses.replace(larger, model=looped.icl_config(n_dims=2, n_points=7, d_model=24, n_heads=4, n_loops=4))
    train(larger, tmp_path / "run", progress=False)

    def notes(place):
        lab = quick(tmp_path, given={"linear_regression": str(place)}, n_steps=3)
        outcome = run_experiment("adaptive", dataclasses.replace(lab, may_train=False))
        assert outcome.models["linear_regression"]["n_parameters"] == sum(
            p.numel() for p in looped.load_model(place).parameters()
        )
        return [note for note in outcome.notes if note.startswith("linear_regression is ")]

    place = tmp_path / "run" / "model"
    (note,) = notes(place)
    assert note.startswith(f"linear_regression is {place}, which has d_model=24, not 32; n_heads=4, not 2; ")
    assert "batch_size=8, not 64" in note
    assert "n_steps" not in note
    assert "seed" not in note
    unknown = f"linear_regression is {place}, and what that was trained on is not known: "
    (tmp_path / "run" / "train.json").write_text("{")
    assert notes(place)[1].startswith(f"{unknown}{tmp_path / 'run' / 'train.json'} is not JSON")
    (tmp_path / "run" / "train.json").write_text(json.dumps(preset("tiny").to_dict()))
    assert notes(place)[1] == f"{unknown}{tmp_path / 'run' / 'train.json'} is of another model"
    (tmp_path / "run" / "train.json").unlink()
    assert notes(place)[1] == f"{unknown}no train.json is beside it"


def test_a_run_that_diverges_is_noted_and_left_out(tmp_path, monkeypatch):
    def diverge(*args, **kwargs):
        raise FloatingPointError("train: the loss has exploded at step 9")

    monkeypatch.setattr(lab_module, "train", diverge)
    lab = quick(tmp_path)
    assert lab.models("m", lab.config()) == []
    assert lab.notes == ["m diverged: the loss has exploded at step 9"]
    assert lab.used["m"]["source"] == "diverged"


@pytest.mark.parametrize("save_every", [1, 30])
def test_a_run_that_has_diverged_is_not_tried_again(tmp_path, monkeypatch, save_every):
    """Whether it had come to a checkpoint or not."""
    lab = quick(tmp_path, n_steps=0)
    config = dataclasses.replace(lab.config(), n_steps=30, save_every=save_every)
    advance = Run.advance

    def destroyed_after_five(run):
        if run.step == 5:
            torch.nn.init.constant_(run.model.read_out.weight, math.nan)
        return advance(run)

    monkeypatch.setattr(Run, "advance", destroyed_after_five)
    assert lab.models("m", config) == []
    (note,) = lab.notes
    assert ("last checkpoint: step 5" if save_every == 1 else "there is no checkpoint yet") in note
    assert [place for _, _, place in lab.inventory([("m", config)])] == ["diverged"]
    monkeypatch.setattr(lab_module, "train", must_not_train)
    again = quick(tmp_path, n_steps=0)
    assert again.models("m", config) == []
    assert again.notes[0].split(" (")[0] == note.split(" (")[0]
    with pytest.raises(AssertionError, match="trained again"):
        again.models("m", dataclasses.replace(config, lr=1e-4))


def test_unknown_presets_and_experiments_are_named(tmp_path):
    with pytest.raises(ValueError, match="preset='huge' is not one of tiny, small, paper"):
        Lab("huge", tmp_path)
    with pytest.raises(ValueError, match="did you mean 'sparsity'"):
        run_experiment("sparse", quick(tmp_path))


# Measuring


def test_bootstrap_intervals_are_scipys():
    rows = torch.randn(200, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).exp()
    running = RunningCurve()
    running.add(rows)
    curve = running.curve(seed=5)
    rng = np.random.default_rng(5)
    options = dict(n_resamples=N_RESAMPLES, confidence_level=CONFIDENCE, method="percentile", batch=20, rng=rng)
    expected = scipy.stats.bootstrap((rows.numpy(),), np.mean, axis=0, vectorized=True, **options).confidence_interval
    np.testing.assert_allclose(curve.low, expected.low, rtol=1e-12)
    np.testing.assert_allclose(curve.high, expected.high, rtol=1e-12)
    means = [rows.numpy()[np.random.default_rng(i).integers(0, 200, 200)].mean(axis=0) for i in range(3000)]
    by_hand = np.quantile(means, [0.05, 0.95], axis=0)  # other resamples: alike, not equal
    np.testing.assert_allclose([curve.low, curve.high], by_hand, rtol=0.02)
    assert running.mean() == curve.mean


def test_measuring_averages_over_models_prompt_by_prompt():
    pairs = [Pairs(torch.zeros(n, 3, 2), torch.arange(3.0 * n).reshape(n, 3)) for n in (100, 60)]
    ways = {"both": [lambda p: p.ys, lambda p: 3 * p.ys], "none": [], "slow": [lambda p: p.ys + 1]}
    found = measure(pairs, ways, slow=["slow"])
    ys = torch.cat([p.ys for p in pairs]).double()
    assert set(found) == {"both", "slow"}
    np.testing.assert_allclose(found["both"].curve.mean, (2 * ys).mean(dim=0))
    np.testing.assert_allclose(found["both"].by_model, [ys.mean(dim=0), 3 * ys.mean(dim=0)])
    assert found["slow"].curve.n_prompts == 128
    assert found["slow"].first == ()
    np.testing.assert_allclose(found["both"].first, 2 * ys[:128].mean(dim=0))
    assert on_shared([found["both"], found["slow"]]) == (128, [found["both"].first, found["slow"].curve.mean])
    assert on_shared([found["both"]]) == (160, [found["both"].curve.mean])
    assert line("l", range(3), found["both"]).by_seed == found["both"].by_model
    assert line("l", range(3), found["slow"]).by_seed == ()
    assert [line("l", range(3), found["both"], kind).models_at for kind in ("looped", "twin", "baseline")] == [
        [2, 2, 2],
        [2, 2, 2],
        [0, 0, 0],
    ]
    both = line_of_last("l", [3, 5], [found["both"], found["slow"]], "looped")
    assert (both.curve.mean, both.prompts_at, both.models_at) == (
        [found["both"].curve.mean[-1], found["slow"].curve.mean[-1]],
        [160, 128],
        [2, 1],
    )
    np.testing.assert_allclose(found["slow"].curve.mean, ys[:128].mean(dim=0) + 1)


def test_measurements_show_how_far_they_are(tmp_path, monkeypatch):
    shown = []

    class Bar:
        def __init__(self, **options):
            shown.append([options["desc"], options["total"], 0, options["disable"]])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, n):
            shown[-1][2] += n

    monkeypatch.setattr(lab_module, "tqdm", Bar)
    lab = Lab("tiny", tmp_path, n_prompts=200)
    batches = list(fresh(LinearRegression(2), 200, 5, 0))
    assert list(lab.watched("m", iter(batches))) == batches
    assert shown == [["measuring m", 200, 200, False]]
    run_experiment(
        "fixed-point", quick(tmp_path, given={"linear_regression_tied": "linear_regression_tied"}, preset_name="small")
    )
    assert [bar[0] for bar in shown[1:] if "measuring" in bar[0]] == ["measuring by loops", "measuring by examples"]
    assert all(bar[1:] == [8, 8, True] for bar in shown[1:])


def test_ways_are_the_errors_of_a_plain_loop():
    task, model = LinearRegression(3), icl_model(std=0.1, dtype=torch.float32)
    pairs = next(iter(fresh(task, 6, 5, 0)))
    x, ys = interleave(*pairs), pairs.ys.double()
    every = model(x, n_loops=7, return_predictions=True).double()
    got = by_loops([model], task, 7)[0](pairs)
    torch.testing.assert_close(got, (every[:, :, -1] - ys[:, -1:]) ** 2 / 3, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(by_examples([model], task)[0](pairs), (every[:, 5] - ys) ** 2 / 3, rtol=1e-4, atol=1e-6)
    far = model(x, n_loops=30).double()  # five times the trained 6
    torch.testing.assert_close(by_examples([model], task, "small")[0](pairs), (far - ys) ** 2 / 3, rtol=1e-4, atol=1e-6)
    baseline = of_baseline(LeastSquares(), task)[0](pairs)
    torch.testing.assert_close(baseline, (LeastSquares().predict(*pairs).double() - ys) ** 2 / 3)
    shifted = make_shift("skewed").sample(
        task, 4, 3, generator=torch.Generator().manual_seed(0), rotation=random_rotation(3, 0)
    )
    assert [len(part) for part in first_of(shifted, 2)[:4]] == [2] * 4


def test_curves_by_examples_are_of_the_published_loops():
    looped_model, unlooped = icl_model(n_loops=6), icl_model(n_loops=1)
    tree, linear = DecisionTree(3), LinearRegression(3)
    assert [n_loops_tested(looped_model, task, "paper") for task in (linear, tree)] == [500, 200]
    assert [n_loops_tested(looped_model, task, name) for task in (linear, tree) for name in ("small", "tiny")] == [30] * 4
    assert [n_loops_tested(unlooped, task, name) for task in (linear, tree) for name in ("small", "paper")] == [1] * 4


def test_kinds_of_lines():
    kinds = {"looped": "looped", "tied": "twin", "unlooped": "twin", "unlooped L=4": "twin", "looped, control": "baseline"}
    assert {name: kind_of(name) for name in (*kinds, "lasso")} == kinds | {"lasso": "baseline"}


def test_slow_rivals_are_met_on_the_prompts_that_they_have_seen():
    """The looped model has the smaller error over all 160 prompts, and the larger one over the 128 that XGBoost has seen."""
    pairs = [Pairs(torch.zeros(80, 2, 1), torch.cat([torch.full((80, 1), float(i)), torch.zeros(80, 1)], 1)) for i in (0, 1)]
    errors = torch.cat([torch.full((128, 2), 0.5), torch.zeros(32, 2)])

    def looped_way(own, seen=[]):  # noqa: B006
        start = sum(seen)
        seen.append(len(own.ys))
        return errors[start : start + len(own.ys)]

    ways = {"looped": [looped_way], "xgboost": [lambda own: torch.full((len(own.ys), 2), 0.45)]}
    found = measure(pairs, ways, slow=["xgboost"])
    assert found["looped"].curve.mean == pytest.approx([0.4, 0.4])
    claim = functions._claims("decision_tree", found)[1]
    assert (claim.holds, claim.measured) == (False, "0.5 against 0.45, on the first 128 prompts")


def test_ratios_and_curves_of_curves():
    assert mean_ratio([9.0, 2.0, 8.0], [1.0, 1.0, 2.0]) == pytest.approx(math.sqrt(8))
    assert mean_ratio([1.0, math.nan, 3.0], [1.0, 1.0, 1.0]) == pytest.approx(3)
    assert math.isnan(mean_ratio([1.0], [1.0]))
    one, two = single([1.0, 2.0], 5), single([3.0, 4.0], 7)
    both = joined([one, two])
    assert (both.mean, both.n_prompts) == ([2.0, 4.0], 5)


# Outcomes


def outcome(**changes):
    fields = dict(
        experiment="test",
        figures="Fig. 0",
        preset="tiny",
        settings={"tol": math.inf},
        panels=[
            Panel(
                "p",
                "x",
                "y",
                [
                    Line("a", [1, 2], single([0.5, math.nan], 3), by_seed=[[0.4, 1.0], [0.6, 1.0]], models_at=[2, 1]),
                    Line("b", [1], single([0.0]), "twin"),
                ],
            )
        ],
        sheet=Sheet("table", ["", "n", "value"], [["row", 1200, 0.12345], ["", None, 1e-7]]),
    )
    return Outcome(**(fields | changes))


def test_an_exact_baseline_leaves_the_models_room(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    limits = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: limits.extend(axes.get_ylim() for axes in figure.axes))
    lines = [Line("looped", [0, 1], single([1.0, 1e-3])), Line("least squares", [0, 1], single([1.0, 1e-15]), "baseline")]
    plot_outcome(outcome(panels=[Panel("", "x", "y", lines), Panel("", "x", "y", lines[1:])]), tmp_path / "it.png")
    assert limits[0][0] == pytest.approx(1e-4)
    assert limits[1][0] < 1e-8


@pytest.mark.parametrize("xs", [[1, 2], [math.nan, 1]], ids=["no y", "no pair"])
def test_a_figure_of_nothing_finite_is_drawn(tmp_path, xs):
    """Of values that are all NaN, and of finite ones at places that are not."""
    line = Line("looped", xs, single([math.nan] * 2 if xs[0] == 1 else [0.5, math.nan]))
    plot_outcome(outcome(panels=[Panel("p", "x", "y", [line], "xy")]), tmp_path / "it.png")
    assert (tmp_path / "it.png").read_bytes()[:4] == b"\x89PNG"


def test_outcomes_are_written_as_json_csv_and_pictures(tmp_path):
    one = outcome()
    one.save(tmp_path / "new")
    read = json.loads((tmp_path / "new" / "test.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert read["settings"] == {"tol": None}
    assert read["panels"][0]["lines"][0]["mean"] == [0.5, None]
    assert [one["by_seed"] for one in read["panels"][0]["lines"]] == [[[0.4, 1.0], [0.6, 1.0]], []]
    assert read["table"]["rows"] == [["row", 1200, 0.12345], ["", None, 1e-7]]
    lines = (tmp_path / "new" / "test.csv").read_text().splitlines()
    assert lines[0] == "panel,line,kind,at,mean,low,high,n_prompts,n_models"
    assert lines[1:] == ["p,a,looped,1,0.5,,,3,2", "p,a,looped,2,,,,3,1", "p,b,twin,1,0.0,,,0,0"]
    assert [(one["n_prompts"], one["prompts_at"], one["models_at"]) for one in read["panels"][0]["lines"]] == [
        (3, [3, 3], [2, 1]),
        (0, [0], [0]),
    ]
    for panels in (one.panels, [], [one.panels[0]] * 4):
        plot_outcome(dataclasses.replace(one, panels=panels), tmp_path / "test.png")
        assert (tmp_path / "test.png").read_bytes()[:4] == b"\x89PNG"
    assert len(outcome_tables(one)) == 1
    with pytest.raises(ValueError, match="a has 2 places and 1 values"):
        Line("a", [1, 2], single([1.0]))
    with pytest.raises(ValueError, match="a has 2 places and 1 models_at"):
        Line("a", [1, 2], single([1.0, 2.0]), models_at=[1])


def test_quick_looks_have_files_and_titles_of_their_own(tmp_path, monkeypatch):
    def variant(preset_name, **options):
        return Lab(preset_name, tmp_path, **options).variant

    assert variant("small") == variant("small", n_prompts=1280) == variant("small", n_prompts=5000) == ""
    assert variant("small", n_prompts=1279) == "_1279_prompts"
    assert variant("tiny", n_prompts=64, n_steps=1000) == "_1000_steps"
    assert variant("tiny", n_prompts=63, n_steps=1000) == "_1000_steps_63_prompts"
    monkeypatch.setattr(Lab, "models", lambda *args, **how: Models())
    settings = {"n_steps": 12, "n_prompts": 8, "seeds": [42, 7]}
    quick_look, whole = (run_experiment("probe", lab) for lab in (quick(tmp_path, seeds=[42, 7]), Lab("tiny", tmp_path)))
    assert quick_look.settings.items() >= settings.items()
    assert whole.settings.items() >= {"n_steps": None, "n_prompts": 64, "seeds": [42]}.items()
    assert (quick_look.stem, whole.stem) == ("probe_12_steps_8_prompts", "probe")
    titles = []
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda self, text: titles.append(text))
    given = {"a": {"source": "given: linear_regression"}}
    all_given = dataclasses.replace(quick_look, models=given)
    one_given = dataclasses.replace(whole, models=given | {"b": {"source": "trained: b"}})
    for one in (quick_look, whole, outcome(), all_given, one_given):
        one.save(tmp_path)
        plot_outcome(one, tmp_path / f"{one.stem}.png")
    assert titles == [
        "probe, preset tiny (Fig. 8)\n8 prompts; training seeds 42, 7; a quick look: every training 12 steps",
        "probe, preset tiny (Fig. 8)\n64 prompts; training seed 42",
        "test, preset tiny (Fig. 0)",
        "probe, preset tiny (Fig. 8)\n8 prompts; given: all models",
        "probe, preset tiny (Fig. 8)\n64 prompts; given: a; training seed 42",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{stem}.{kind}" for stem in ("probe", "probe_12_steps_8_prompts", "test") for kind in ("json", "csv", "png")
    }


@pytest.mark.parametrize(
    ("cell", "text"),
    [(1234, "1,234"), (None, "-"), (math.nan, "-"), ("b", "b"), (0.0, "0"), (0.01234, "0.0123"), (1e-4, "1.00e-04")],
)
def test_cells(cell, text):
    assert cell_text(cell) == text


# The command


def invoke(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_the_command_lists_and_runs(tmp_path):
    listed = invoke("experiment")
    assert all(name in listed.stdout for name in EXPERIMENTS)
    options = ("--preset", "tiny", "--steps", 3, "--prompts", 4, "--out", tmp_path, "--threads", 1)
    result = invoke("experiment", "fixed-point", *options, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["experiment"], report["settings"]["n_prompts"]) == ("fixed-point", 4)
    assert report["models"]["linear_regression"]["n_steps"] == 3
    assert report["models"]["linear_regression"]["source"] == "trained: linear_regression_steps_3"
    for kind in ("json", "csv", "png"):
        assert (tmp_path / f"fixed-point_3_steps_4_prompts.{kind}").stat().st_size > 100
    assert not list(tmp_path.glob("fixed-point.*")), "a quick look takes no measurement's place"
    assert f"wrote {tmp_path / 'fixed-point_3_steps_4_prompts'}.json" in result.stderr
    again = invoke("experiment", "fixed-point", *options)
    assert again.exit_code == 0
    assert "with injection" in again.stdout
    assert "training" not in again.stderr
    tied = dict(inject="none", state_init="embedding")
    looped.save_model(icl_model(n_dims=2, n_points=5, dtype=torch.float32, **tied), tmp_path / "mine")
    given = ("--models", f"linear_regression_tied={tmp_path / 'mine'}")
    listed = invoke("experiment", "fixed-point", "--list", *options, "--seeds", "42,43", *given)
    assert [line.endswith("to be trained") for line in listed.stdout.splitlines()] == [False, False, True, False, False, True]
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [
        "model",
        *("linear_regression", "linear_regression,", "linear_regression_tied"),
        *("linear_regression_unlooped", "linear_regression_unlooped,"),
    ]
    listed = json.loads(invoke("experiment", "fixed-point", "--list", "--json", *options, "--seeds", "42,43", *given).stdout)
    assert [(one["n_steps"], one["source"]) for one in listed] == [
        (3, "trained: linear_regression_steps_3"),
        (3, None),
        (None, f"given: {tmp_path / 'mine'}"),
        (3, "trained: linear_regression_unlooped_steps_3"),
        (3, None),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fixed"], "did you mean 'fixed-point'"),
        (["fixed-point", "--models", "x"], "NAME=FOLDER"),
        (["fixed-point", "--models", "x="], "NAME=FOLDER"),
        (["fixed-point", "--models", "x=a", "--models", "x=b"], "each NAME once"),
        (["fixed-point", "--models", "linear=linear_regression"], "uses no model 'linear'; did you mean 'linear_regression'"),
        (["fixed-point", "--seed", "-1"], "seed=-1 must be an integer"),
        (["fixed-point", "--data", "openml"], "reads no tables"),
        (["fixed-point", "--seeds", "a"], "a list such as"),
        (["fixed-point", "--preset", "big"], "is not one of"),
    ],
)
def test_wrong_commands_are_named(tmp_path, arguments, message):
    result = invoke("experiment", *arguments, "--out", tmp_path)
    assert result.exit_code == 2
    assert message in result.stderr


def test_without_any_model_nothing_takes_a_measurements_place(tmp_path, monkeypatch):
    looped.save_model(icl_model(n_dims=2, n_points=5, dtype=torch.float32), tmp_path / "mine")
    options = ("--preset", "tiny", "--prompts", 4, "--no-train", "--out", tmp_path / "out")
    measured = invoke("experiment", "fixed-point", *options, "--models", f"linear_regression={tmp_path / 'mine'}")
    assert measured.exit_code == 0, measured.stderr
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert "fixed-point_4_prompts.json" in before
    for name in ("fixed-point", "shift"):
        result = invoke("experiment", name, *options)
        assert result.exit_code == 2
        assert f"{name} has no model to measure, and no result was written; give models with --models or leave" in result.stderr
        assert f"(--list shows what {name} asks for)" in result.stderr
        assert result.stdout == ""
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_file_in_the_place_of_results_is_refused_first(tmp_path, monkeypatch):
    monkeypatch.setattr("looped.experiments.catalog.run_experiment", must_not_train)
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "deeper"):
        result = invoke("experiment", "fixed-point", "--preset", "tiny", "--out", out)
        assert result.exit_code == 2
        assert f"--out {out} takes a folder, and {tmp_path / 'file'} is a file" in result.stderr


def test_train_takes_seeds_and_the_unlooped_twin(tmp_path):
    result = invoke("train", "--preset", "tiny", "--unlooped", "--seeds", "1,2", "--out", tmp_path / "r", "--json")
    assert result.exit_code == 0, result.stderr
    folders = json.loads(result.stdout)
    assert [looped.load_model(folder).config.n_core for folder in folders] == [2, 2]
    assert looped.load_model(folders[0]).config == preset("tiny", unlooped=True).model


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta"])
def test_a_device_that_does_not_work_is_refused(tmp_path, device):
    with pytest.raises(ValueError, match=f"device='{device}' does not work here"):
        quick(tmp_path, device=device)
    result = invoke("train", "--preset", "tiny", "--device", device, "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert f"looped: device='{device}' does not work here" in result.stderr
    assert not (tmp_path / "run").exists()
    result = invoke("train", "--preset", "tiny", "--device", device, "--seeds", "1,2", "--out", tmp_path / "runs")
    assert (result.exit_code, (tmp_path / "runs").exists()) == (2, False)
