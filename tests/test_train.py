"""Training: the recipe's numbers, resuming bit for bit, and what survives an interrupt, a crash and a full disk."""

import dataclasses
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from labs import needs_muon

import looped
from looped import checkpoint
from looped.icl.prompts import interleave
from looped.train import Ramp, TrainConfig, preset, train, trainer
from looped.train.recipe import PAPER
from looped.train.shortfall import shortfall
from looped.train.trainer import Run, window_errors

LARGE = ("batch_size", "n_steps", "warmup_steps", "extra_loops", "settle_from", "save_every", "keep_every")
SETTLING = dict(rest_weight=3.0, extra_loops=3, settle_from=4)


def tiny(**changes):
    return preset("tiny", **changes)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def crash_after(n, advance=Run.advance):
    """`Run.advance` that crashes at its call n + 1."""
    calls = []

    def advance_or_crash(self):
        calls.append(1)
        if len(calls) > n:
            raise RuntimeError("power cut")
        return advance(self)

    return advance_or_crash


def test_curricula_grow_as_published():
    config = preset("paper")
    assert [config.dims.at(s) for s in (0, 4999, 5000, 74_999, 75_000, 499_999)] == [5, 5, 6, 19, 20, 20]
    assert [config.points.at(s) for s in (0, 5000, 75_000, 499_999)] == [11, 13, 41, 41]
    assert [config.loops.at(s) for s in (0, 499, 500, 3500, 4000)] == [15, 15, 17, 29, 30]
    assert (config.window, config.batch_size, config.lr, config.n_steps, config.seed) == (15, 64, 1e-4, 500_000, 42)
    assert sum(p.numel() for p in looped.LoopedTransformer(config.model).parameters()) == 847_873
    assert (config.grad_clip, config.decay, config.rest_weight, config.extra_loops) == (None, "none", 0.0, 0)
    tree = preset("paper", "decision_tree")
    assert (tree.model.n_loops, tree.window, tree.points.end) == (70, 15, 101)
    tied = preset("small", tied=True)
    assert (tied.model.inject, tied.model.state_init) == ("none", "embedding")


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("muon", marks=needs_muon)])
def test_learning_rate_warms_up_and_decays(optimizer):
    config = tiny(n_steps=110, warmup_steps=10, decay="cosine", lr=1.0, optimizer=optimizer)
    assert [config.lr_at(s) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert config.lr_at(10) == pytest.approx(1.0)
    assert config.lr_at(60) == pytest.approx(0.5)
    assert config.lr_at(109) < 1e-3
    run = Run.start(config)
    for step in range(12):
        assert run.advance()["lr"] == config.lr_at(step)
        assert {g["lr"] for optimizer in run.optimizers.values() for g in optimizer.param_groups} == {config.lr_at(step)}


def test_configuration_errors():
    for changes, message in [
        (dict(window=3), r"window=3 must lie in 1 \.\. loops\.start=2"),
        (dict(loops=Ramp(2, 5)), "loops end at 5 but the model runs 4"),
        (dict(dims=Ramp(1, 3)), "dims"),
        (dict(points=Ramp(3, 9)), "17 tokens but the model has 11"),
        (dict(decay="linear"), "decay='linear'"),
        (dict(rest_weight=1.0, window=1, loops=Ramp(2, 4)), "set window to 2 or more"),
        (dict(n_steps=0), "at least 1"),
        (dict(seed="4"), "seed='4' must be an integer"),
        (dict(n_steps=True), "n_steps=True must be an integer"),
        *((dict([(name, 10**20)]), rf"{name}=10{{20}} must be below 2\^31") for name in LARGE),
        (dict(n_distinct=10**20, dims=2, points=5), r"n_distinct=10{20} must be below 2\^31"),
        (dict(task="relu_2nn_regression", task_options={"hidden": 10**20}), r"hidden=10{20} must be below 2\^31"),
        *((dict(lr=lr), r"lr=\S+ must be a number of at least 0, and at most 1e\+30") for lr in (1e40, math.nan, math.inf, -1)),
        (dict(lr=10**400), r"lr=10{19}\.\.\. \(401 characters\) must be a number"),
        (dict(rest_weight=1e40), "rest_weight=1e.40 must be a number"),
        (dict(task_options={"n_dims": 3}), "task_options takes no n_dims"),
        (dict(task_options={"name": "x"}), "task_options takes no name"),
    ]:
        with pytest.raises(ValueError, match=message):
            tiny(**changes)
    with pytest.raises(ValueError, match="is not one of paper, small, tiny"):
        preset("large")
    with pytest.raises(ValueError, match="did you mean 'linear_regression'"):
        preset("paper", "linear_regresion")
    with pytest.raises(ValueError, match="Ramp"):
        Ramp(3, 2)
    config = tiny()
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_integers_of_numpy_and_of_tensors_are_integers():
    config = tiny(seed=np.uint32(7), n_steps=np.int64(12), loops=Ramp(np.int64(2), torch.tensor(4)), points=np.int16(5))
    assert config == tiny(seed=7, n_steps=12, loops=Ramp(2, 4), points=5)
    assert json.dumps(config.to_dict()) == json.dumps(tiny(seed=7, n_steps=12, loops=Ramp(2, 4), points=5).to_dict())
    for wrong in (np.bool_(True), torch.tensor(True), np.float64(4)):
        with pytest.raises(ValueError, match="must be integers"):
            Ramp(2, wrong)
        with pytest.raises(ValueError, match="seed"):
            tiny(seed=wrong)


def test_loss_is_the_last_loops_squared_error_and_the_last_move():
    config = tiny()
    model = Run.start(config).model
    xs, ys = config.make_task().sample(3, 5, generator=torch.Generator().manual_seed(0))
    squared, change = window_errors(model, xs, ys, n_loops=4, window=2)
    x = interleave(xs, ys)
    for k, t in enumerate((3, 4)):
        torch.testing.assert_close(squared[:, k], (model(x, n_loops=t) - ys) ** 2)
    before, after = (looped.solve(model, x, n_loops=t).y for t in (3, 4))
    torch.testing.assert_close(change, (after - before).flatten(1).norm(dim=1) / after.flatten(1).norm(dim=1))


def test_training_learns():
    config = tiny(n_steps=250, lr=3e-3, points=Ramp(5, 5), dims=Ramp(1, 2, 1, 50))
    run = Run.start(config)
    xs, ys = config.make_task().sample(256, 5, generator=torch.Generator().manual_seed(1))
    before = window_errors(run.model, xs, ys, n_loops=4, window=1)[0].mean().item()
    while run.step < config.n_steps:
        run.advance()
    after = window_errors(run.model, xs, ys, n_loops=4, window=1)[0].mean().item()
    assert after < 0.8 * before


@pytest.mark.parametrize("changes", [{}, SETTLING], ids=["published", "settling"])
def test_a_stopped_run_resumes_bit_for_bit(tmp_path, changes, monkeypatch):
    config = tiny(**changes)
    whole = train(config, tmp_path / "whole", progress=False)
    monkeypatch.setattr(Run, "advance", crash_after(7))
    with pytest.raises(RuntimeError, match="power cut"):
        train(config, tmp_path / "cut", progress=False)
    assert checkpoint.load_training_state(tmp_path / "cut" / "state.pt")["step"] == 5  # save_every
    monkeypatch.undo()
    resumed = train(config, tmp_path / "cut", resume=True, progress=False)
    assert torch.equal(weights(resumed), weights(whole))
    assert torch.equal(weights(looped.load_model(tmp_path / "cut" / "model")), weights(whole))
    one, two = (checkpoint.load_training_state(tmp_path / name / "state.pt") for name in ("whole", "cut"))
    assert torch.equal(one["prompt_rng"], two["prompt_rng"])
    again = train(config, tmp_path / "whole", resume=True, progress=False)  # a finished run has nothing to do
    assert torch.equal(weights(again), weights(whole))


def test_the_settling_term_acts_from_its_step_on():
    plain, settled = (Run.start(tiny(**changes)) for changes in ({}, SETTLING))
    for step in range(6):
        plain.advance()
        settled.advance()
        assert torch.equal(weights(plain.model), weights(settled.model)) == (step < 4)


def test_seeds_decide_and_the_global_generator_is_left_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    a = train(tiny(), tmp_path / "a", progress=False)
    assert torch.equal(torch.rand(3), expected)
    b = train(tiny(), tmp_path / "b", progress=False)
    c = train(tiny(seed=7), tmp_path / "c", progress=False)
    assert torch.equal(weights(a), weights(b))
    assert not torch.equal(weights(a), weights(c))


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    train(tiny(), tmp_path, progress=False)
    with pytest.raises(ValueError, match="already holds a run; resume it or choose another folder"):
        train(tiny(), tmp_path, progress=False)
    with pytest.raises(ValueError, match=r"has another lr \(0\.001, not 0\.01\), seed \(42, not 3\)"):
        train(tiny(lr=1e-2, seed=3), tmp_path, resume=True, progress=False)


@pytest.mark.parametrize("place", ["model", "model_4"])
def test_a_new_run_does_not_take_the_models_of_another_for_its_own(tmp_path, place):
    old, new = tiny(keep_every=4), tiny(keep_every=4, lr=1e-2)
    whole = train(old, tmp_path, progress=False)
    for path in (tmp_path / "state.pt", *(one for one in tmp_path.glob("model*") if one.name != place)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for resume in (False, True):
        with pytest.raises(
            ValueError, match=f"holds {place} and no state.pt, and its train.json is not of this run; choose another"
        ):
            train(new, tmp_path, resume=resume, progress=False)
        assert json.loads((tmp_path / "train.json").read_text())["lr"] == old.lr
    assert torch.equal(weights(train(dataclasses.replace(old, save_every=3), tmp_path, progress=False)), weights(whole))
    (tmp_path / "state.pt").unlink()
    (tmp_path / "train.json").unlink()
    with pytest.raises(ValueError, match="is not of this run"):
        train(old, tmp_path, progress=False)
    for content, message in (("{", "is not JSON"), ("[]", "describes no run"), ("{}", "describes no run .'model' is missing")):
        (tmp_path / "train.json").write_text(content)
        with pytest.raises(ValueError, match=rf"train\.json {message}.*; restore it"):
            train(old, tmp_path, progress=False)


def test_a_run_shorter_than_its_curriculum_says_so(tmp_path, caplog):
    train(tiny(), tmp_path / "whole", progress=False)
    assert not caplog.messages
    train(tiny(n_steps=3, **SETTLING), tmp_path / "short", progress=False)
    (message,) = caplog.messages
    assert message.startswith("train: n_steps=3 is shorter than the curriculum: dims end at 1, not 2; points end at 3, not 5; ")
    assert message.endswith("nothing asks states to rest, as settle_from=4 is past the last step")
    for n_steps, missing in (
        (4, "dims end at 1, not 2; points end at 4, not 5; loops end at 3, not 4"),
        (5, "points end at 4, not 5"),
        (7, ""),
    ):
        assert shortfall(tiny(n_steps=n_steps)) == missing
    for name in ("rest_weight", "extra_loops"):
        assert "to rest" in shortfall(tiny(settle_from=12, **{name: SETTLING[name]}))
        assert shortfall(tiny(settle_from=11, **{name: SETTLING[name]})) == ""
    assert not any(shortfall(preset(name, task)) for name in ("tiny", "small", "paper") for task in PAPER)


def test_log_has_each_step_once_after_a_crash(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "LOG_EVERY", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "advance", crash_after(8))
        with pytest.raises(RuntimeError):
            train(tiny(), tmp_path, progress=False)
    with open(tmp_path / "log.jsonl", "a") as log:
        log.write('{"step": 9, "lo')  # a line cut short
    log = (tmp_path / "log.jsonl").read_bytes()
    (tmp_path / "log.jsonl").write_bytes(log + b"\n\xff\xfe{}\n1\n{}\n")  # and damage
    train(tiny(), tmp_path, resume=True, progress=False)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert {"loss", "n_loops", "n_live", "lr", "grad_norm", "prompts_per_second"} <= set(lines[-1])


def test_full_disk_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch):
    fsync = os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(Run, "advance", crash_after(6))
        with pytest.raises(RuntimeError):
            train(tiny(), tmp_path / "run", progress=False)

    def full(descriptor):
        if "state.pt" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            OSError, match=r"cannot write the checkpoint of step 10 .*; the checkpoint of step 5 is whole"
        ) as caught:
            train(tiny(), tmp_path / "run", resume=True, progress=False)
    assert caught.value.errno == errno.ENOSPC
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "log.jsonl", "provenance.jsonl", "state.pt", "train.json"]
    resumed = train(tiny(), tmp_path / "run", resume=True, progress=False)
    assert torch.equal(weights(resumed), weights(train(tiny(), tmp_path / "other", progress=False)))


