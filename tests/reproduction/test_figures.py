"""Figures over several seeds: means, errors, and what is not drawn."""

import copy
import json
import math

import numpy as np
import pytest

from evenclip.comparison.presets import PUBLISHED
from evenclip.reproduction import figures, validity
from evenclip.reproduction.figures import FIGURES

SEEDS = 3


def set_ratio(run, measured, group, c):
    """Change the term that the ratio c = η·gᵀHg/‖g‖² is computed from."""
    form = c * measured["norms"][0][0] ** 2 / run["lr"]
    slope = group["slopes"][0]
    group["terms"]["non_private"][0] = -run["lr"] * slope + run["lr"] ** 2 / 2 * form


@pytest.fixture
def observed(seen):
    """Rule -> runs, in which every term of seed s is (s + 1) times that of the fixture."""

    def scaled(rule, factor):
        run = json.loads(json.dumps(seen(rule)))  # its measurements share no objects
        run["watch"]["epochs"] = None
        run["n"] = 23458
        run["loss"] = [[factor * value for value in row] for row in run["loss"]]
        for measured in run["risk"]:
            for group in measured["risk"]:
                for name, (value, se) in group["terms"].items():
                    group["terms"][name] = [factor * value, se]
                set_ratio(run, measured, group, 0.5)
        return run

    names = [method.name for method in PUBLISHED["adult"].methods]
    return {name: [scaled(name, s + 1.0) for s in range(SEEDS)] for name in names}


def curve(figure, row, column, k):
    """The k-th group's curve in a panel, without the line at 0."""
    columns = figure.axes[0].get_subplotspec().get_gridspec().ncols
    lines = [
        line
        for line in figure.axes[row * columns + column].lines
        if not line.get_label().startswith("_")
    ]
    return np.asarray(lines[k].get_ydata())


def band(figure, row, column, k):
    """Lowest and highest value of the k-th group's shaded area."""
    columns = figure.axes[0].get_subplotspec().get_gridspec().ncols
    area = figure.axes[row * columns + column].collections[k].get_paths()[0].vertices[:, 1]
    return area.min(), area.max()


def test_a_curve_is_the_mean_over_seeds_and_its_band_the_standard_error(observed):
    drawn = figures.draw(FIGURES["adult-risk"], observed)
    mean, error = 0.04 * 2, 0.04 / math.sqrt(SEEDS)  # R_dir of seeds: 0.04, 0.08, 0.12
    assert curve(drawn, 0, 0, 0) == pytest.approx(np.full(6, mean))
    assert band(drawn, 0, 0, 0) == pytest.approx((mean - error, mean + error))
    assert "mean and standard error over 3 seeds" in drawn.legends[0].get_title().get_text()


def test_one_seed_has_no_band_and_says_so(observed):
    alone = {rule: runs[:1] for rule, runs in observed.items()}
    drawn = figures.draw(FIGURES["adult-epochs"], alone)
    assert not any(axes.collections for axes in drawn.axes)
    assert drawn.legends[0].get_title().get_text() == "one seed, so without errors"


def test_a_term_outside_the_range_of_the_expansion_is_not_drawn(observed):
    """In one seed of one rule, g_Bᵀ H g_B is made so large that c = 2."""
    run = observed["dpsgd"][1]
    measured = copy.deepcopy(run["risk"][2])
    set_ratio(run, measured, measured["risk"][0], 2.0)
    run["risk"][2] = measured
    assert validity.ratio(run, measured, 0) == pytest.approx(2)
    assert not validity.holds(run, measured, 0)
    drawn = figures.draw(FIGURES["adult-risk"], observed)
    places = [axes.get_title() for axes in drawn.axes]
    column = places.index("DPSGD")
    for row in (0, 1):
        known = np.isfinite(curve(drawn, row, column, 0))
        assert known.tolist() == [True, True, False, True, True, True]
        assert np.isfinite(curve(drawn, row, column, 1)).all()
    assert "not drawn: 1 of 180 values" in drawn.legends[0].get_title().get_text()


def test_the_ratio_is_that_of_the_definition():
    """η·gᵀHg/‖g‖² of a quadratic, from the terms that a measurement keeps."""
    generator = np.random.default_rng(0)
    root = generator.normal(size=(4, 4))
    H, g, slope, lr = root @ root.T, generator.normal(size=4), 0.7, 0.03
    non_private = -lr * slope + lr**2 / 2 * (g @ H @ g)
    measured = {
        "risk": [{"terms": {"non_private": [non_private, 0.0]}, "slopes": [slope]}],
        "norms": [[float(np.linalg.norm(g))], [0.0]],
    }
    assert validity.ratio({"lr": lr}, measured, 0) == pytest.approx(lr * (g @ H @ g) / (g @ g))
    nothing = {**measured, "norms": [[0.0], [0.0]]}
    assert validity.ratio({"lr": lr}, nothing, 0) is None
    assert validity.holds({"lr": lr}, nothing, 0)


def test_the_table_of_validity_counts(observed):
    text = validity.draw({("adult", False): observed})
    (row,) = [line for line in text.splitlines() if "| dpsgd |" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:3] == ["Adult, as published", "dpsgd", "3"]
    assert cells[3:6] == ["0.5", "36 of 36", "0 of 36"]
    assert float(cells[7]) == pytest.approx(0.03 / 0.04)
    assert "non-private" not in text
