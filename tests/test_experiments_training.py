"""Training that experiments stand on: published schedules and sizes, the loops before the window, and every option of a run."""

import copy
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from labs import needs_muon
from tolerances import FP32, NEWTON_SCHULZ_IN_BF16

import looped
from looped import checkpoint
from looped.icl.prompts import interleave
from looped.icl.tasks import PromptPool
from looped.model import FUSED, LoopedTransformer
from looped.pretrained import bundled_models
from looped.train import Ramp, TrainConfig, divergence, loss, preset, train, train_seeds, trainer
from looped.train.divergence import EXPLODED_STEPS, why_diverged
from looped.train.loss import loops_are_fused, matrix_products, prediction_errors, state_after, window_errors
from looped.train.recipe import PAPER
from looped.train.trainer import Run

needs_engine = pytest.mark.skipif("cpu" not in FUSED, reason="needs the C++ engine")


def tiny(**changes):
    return preset("tiny", **changes)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# Schedules and sizes


class PublishedCurriculum:
    """The authors' rule, step by step: a counter, and an increment whenever the counter is a multiple of the interval."""

    def __init__(self, start, end, increment, interval):
        self.value, self.end, self.increment, self.interval, self.count = start, end, increment, interval, 0

    def update(self):
        self.count += 1
        if self.count % self.interval == 0:
            self.value = min(self.value + self.increment, self.end)


@pytest.mark.parametrize("task", PAPER)
def test_every_step_of_the_published_schedule(task):
    """Tables have all their columns, and `get_batch` of train_openml.py always takes 41 points, whatever the yaml says."""
    b, window, first, last, more = {
        "sparse_linear_regression": (20, 10, 11, 41, 2),
        "decision_tree": (70, 15, 26, 101, 5),
        "relu_2nn_regression": (12, 5, 26, 101, 5),
        "tabular": (30, 15, 41, 41, 2),
    }.get(task, (30, 15, 11, 41, 2))
    config = preset("paper", task)
    assert config.window == window
    published = {
        "dims": PublishedCurriculum(20 if task == "tabular" else 5, 20, 1, 5000),
        "points": PublishedCurriculum(first, last, more, 5000),
        "loops": PublishedCurriculum(window, b, 2, 500),
    }
    for step in range(90_000):
        for name, curriculum in published.items():
            if step % 250 in (0, 1, 249):
                assert getattr(config, name).at(step) == curriculum.value, (name, step)
            curriculum.update()
    assert [getattr(config, name).at(config.n_steps - 1) for name in published] == [20, last, b]
    unlooped = preset("paper", task, unlooped=True)
    assert (unlooped.dims, unlooped.points) == (config.dims, config.points)


@pytest.mark.parametrize(("unlooped", "size", "n_layers"), [(False, 847_873, 1), (True, 9_535_233, 12)])
def test_the_paper_preset_has_the_published_sizes_and_trains(unlooped, size, n_layers):
    config = preset("paper", unlooped=unlooped)
    assert (config.batch_size, config.model.n_core) == (64, n_layers)
    run = Run.start(dataclasses.replace(config, batch_size=2))  # of 64: twenty steps of the whole batch take minutes here
    assert sum(p.numel() for p in run.model.parameters()) == size
    before = weights(run.model)
    losses = [run.advance()["loss"] for _ in range(20)]
    assert all(math.isfinite(x) for x in losses)
    assert (weights(run.model) != before).float().mean() > 0.9


@needs_engine
def test_the_paper_preset_trains_at_the_end_of_its_curricula(monkeypatch):
    """Its first steps have no loops before the window: they come at step 500."""
    config = preset("paper", batch_size=1)
    run, calls = Run.start(config), []
    run.step = 75_000

    def spy(model, prompts, n_loops):
        calls.append((n_loops, tuple(prompts.shape), loops_are_fused(model)))
        return state_after(model, prompts, n_loops)

    with monkeypatch.context() as patch:
        patch.setattr(loss, "state_after", spy)
        for _ in range(2):
            before, numbers = weights(run.model), run.advance()
            assert (numbers["n_loops"], numbers["n_live"], numbers["n_points"]) == (30, 20, 41)
            assert math.isfinite(numbers["loss"])
            assert (weights(run.model) != before).float().mean() > 0.9
    assert calls == [(15, (1, 81, 20), True)] * 2
    pairs = config.make_task().sample(1, 41, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        fused, _ = window_errors(run.model, *pairs, n_loops=30, window=15)
        monkeypatch.setattr(loss, "loops_are_fused", lambda model: False)
        plain, _ = window_errors(run.model, *pairs, n_loops=30, window=15)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)


