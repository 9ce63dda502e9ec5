"""`looped bench` and what stands below it: counts, rounds, rows, files, errors."""

import csv
import io
import json
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from click.testing import CliRunner
from models import icl_model
from rich.console import Console

import looped
from looped.bench import rounds
from looped.bench.latency import Sweep, measure, n_ways
from looped.bench.rounds import Way, interleaved, spread
from looped.bench.shapes import operations, random_model, shape_sizes
from looped.cli import main
from looped.environment import n_cores
from looped.exits import RULES, Contraction
from looped.icl.evaluate import batches
from looped.icl.prompts import interleave
from looped.icl.tasks import TASKS, LinearRegression
from looped.report.latency import LEAST_NEEDED, latency_table

pytest.importorskip("looped._engine", reason="the C++ engine is not built")


def run(*arguments):
    return CliRunner().invoke(main, ["bench", *(str(a) for a in arguments)])


def test_operations_of_a_loop():
    for name in ("C256H8T82", "C64H4T22"):
        C, _, T = shape_sizes(name)
        model = random_model(name)
        assert operations(model, T) == 24 * C**2 * T + 2 * T * (T + 1) * C
    full = icl_model(d_model=48, n_heads=3, mask_kind="full", n_core=2)
    assert operations(full, 7) == 2 * (24 * 48**2 * 7 + 4 * 7**2 * 48)


@pytest.mark.parametrize("name", ["C256", "C0H1T3", "C10H3T5", "256x8x82", f"C16H2T{10**12}", f"C{10**400}H1T3"])
def test_wrong_shapes_are_refused(name):
    with pytest.raises(ValueError, match="shape"):
        random_model(name)


