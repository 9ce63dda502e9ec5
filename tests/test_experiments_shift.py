"""The experiment shift: claims, and cells that are absent."""

import math

import pytest
from labs import curves, quick

from looped.experiments import (
    Lab,
    run_experiment,
    shift,
)
from looped.experiments.measure import Measured, single
from looped.icl.shifts import SHIFTS
from looped.train import preset

SMALL_MODELS = ("looped", "unlooped L=1", "unlooped L=4", "unlooped L=12")


def shifted(names, at_d=None, **errors):
    """Curves up to 10 examples: 0.5 from the first on but where `errors` has another value; another one at 5 examples."""
    values = {name: [1.0] + [errors.get(name.replace(" ", "_").replace("=", ""), 0.5)] * 10 for name in names}
    for name, value in (at_d or {}).items():
        values[name][5] = value
    return curves(**values)


def test_shift_claims():
    lab = Lab("small", "x")
    found = {name: shifted(SMALL_MODELS) for name in SHIFTS}
    found["x_times_2"] = shifted(SMALL_MODELS, unlooped_L12=0.1)
    found["w_times_1/3"] = shifted(SMALL_MODELS, unlooped_L4=0.1)
    found["skewed"] = shifted(SMALL_MODELS, looped=0.6)
    found["orthogonal_query"] = curves(
        **{name: [1.0, 0.9 if name == "looped" else 0.5] + [math.nan] * 9 for name in SMALL_MODELS}
    )
    found["noisy_output"] = shifted(SMALL_MODELS, {"looped": 0.55, "unlooped L=12": 0.7}, looped=0.9)
    every = shift._claims(found, lab)
    claims = {claim.text.partition(":")[0]: claim.holds for claim in every if not claim.text.startswith("noise")}
    assert claims == {
        "skewed": False,
        "half_subspace": True,
        "random_orthants": True,
        "orthogonal_query": False,
        "overlapping_query": True,
        **{f"{what} scaled by {scale}": False for what in "xw" for scale in ("1/3", "1/2", "2", "3")},  # as near to either
        "x scaled by 2": True,
        "w scaled by 1/3": False,
    }
    noise = {claim.text.partition(": ")[2]: (claim.holds, claim.measured) for claim in every if claim.text.startswith("noise")}
    lower = "the looped model's peak is lower than the deepest one's (here: its error at d examples below unlooped L=12's)"
    like = "at d examples the looped model is like one of few layers (here: nearer to unlooped L=4 than to unlooped L=12)"
    assert noise == {
        lower: (True, "0.55 against 0.7"),
        like: (True, "1.10 x unlooped L=4, 0.79 x unlooped L=12"),
    }, "of the errors at d = 5 examples, and not of the others"
    assert {claim.figure for claim in every if claim.text.startswith("noise")} == {"appendix D"}
    assert all("(here: " in claim.text and "\n" not in claim.text for claim in every)
    found["noisy_output"] = shifted(SMALL_MODELS, {"looped": 0.71, "unlooped L=12": 0.7})
    assert [claim.holds for claim in shift._claims(found, lab) if claim.text.startswith("noise")] == [False, False]
    assert shift.last_measured([1.0, 0.5, math.nan]) == 1


@pytest.mark.parametrize(
    ("lost", "without"),
    [
        ("unlooped L=1", {"skewed", "half_subspace", "random_orthants"}),
        ("unlooped L=4", {"skewed", "half_subspace", "random_orthants", "x scaled", "w scaled", "like one of few"}),
        ("looped", {""}),
    ],
)
def test_shift_claims_without_a_model(lost, without):
    """No verdict on what is about a model that is not there, and one on all the rest."""
    names = [name for name in SMALL_MODELS if name != lost]
    claims = shift._claims({name: shifted(names) for name in SHIFTS}, Lab("small", "x"))
    assert len(claims) == 15
    for claim in claims:
        is_without = any(part in claim.text for part in without)
        assert (claim.holds is None) == is_without, claim
        assert (claim.measured == f"no finite model of {lost}") == is_without


def test_shift_at_paper_has_two_looped_models():
    lab = Lab("paper", "x")
    wanted = shift.runs(lab)
    assert [name for name in wanted if name.startswith("looped")] == ["looped", "looped b=20"]
    name, config = wanted["looped b=20"]
    assert (name, config.model.n_loops, config.window) == ("linear_regression_b20_T15", 20, 15)
    assert wanted["looped"] == ("linear_regression", preset("paper"))
    assert [shift._kind_of(name) for name in ("looped b=20", "unlooped L=4", "least squares")] == ["looped", "twin", "baseline"]
    found = {name: curves(**{one: [0.5] * 41 for one in wanted}) for name in SHIFTS}
    values = [0.5] * 41
    values[20] = 0.6
    found["noisy_output"]["looped b=20"] = Measured(single(values), [], 0.0)
    (claim,) = (one for one in shift._claims(found, lab) if "larger b" in one.text)
    assert claim.text.endswith("the larger b, the lower the peak (here: the error at d examples, b=30 below b=20)")
    assert (claim.holds, claim.measured) == (True, "0.5 against 0.6")


def test_shift_draws_absent_cells_as_absent(folder):
    outcome = run_experiment("shift", quick(folder))
    panel = next(panel for panel in outcome.panels if panel.title == "orthogonal query")
    report = outcome.to_dict()
    for line in panel.lines:
        assert [math.isnan(x) for x in line.curve.mean] == [False, False, True, True, True]
    rows = [line for line in outcome.to_csv().splitlines() if line.startswith("orthogonal query,looped")]
    assert rows[2].split(",")[4:7] == ["", "", ""]
    row = next(row for row in report["table"]["rows"] if row[0] == "orthogonal_query")
    assert row[1] == 1, "the last number of examples to which two dimensions leave an orthogonal query"
    assert all(cell > 0 for cell in row[2:])
