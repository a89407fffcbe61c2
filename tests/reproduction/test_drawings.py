"""What the drawings show is computed and true; how they look is the same everywhere, down to the
byte.
"""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import evenclip
from evenclip.reproduction import drawings, style
from evenclip.reproduction.drawings import DRAWINGS, PATHS
from evenclip.rules import RULES


@pytest.fixture(scope="module")
def descent():
    return drawings.convergence()


@pytest.fixture(scope="module")
def rules():
    return drawings.clipping()


@pytest.fixture(scope="module")
def step():
    return drawings.decomposition()


@pytest.fixture(scope="module")
def figures():
    return {name: draw() for name, draw in DRAWINGS.items()}


@pytest.fixture(scope="module")
def saved(figures, tmp_path_factory):
    """The folder, and the two files of each drawing."""
    folder = tmp_path_factory.mktemp("drawings") / "new"
    return folder, {name: style.save(figure, folder, name) for name, figure in figures.items()}


def clipped_mean(g, C0):
    """By the definition, one gradient after another."""
    return sum(min(1.0, C0 / math.hypot(*one)) * one for one in g) / len(g)


def angle(a, b):
    """In degrees, from cosines."""
    return math.degrees(math.acos(np.clip(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)), -1, 1)))


def test_gradients_are_those_of_the_loss():
    of, theta, h = drawings.problem(), np.array([1.3, -0.4]), 0.5
    slopes = [
        (of.losses(theta + h * e) - of.losses(theta - h * e)) / (2 * h) for e in np.eye(2)
    ]  # exact: quadratic
    means = [of.gradients(theta)[of.group == k].mean(0) for k in (0, 1)]
    np.testing.assert_allclose(np.transpose(slopes), means, atol=1e-12)
    np.testing.assert_allclose(
        of.loss(theta), (48 * of.losses(theta)[0] + 12 * of.losses(theta)[1]) / 60
    )


def test_the_minimum_is_one():
    of = drawings.problem()
    np.testing.assert_allclose(of.gradients(of.minimum).mean(0), 0, atol=1e-12)
    around = of.minimum + 0.1 * np.array([[1, 0], [0, 1], [-1, 0], [0, -1]])
    assert np.all(of.loss(around) > of.loss(of.minimum))


def test_a_wrong_length_still_reaches_the_minimum_and_a_wrong_direction_does_not(descent):
    start = np.linalg.norm(descent.paths["plain"][0] - descent.minimum)
    relative = {name: distance / start for name, distance in descent.distances.items()}
    assert relative["plain"] < 1e-5
    assert relative["magnitude"] < 0.01
    assert relative["direction"] > 0.25
    assert relative["clipped"] > 0.25


def test_direction_and_clipped_end_where_clipped_gradients_cancel(descent):
    end = descent.paths["clipped"][-1]
    assert np.linalg.norm(clipped_mean(descent.problem.gradients(end), 1.0)) < 1e-3
    assert np.linalg.norm(descent.paths["direction"][-1] - end) < 0.05


@pytest.mark.parametrize(("one", "other"), [("magnitude", "plain"), ("direction", "clipped")])
def test_length_does_not_change_the_road(descent, one, other):
    apart = np.linalg.norm(descent.paths[one][:, None] - descent.paths[other], axis=2).min(1)
    assert apart.max() < 0.06


def test_each_error_changes_what_it_says(descent):
    first = {name: path[1] - path[0] for name, path in descent.paths.items()}
    length = {name: np.linalg.norm(step) for name, step in first.items()}
    assert length["magnitude"] == pytest.approx(length["clipped"])
    assert length["direction"] == pytest.approx(length["plain"])
    assert angle(first["magnitude"], first["plain"]) == pytest.approx(0, abs=1e-5)
    assert angle(first["direction"], first["clipped"]) == pytest.approx(0, abs=1e-5)
    assert angle(first["plain"], first["clipped"]) > 10
    expected = -descent.lr * clipped_mean(descent.problem.gradients(descent.paths["plain"][0]), 1.0)
    np.testing.assert_allclose(first["clipped"], expected, rtol=1e-12)


