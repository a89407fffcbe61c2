"""The folder: kept, drawn, drawn again without training, the same bytes; and the commands."""

import json
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from evenclip import files
from evenclip.cli import app, main
from evenclip.comparison.presets import PUBLISHED
from evenclip.reproduction import figures, observed
from evenclip.reproduction.artifacts import Artifacts
from evenclip.reproduction.figures import FIGURES, bound_rows
from evenclip.reproduction.observed import GroupGradients, ObservedRun


def filled(folder, kept, seen):
    artifacts = Artifacts(folder)
    artifacts.keep(kept())
    artifacts.observed.mkdir(parents=True)
    for method in PUBLISHED["adult"].methods:
        path = artifacts.observed / f"{ObservedRun('adult', method.name).name}.json"
        path.write_bytes(files.sealed(seen(method.name)))
    (artifacts.observed / "adult-published-dpsgd-eigenvalues.json").write_bytes(
        files.sealed(seen("dpsgd"))
    )
    return artifacts


@pytest.fixture(scope="module")
def drawn(tmp_path_factory, kept, seen):
    """A folder that the command has drawn."""
    folder = tmp_path_factory.mktemp("drawn")
    filled(folder, kept, seen)
    assert CliRunner().invoke(app, ["paper", "redraw", "--out", str(folder)]).exit_code == 0
    return folder


def test_everything_is_drawn_again_from_what_is_kept(drawn):
    first = {
        path: path.read_bytes()
        for path in drawn.rglob("*")
        if path.is_file() and path.suffix != ".json"
    }
    names = {path.relative_to(drawn).as_posix() for path in first}
    assert {
        "tables/adult.md",
        "figures/adult-risk.svg",
        "figures/adult-bounds.png",
        "index.html",
    } <= names
    assert not any("mnist" in name for name in names)
    artifacts = Artifacts(drawn)
    again = [
        artifacts.draw_table("adult"),
        *(path for name in FIGURES for path in artifacts.draw_figure(name)),
        artifacts.index(),
    ]
    assert len(again) == 12  # a table, five figures in two formats, the index
    assert {path: path.read_bytes() for path in again}.items() <= first.items()


def test_the_index_links_every_table_and_figure(drawn):
    page = (drawn / "index.html").read_text()
    kinds = ("epochs", "risk", "noise", "bounds", "eigenvalues")
    for name in ("adult", *(f"adult-{kind}" for kind in kinds), "convergence"):
        assert f'href="#{name}"' in page
        assert f'id="{name}"' in page
    assert "<td>+8.3‡</td>" in page
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "One seed, so without errors."),
        ({"n": 7920}, "Partial: 7,920 training records; one seed, so without errors."),
        ({"watch": {"epochs": 1}}, "A quick run; one seed, so without errors."),
    ],
    ids=["whole", "partial", "quick"],
)
def test_a_figure_that_is_not_the_papers_is_marked(change, says, tmp_path, kept, seen):
    artifacts = filled(
        tmp_path, kept, lambda rule: {**seen(rule), "n": 23458, "watch": {"epochs": None}, **change}
    )
    (drawing,) = [path for path in artifacts.draw_figure("adult-noise") if path.suffix == ".svg"]
    caption = f"{FIGURES['adult-noise'].caption} {says} (<a"
    assert caption in artifacts.index().read_text()
    text = drawing.read_text()
    assert says[1:-1] in text
    assert ("partial" in text, "quick run" in text) == ("Partial" in says, "quick" in says)


def test_figures_lack_nothing_of_the_paper():
    of = {figure.name for figure in FIGURES.values() if not figure.match}
    assert {f"{d}-{k}" for d in PUBLISHED for k in ("epochs", "risk", "noise")} <= of
    assert {"adult-bounds", "adult-eigenvalues"} <= of


def test_a_figure_with_runs_missing_is_not_drawn(tmp_path, kept, seen):
    artifacts = filled(tmp_path, kept, seen)
    (artifacts.observed / "adult-published-dpsgd.json").unlink()
    assert artifacts.draw_figure("adult-risk") == []
    assert len(artifacts.draw_figure("adult-bounds")) == 2
    with pytest.raises(ValueError, match="There is no figure 'mona-lisa'"):
        artifacts.draw_figure("mona-lisa")