def test_the_paper_preset_has_the_published_precision():
    for twin in ({}, {"tied": True}, {"unlooped": True}):
        assert {preset("paper", task, **twin).precision for task in PAPER} == {"tf32"}
        assert {preset(name, task, **twin).precision for name in ("tiny", "small") for task in PAPER} == {"fp32"}


def test_small_numbers_by_task():
    for name in ("linear_regression", "linear_regression_tied"):
        with open(bundled_models()[name] + "/train.json") as file:
            assert TrainConfig.from_dict(json.load(file)) == preset("small", tied=name.endswith("tied"))
    sparse = preset("small", "sparse_linear_regression")
    assert (sparse.task_options, sparse.dims, sparse.points) == ({"sparsity": 2}, Ramp(2, 8, 1, 1000), Ramp(17, 17))
    assert sparse.model == looped.icl_config(n_dims=8, n_points=17, d_model=64, n_heads=4, n_loops=20)
    unlooped = preset("small", "sparse_linear_regression", unlooped=True)
    assert unlooped.model == looped.icl_config(
        n_dims=8, n_points=17, d_model=64, n_heads=4, n_loops=1, n_core=12, inject="none", state_init="embedding"
    )
    assert (unlooped.window, unlooped.loops, unlooped.rest_weight, unlooped.extra_loops) == (1, Ramp(1, 1), 0.0, 0)
    with pytest.raises(ValueError, match="two twins"):
        preset("small", tied=True, unlooped=True)
    for task in PAPER:
        for name in ("tiny", "small", "paper"):
            if task != "tabular":
                assert preset(name, task, unlooped=True).window == 1


# Loops before the window


@needs_engine
def test_loops_before_the_window_are_the_fused_ones_and_agree_with_eager(monkeypatch):
    config = preset("small", batch_size=3)
    model = Run.start(config).model
    pairs = config.make_task().sample(3, 11, generator=torch.Generator().manual_seed(0))
    x = interleave(*pairs)
    torch.testing.assert_close(state_after(model, x, 9), state_after(model, x, 9, fused=False), rtol=1e-5, atol=1e-5)
    assert not state_after(model, x, 9).requires_grad
    assert state_after(model, x, 0) is None

    def gradient():
        model.zero_grad()
        window_errors(model, *pairs, n_loops=12, window=3)[0].mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    calls = []
    monkeypatch.setattr(loss, "loops_are_fused", lambda model: calls.append(1) or True)
    fused = gradient()
    monkeypatch.setattr(loss, "loops_are_fused", lambda model: False)
    assert calls == [1]
    torch.testing.assert_close(gradient(), fused, rtol=1e-4, atol=1e-6)


