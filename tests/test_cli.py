"""The command line: results, standard output for programs, exit codes, errors in one line."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from click.testing import CliRunner
from models import icl_model

import looped
import looped.cli.evaluate
from looped.cli import main
from looped.pretrained import bundled_models
from looped.train import preset
from looped.train.trainer import Run


@pytest.fixture
def model_folder(tmp_path):
    looped.save_model(icl_model(std=0.1, dtype=torch.float32, n_dims=2, n_points=6), tmp_path / "model")
    return tmp_path / "model"


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_eval_prints_json_alone_on_standard_output(model_folder, tmp_path):
    result = run("eval", model_folder, "--prompts", 6, "--json", "--out", tmp_path / "out", "--twin", model_folder)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["task"], report["n_prompts"], report["n_points"], report["n_loops_trained"]) == (
        "linear_regression",
        6,
        5,
        6,
    )
    assert {"looped", tmp_path.name, "least_squares", "averaging"} <= set(report["predictors"])
    assert report["predictors"]["looped"]["exit"]["rule"] == "contraction"
    for name in ("evaluation.json", "evaluation.csv", "evaluation.png"):
        assert (tmp_path / "out" / name).stat().st_size > 100
    assert (tmp_path / "out" / "evaluation.png").read_bytes()[:4] == b"\x89PNG"
    assert "evaluating" in result.stderr


def commands_with_files(model_folder, out):
    """Commands that show a result and keep it, and the files that they leave."""
    one = ["eval", model_folder, "--prompts", 4, "--no-baselines", "--no-settling", "--out", out]
    given = ("--models", f"linear_regression={model_folder}", "--no-train", "--prompts", 4)
    several = ["experiment", "fixed-point", "--preset", "tiny", *given, "--out", out]
    return {"eval": (one, "evaluation"), "experiment": (several, "fixed-point_4_prompts")}


@pytest.mark.parametrize(
    ("command", "options", "output"), [("eval", ["--json"], "full"), ("experiment", [], "closed")], ids=["eval", "experiment"]
)
def test_a_result_that_cannot_be_shown_is_kept(command, options, output, model_folder, tmp_path):
    arguments, stem = commands_with_files(model_folder, tmp_path / "out")[command]
    if output == "full":
        stdout = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stdout = os.pipe()
        os.close(reader)
    try:
        line = [sys.executable, "-m", "looped.cli", *map(str, arguments), *options]
        done = subprocess.run(line, stdout=stdout, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(stdout)
    assert done.returncode != 0
    assert json.loads((tmp_path / "out" / f"{stem}.json").read_text())
    assert (tmp_path / "out" / f"{stem}.png").read_bytes()[:4] == b"\x89PNG"
    assert f"wrote {tmp_path / 'out'}" in done.stderr


@pytest.mark.parametrize("command", ["eval", "experiment"])
def test_a_result_that_cannot_be_kept_is_shown(command, model_folder, tmp_path):
    arguments, stem = commands_with_files(model_folder, tmp_path / "out")[command]
    (tmp_path / "out" / f"{stem}.json").mkdir(parents=True)
    result = run(*arguments, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)
    assert f"{stem}.json" in result.stderr


def test_eval_takes_the_folder_of_a_run_and_names_the_bundled_models(model_folder):
    options = ("--prompts", 3, "--no-baselines", "--no-settling", "--loops", 4, "--json")
    of_run, of_model = (run("eval", folder, *options) for folder in (model_folder.parent, model_folder))
    assert of_run.exit_code == 0, of_run.stderr
    scores = [json.loads(result.stdout)["predictors"]["looped"]["error_by_examples"] for result in (of_run, of_model)]
    assert scores[0] == scores[1]
    for name in ("nosuch", "--twin=nosuch"):
        result = run("eval", name)
        assert result.exit_code == 2
        assert (
            "'nosuch' is neither a folder or file nor a bundled model (decision_tree, linear_regression, linear_"
            in result.stderr
        )


def test_eval_draws_what_the_model_was_trained_on(tmp_path):
    """Family, its numbers and the pairs in a prompt come from the run's train.json, in its folder and in a model's."""
    options = ("--prompts", 2, "--no-baselines", "--no-settling", "--loops", 2, "--json")
    report = json.loads(run("eval", "sparse_linear_regression", *options).stdout)
    assert (report["task"], report["task_options"], report["n_points"]) == ("sparse_linear_regression", {"sparsity": 2}, 17)
    relu = ("--preset", "tiny", "--task", "relu_2nn_regression", "--set", "n_steps=2", "--set", "keep_every=1")
    assert run("train", *relu, "--out", tmp_path / "run").exit_code == 0
    for folder in ("run", "run/model", "run/model_1"):
        report = json.loads(run("eval", tmp_path / folder, *options).stdout)
        assert (report["task"], report["task_options"], report["n_points"]) == ("relu_2nn_regression", {"hidden": 4}, 5)
    other = run("eval", tmp_path / "run", *options, "--task-set", "hidden=3", "--points", 4)
    report = json.loads(other.stdout)
    assert (report["task_options"], report["n_points"]) == ({"hidden": 3}, 4)
    assert "was trained on ReLURegression(n_dims=2, hidden=4), not on ReLURegression(n_dims=2, hidden=3)" in other.stderr
    other = run("eval", tmp_path / "run", *options, "--task", "linear_regression")
    assert json.loads(other.stdout)["task_options"] == {}
    assert "not on LinearRegression(n_dims=2)" in other.stderr
    (tmp_path / "run" / "train.json").write_text('{"task": 3}')
    damaged = run("eval", tmp_path / "run", *options)
    assert damaged.exit_code == 2
    assert "give --task" in damaged.stderr
    result = run("eval", tmp_path / "run", *options, "--task", "relu_2nn_regression")
    assert json.loads(result.stdout)["task_options"] == {"hidden": 100}
    damaged = f"{tmp_path}/run/train.json describes no run ('model' is missing)"
    assert f"looped: it is not known what the model was trained on: {damaged}" in result.stderr
    assert "; numbers of the family and pairs in a prompt are the defaults, where not given\n" in result.stderr


FAST = ("--prompts", 2, "--no-baselines", "--no-settling", "--loops", 2)


def test_a_model_without_its_run_is_scored_on_linear_regression_and_told_so(model_folder, monkeypatch):
    scored_on = "scored on linear_regression, 2 dimensions; give --task if it was trained on others\n"
    result = run("eval", model_folder, *FAST)
    assert f"looped: no train.json beside {model_folder}: {scored_on}" in result.stderr
    for known in ((model_folder, "--task", "linear_regression"), ("linear_regression",)):
        assert "scored on" not in run("eval", *known, *FAST).stderr
    monkeypatch.setattr(looped.cli.evaluate, "load_model_of", lambda source, fields, **how: looped.load_model(source))
    foreign = run("eval", model_folder, *FAST, "--set", "n_loops=6")
    assert f"looped: --set reads no train.json: {scored_on}" in foreign.stderr


@pytest.fixture
def run_folder(tmp_path):
    """Of a run on ReLU networks of 4 units, 2 dimensions, 5 points."""
    result = run("train", "--preset", "tiny", "--task", "relu_2nn_regression", "--set", "n_steps=1", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    return tmp_path / "run"


def test_the_run_is_found_from_inside_the_model_and_through_links(run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(run_folder / "model")
    (tmp_path / "link").symlink_to(run_folder / "model")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model").symlink_to(run_folder / "model")
    (tmp_path / "other" / "train.json").write_text(
        (run_folder / "train.json").read_text().replace('"hidden": 4', '"hidden": 7')
    )
    for source, hidden in ((".", 4), (tmp_path / "link", 4), (tmp_path / "other" / "model", 7)):
        report = json.loads(run("eval", source, *FAST, "--json").stdout)
        assert (report["task"], report["task_options"]) == ("relu_2nn_regression", {"hidden": hidden})


def test_titles_name_the_task_its_numbers_and_the_dimensions(monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure.get_suptitle()))
    result = run("eval", "sparse_linear_regression", *FAST, "--out", tmp_path)
    shown = " ".join(result.stdout.split())
    assert "sparse_linear_regression, sparsity 2, 8 dimensions: squared error / variance of y, by examples in the" in shown
    assert drawn == ["sparse linear regression, sparsity 2, 8 dimensions, 2 prompts"]


def test_points_beyond_the_trained_ones_are_told(run_folder, tmp_path):
    longer = icl_model(std=0.1, dtype=torch.float32, n_dims=2, n_points=6)
    looped.save_model(longer, run_folder / "model")
    record = json.loads((run_folder / "train.json").read_text()) | {"model": longer.config.to_dict()}
    record["loops"]["end"] = longer.config.n_loops
    (run_folder / "train.json").write_text(json.dumps(record))
    for points, told in ((5, False), (6, True)):
        result = run("eval", run_folder, *FAST, "--points", points, "--twin", run_folder / "model")
        assert result.exit_code == 0, result.stderr
        for who in ("the model", f"the twin {run_folder / 'model'}"):
            beyond = f"looped: {who} was trained on prompts of 5 points; those from 6 to 6 were never trained\n"
            assert (beyond in result.stderr) is told


@pytest.mark.parametrize(
    ("source", "changes", "name"),
    [
        ("runs/a", dict(inject="none", state_init="embedding"), "weight-tied twin"),
        ("runs/a", dict(inject="none", state_init="embedding", n_loops=1), "a"),
        ("runs/a", dict(state_init="embedding"), "a"),
        ("runs/a/model", {}, "a"),
        ("runs/a/model_40", {}, "a/model_40"),
        ("runs/a/state.pt", {}, "a/state.pt"),
        ("looped", {}, "looped (twin)"),
        ("least_squares", {}, "least_squares (twin)"),
        ("weight-tied twin", {}, "weight-tied twin (twin)"),
        ("linear_regression_unlooped", {}, "linear_regression_unlooped"),
    ],
)
def test_a_twin_has_the_name_of_what_it_is(source, changes, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / source
    if path.suffix:
        path.parent.mkdir(parents=True)
        path.touch()
    elif not source.startswith("linear"):
        path.mkdir(parents=True)
    config = icl_model(**changes).config
    assert looped.cli.evaluate._name_of_twin(source, config, {"looped", "least_squares"}) == name
    if path.is_dir():
        monkeypatch.chdir(path)
        assert looped.cli.evaluate._name_of_twin(".", config, {"looped", "least_squares"}) == name


def test_the_report_names_the_models(model_folder, tmp_path):
    model_folder.rename(tmp_path / "looped")
    result = run("eval", tmp_path / "looped", *FAST, "--twin", tmp_path / "looped", "--out", tmp_path / "out", "--json")
    report = json.loads(result.stdout)
    assert list(report["predictors"]) == ["looped", "looped (twin)"]
    assert (report["model"], report["twin"]) == (str(tmp_path / "looped"), str(tmp_path / "looped"))
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == report
    report = json.loads(run("eval", *FAST, "--json").stdout)
    assert list(report["predictors"]) == ["looped", "weight-tied twin"]
    assert (report["model"], report["twin"]) == ("linear_regression", "linear_regression_tied")
    assert json.loads(run("eval", "linear_regression", *FAST, "--json").stdout)["twin"] is None


def test_a_twin_that_was_trained_on_something_else_is_told(run_folder, model_folder):
    result = run("eval", model_folder, *FAST, "--twin", run_folder)
    trained, drawn = "ReLURegression(n_dims=2, hidden=4)", "LinearRegression(n_dims=2)"
    assert f"looped: the twin {run_folder} was trained on {trained}, not on {drawn}\n" in result.stderr
    assert "was trained on" not in run("eval", run_folder, *FAST, "--twin", run_folder).stderr
    (run_folder / "train.json").write_text('{"task": 3}')
    result = run("eval", model_folder, *FAST, "--twin", run_folder)
    assert result.exit_code == 0, result.stderr
    assert "; whether the twin was trained on what is drawn is not known\n" in result.stderr


@pytest.mark.parametrize(("name", "last"), [("linear_regression_unlooped", 0.004), ("sparse_linear_regression_unlooped", 0.06)])
def test_eval_runs_an_unlooped_model_once(name, last):
    report = json.loads(run("eval", name, "--prompts", 256, "--no-baselines", "--json").stdout)
    score = report["predictors"]["unlooped"]
    assert score["error_by_examples"]["mean"][-1] <= last
    assert (score["mean_loops"], len(score["error_by_loops"]["mean"])) == (1, 1)
    assert "settling" not in score


def test_without_a_model_the_bundled_one_is_scored_whatever_folder_has_its_name(tmp_path, model_folder, monkeypatch):
    """Trainings of `looped experiment` leave folders of the bundled models' names."""
    model_folder.rename(tmp_path / "linear_regression")
    monkeypatch.chdir(tmp_path)
    fast = ("--loops", 1, "--batch", 1, "--rounds", 1, "--backend", "eager", "--json")
    for source, n_points, n_tokens in (((), 11, 21), (("linear_regression",), 5, 9)):
        assert json.loads(run("eval", *source, *FAST, "--json").stdout)["n_points"] == n_points
        assert json.loads(run("bench", *source, *fast).stdout)["n_tokens"] == n_tokens