def test_noise_at_the_scale_of_the_paper(seen):
    runs = {method.name: [seen(method.name)] for method in PUBLISHED["adult"].methods}
    drawn = [
        figures.draw(FIGURES["adult-noise"], runs, published_scale=scale) for scale in (False, True)
    ]
    ours, theirs = (figure.axes[0].lines[1].get_ydata()[0] for figure in drawn)
    assert drawn[0].axes[0].get_ylabel() == r"$R^{\mathrm{noise}}$"
    assert drawn[1].axes[0].get_ylabel() == r"$R^{\mathrm{noise}}$, without $1/B^2$"
    assert drawn[0].axes[0].texts[0].get_text() == r"$\times 10^{-1}$"
    assert drawn[1].axes[0].texts[0].get_text() == r"$\times 10^{3}$"
    assert theirs * 10**3 == pytest.approx(ours * 10**-1 * 256**2)


def test_bounds_of_a_look(seen):
    """By hand: ρ = 0.4; Proposition 3: η[(0.4·0.5 − 0.2) − (0.4·1.5 − 1.2) − 0.16]."""
    row = bound_rows(seen("dpsgd"))[0]
    assert row["dir bound"] == pytest.approx(0.01 * (0.0 + 0.6 - 0.16))
    spread = (1 - 0.01) / 256
    tran = 0.5 * 1 - 0.5 * 4 - 0.5 * 3 - 0.5 - 0.25 / 2 * (1 + spread)
    assert row["clip bound"] == pytest.approx(0.01 * tran)
    assert row["dir"] == pytest.approx(0.04 - 0.08)
    assert row["convex"] is False
    assert row["small_steps"] is True


# --- observing -----------------------------------------------------------------------------------


def test_a_watched_run_is_the_run_of_the_table():
    """Observers change nothing: the losses are those of the same run without observers."""
    from evenclip.sweep.describe import load_data, make_model
    from evenclip.training.fit import fit

    given = ObservedRun("adult", "dpsgd-global-adapt", epochs=1, every=40, sample=64, probes=4)
    seen = observed.observe_run(given)
    loaded = load_data({"name": "adult"}, 0).splits.train
    method = given.method
    plain = fit(
        make_model(given.settings.model, loaded, 0),
        loaded,
        rule=method.rule,
        epochs=1,
        lr=method.lr,
        q=1 / 92,
        delta=1e-6,
        seed=0,
    )
    order = [loaded.group_names.index(group) for group in ("Male", "Female")]
    assert seen["groups"] == ["Male", "Female"]
    assert seen["loss"] == [[row["loss"][k] for k in order] for row in plain.trace]
    assert [look["t"] for look in seen["risk"]] == [0, 40, 80]
    assert len(seen["norm"]) == 1
    assert json.loads(json.dumps(seen)) == seen
    first = seen["risk"][0]["risk"][0]["terms"]
    assert first["mag"][0] + first["dir"][0] == pytest.approx(first["clip"][0], rel=1e-4, abs=1e-9)


def test_gradients_of_groups_are_averaged_over_the_batches_that_have_them():
    import torch

    class Fake:
        def __init__(self, t, group):
            self.t, self.group = t, torch.tensor(group)
            self.weights = torch.ones(len(group), dtype=torch.float64)

        def weighted_sum(self, w):
            return (w * (1.0 + self.group)).sum().reshape(1)

    watch = GroupGradients([0, 1], epoch=2)
    watch(Fake(0, [0, 1]))
    watch(Fake(1, [0, 0]))
    assert watch.rows == [[pytest.approx(1.25), pytest.approx(1.0), pytest.approx(2.0)]]
    watch(Fake(2, []))
    watch.close()
    assert watch.rows[1] == [None, None, None]
    seldom = GroupGradients([0, 1], epoch=3, every=2)
    for t, group in enumerate(([0, 1], [0, 0], [1, 1], [1, 1], [0, 0], [0, 1])):
        seldom(Fake(t, group))
    assert seldom.rows == [[1.75, 1.0, 2.0], [1.0, 1.0, None]]