def test_a_changed_model_trains_on_its_own_forward():
    model = Run.start(tiny()).model
    model.core[0].register_forward_hook(lambda module, inputs, output: output * 0)
    x = interleave(*tiny().make_task().sample(2, 5, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(state_after(model, x, 2), state_after(model, x, 2, fused=False))


# Losses and options


def test_classes_are_trained_on_the_cross_entropy():
    logits = torch.randn(2, 3, 4, 2)
    ys = torch.tensor([[0.0, 1, 1, 0], [1, 1, 0, 0]])
    got = prediction_errors(logits, ys)
    for b, k, i in ((0, 0, 0), (1, 2, 3), (0, 1, 2)):
        torch.testing.assert_close(got[b, k, i], F.cross_entropy(logits[b, k, i][None], ys[b, i].long()[None]))


def test_weight_decay_shrinks_matrices_alone():
    plain, decayed = Run.start(tiny(lr=1e-2)), Run.start(tiny(lr=1e-2, weight_decay=0.5))
    before = {name: parameter.clone() for name, parameter in plain.model.named_parameters()}
    for run in (plain, decayed):
        run.advance()
    for (name, a), b in zip(plain.model.named_parameters(), decayed.model.parameters(), strict=True):
        expected = a - 1e-2 * 0.5 * before[name] if a.dim() >= 2 else a
        torch.testing.assert_close(b, expected, rtol=1e-5, atol=1e-7)


def test_bf16_keeps_weights_states_and_errors_in_float32():
    config = tiny()
    model = Run.start(config).model
    pairs = config.make_task().sample(16, 5, generator=torch.Generator().manual_seed(0))
    full, _ = window_errors(model, *pairs, n_loops=4, window=2)
    half, change = window_errors(model, *pairs, n_loops=4, window=2, precision="bf16")
    assert half.dtype == change.dtype == torch.float32
    assert not torch.equal(full, half)
    torch.testing.assert_close(half, full, rtol=0.1, atol=0.05)
    half.mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_tf32_is_on_inside_and_put_back():
    before = torch.backends.cuda.matmul.allow_tf32
    with matrix_products("tf32"):
        assert torch.backends.cuda.matmul.allow_tf32
    with matrix_products("fp32"):
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_tf32_is_float32_on_a_cpu():
    runs = [Run.start(preset("small", batch_size=4, precision=precision)) for precision in ("fp32", "tf32")]
    for run in runs:
        run.step = 10_000  # with loops before the window, and all dimensions
        run.advance()
    assert torch.equal(*(weights(run.model) for run in runs))


def test_a_checkpoint_of_before_there_were_precisions_is_of_float32(tmp_path):
    whole = train(tiny(), tmp_path, progress=False)
    state = checkpoint.load_training_state(tmp_path / "state.pt")
    del state["config"]["precision"]
    checkpoint.write_training_state(tmp_path / "state.pt", state)
    assert torch.equal(weights(train(tiny(), tmp_path, resume=True, progress=False)), weights(whole))
    with pytest.raises(ValueError, match=r"has another precision \(fp32, not tf32\); use its values"):
        train(tiny(precision="tf32"), tmp_path, resume=True, progress=False)


def test_a_fixed_set_of_prompts_is_all_that_is_seen(monkeypatch):
    config = tiny(n_distinct=5, dims=2, points=5, batch_size=16)
    pool = PromptPool.of(config.make_task(), 5, 5, seed=config.seed).pairs
    seen = []

    def spy(model, xs, ys, **how):
        seen.append(xs)
        return window_errors(model, xs, ys, **how)

    monkeypatch.setattr(trainer, "window_errors", spy)
    run = Run.start(config)
    for _ in range(4):
        run.advance()
    which = (torch.cat(seen)[:, None] == pool.xs).all(dim=(2, 3))
    assert which.any(dim=1).all()
    assert which.any(dim=0).all()
    assert not torch.equal(seen[0], seen[1])
    with pytest.raises(ValueError, match="has no curriculum"):
        tiny(n_distinct=5)
    for wrong in (0, 2.5, True):
        with pytest.raises(ValueError, match="n_distinct"):
            tiny(n_distinct=wrong, dims=2, points=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(precision="fp16"), "precision='fp16' is not one of fp32, tf32, bf16"),
        (dict(weight_decay=-1.0), "weight_decay=-1.0 must be a number of at least 0"),
        (dict(weight_decay="no"), "weight_decay='no'"),
        (dict(optimizer="sgd"), "optimizer='sgd' is not one of adam, muon"),
    ],
)
def test_wrong_options_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


EVERYTHING = dict(weight_decay=0.1, precision="bf16", n_distinct=6, dims=2, points=5, rest_weight=1.0, extra_loops=2)


