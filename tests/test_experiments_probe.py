"""The experiment probe: errors over fresh prompts, claims, stages and seeds."""

import numpy as np
import pytest
import torch
from labs import quick
from models import icl_model

from looped.experiments import (
    Lab,
    probe,
    run_experiment,
)
from looped.icl.probe import Probes, targets_of
from looped.icl.prompts import interleave
from looped.icl.tasks import LinearRegression
from looped.train import Ramp


def test_probe_errors_are_means_over_fresh_prompts(tmp_path):
    """Probes that answer 0 at the embedded prompt and after the first loop, 0.5 after the second, against plain numpy."""
    model, lab = icl_model(dtype=torch.float32, n_dims=2, n_points=5, n_loops=2), quick(tmp_path, n_prompts=300)
    task, n_examples = LinearRegression(2), [1, 4]
    probes = Probes(2, 3, n_examples, 16, 2)
    with torch.no_grad():
        for parameter in probes.parameters():
            parameter.zero_()
        probes.b2[1, 2] = 0.5  # of the least-squares weights after the second loop
    got = probe._errors(lab, probes, model, task, n_examples)
    generator = probe.evaluation_stream(0)
    parts = [task.sample(n, 4, generator=generator) for n in (256, 44)]
    xs, ys = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    targets = targets_of(xs, ys, n_examples).numpy()  # [P, K, B, d]
    expected = np.stack([[(targets**2).mean(axis=(2, 3))[p]] * 3 for p in range(2)])  # [P, S, K]
    expected[1, 2] = ((targets[1] - 0.5) ** 2).mean(axis=(1, 2))
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_probe_claims():
    def planted(looped, unlooped, control):
        both = {"looped": looped, "unlooped": unlooped, "looped, control": control, "unlooped, control": control}
        return {name: torch.tensor([values] * 2) for name, values in both.items()}

    claims = probe._claims(planted([0.1, 0.9, 0.2, 0.21], [0.1, 0.8, 0.3, 0.5], [0.1, 1.0, 0.9, 0.9]))
    assert [claim.holds for claim in claims] == [True] * 10, "what the embedded prompt tells is no loop's and no layer's"
    assert claims[0].measured == "1.05 x, 0.9 to 0.21"
    assert claims[1].measured == "1.67 x, 0.8 to 0.3 at 2"
    assert claims[2].measured == "0.21 against 0.3"
    assert claims[4].measured == "0.3 against 0.9"
    claims = probe._claims(planted([1.0, 0.9, 0.2, 0.4], [1.0, 0.8, 0.4, 0.3], [1.0, 1.0, 0.3, 0.9]))
    assert [claim.holds for claim in claims] == [False] * 10
    alone = probe._claims({name: torch.tensor([[1.0, 0.9, 0.2]] * 2) for name in ("looped", "looped, control")})
    assert len(alone) == 4, "nothing is claimed of a model that is not there"


@pytest.mark.parametrize("curve", [[1.0, 0.5, 0.5, 0.5], [1.0, 0.5, 0.47, 0.46], [1.0, 0.5, 0.51, 0.52], [1.0, 0.5, 0.7, 0.9]])
def test_a_flat_or_worsening_probe_does_not_improve(curve):
    found = {name: torch.tensor([curve] * 2) for name in ("looped", "unlooped", "looped, control", "unlooped, control")}
    claims = [claim for claim in probe._claims(found) if "improves" in claim.text or "inner layer" in claim.text]
    assert [claim.holds for claim in claims] == [False] * 4
    assert claims[0].text.endswith("(here: the last below 0.9 x the first and within 1.1 x of the best)")
    assert claims[1].text.endswith("(here: its best below 0.9 x the first, the last above 1.1 x the best)")


def test_probes_at_paper_are_of_as_many_loops_as_layers(folder):
    wanted = probe.runs(Lab("paper", folder))
    (name, config), (_, unlooped) = wanted["looped"], wanted["unlooped"]
    assert (name, config.model.n_loops, config.window, config.loops) == (
        "linear_regression_b20_T15",
        20,
        15,
        Ramp(15, 20, 2, 500),
    )
    assert (unlooped.model.n_core, unlooped.model.n_loops) == (20, 1)
    for other in ("tiny", "small"):
        lab = Lab(other, folder)
        assert probe.runs(lab)["looped"] == ("linear_regression", lab.config())


@pytest.mark.parametrize("unlooped", [False, True])
def test_stage_0_of_the_probes_is_the_embedded_prompt(tmp_path, unlooped):
    changes = dict(n_core=3, n_loops=1, inject="none", state_init="embedding") if unlooped else dict(n_loops=3)
    model = icl_model(std=0.2, dtype=torch.float32, n_dims=2, n_points=5, **changes)
    draw = probe._drawer(quick(tmp_path), model, LinearRegression(2), [1, 4], 6, False)
    states = draw(torch.Generator().manual_seed(0)).states
    pairs = LinearRegression(2).sample(6, 4, generator=torch.Generator().manual_seed(0))
    prompts = interleave(*pairs, keep_last_y=True)
    assert states.shape == (4, 6, 8, 16)
    assert not states.requires_grad
    torch.testing.assert_close(states[0], model.read_in(prompts).detach())
    torch.testing.assert_close(states[1], model.core[0](states[0] + model.positions.weight[:8]).detach())


def test_probe_and_adaptive_measure_every_seed(tmp_path):
    for name in ("probe", "adaptive"):
        runs = {seeds: run_experiment(name, quick(tmp_path, seeds=seeds)) for seeds in ((42,), (7,), (42, 7))}
        first = next(line for line in runs[42, 7].panels[-1].lines if line.label in ("unlooped", "same loops for all"))
        alone = [next(one for one in runs[seed,].panels[-1].lines if one.label == first.label) for seed in (42, 7)]
        assert alone[0].curve.mean != alone[1].curve.mean
        np.testing.assert_allclose(first.by_seed, [one.curve.mean for one in alone])
        np.testing.assert_allclose(first.curve.mean, np.mean(first.by_seed, axis=0))
        assert all(set(line.models_at) == {2} for panel in runs[42, 7].panels for line in panel.lines)
        assert {"linear_regression", "linear_regression, seed 7"} <= set(runs[42, 7].models)
        if name == "adaptive":
            rows = [[row[4:8] for row in outcome.sheet.rows] for outcome in runs.values()]
            np.testing.assert_allclose(rows[2], np.mean(rows[:2], axis=0), rtol=1e-6)