def test_a_state_of_another_run_is_not_resumed(tmp_path):
    for seed in (1, 2):
        train(tiny(seed=seed), tmp_path / str(seed), progress=False)
    (tmp_path / "2" / "state.pt").write_bytes((tmp_path / "1" / "state.pt").read_bytes())
    with pytest.raises(ValueError, match=r"has another seed \(1, not 2\); use"):
        train(tiny(seed=2), tmp_path / "2", resume=True, progress=False)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "advance", crash_after(7))
        with pytest.raises(RuntimeError):
            train(tiny(), folder, progress=False)
    return folder


DAMAGE = {
    "it lacks model": lambda state: state.pop("model"),
    "it lacks config, step": lambda state: [state.pop(name) for name in ("config", "step")],
    "its config is int and must be a mapping": lambda state: state.update(config=3),
    "its model is list and must be a mapping": lambda state: state.update(model=[]),
    "its step is 'x' and must be an integer in 0 .. n_steps=12": lambda state: state.update(step="x"),
    "its step is 99 and must be an integer in 0 .. n_steps=12": lambda state: state.update(step=99),
    "its step is -1 and must be": lambda state: state.update(step=-1),
    "its seconds are nan and must be": lambda state: state.update(seconds=float("nan")),
    "it lacks read_out.bias": lambda state: state["model"].pop("read_out.bias"),
    "its read_out.bias is int and must be a tensor": lambda state: state["model"].update({"read_out.bias": 3}),
    "its read_out.bias is torch.float32 [9] and must be torch.float32 [1]": lambda state: state["model"].update(
        {"read_out.bias": torch.ones(9)}
    ),
    "its prompt_rng is torch.uint8 [7] and must be": lambda state: state.update(prompt_rng=state["prompt_rng"][:7]),
    "its prompt_rng is NoneType and must be a tensor": lambda state: state.update(prompt_rng=None),
    "its prompt_rng is none": lambda state: state.update(prompt_rng=torch.zeros_like(state["prompt_rng"])),
    "its optimizer has no groups of parameters": lambda state: state.update(optimizer={}),
    "its optimizer is of other parameters or numbers": lambda state: state["optimizer"]["param_groups"][0].update(betas=None),
    "its optimizer does not hold the moments of every": lambda state: state["optimizer"]["state"].pop(0),
    "its optimizer's moments of adam's parameter 0 are int": lambda state: state["optimizer"]["state"].update({0: 3}),
    "its optimizer is of other parameters": lambda state: state["optimizer"]["param_groups"][0]["params"].pop(),
    "its optimizer does not hold the moments": lambda state: state["optimizer"].update(state={}),
    "its optimizer's exp_avg of adam's parameter 0 is NoneType": lambda state: state["optimizer"]["state"][0].pop("exp_avg"),
    "its optimizer's step of adam's parameter 0 is None": lambda state: state["optimizer"]["state"][0].pop("step"),
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_a_checkpoint_that_is_none_is_refused(tmp_path, stopped, reason):
    state = checkpoint.load_training_state(stopped / "state.pt")
    DAMAGE[reason](state)
    checkpoint.write_training_state(tmp_path / "state.pt", state)
    with pytest.raises(ValueError, match=r"is no checkpoint of a run: .*; restore it, or remove it to start the run") as caught:
        train(tiny(), tmp_path, resume=True, progress=False)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_goes_on_where_it_is_saved_more_or_less_often(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Run, "advance", crash_after(7))
        with pytest.raises(RuntimeError):
            train(tiny(), tmp_path / "cut", progress=False)
    resumed = train(tiny(save_every=2, keep_every=4), tmp_path / "cut", resume=True, progress=False)
    assert torch.equal(weights(resumed), weights(train(tiny(), tmp_path / "whole", progress=False)))
    assert {path.name for path in (tmp_path / "cut").glob("model_*")} == {"model_8", "model_12"}


def test_two_processes_do_not_share_a_folder(tmp_path):
    with trainer._alone_in(tmp_path), pytest.raises(ValueError, match="another process trains in"):
        train(tiny(), tmp_path, progress=False)
    train(tiny(), tmp_path, progress=False)


def test_diverging_training_says_so(tmp_path, monkeypatch):
    run = Run.start(tiny())
    with torch.no_grad():
        run.model.read_out.weight.fill_(float("inf"))
    monkeypatch.setattr(Run, "start", classmethod(lambda cls, config, device: run))
    with pytest.raises(FloatingPointError, match="not finite at step 1; start again in another folder"):
        train(tiny(), tmp_path, progress=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_finishes_the_step_and_saves(tmp_path, number):
    command = [
        sys.executable,
        "-m",
        "looped.cli",
        "train",
        "--preset",
        "tiny",
        "--threads",
        "1",
        "--out",
        str(tmp_path / "run"),
    ]
    command += ["--set", "n_steps=100000", "--set", "save_every=100000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "log.jsonl"
    deadline = time.time() + 60
    while time.time() < deadline and not (log.exists() and log.read_text().count("\n") > 2):
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "the same with --resume" in errors.splitlines()[-1]
    state = checkpoint.load_training_state(tmp_path / "run" / "state.pt")
    run = Run.start(dataclasses.replace(tiny(), n_steps=100_000, save_every=100_000))
    while run.step < state["step"]:
        run.advance()
    assert all(torch.equal(tensor, state["model"][name]) for name, tensor in run.model.state_dict().items())


def test_without_injection_the_gradient_reaches_the_prompt():
    for tied in (False, True):
        config = tiny(tied=tied)
        run = Run.start(config)
        xs, ys = config.make_task().sample(3, 5, generator=torch.Generator().manual_seed(0))
        squared, _ = window_errors(run.model, xs, ys, n_loops=4, window=2)
        assert squared.shape == (3, 2, 5)
        squared.mean().backward()
        assert run.model.read_in.weight.grad.abs().max() > 0
        whole = Run.start(config).model
        predictions = whole(interleave(xs, ys), n_loops=4, return_predictions=True)[:, 2:]
        (predictions - ys[:, None]).square().mean().backward()
        same = torch.allclose(whole.read_in.weight.grad, run.model.read_in.weight.grad, rtol=1e-5, atol=1e-8)
        assert same == tied