def stop_at(monkeypatch, step):
    advance = Run.advance

    def advance_or_stop(self):
        if self.step == step:
            raise RuntimeError("power cut")
        return advance(self)

    monkeypatch.setattr(Run, "advance", advance_or_stop)


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("muon", marks=needs_muon)])
def test_a_run_with_every_option_resumes_bit_for_bit(tmp_path, monkeypatch, optimizer):
    config = tiny(**EVERYTHING, optimizer=optimizer)
    whole = train(config, tmp_path / "whole", progress=False)
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(RuntimeError):
            train(config, tmp_path / "cut", progress=False)
    resumed = train(config, tmp_path / "cut", resume=True, progress=False)
    assert torch.equal(weights(resumed), weights(whole))
    lines = [json.loads(line) for line in (tmp_path / "cut" / "provenance.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 5]
    assert lines[0]["source"] == lines[1]["source"]
    assert len(lines[0]["source"]) == 64
    assert {"looped", "torch", "threads", "device", "time"} <= set(lines[0])


def test_a_checkpoint_from_before_an_option_existed_resumes(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(RuntimeError):
            train(tiny(), tmp_path, progress=False)
    state = checkpoint.load_training_state(tmp_path / "state.pt")
    for name in ("optimizer", "weight_decay", "precision", "n_distinct"):
        del state["config"][name]
    checkpoint.write_training_state(tmp_path / "state.pt", state)
    with pytest.raises(ValueError, match="has another weight_decay"):
        train(tiny(weight_decay=0.1), tmp_path, resume=True, progress=False)
    train(tiny(), tmp_path, resume=True, progress=False)


# Muon


@needs_muon
def test_muon_orthogonalises_the_steps_of_the_blocks_matrices_and_leaves_the_others_to_adam():
    torch.manual_seed(0)
    model = tiny().model.replace(n_prelude=1, n_coda=1, loop_norm="once")
    gradients = {name: torch.randn_like(weight) for name, weight in LoopedTransformer(model).named_parameters()}
    moved = {}
    for kind in ("adam", "muon"):
        run = Run.start(tiny(model=model, optimizer=kind, lr=1e-3))
        before = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
        for name, weight in run.model.named_parameters():
            weight.grad = gradients[name].clone()
        for optimizer in run.optimizers.values():
            optimizer.step()
        moved[kind] = {name: weight.detach() - before[name] for name, weight in run.model.named_parameters()}
    blocks = ("prelude.", "core.", "coda.")
    inside = {name for name, gradient in gradients.items() if gradient.dim() == 2 and name.startswith(blocks)}
    assert len(inside) == 12
    for name, gradient in gradients.items():
        if name in inside:
            expected = -1e-3 * 0.2 * max(gradient.shape) ** 0.5 * nearly_orthogonal(gradient)
            assert (moved["muon"][name] - expected).norm() < NEWTON_SCHULZ_IN_BF16 * expected.norm()
        else:
            assert torch.equal(moved["muon"][name], moved["adam"][name])


def nearly_orthogonal(gradient):
    """Five steps of Newton and Schulz's iteration, with the coefficients of Jordan et al. (2024)."""
    X = gradient.double() / gradient.double().norm()
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.775 * A + 2.0315 * A @ A) @ X
    return X


@needs_muon
def test_muon_decays_what_adam_does():
    plain, decayed = Run.start(tiny(optimizer="muon", lr=0.1)), Run.start(tiny(optimizer="muon", lr=0.1, weight_decay=0.5))
    before = {name: weight.detach().clone() for name, weight in plain.model.named_parameters()}
    for run in (plain, decayed):
        run.advance()
    both = zip(plain.model.named_parameters(), decayed.model.parameters(), strict=True)
    for (name, without), with_decay in both:
        shrunk = without - plain.config.lr * 0.5 * before[name] if without.dim() >= 2 else without
        torch.testing.assert_close(with_decay, shrunk, rtol=FP32, atol=FP32 * 0.1)  # of a step


@needs_muon
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(RuntimeError):
            train(tiny(optimizer="muon"), tmp_path, progress=False)
    with pytest.raises(ValueError, match=r"has another optimizer \(muon, not adam\)"):
        train(tiny(), tmp_path, resume=True, progress=False)
    whole = checkpoint.load_training_state(tmp_path / "state.pt")
    for damage, reason in (
        (lambda state: state["optimizer"].pop("adam"), "its optimizer has no adam"),
        (lambda state: state.update(optimizer=state["optimizer"]["adam"]), "its optimizer has no muon"),
        (lambda state: state["optimizer"]["muon"]["param_groups"][0].update(momentum=0.5), "of other parameters or numbers"),
        (lambda state: state["optimizer"]["muon"]["state"][0].pop("momentum_buffer"), "momentum_buffer of muon's parameter 0"),
    ):
        state = copy.deepcopy(whole)
        damage(state)
        checkpoint.write_training_state(tmp_path / "state.pt", state)
        with pytest.raises(ValueError, match=reason):
            train(tiny(optimizer="muon"), tmp_path, resume=True, progress=False)


def test_a_torch_without_muon_says_so(tmp_path, monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ValueError, match=r"optimizer='muon' needs torch 2\.9 or newer"):
        train(tiny(optimizer="muon"), tmp_path, progress=False)


def test_seeds_are_runs_of_their_own(tmp_path):
    one, two = train_seeds(tiny(), tmp_path, [1, 2], progress=False)
    assert not torch.equal(weights(one), weights(two))
    assert torch.equal(weights(one), weights(train(tiny(seed=1), tmp_path / "other", progress=False)))
    assert torch.equal(weights(looped.load_model(tmp_path / "seed_2" / "model")), weights(two))
    with pytest.raises(ValueError, match="seeds of their own"):
        train_seeds(tiny(), tmp_path, [1, 1])


# Divergence


def explode_from(monkeypatch, step, factor):
    """From a step on, errors are `factor` times too large; NaN for a factor of NaN."""

    def errors(model, xs, ys, **how):
        found, change = window_errors(model, xs, ys, **how)
        return (found * factor if explode_from.step >= step else found), change

    advance = Run.advance

    def counted(self):
        explode_from.step = self.step
        return advance(self)

    monkeypatch.setattr(Run, "advance", counted)
    monkeypatch.setattr(trainer, "window_errors", errors)
    monkeypatch.setattr(divergence, "window_errors", errors)  # of the weights, on other prompts


@pytest.mark.parametrize(("factor", "first", "match"), [(1e4, 6, "has exploded"), (math.nan, 6, "is not finite")])
def test_divergence_names_the_step_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch, factor, first, match):
    config = tiny(n_steps=100, save_every=1)
    with monkeypatch.context() as patch:
        explode_from(patch, first, factor)
        step = first + EXPLODED_STEPS if factor == factor else first + 1
        with pytest.raises(FloatingPointError, match=rf"{match} at step {step}\b.*last checkpoint: step {first}"):
            train(config, tmp_path, progress=False)
    state = checkpoint.load_training_state(tmp_path / "state.pt")
    assert state["step"] == first, "no exploded state takes the place of a good one"
    good = train(dataclasses.replace(config, n_steps=first), tmp_path / "good", progress=False)
    assert torch.equal(torch.cat([t.flatten() for t in state["model"].values()]), weights(good))
    note = json.loads((tmp_path / "diverged.json").read_text())
    assert (note["step"], note["checkpoint"]) == (step, first)
    with pytest.raises(FloatingPointError, match=match):
        train(config, tmp_path, resume=True, progress=False)
    assert not (tmp_path / "model").exists()


def test_divergence_before_the_first_checkpoint_names_none(tmp_path, monkeypatch):
    config = tiny(n_steps=12, save_every=5)
    explode_from(monkeypatch, 3, math.nan)
    with pytest.raises(FloatingPointError, match=r"is not finite at step 4; .* \(there is no checkpoint yet\)$"):
        train(config, tmp_path, progress=False)
    assert not (tmp_path / "state.pt").exists()
    note = json.loads((tmp_path / "diverged.json").read_text())
    assert (note["step"], note["checkpoint"]) == (4, None)
    assert why_diverged(config, tmp_path) == note["reason"]
    with pytest.raises(FloatingPointError, match="is not finite at step 4"):
        train(config, tmp_path, resume=True, progress=False)


def test_a_damaged_note_of_divergence_is_passed_over(tmp_path, monkeypatch, caplog):
    config, path = tiny(n_steps=12, save_every=4), tmp_path / "diverged.json"
    with monkeypatch.context() as patch:
        explode_from(patch, 9, 1e4)
        with pytest.raises(FloatingPointError):
            train(config, tmp_path, progress=False)
    whole = path.read_bytes()
    assert "was exploding" in why_diverged(config, tmp_path)
    assert why_diverged(tiny(n_steps=13), tmp_path) is None
    assert not caplog.records
    for damaged in (b"", whole[:-9], b"\xff" + whole, b"[" * 100_000, b"[]", b"7", b"{}", whole.replace(b"reason", b"reas")):
        path.write_bytes(damaged)
        caplog.clear()
        assert why_diverged(config, tmp_path) is None
        assert caplog.messages == [f"{path} is damaged and is passed over"]
    resumed = train(config, tmp_path, resume=True, progress=False)  # this time it does not explode
    assert not path.exists()
    assert torch.equal(weights(resumed), weights(train(config, tmp_path / "whole", progress=False)))


@pytest.mark.parametrize(("n_exploded", "is_kept"), [(2, True), (3, False)])
def test_a_batch_or_two_that_explode_do_not_end_a_run_whose_weights_are_sound(tmp_path, monkeypatch, n_exploded, is_kept):
    """Of few prompts all may have answers near 0, beside which any error is large; other prompts say what the weights are."""
    explode_from(monkeypatch, 12 - n_exploded, 1e4)
    monkeypatch.setattr(divergence, "window_errors", window_errors)
    if is_kept:
        train(tiny(n_steps=12, save_every=11), tmp_path, progress=False)
        assert checkpoint.load_training_state(tmp_path / "state.pt")["step"] == 12
    else:
        with pytest.raises(FloatingPointError, match="for the last 3 of its steps"):
            train(tiny(n_steps=12, save_every=9), tmp_path, progress=False)
        assert checkpoint.load_training_state(tmp_path / "state.pt")["step"] == 9


def test_a_run_that_ends_while_it_explodes_is_no_good_one(tmp_path, monkeypatch):
    config = tiny(n_steps=12, save_every=4)
    with monkeypatch.context() as patch:
        explode_from(patch, 9, 1e4)
        match = "was exploding when the run ended at step 12: for the last 3 of its steps.*last checkpoint: step 8"
        with pytest.raises(FloatingPointError, match=match):
            train(config, tmp_path, progress=False)
    assert not (tmp_path / "model").exists()
    assert checkpoint.load_training_state(tmp_path / "state.pt")["step"] == 8
    note = json.loads((tmp_path / "diverged.json").read_text())
    assert (note["step"], note["checkpoint"]) == (12, 8)
    with pytest.raises(FloatingPointError, match="was exploding"):
        train(config, tmp_path, resume=True, progress=False)


def test_an_interrupt_while_it_explodes_names_the_step_that_is_kept(tmp_path, monkeypatch):
    config = tiny(n_steps=12, save_every=4)
    with monkeypatch.context() as patch:
        explode_from(patch, 9, 1e4)
        advance = Run.advance

        def interrupted(self):
            if self.step == 10:
                os.kill(os.getpid(), signal.SIGINT)
            return advance(self)

        patch.setattr(Run, "advance", interrupted)
        match = r"stopped at step 11 while its loss explodes, which is not kept \(the checkpoint of step 8 is whole"
        with pytest.raises(KeyboardInterrupt, match=match):
            train(config, tmp_path / "cut", progress=False)
    assert checkpoint.load_training_state(tmp_path / "cut" / "state.pt")["step"] == 8
    resumed = train(config, tmp_path / "cut", resume=True, progress=False)  # this time it does not explode
    assert torch.equal(weights(resumed), weights(train(config, tmp_path / "whole", progress=False)))


@pytest.mark.parametrize(("lr", "first", "resumed"), [(1e4, "(2|21)", "(6|25)"), (1e30, "2", "6")])
def test_a_step_that_destroys_the_weights_is_kept_nowhere(tmp_path, lr, first, resumed):
    """Its loss is that of the weights before it, and a good one.

    At 1e4 a machine's rounding says whether the next one is infinite, or only explodes for 20 steps in a row.
    """
    config = preset("tiny", grad_clip=None, lr=1e-3, n_steps=60, save_every=1, keep_every=1)
    good = train(dataclasses.replace(config, n_steps=4), tmp_path / "good", progress=False)
    state = checkpoint.load_training_state(tmp_path / "good" / "state.pt")
    wild = dataclasses.replace(config, lr=lr)
    with pytest.raises(FloatingPointError, match=rf"at step {first}\b.*\(there is no checkpoint yet\)"):
        train(wild, tmp_path / "wild", progress=False)
    (tmp_path / "cut").mkdir()
    state["config"] = wild.to_dict()
    checkpoint.write_training_state(tmp_path / "cut" / "state.pt", state)
    with pytest.raises(FloatingPointError, match=rf"at step {resumed}\b.*last checkpoint: step 4"):
        train(wild, tmp_path / "cut", resume=True, progress=False)
    kept = checkpoint.load_training_state(tmp_path / "cut" / "state.pt")
    assert kept["step"] == 4
    assert torch.equal(torch.cat([t.flatten() for t in kept["model"].values()]), weights(good))
    assert not [*(tmp_path / "cut").glob("model*"), *(tmp_path / "wild").glob("model*")]
    with pytest.raises(FloatingPointError, match="was exploding when the run ended at step 1: that of its last weights is not"):
        train(dataclasses.replace(wild, n_steps=1), tmp_path / "one", progress=False)
    assert not [*(tmp_path / "one").glob("model*"), *(tmp_path / "one").glob("state.pt")]


def test_an_interrupt_after_a_step_that_destroys_the_weights_keeps_the_one_before(tmp_path, monkeypatch):
    config, advance = tiny(n_steps=12, save_every=4), Run.advance

    def interrupted(self):
        numbers = advance(self)
        if self.step == 6:
            with torch.no_grad():
                self.model.read_out.weight.fill_(1e4)
            os.kill(os.getpid(), signal.SIGINT)
        return numbers

    with monkeypatch.context() as patch:
        patch.setattr(Run, "advance", interrupted)
        match = r"stopped at step 6 while its loss explodes, which is not kept \(the checkpoint of step 4 is whole"
        with pytest.raises(KeyboardInterrupt, match=match):
            train(config, tmp_path / "cut", progress=False)
    resumed = train(config, tmp_path / "cut", resume=True, progress=False)
    assert torch.equal(weights(resumed), weights(train(config, tmp_path / "whole", progress=False)))


def test_spikes_are_no_divergence(tmp_path, monkeypatch):
    calls = []

    def errors(model, xs, ys, **how):
        found, change = window_errors(model, xs, ys, **how)
        calls.append(1)
        return (found * 1e4 if len(calls) % EXPLODED_STEPS else found), change  # all but one in a row

    monkeypatch.setattr(trainer, "window_errors", errors)
    train(tiny(n_steps=3 * EXPLODED_STEPS), tmp_path, progress=False)
    assert (tmp_path / "model").exists()
    assert not (tmp_path / "diverged.json").exists()


# The script for a GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it trains for half an hour")
def test_the_device_script_runs_without_a_gpu(tmp_path):
    script = Path(__file__).parents[1] / "benches" / "train_device.sh"
    environment = os.environ | {"PYTHON": sys.executable, "PROMPTS": "1", "OMP_NUM_THREADS": "1"}
    command = ["bash", str(script), str(tmp_path / "run"), "5", "--set", "save_every=2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step 3 of 3 after" in done.stdout
    assert json.loads((tmp_path / "run" / "train.json").read_text())["precision"] == "tf32"
    assert (tmp_path / "run" / "evaluation" / "evaluation.json").exists()


def test_the_device_script_says_when_no_step_was_logged_yet(tmp_path):
    """Stopped before step 20, a run has an empty log."""
    python = tmp_path / "python"
    python.write_text(
        f"""#!/usr/bin/env bash
if [ "$1" = -m ] && [ "$3" = train ]; then
    mkdir -p {tmp_path}/run && echo '{{"n_steps": 500000, "task": "linear_regression"}}' > {tmp_path}/run/train.json
    : > {tmp_path}/run/log.jsonl
    exit 124
fi
exec {sys.executable} "$@"
"""
    )
    python.chmod(0o755)
    script = Path(__file__).parents[1] / "benches" / "train_device.sh"
    environment = os.environ | {"PYTHON": str(python)}
    done = subprocess.run(["bash", str(script), str(tmp_path / "run"), "5"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no step of 500,000 is logged yet" in done.stdout
    assert "run the same command again" in done.stdout