def test_the_matched_reference_has_the_rates_that_its_table_chose(tmp_path):
    artifacts = Artifacts(tmp_path)
    assert artifacts.reference_lr("adult") == []
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "adult-matched.json").write_bytes(
        files.sealed({"rules": {"non-private": {"lr": [0.3, 0.1]}}})
    )
    plan = observed.plan("adult", match=True, reference_lr=artifacts.reference_lr("adult"))
    assert len({w.name for w in plan}) == len(plan) == 5 * 7  # six rules, and one with eigenvalues
    rates = {w.seed: w.method.lr for w in plan if w.rule == "non-private"}
    assert rates == {0: 0.3, 1: 0.1, 2: 0.01, 3: 0.01, 4: 0.01}
    assert {w.method.lr for w in plan if w.rule == "dpsgd"} == {0.2}  # 0.1/C0
    unknown = [w for w in observed.plan("adult", match=True) if w.rule == "non-private"]
    assert {w.method.lr for w in unknown} == {0.01}


def test_images_and_quick_runs_have_one_seed():
    assert {w.seed for w in observed.plan("mnist", match=False)} == {0}
    assert {w.seed for w in observed.plan("adult", match=False, quick=True)} == {0}


def test_norms_of_a_run_are_by_its_own_epochs():
    """Adult's seed 2 has 93 shuffled batches an epoch, not the published 92."""
    given = ObservedRun("adult", "non-private", seed=2, epochs=2, every=180, sample=32, probes=0)
    measured = observed.observe_run(given)
    assert measured["steps"] == 2 * 93
    assert len(measured["norm"]) == len(measured["loss"]) == 2


def test_what_was_watched_is_not_watched_again(tmp_path, here):
    given = ObservedRun("adult", "dpsgd", epochs=1, every=90, sample=32, probes=2, rows=600)
    first = list(observed.carry_out([given], tmp_path, on=here))
    assert len(first) == 1

    class NoRuns:
        def map_processes(self, work, items):
            assert items == []
            return ()

    assert list(observed.carry_out([given], tmp_path, on=NoRuns())) == first
    assert observed.read(tmp_path, replace(given, sample=33)) is None


def test_matched_runs_have_the_same_largest_step():
    for name in ("dpsgd", "dpsgd-global", "dpsgd-global-adapt"):
        assert ObservedRun("adult", name, match=True).method.lr == pytest.approx(0.2)
    assert ObservedRun("adult", "dpsgd").method.lr == 0.01


# --- commands -----------------------------------------------------------------------------------


def test_the_list_names_everything_and_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("EVENCLIP_DATA", str(tmp_path))
    found = CliRunner().invoke(app, ["paper", "list"])
    assert found.exit_code == 0
    for name in ("directions", "adult-matched", "adult-eigenvalues-matched", "decomposition"):
        assert f" {name} " in found.output
    assert "Dutch, as published (no data)" in found.output
    assert all(
        len(line) <= 80
        for line in found.output.splitlines()
        if not line.startswith(("dutch:", "mnist:", "celeba:"))
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["paper", "table", "iris"],
            "There is no table 'iris'; choose among directions, variants, steps, adult,",
        ),
        (
            ["paper", "figure", "iris"],
            "There is no figure 'iris'; `evenclip paper list` has their names.",
        ),
        (["paper", "redraw", "--out", "nowhere"], "nowhere is not there; give the folder"),
        (
            ["paper", "table", "directions", "--tf32"],
            "Table directions is not made with --tf32; leave it out,",
        ),
        (
            ["paper", "table", "adult", "--tf32"],
            "tf32 is for a GPU; give cuda as the device with it, or leave it out.",
        ),
        (
            ["paper", "all", "--only", "iris"],
            "There is no dataset 'iris' in the paper; choose among adult,",
        ),
    ],
)
def test_a_mistake_is_a_sentence(words, says, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["evenclip"])
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"evenclip: {says}" in capsys.readouterr().err