def test_eval_calls_a_weight_tied_model_so():
    report = json.loads(run("eval", "linear_regression_tied", *FAST, "--json").stdout)
    assert list(report["predictors"]) == ["weight-tied"]


def test_eval_trusts_no_record_of_another_model_or_program(tmp_path, model_folder):
    options = ("--prompts", 2, "--no-baselines", "--no-settling", "--loops", 2, "--json")
    record = model_folder.parent / "train.json"
    record.write_text('[{"text": "data of another program"}]')
    result = run("eval", model_folder, *options)
    assert result.exit_code == 0, result.stderr
    assert "no train.json beside" in result.stderr
    record.write_text(json.dumps(preset("tiny", "relu_2nn_regression").to_dict()))
    result = run("eval", model_folder, *options)
    assert result.exit_code == 2
    assert f"{record} is of another model; give --task" in result.stderr
    result = run("eval", model_folder, *options, "--task", "linear_regression")
    assert result.exit_code == 0
    assert f"{record} is of another model; numbers of the family" in result.stderr


def test_a_twin_may_have_any_name(model_folder, tmp_path):
    looped.save_model(looped.load_model(model_folder), tmp_path / "a[red]c")
    options = ("--prompts", 2, "--no-baselines", "--no-settling", "--loops", 2)
    assert "a[red]c: loops" in run("eval", model_folder, "--twin", tmp_path / "a[red]c", *options).stdout