def test_the_smaller_group_pays_for_a_wrong_direction(descent):
    for name in ("plain", "magnitude"):
        np.testing.assert_allclose(descent.risks[name], 0, atol=0.05)
    for name in ("direction", "clipped"):
        larger, smaller = descent.risks[name]
        assert larger < 0
        assert smaller > 5


def test_clipping_one_by_one_turns_the_mean_and_scaling_does_not(rules):
    assert rules.treatments["local"].degrees > 20
    assert rules.treatments["scaled"].degrees == pytest.approx(0, abs=1e-9)
    assert rules.treatments["capped"].degrees < 10 < rules.treatments["dropped"].degrees
    for treatment in rules.treatments.values():
        assert abs(treatment.degrees) == pytest.approx(
            angle(rules.mean, treatment.summed.mean(0)), abs=1e-5
        )


def test_the_mean_is_turned_towards_the_larger_group(rules):
    larger = rules.gradients[rules.group == 0].mean(0)
    for name in ("local", "dropped"):
        assert angle(rules.treatments[name].mean, larger) < angle(rules.mean, larger) - 15


def test_each_rule_does_what_its_panel_says(rules):
    enough, scarce = rules.Z
    norms = np.array([math.hypot(*g) for g in rules.gradients])
    lengths = {
        name: np.linalg.norm(treatment.summed, axis=1)
        for name, treatment in rules.treatments.items()
    }
    above = norms > scarce
    assert not np.any(norms > enough)
    assert 0 < above.sum() < len(norms)
    assert np.all(rules.group[above] == 1)
    np.testing.assert_allclose(lengths["local"], [min(n, rules.C0) for n in norms])
    np.testing.assert_allclose(lengths["scaled"], norms * rules.C0 / enough)
    np.testing.assert_allclose(lengths["dropped"], np.where(above, 0, norms * rules.C0 / scarce))
    np.testing.assert_allclose(
        lengths["capped"], np.where(above, rules.C0, norms * rules.C0 / scarce)
    )


def test_the_two_errors_add_up_to_that_of_clipping(step):
    np.testing.assert_allclose(step.mag + step.dir, step.clip, rtol=0, atol=1e-12)


def test_the_numbers_that_are_printed_add_up(step):
    np.testing.assert_allclose(
        step.mag.round(2) + step.dir.round(2), step.clip.round(2), rtol=0, atol=1e-9
    )


def test_the_terms_are_what_the_losses_really_do(step):
    """The loss is quadratic, so its expansion to second order is exact."""
    after = {
        name: step.problem.losses(step.theta - step.lr * along)
        for name, along in (
            ("plain", step.plain),
            ("shorter", step.rho * step.plain),
            ("clipped", step.clipped),
        )
    }
    np.testing.assert_allclose(step.mag, after["shorter"] - after["plain"], atol=1e-12)
    np.testing.assert_allclose(step.dir, after["clipped"] - after["shorter"], atol=1e-12)
    np.testing.assert_allclose(step.clip, after["clipped"] - after["plain"], atol=1e-12)


def test_the_clipped_gradient_is_the_shortened_one_turned(step):
    np.testing.assert_allclose(step.M @ step.M.T, np.eye(2), atol=1e-15)
    np.testing.assert_allclose(step.M @ (step.rho * step.plain), step.clipped, atol=1e-15)
    np.testing.assert_allclose(
        step.clipped, clipped_mean(step.problem.gradients(step.theta), 1.0), atol=1e-15
    )
    assert abs(step.degrees) == pytest.approx(angle(step.plain, step.clipped))


def test_direction_costs_the_smaller_group_most(step):
    assert step.dir[0] < 0 < step.mag[1] < step.dir[1]


@pytest.mark.parametrize("name", DRAWINGS)
def test_there_are_two_files_of_the_right_size(name, figures, saved):
    folder, files = saved
    svg, png = files[name]
    assert [svg, png] == [folder / f"{name}.svg", folder / f"{name}.png"]
    width, height = figures[name].get_size_inches()
    assert width * 25.4 == pytest.approx(style.WIDTH)
    with Image.open(png) as image:
        assert image.size == (int(width * 200), int(height * 200))
        assert image.getextrema()[0] == (0, 255)
    text = svg.read_text()
    assert "<text" in text
    assert not [word for word in ("<dc:date>", "Matplotlib", str(Path.home())) if word in text]


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_redraw_gives_the_same_bytes(name, saved, tmp_path):
    again = style.save(DRAWINGS[name](), tmp_path, name)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in saved[1][name]]


