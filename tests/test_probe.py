"""Probes: a planted signal is found and none is not; stages and targets are what they say; the control task."""

import numpy as np
import pytest
import torch
from models import icl_model

from looped.experiments.probe import _with_ones
from looped.icl.probe import Probes, Sample, fit_probes, sample_states, stages, targets_of
from looped.icl.prompts import interleave
from looped.icl.tasks import LinearRegression

N_STAGES, WIDTH, N_DIMS, EXAMPLES = 3, 12, 2, [1, 3]


def planted(generator, n_prompts=64, token=1):
    """Stage 0 noise; stage 1 the target, rotated, in one token that both numbers of examples see; stage 2 in a token that only
    the larger number sees."""
    states = torch.randn(N_STAGES, n_prompts, 6, WIDTH, generator=generator)
    target = torch.randn(n_prompts, N_DIMS, generator=generator)
    mix = torch.randn(N_DIMS, WIDTH, generator=torch.Generator().manual_seed(1))
    states[1, :, token] = target @ mix
    states[2, :, 4] = target @ mix
    return Sample(states, target.expand(1, 2, n_prompts, N_DIMS))


def test_planted_signal_is_found_where_it_is_and_nowhere_else():
    probes = fit_probes(planted, EXAMPLES, n_steps=700, lr=2e-2)
    with torch.no_grad():
        errors = probes.errors(planted(torch.Generator().manual_seed(99), n_prompts=2000))[0]  # [S, K]
    assert (errors[0] > 0.9).all(), "noise tells nothing: the variance of the target is 1"
    assert (errors[1] < 0.1).all()
    assert errors[2, 0] > 0.9, "with one example the probe must not see token 4"
    assert errors[2, 1] < 0.1
    alpha = probes.pooling.masked_fill(probes.outside, -torch.inf).softmax(-1)[0]
    assert alpha[1, :, 1].min() > 0.8, "the pooling points at the token"
    assert (alpha[:, 0, 2:] == 0).all()


def test_probes_are_independent_and_follow_their_seed():
    one = fit_probes(planted, EXAMPLES, n_steps=5, seed=3)
    again = fit_probes(planted, EXAMPLES, n_steps=5, seed=3)
    assert torch.equal(one.W1, again.W1)

    def loud(generator):  # another signal at stage 0 leaves stage 1 alone
        sample = planted(generator)
        sample.states[0] *= 10
        return sample

    other = fit_probes(loud, EXAMPLES, n_steps=5, seed=3)
    torch.testing.assert_close(other.W1[:, 1:], one.W1[:, 1:], rtol=1e-5, atol=1e-7)
    assert not torch.allclose(other.W1[:, 0], one.W1[:, 0], rtol=1e-3)


def test_a_probe_is_its_equation():
    torch.manual_seed(0)
    probes = Probes(1, N_STAGES, EXAMPLES, WIDTH, N_DIMS)
    with torch.no_grad():
        probes.pooling.normal_()
    states = torch.randn(N_STAGES, 5, 6, WIDTH)
    got = probes(states)
    for s in range(N_STAGES):
        for k, n in enumerate(EXAMPLES):
            alpha = probes.pooling[0, s, k, : 2 * n].softmax(0)
            z = (alpha[:, None] * states[s, :, : 2 * n]).sum(dim=1)
            hidden = torch.relu(z @ probes.W1[0, s, k] + probes.b1[0, s, k])
            torch.testing.assert_close(got[0, s, k], hidden @ probes.W2[0, s, k] + probes.b2[0, s, k])
    targets = torch.randn(1, 2, 5, N_DIMS)
    squared = ((got[0, 2, 1] - targets[0, 1]) ** 2).sum(dim=1).mean() / N_DIMS
    torch.testing.assert_close(probes.errors(Sample(states, targets))[0, 2, 1], squared)


@pytest.mark.parametrize("unlooped", [False, True])
def test_stages_are_the_stream_before_the_final_norm(unlooped):
    changes = dict(n_core=3, n_loops=1, inject="none", state_init="embedding") if unlooped else dict(n_core=2)
    model = icl_model(std=0.2, **changes)
    xs, ys = LinearRegression(3).sample(2, 4, generator=torch.Generator().manual_seed(0))
    prompts = interleave(xs, ys, keep_last_y=True).double()
    n_loops = model.config.n_loops if unlooped else 4
    got = stages(model, prompts, n_loops)
    assert got.shape == (n_loops * model.config.n_core, 2, 8, 16)
    last_of_loop = got[model.config.n_core - 1 :: model.config.n_core]
    for stage, state in zip(last_of_loop, model.iterate(prompts, n_loops), strict=True):
        torch.testing.assert_close(model.final_norm(stage), state)
    P = model.embed(prompts)
    first = model.core[0](model._add_positions(model.inject(model.initial_state(P), P)))
    torch.testing.assert_close(got[0], first)
    assert not model.core[0]._forward_hooks


def test_targets_equal_numpy():
    xs, ys = LinearRegression(3).sample(4, 6, generator=torch.Generator().manual_seed(0))
    got = targets_of(xs, ys, [1, 3, 6])
    assert got.shape == (2, 3, 4, 3)
    for b in range(4):
        for i, k in enumerate((1, 3, 6)):
            X, y = xs[b, :k].double().numpy(), ys[b, :k].double().numpy()
            np.testing.assert_allclose(got[0, i, b], X.T @ y / k, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(got[1, i, b], np.linalg.lstsq(X, y, rcond=1e-5)[0], rtol=1e-3, atol=1e-4)


def test_samples_hold_the_prompts_states_and_name_wrong_lengths():
    model = icl_model(std=0.2, dtype=torch.float32)
    xs, ys = LinearRegression(3).sample(2, 6, generator=torch.Generator().manual_seed(0))
    sample = sample_states(model, xs, ys, n_loops=2, n_examples=[2, 4])
    assert sample.states.shape == (2, 2, 8, 16)
    torch.testing.assert_close(sample.states, stages(model, interleave(xs[:, :4], ys[:, :4], keep_last_y=True), 2))
    with pytest.raises(ValueError, match=r"must lie in 1 \.\. 6"):
        sample_states(model, xs, ys, n_loops=2, n_examples=[7])


def test_control_task_has_weights_of_one():
    pairs = LinearRegression(3).sample(2, 5, generator=torch.Generator().manual_seed(0))
    control = _with_ones(pairs)
    assert torch.equal(control.xs, pairs.xs)
    w = torch.linalg.lstsq(control.xs, control.ys[..., None]).solution
    torch.testing.assert_close(w, torch.ones(2, 3, 1), rtol=1e-3, atol=1e-3)