def test_eval_prints_tables(model_folder):
    result = run("eval", model_folder, "--prompts", 3, "--no-baselines", "--no-settling", "--exit", "fixed", "--loops", 4)
    assert result.exit_code == 0, result.stderr
    assert "loops used, mean" in result.stdout
    assert "4.0" in result.stdout
    assert "against all" not in result.stdout  # 30 loops are shown, and 4 were made


def test_eval_says_how_far_the_exit_moves_the_error(model_folder, tmp_path):
    result = run("eval", model_folder, "--prompts", 3, "--no-baselines", "--no-settling", "--tol", 0.3, "--out", tmp_path)
    score = json.loads((tmp_path / "evaluation.json").read_text())["predictors"]["looped"]
    change = score["error_by_examples"]["mean"][-1] / score["error_by_loops"]["mean"][29] - 1
    assert change != 0
    assert f"({change:+.1%} against all 30 loops)" in result.stdout


def test_a_changed_checkpoint_gives_a_changed_result(model_folder):
    options = ("--prompts", 4, "--no-baselines", "--no-settling", "--json")
    first = json.loads(run("eval", model_folder, *options).stdout)
    assert json.loads(run("eval", model_folder, *options).stdout) == first
    looped.save_model(icl_model(std=0.1, seed=9, dtype=torch.float32, n_dims=2, n_points=6), model_folder)
    assert json.loads(run("eval", model_folder, *options).stdout) != first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "--task", "linear"], "unknown task 'linear'; did you mean"),
        (["eval", "--exit", "contract"], "did you mean 'contraction'"),
        (["eval", "--tol", "-1"], "tol=-1.0 must be a number of at least 0"),
        (["eval", "--prompts", "0"], "0 is not in the range"),
        (["eval", "--points", "50", "--prompts", "2"], "positions"),
        (["eval", "--points", "8", "--prompts", "2"], "has positions for 7 points, and 8 are asked for; give --points 7"),
        (["eval", "--seed", "-1"], "-1 is not in the range"),
        (["eval", "--twin", "linear_regression"], "the twin linear_regression reads 5 dimensions, and the model 2"),
        (["eval", "--twin", ""], "the name of a model is empty"),
        (
            ["eval", "--task", "noisy_linear_regression", "--task-set", "std=1e308"],
            "std=1e+308 must lie in 0 .. 1e+37, as y is float32",
        ),
        (["eval", "--sett"], "No such option"),
        (["eval", "--task-set", "sparsity"], "--task-set takes KEY=VALUE, got 'sparsity'"),
        (["eval", "--task-set", "n_dims=3"], "--task-set takes no n_dims: the model has 2 dimensions"),
        (["eval", "--task", "sparse_linear_regression", "--task-set", "sparsity=1.5"], "sparsity=1.5 must be an integer"),
        (["eval", "--task", "tabular"], "looped experiment tabular"),
        (["eval", "--task", "sparse_linear_regression", "--task-set", "sparsity=9"], "sparsity=9 must lie in 1 .. n_dims=2"),
        (["train"], "Missing option '--out'"),
        (["train", "--out", "{tmp}/r", "--set", "n_step=3"], "did you mean 'n_steps'"),
        (["train", "--out", "{tmp}/r", "--set", "n_steps"], "KEY=VALUE"),
        (["train", "--out", "{tmp}/r", "--set", "n_loops=20"], "--set n_loops is of the model, which the preset gives"),
        (["train", "--out", "{tmp}/r", "--set", "loops=20"], "loops end at 20 but the model runs 30; change both"),
        (
            ["train", "--preset", "tiny", "--out", "{tmp}/r", "--seeds", "42", "--set", "seed=7"],
            "--seeds 42 and --set seed=7 are the same",
        ),
        (["train", "--preset", "tiny", "--out", "{tmp}/r", "--set", "lr=fast"], "lr='fast' must be a number"),
        (["train", "--preset", "tiny", "--out", "{tmp}/r", "--seeds", ""], "--seeds takes a list such as 1,5,20"),
        (["train", "--preset", "tiny", "--out", "{tmp}/r", "--seeds", "1,1,2"], "seeds of their own, got [1, 1, 2]"),
        (["train", "--preset", "tiny", "--out", "{tmp}/r", "--seeds", "1:3,2"], "seeds of their own, got [1, 2, 2, 3]"),
        (["train", "--preset", "tiny", "--out", "{tmp}/r", "--seeds", "0:99999999999999"], "more than 10,000 integers"),
        (["train", "--preset", "tiny", "--out", ""], "--out takes the name of a folder, got ''"),
        (["train", "--preset", "tiny", "--out", "{tmp}/r", "--set", f"n_steps={10**23}"], "must be below 2^31"),
        (
            ["experiment", "fixed-point", "--preset", "tiny", "--out", "{tmp}/r", "--list", "--seeds", "1,1,2"],
            "seeds=[1, 1, 2] must be one or more, each once",
        ),
        (["nothing"], "No such command"),
    ],
)
def test_bad_use_is_exit_code_2_and_one_clear_line(arguments, message, tmp_path, model_folder):
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    if arguments[0] == "eval":
        arguments.insert(1, str(model_folder))
    result = run(*arguments)
    assert result.exit_code == 2, result.stderr
    assert message in result.stderr
    assert "evaluating" not in result.stderr, "refused before anything runs"
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_an_empty_name_is_not_the_bundled_model():
    result = run("eval", "", "--prompts", 2)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the name of a model is empty" in result.stderr