def test_random_models_are_seeded_and_every_part_moves_the_state():
    model, again, other = (random_model("C24H2T9", seed=seed) for seed in (0, 0, 1))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        assert not torch.equal(weight, other.state_dict()[name])
    x = torch.randn(2, 9, 20, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(x)
        for name, weight in model.named_parameters():
            kept = weight.clone()
            weight.mul_(1.01) if "norm" not in name else weight.add_(0.01)
            is_key_bias = name == "core.0.attn.qkv.bias"  # half of it is: softmax takes no notice of a shift of all scores
            assert (model(x) - want).norm() > (1e-6 if is_key_bias else 3e-6) * want.norm(), name
            weight.copy_(kept)


def test_rounds_are_interleaved_and_prepared_after_a_warm_up():
    seen, clock = [], {"slow": 0.02, "slower": 0.04}

    def way(name):
        return Way(lambda: (seen.append(name), time.sleep(clock[name])), lambda: seen.append(f"prepare {name}"))

    told = []
    rounds = list(interleaved({name: way(name) for name in clock}, 3, sample_seconds=0.01, progress=told.append))
    pair = ["prepare slow", "slow", "prepare slower", "slower"]
    assert seen[-12:] == 3 * pair
    assert told == ["slow", "slower"] * 4
    for seconds in rounds:
        assert clock["slow"] <= seconds["slow"] < 0.04 <= seconds["slower"]
    with pytest.raises(ValueError, match="n_rounds=0"):
        next(interleaved({}, 0))


def test_short_calls_are_repeated_within_a_sample():
    count = []
    seconds = next(interleaved({"short": Way(lambda: (count.append(1), time.sleep(0.001)))}, 1, sample_seconds=0.02))["short"]
    assert 0.001 <= seconds < 0.02
    assert len(count) >= 8


def test_a_sample_goes_round_all_inputs_or_as_many_as_fit(monkeypatch):
    """Also those of a short call are counted a whole number of times, or the mean would lean to the first ones."""
    seen = []
    calls = [lambda i=i: seen.append(i) for i in range(3)]
    way = Way(calls[0], lambda: seen.append("prepare"), calls[1:])
    for room, n_calls in ((2.0, 9), (0.005, 2)):
        monkeypatch.setattr(rounds, "PASS_SECONDS", room)
        monkeypatch.setattr(rounds.time, "perf_counter", iter([0, 9, 0, 0.002, 0, 1]).__next__)
        (seconds,) = interleaved({"way": way}, 1, sample_seconds=0.015 if room == 2.0 else 0.001)
        assert seconds["way"] == 1 / n_calls
        last = len(seen) - seen[::-1].index("prepare")
        assert seen[last:] == [0, *(i % 3 for i in range(n_calls))]
        monkeypatch.undo()


def test_spread():
    assert spread([3.0, 1.0, 2.0]) == pytest.approx((2.0, 1.2, 2.8))


def test_measured_rows_say_what_ran():
    model = icl_model(std=0.1, dtype=torch.float32, n_dims=2, n_points=6)
    rule = Contraction(tol=1e-2)
    sweep = Sweep(loops=[0, 1, 150], batch_sizes=[1, 3], backends=["eager", "cpu"], threads=[1], exits=[None, rule])
    torch.set_num_threads(2)
    *_, latency = measure(model, sweep, name="tiny", n_tokens=9, task=LinearRegression(2), n_rounds=2)
    assert torch.get_num_threads() == 2
    assert latency.n_rounds == 2
    assert len(latency.rows) == n_ways(sweep) == 24
    by_key = {(row.backend, row.batch, row.exit, row.n_loops): row for row in latency.rows}
    for (_, batch, exit, n_loops), row in by_key.items():
        assert 0 < row.ms_p10 <= row.ms <= row.ms_p90
        if exit == "off" or n_loops < 2:
            assert row.mean_loops == n_loops
        else:
            assert 2 <= row.mean_loops < n_loops
        per_loop = 24 * 16**2 * 9 + 2 * 9 * 10 * 16
        assert row.gflops == pytest.approx(per_loop * batch * row.mean_loops / row.ms / 1e6)
        assert row.peak_fraction == pytest.approx(row.gflops / latency.fma_peak_gflops["1"], abs=1e-12)
        assert row.error == by_key["eager", 1, exit, n_loops].error  # of the same prompts, whatever the batch
    assert by_key["cpu", 1, "off", 1].error != by_key["cpu", 1, "off", 150].error


def test_with_an_exit_time_and_loops_are_of_many_prompts(monkeypatch):
    """64 of the seed whatever the batch size, so that they go with the error; fewer only where they take too long."""
    model = looped.load_pretrained("linear_regression")
    sweep = Sweep([60], [1, 24, 64, 80], ["cpu"], exits=[None, Contraction(tol=0.1)])

    def rows():
        *_, latency = measure(model, sweep, name="x", n_tokens=21, task=LinearRegression(5), n_rounds=1)
        return {(row.batch, row.exit): row for row in latency.rows}

    many = rows()
    assert {key: row.n_prompts for key, row in many.items()} == {
        **{(B, "off"): B for B in (1, 24, 64, 80)},
        **{(B, "contraction"): n for B, n in ((1, 64), (24, 72), (64, 64), (80, 80))},
    }
    assert many[1, "contraction"].mean_loops == many[64, "contraction"].mean_loops
    monkeypatch.setattr(rounds, "warm_up", lambda way, seconds: min(5, 1 + len(way.others)))  # no time for more
    few = rows()
    assert [few[B, "contraction"].n_prompts for B in (1, 24, 64)] == [5, 72, 64]
    pairs = next(batches(LinearRegression(5), 5, 11, 0, 5))
    first = looped.solve(model, interleave(pairs.xs, pairs.ys), n_loops=60, exit=Contraction(tol=0.1), on_stall="exit")
    assert few[1, "contraction"].mean_loops == first.n_loops.double().mean() != many[1, "contraction"].mean_loops


def test_the_error_is_that_of_the_evaluation():
    from looped.icl.evaluate import evaluate
    from looped.icl.predictor import LoopedPredictor

    model = looped.load_pretrained("linear_regression")
    sweep = Sweep(loops=[20], batch_sizes=[1], backends=["cpu"])
    *_, latency = measure(model, sweep, name="bundled", n_tokens=21, task=LinearRegression(5), n_rounds=1, seed=4)
    scored = evaluate(
        LinearRegression(5), [LoopedPredictor(model, n_loops=20)], n_prompts=512, n_points=11, seed=4, n_loops_settling=0
    )
    assert latency.rows[0].error == pytest.approx(scored.scores["looped"].error_by_examples.mean[-1], rel=1e-4)


def test_other_kinds_of_models_are_measured_too():
    tokens = looped.LoopedTransformer(looped.gpt2_config(11, 7, 16, 2, 1))
    states = looped.LoopedTransformer(
        looped.LoopedConfig(input_kind="states", readout="none", d_model=16, n_heads=2, n_positions=7, state_init="given")
    )
    for model in (tokens, states):
        *_, latency = measure(model, Sweep(loops=[2], batch_sizes=[2]), name="x", n_tokens=5, n_rounds=1)
        assert [row.backend for row in latency.rows] == ["cpu", "eager"]


def test_bench_writes_tables_files_and_the_picture(tmp_path):
    out = tmp_path / "out"
    options = ("--loops", "1,4", "--batch", "1:3:2", "--rounds", 2, "--threads", 1, "--task", "linear_regression")
    result = run(*options, "--out", out, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report == json.loads((out / "latency.json").read_text())
    assert (report["model"], report["n_tokens"], report["task"]) == ("linear_regression", 21, "linear_regression")
    assert {(r["batch"], r["n_loops"], r["backend"], r["exit"]) for r in report["rows"]} == {
        (B, L, backend, exit) for B in (1, 3) for L in (1, 4) for backend in ("cpu", "eager") for exit in ("off", "contraction")
    }
    assert (report["task_options"], report["n_dims"], report["seed"]) == ({}, 5, 0)
    rule = dict(rule="contraction", tol=3e-3, check_every=1, min_loops=0, scope="prompt", stall_window=16)
    for row in report["rows"]:
        assert row["stopping"] == (None if row["exit"] == "off" else rule | dict(on_stall="exit", accelerate=None))
    lines = list(csv.DictReader(io.StringIO((out / "latency.csv").read_text())))
    assert [float(line["ms"]) for line in lines] == [row["ms"] for row in report["rows"]]
    shared = dict(model="linear_regression", task="linear_regression", task_options="{}", n_dims="5", n_tokens="21", seed="0")
    for line, row in zip(lines, report["rows"], strict=True):
        assert line | shared | dict(n_rounds="2") == line
        settings = ("", "", "") if row["exit"] == "off" else ("0.003", "exit", "")
        assert (line["tol"], line["on_stall"], line["accelerate"]) == settings
    assert (out / "latency.png").read_bytes()[:4] == b"\x89PNG"
    assert "measuring" in result.stderr


def test_bench_of_a_shape_prints_a_table_or_csv():
    options = ("--shape", "C16H2T7", "--loops", "1", "--batch", "1", "--rounds", 1, "--threads", 1)
    table = run(*options)
    assert table.exit_code == 0, table.stderr
    assert "C16H2T7, 7 tokens, 1 round, 1 thread; FMA peak" in " ".join(table.stdout.split())
    rows = list(csv.DictReader(io.StringIO(run(*options, "--csv", "--backend", "eager").stdout)))
    assert [(row["backend"], row["exit"], row["error"]) for row in rows] == [("eager", "off", "")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "256"], "is not of the form C256H8T82"),
        (["--shape", f"C16H2T{10**12}"], "that fit into this machine; take smaller sizes"),
        (["--shape", "C16H2T7", "--checkpoint", "x"], "leave out MODEL, --checkpoint"),
        (["x", "--checkpoint", "y"], "are the same argument; give one"),
        (["--shape", "C16H2T7", "--task", "linear_regression"], "give a MODEL"),
        (["--exit", "fixed", "--on-stall", "damp"], "go with an exit rule"),
        (["--exit", "none", "--anderson", "1"], "go with an exit rule"),
        (["--exit", "exact", "--anderson", "1"], "leave out --anderson"),
        (["--loops", "1;2"], "--loops takes a list such as 1,5,20 or a range"),
        (["--loops", "9:1"], "--loops takes a list"),
        (["--batch", "0"], "integers of at least 1"),
        (["--backend", "gpu"], "is not one of auto, cpu, eager"),
        (["--exit", "contract"], "did you mean 'contraction'"),
        (["--exit", "none", "--tol", "0.1"], "--tol goes with an exit rule"),
        (["--task", "linear"], "unknown task 'linear'; did you mean"),
        (["--task-set", "sparsity=2"], "--task-set goes with --task"),
        (["--task", "linear_regression", "--tokens", "20"], "--tokens 20 must be odd with --task"),
        (["--tokens", "500"], "--tokens 500 is more than the model's 23 positions"),
        (["--json", "--csv"], "choose one"),
        (["--rounds", "0"], "0 is not in the range"),
    ],
)
def test_bad_use_is_exit_code_2_and_one_clear_line(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert "measuring" not in result.stderr


def test_a_lack_of_memory_is_one_line():
    result = run("--shape", "C16H2T7", "--batch", 2**50)
    assert result.exit_code == 1
    assert re.search(r"\nlooped: not enough memory: .+\n$", result.stderr)


def test_help_lists_the_rules_and_the_tasks():
    shown = " ".join(run("--help").stdout.split())
    assert f"Exit rules: {', '.join(RULES)}." in shown
    assert f"Tasks: {', '.join(TASKS)}." in shown


def test_the_model_is_an_argument_and_fixed_is_no_second_exit():
    result = run("linear_regression", "--exit", "fixed", "--loops", 2, "--batch", 1, "--rounds", 1, "--threads", 1, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [(row["backend"], row["exit"]) for row in report["rows"]] == [("cpu", "off"), ("eager", "off")]
    assert report["model"] == "linear_regression"


def test_stalls_and_acceleration_reach_the_exits_rows_alone():
    options = ("--loops", 100, "--batch", 4, "--rounds", 1, "--threads", 1, "--task", "linear_regression", "--backend", "cpu")
    plain, faster = (json.loads(run(*options, "--json", *more).stdout)["rows"] for more in ((), ("--anderson", 2)))
    assert [row["mean_loops"] for row in (plain[0], faster[0])] == [100, 100]
    assert [row["stopping"]["accelerate"] for row in (plain[1], faster[1])] == [None, "anderson(2)"]
    assert plain[0]["error"] == faster[0]["error"]
    assert faster[1]["mean_loops"] < plain[1]["mean_loops"]
    assert faster[1]["error"] != plain[1]["error"]
    model = looped.load_pretrained("linear_regression")
    seen = []
    for on_stall in ("ignore", "damp"):
        sweep = Sweep([100], [16], ["cpu"], exits=[None, Contraction(tol=1e-7, stall_window=3)], on_stall=on_stall)
        *_, latency = measure(model, sweep, name="x", n_tokens=21, task=LinearRegression(5), n_rounds=1)
        seen.append([row.error for row in latency.rows])
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] != seen[1][1]


def test_the_task_has_the_numbers_that_the_model_was_trained_with():
    options = ("sparse_linear_regression", "--task", "sparse_linear_regression", "--loops", 2, "--batch", 8, "--rounds", 1)
    options = (*options, "--threads", 1, "--backend", "cpu", "--json", "--exit", "none")
    own, same, other = (run(*options, *more) for more in ((), ("--task-set", "sparsity=2"), ("--task-set", "sparsity=5")))
    errors = [json.loads(result.stdout)["rows"][0]["error"] for result in (own, same, other)]
    assert errors[0] == errors[1] != errors[2]
    assert "was trained on" not in own.stderr
    assert "was trained on SparseLinearRegression(n_dims=8, sparsity=2), not on" in other.stderr


def test_prompts_are_as_long_as_those_of_training(tmp_path):
    options = ("--loops", 1, "--batch", 1, "--rounds", 1, "--threads", 1, "--backend", "cpu", "--exit", "none", "--json")
    for task in ((), ("--task", "relu_2nn_regression"), ("--task", "linear_regression")):
        result = run("relu_2nn_regression", *options, *task)
        assert json.loads(result.stdout)["n_tokens"] == 41
        assert "never trained" not in result.stderr
    model = looped.load_pretrained("relu_2nn_regression")
    looped.save_model(model, tmp_path / "model")
    assert json.loads(run(tmp_path, *options).stdout)["n_tokens"] == 17  # no run: those that eval draws
    for n_tokens, told in ((41, False), (42, True), (43, True)):
        result = run("relu_2nn_regression", *options, "--tokens", n_tokens)
        beyond = "looped: the model was trained on prompts of 21 points; those from 22 to 22 were never trained\n"
        assert (beyond in result.stderr) is told
    (tmp_path / "train.json").write_text('{"task": 3}')
    result = run(tmp_path, *options, "--task", "relu_2nn_regression")
    report = json.loads(result.stdout)
    assert (report["n_tokens"], report["task_options"], report["n_dims"]) == (17, {"hidden": 100}, 4)
    assert f"looped: it is not known what the model was trained on: {tmp_path}/train.json describes no run (" in result.stderr
    assert "; numbers of the family and tokens of a prompt are the defaults, where not given\n" in result.stderr


def test_more_threads_than_cores_are_not_measured():
    options = ("--shape", "C16H2T7", "--loops", 1, "--batch", 1, "--rounds", 1, "--json")
    result = run(*options, "--threads", "1,1000")
    assert {row["threads"] for row in json.loads(result.stdout)["rows"]} == {1, n_cores()}
    assert "looped: 1000 threads on" in result.stderr


def test_the_table_fits_its_terminal_with_its_errors_whole():
    row = dict(backend="eager", threads=1, batch=64, exit="contraction", n_loops=100, mean_loops=61.25, error=0.0019876)
    row |= dict(n_prompts=64, ms=123.4, ms_p10=120.0, ms_p90=1234.0, ms_per_loop=2.01, gflops=104.2, peak_fraction=0.8)
    report = dict(model="x", n_tokens=21, n_rounds=5, rows=[row], fma_peak_gflops={"1": 113.0}, task=None)
    for width, left_out in ((100, {"threads"}), (90, {"threads", "ms a loop"}), (78, {"threads", *LEAST_NEEDED})):
        console = Console(width=width, file=io.StringIO())
        console.print(table := latency_table(report, width))
        assert not {column.header for column in table.columns} & left_out
        text = console.file.getvalue()
        assert "0.002" in text
        assert "…" not in text
    several = latency_table(report | {"rows": [row, row | {"threads": 2}]})
    assert {"threads", "ms a loop"} <= {column.header for column in several.columns}


def test_the_table_says_what_was_measured_and_of_how_many_prompts():
    row = dict(backend="cpu", threads=1, batch=1, exit="off", n_loops=1, mean_loops=1, n_prompts=1, ms=1, ms_p10=1, ms_p90=1)
    row |= dict(ms_per_loop=1, gflops=1, peak_fraction=None, error=None)
    report = dict(model="runs/a", n_tokens=17, n_rounds=5, fma_peak_gflops={}, task="sparse_linear_regression")
    report |= dict(task_options={"sparsity": 2}, n_dims=8)
    with_exit = [row | dict(exit="contraction", n_prompts=n) for n in (64, 7, 80)]
    table = latency_table(report | {"rows": [row, *with_exit]})
    assert table.title == "runs/a on sparse_linear_regression, sparsity 2, 8 dimensions, 17 tokens, 5 rounds, 1 thread"
    assert table.caption == "with an exit, ms and loops used are means over 7 to 80 prompts"
    assert latency_table(report | {"rows": [row, with_exit[0]]}).caption.endswith("means over 64 prompts")
    assert latency_table(report | {"rows": [row]}).caption is None


def test_an_interrupt_keeps_the_finished_rounds(tmp_path):
    options = ["--shape", "C16H2T7", "--loops", "1", "--batch", "1", "--rounds", "100000", "--threads", "1", "--json"]
    command = [sys.executable, "-u", "-m", "looped.cli", "bench", *options, "--out", str(tmp_path)]
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  a shell may have it ignored for background jobs
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=heed)
    text = ""
    while not re.search(r"\| (?!0/|1/|2/|3/|4/)\d+/", text):  # two ways, warmed up, and a round at least
        text += (more := process.stderr.read(60))
        assert more, "the bench ended by itself"
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    report = json.loads(out)
    assert report["n_rounds"] >= 1
    assert report == json.loads((tmp_path / "latency.json").read_text())
    assert f"interrupted after {report['n_rounds']} of 100000 rounds, which " in errors