def test_so_does_saving_twice(figures, saved, tmp_path):
    again = style.save(figures["decomposition"], tmp_path, "again")
    assert [path.read_bytes() for path in again] == [
        path.read_bytes() for path in saved[1]["decomposition"]
    ]


def test_another_process_with_other_defaults_draws_the_same_bytes(saved, tmp_path):
    """The module that computes the numbers does not import matplotlib."""
    (tmp_path / "matplotlibrc").write_text(
        "font.size: 20\nlines.linewidth: 9\nsvg.fonttype: path\n"
    )
    code = (
        "import sys\n"
        "from evenclip.reproduction import drawings, style\n"
        "values = drawings.decomposition()\n"
        "print('matplotlib' in sys.modules)\n"
        f"style.save(drawings.draw_decomposition(values), {str(tmp_path)!r}, 'other')\n"
        "import matplotlib\n"
        "print(matplotlib.rcParams['font.size'], 'matplotlib.pyplot' in sys.modules)\n"
    )
    environment = {
        **os.environ,
        "MATPLOTLIBRC": str(tmp_path / "matplotlibrc"),
        "PYTHONHASHSEED": "1",
        "PYTHONPATH": str(Path(evenclip.__file__).parent.parent),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout == "False\n20.0 False\n", done.stderr
    assert (tmp_path / "other.svg").read_bytes() == saved[1]["decomposition"][0].read_bytes()


@pytest.mark.parametrize("name", DRAWINGS)
def test_letters_are_large_enough_inside_and_apart(name, figures, saved):
    from matplotlib.text import Text

    figure = figures[name]
    texts = [
        text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()
    ]
    boxes = {text: Text.get_window_extent(text) for text in texts}
    assert min(text.get_fontsize() for text in texts) >= style.SMALLEST
    outside = [
        t.get_text()
        for t, box in boxes.items()
        if not (figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1)
    ]
    outside += [
        t.get_text()
        for t, box in boxes.items()
        if not (figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1)
    ]
    assert outside == []
    pairs = itertools.combinations(boxes.items(), 2)
    assert [
        (a.get_text(), b.get_text()) for (a, one), (b, two) in pairs if one.padded(-1).overlaps(two)
    ] == []


def test_every_sample_is_in_the_plane(figures, descent):
    plane = figures["convergence"].axes[0]
    for limits, values in (
        (plane.get_xlim(), descent.problem.x[:, 0]),
        (plane.get_ylim(), descent.problem.x[:, 1]),
    ):
        assert limits[0] < values.min()
        assert values.max() < limits[1]


def test_the_legend_has_the_distances(figures, descent):
    legends = [axes.get_legend() for axes in figures["convergence"].axes if axes.get_legend()]
    printed = [text.get_text().rsplit(": ", 1)[1] for text in legends[0].get_texts()]
    assert printed == [f"{descent.distances[name]:.3f}" for name in PATHS]


@pytest.mark.parametrize(
    "looks", [list(style.RULES.values()), list(style.GROUPS)], ids=["rules", "groups"]
)
def test_looks_differ_without_colour(looks):
    for what in ("label", "colour", "line", "marker", "hatch"):
        assert len({getattr(look, what) for look in looks}) == len(looks), what
    lightness = sorted(look.lightness for look in looks)
    assert np.diff(lightness).min() > 8
    assert lightness[-1] < 80


def test_every_rule_has_a_look():
    assert set(style.RULES) == set(RULES)
    assert [look.label for look in style.RULES.values()] == [
        "Non-private", "DPSGD", "FairLens", "DPSGD-F", "DPSGD-Global", "DPSGD-Global-Adapt",
    ]  # fmt: skip


def test_letters_in_a_colour_can_be_read():
    for look in [*style.RULES.values(), *style.GROUPS]:
        assert style.Look("", look.ink, "-", "o", "").lightness < 50


def test_a_figure_without_area_is_refused():
    with pytest.raises(
        ValueError, match=r"^A figure of 140\.0 by 0 mm has no area; give two positive lengths\.$"
    ):
        style.figure(height_mm=0)