def test_eval_shows_a_model_whose_errors_are_not_finite_or_huge(model_folder, tmp_path):
    model = looped.load_model(model_folder)
    options = ("--prompts", 3, "--no-baselines", "--exit", "fixed", "--out", tmp_path / "out")
    for value, shown in ((math.nan, "looped: not finite for 3 of 3 prompts with 0 examples"), (1e37, "e+")):
        with torch.no_grad():
            model.read_out.weight.fill_(value)
        looped.save_model(model, tmp_path / "broken")
        result = run("eval", tmp_path / "broken", *options)
        assert result.exit_code == 0, result.stderr
        assert shown in (result.stderr if value != value else result.stdout)
        assert not re.search(r"\d{10}", result.stdout)
        assert (tmp_path / "out" / "evaluation.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (TypeError("rand(): failed to unpack\nException raised from unpack at x.cpp\n#1 ..."), 2, "rand(): failed to unpack"),
        (RuntimeError("Storage size calculation overflowed with sizes=[9]\n#1"), 1, "not enough memory: Storage size calc"),
        (RuntimeError("can't allocate memory\n#1"), 1, "not enough memory: can't allocate memory"),
    ],
)
def test_an_error_of_pytorch_is_one_line(error, code, message, tmp_path, monkeypatch):
    def fail(self):
        raise error

    monkeypatch.setattr(Run, "advance", fail)
    result = run("train", "--preset", "tiny", "--out", tmp_path / "r")
    assert result.exit_code == code, result.exception
    lines = [line for line in result.stderr.splitlines() if line.startswith("looped: ")]
    assert result.stderr.endswith(lines[-1] + "\n")
    assert lines[-1].startswith(f"looped: {message}")


def test_missing_and_damaged_models(tmp_path, model_folder):
    result = run("eval", tmp_path / "absent")
    assert result.exit_code in (1, 2)
    assert "absent" in result.stderr
    weights = model_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = run("eval", model_folder)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_train_then_eval(tmp_path):
    result = run("train", "--preset", "tiny", "--out", tmp_path / "run", "--threads", 1, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["step"] == 12
    again = run("train", "--preset", "tiny", "--out", tmp_path / "run")
    assert again.exit_code == 2
    assert "resume it or choose another folder" in again.stderr
    result = run("eval", tmp_path / "run" / "model", "--prompts", 2, "--no-baselines", "--json")
    assert json.loads(result.stdout)["n_dims"] == 2


def test_info_names_versions_devices_and_backends():
    report = json.loads(run("info", "--json").stdout)
    assert report["versions"]["torch"] == torch.__version__
    assert set(report) == {"versions", "devices", "backends", "models"}
    assert "eager" in report["backends"]
    assert "torch" in run("info").stdout


def test_info_shows_paths_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    shown = "".join(line.split("│")[2].strip() for line in run("info").stdout.splitlines() if line.count("│") == 3)
    assert bundled_models()["linear_regression"] in shown


def in_new_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_light():
    heavy = ("transformers", "matplotlib", "sklearn", "scipy", "pandas", "triton")
    assert in_new_process(f"import sys, looped; print([m for m in {heavy} if m in sys.modules])").strip() == "[]"
    seconds = "import time, torch; t = time.time(); import looped; print(time.time() - t)"
    best = min(float(in_new_process(seconds)) for _ in range(3))
    assert best < 1.5


def interrupted_eval(*arguments, wait_for, again_after=None):
    """Ctrl-C when the bar shows what is waited for, and again after some seconds: exit code, standard output and error."""
    command = [sys.executable, "-u", "-m", "looped.cli", "eval", *map(str, arguments), "--prompts", "1000000", "--threads", "1"]
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  a shell may have it ignored for background jobs
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=heed)
    text = ""
    while not re.search(wait_for, text):
        text += (more := process.stderr.read(20))
        assert more, f"eval ended by itself: {text}"
    process.send_signal(signal.SIGINT)
    if again_after:
        time.sleep(again_after)
        process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    return process.returncode, out, errors


@pytest.mark.parametrize("again_after", [None, 0.3], ids=["once", "twice"])
def test_an_interrupt_of_eval_keeps_the_finished_prompts(again_after, model_folder, tmp_path):
    options = ("--no-baselines", "--no-settling", "--batch", 4, "--json", "--out", tmp_path / "out")
    code, out, errors = interrupted_eval(model_folder, *options, wait_for=r"\| [1-9]\d*/1000000", again_after=again_after)
    assert code == 130, errors
    report = json.loads(out)
    n_prompts = report["n_prompts"]
    assert 4 <= n_prompts < 1000000
    assert n_prompts % 4 == 0
    assert report["predictors"]["looped"]["error_by_examples"]["n_prompts"] == n_prompts
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == report
    assert (tmp_path / "out" / "evaluation.png").stat().st_size > 100
    *_, wrote, last = errors.splitlines()
    assert wrote == f"looped: wrote {tmp_path}/out/evaluation.json, .csv and .png"
    assert last == f"looped: interrupted after {n_prompts} of 1000000 prompts, which are shown"


def test_an_interrupt_of_eval_before_anything_is_finished_says_so(model_folder):
    code, out, errors = interrupted_eval(model_folder, "--batch", 1000000, wait_for=r"\| 0/\d+")
    assert code == 130, errors
    assert errors.splitlines()[-1].startswith("looped: interrupted")
    assert "which are shown" not in errors
    assert out == ""
