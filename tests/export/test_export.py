"""Tests of exported models: the folder, predictions on raw rows, and error messages."""

from __future__ import annotations

import json
import math
import os
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from evenclip import export, files, models
from evenclip.data.table import table
from evenclip.export.card import card
from evenclip.files import folder as folder_module
from evenclip.files import kinds
from evenclip.mechanism.accounting import epsilon
from evenclip.mechanism.release import Ledger
from evenclip.models import mlp
from fresh import fresh


def refusal(error, attempt):
    """Return the message of the error that `attempt` raises."""
    with pytest.raises(error) as caught:
        attempt()
    return str(caught.value)


def people(n=1500, seed=0):
    """Return rows whose class is a function of age and job."""
    stream = np.random.default_rng(seed)
    age, job = stream.integers(18, 80, n), stream.choice(["baker", "miller"], n)
    frame = pd.DataFrame(
        {"age": age.astype(float), "job": job, "sex": stream.choice(["f", "m"], n)}
    )
    frame["hired"] = np.where(age > 45 + 10 * (job == "baker"), "yes", "no")
    frame.loc[stream.random(n) < 0.05, "age"] = np.nan
    return frame


TEXTS = ("README.md", "encoder.json", "model.json", "privacy.json")
FEW = {
    "target": "hired",
    "group": "sex",
    "epochs": 2,
    "batch_size": 64,
    "model": "mlp:16",
    "progress": False,
}


@pytest.fixture(scope="module")
def trained():
    return export.train(people(), epsilon=2.0, **FEW)


@pytest.fixture
def folder(trained, tmp_path):
    return export.save(trained, tmp_path / "model")


def test_the_folder_holds_a_model_and_no_more(folder):
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "encoder.json", "manifest.json", "model.json", "model.safetensors",
        "privacy.json",
    ]  # fmt: skip
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    described = json.loads((folder / "model.json").read_text())
    assert described == {
        "evenclip_model": 1, "name": "mlp", "options": {"hidden": [16], "inputs": 6, "classes": 2}
    }  # fmt: skip


def test_the_noise_is_for_the_epsilon_that_was_asked_for(trained, folder):
    report = json.loads((folder / "privacy.json").read_text())
    assert 0.9995 * 2 <= report["epsilon"] <= 2
    assert report["epsilon"] == epsilon(Ledger.from_json(report["ledger"]), report["delta"])
    assert report["target_epsilon"] == 2
    assert report["delta"] == 1e-4  # 1/(2·960) = 5.2e-4
    assert report["n"] == 960
    assert report["seed"] == "from the operating system, not kept"
    assert report["steps"] == 2 * 15
    assert (
        "the encoder (columns used, categories, means and deviations), fitted on the training rows"
        in (report["not_covered"])
    )


def test_the_matched_step_is_the_default(trained):
    assert trained.result.settings.lr == pytest.approx(0.1)
    faster = export.train(people(), epsilon=2.0, rule="dpsgd-f", **FEW)
    assert faster.result.settings.lr == pytest.approx(0.1 / (1 + math.sqrt(2)))


def test_what_is_loaded_predicts_what_was_trained(trained, folder):
    predictor = export.load(folder)
    assert predictor.encoder == trained.tabled.encoder
    assert predictor.privacy == json.loads(json.dumps(trained.privacy))
    rows = people(200, seed=3).set_index(np.arange(200)[::-1] * 10)
    predictions = predictor.predict(rows.drop(columns="hired"))
    with torch.no_grad():
        expected = torch.softmax(
            trained.result.model(trained.tabled.encoder.encode(rows)).double(), 1
        )
    assert list(predictions.columns) == ["prediction", "P(no)", "P(yes)"]
    assert predictions.index.equals(rows.index)
    np.testing.assert_allclose(predictions[["P(no)", "P(yes)"]], expected, atol=1e-12)
    assert (
        list(predictions["prediction"])
        == np.where(expected[:, 1] > expected[:, 0], "yes", "no").tolist()
    )


def test_the_parameters_can_be_read_without_this_package(trained, folder):
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == trained.result.model.state_dict().keys()
    x = trained.tabled.splits.test.x
    by_hand = (
        torch.tanh(x @ stored["0.weight"].T + stored["0.bias"]) @ stored["2.weight"].T
        + stored["2.bias"]
    )
    torch.testing.assert_close(by_hand, trained.result.model(x).detach())


def test_unseen_rows_are_handled(folder):
    predictor = export.load(folder)
    rows = pd.DataFrame(
        {"age": [None, "old", 1e300], "job": ["pilot", None, "baker"], "sex": "x", "more": 1}
    )
    with pytest.warns(UserWarning, match="1 of 3 values are not numbers") as caught:
        predictions = predictor.predict(rows)
    assert str(caught[0].message) == (
        "Column 'age': 1 of 3 values are not numbers (read as missing), such as 'old'; 1 of 3 "
        "values lie outside of its range (read as its end). Column 'sex': 3 of 3 values are not "
        "among its categories (read as none), such as 'x'. Column 'job': 1 of 3 values are not "
        "among its categories (read as none), such as 'pilot'; 1 of 3 values are missing, and in "
        "training none was."
    )
    assert np.isfinite(predictions[["P(no)", "P(yes)"]].to_numpy()).all()
    assert refusal(ValueError, lambda: predictor.predict(rows.drop(columns="job"))) == (
        "The rows lack the column 'job', which the model was trained with; add them (empty where "
        "they are unknown)."
    )
    assert len(predictor.predict(rows.head(0))) == 0


def test_many_rows_are_predicted_piece_by_piece(folder, monkeypatch):
    predictor, rows = export.load(folder), people(100)
    whole = predictor.predict(rows)
    monkeypatch.setattr("evenclip.export.predict.CHUNK", 7)
    pd.testing.assert_frame_equal(predictor.predict(rows), whole)


def test_it_learns():
    made = export.train(
        people(6000),
        target="hired",
        group="sex",
        epsilon=8.0,
        epochs=15,
        model="mlp:32",
        progress=False,
    )
    assert min(made.accuracy.values()) > 80
    for name, accuracy in made.accuracy.items():
        test = made.tabled.splits.test
        of = test.group == test.group_names.index(name)
        right = (made.result.model(test.x).argmax(1) == test.y)[of].double().mean()
        assert accuracy == pytest.approx(100 * float(right))
        assert made.support[name] == int(of.sum())


def test_without_a_seed_no_two_models_are_alike(trained):
    again = export.train(people(), epsilon=2.0, **FEW)
    one, two = (each.result.model.state_dict()["0.weight"] for each in (trained, again))
    assert not torch.equal(one, two)
    assert torch.equal(again.tabled.splits.train.x, trained.tabled.splits.train.x)


def test_a_seed_is_reproducible_and_said_so():
    one, two = (export.train(people(), epsilon=2.0, seed=5, **FEW) for _ in range(2))
    assert torch.equal(
        one.result.model.state_dict()["0.weight"], two.result.model.state_dict()["0.weight"]
    )
    assert one.privacy["seed"].startswith("given and not stated here: reproducible, so not private")


def test_persons_are_the_unit_where_they_are_named():
    frame = people().assign(person=np.arange(1500) // 2)
    made = export.train(frame, epsilon=2.0, unit="person", **FEW)
    assert (
        made.privacy["unit"]
        == "one person, identified by the column 'person'; one row per person was kept"
    )
    assert made.privacy["n"] == 480


def test_q_and_the_steps_come_from_the_declared_number_of_rows():
    few = FEW | {"epochs": 2, "batch_size": 100}
    reports = [
        export.train(frame, epsilon=2.0, records=2000, **few).privacy
        for frame in (people(), people().iloc[1:])
    ]
    for report in reports:
        assert (report["n"], report["q"], report["declared_steps"]) == (1280, 100 / 1280, 26)
        assert not [access for access in report["not_covered"] if "number of r" in access]
    counted = export.train(people(), epsilon=2.0, **few).privacy
    assert (counted["n"], counted["q"]) == (960, 100 / 960)
    assert [access for access in counted["not_covered"] if "number of r" in access] == [
        "the number of rows with a target, from which n, q and T are computed"
    ]


def test_the_card_says_what_it_is(trained, folder):
    text = (folder / "README.md").read_text()
    flat = " ".join(text.split())
    assert text.startswith(
        "# A private model for hired\n\n"
        "Predicts hired (no, yes) from 3 columns of a table: age, job, sex.\n"
    )
    assert (
        "trained by dpsgd-global-adapt (sound) and is (ε, δ)-differentially private with ε = 2 at "
        "δ = 0.0001" in flat
    )
    assert "evenclip predict MODEL_FOLDER rows.csv" in flat
    assert (
        "It holds means, deviations and categories of the training rows, without noise: ε does "
        "not cover them." in flat
    )
    assert "Encoder: ε holds for the encoder as given." in flat


def test_the_folder_has_no_figures_of_the_groups(trained, folder):
    text = "".join((folder / name).read_text() for name in TEXTS)
    assert "This folder has no figures of test rows" in text
    assert "test rows |" not in text
    for name, accuracy in trained.accuracy.items():
        assert f"{accuracy:.1f} %" not in text
        assert f"{trained.support[name]} |" not in text
    keys = set(json.loads((folder / "privacy.json").read_text()))
    assert not keys & {"accuracy", "support", "test_rows"}


def test_the_figures_of_the_groups_are_in_the_card_if_asked_for(trained, tmp_path):
    folder = export.save(trained, tmp_path / "m", with_group_figures=True)
    text = (folder / "README.md").read_text()
    assert "These figures are not differentially private" in text
    for name, accuracy in trained.accuracy.items():
        assert f"| {name} | {trained.support[name]} | {accuracy:.1f} % |" in text


def test_names_are_text_in_the_card(tmp_path):
    """Columns, groups and classes with markup neither format the card nor break its table."""
    frame = people().rename(columns={"job": "a|b `c` *d* _e_", "hired": "<b>hired"})
    group = "m\n\n# m | 1 | 2 |"
    frame["sex"] = frame["sex"].map({"f": "[f](http://x.y)", "m": group})
    made = export.train(frame, epsilon=2.0, **FEW | {"target": "<b>hired"})
    text = card(made, with_group_figures=True)
    assert "# A private model for \\<b\\>hired\n" in text
    assert "a\\|b \\`c\\` \\*d\\* \\_e\\_" in text
    assert f"| m \\# m \\| 1 \\| 2 \\| | {made.support[group]} | " in text
    assert "| \\[f\\](http\\://x.y) | " in text
    assert not re.search(r"(?<!\\)[<>]", text)


def test_with_a_schema_the_card_says_so(tmp_path):
    schema = {
        "evenclip_schema": 1,
        "columns": {
            "age": {"kind": "number", "range": [0, 100]},
            "job": {"kind": "category", "values": ["baker", "miller"]},
            "sex": {"kind": "category", "values": ["f", "m"], "missing": False},
        },
    }
    made = export.train(people(), epsilon=2.0, schema=schema, **FEW)
    assert "\nIts ranges and categories are those of a schema that is declared public." in card(
        made
    )
    assert "were read from the data." in card(made)  # the classes: `hired` is not in the schema
    assert not [
        access for access in made.privacy["not_covered"] if access.startswith("the encoder")
    ]
    assert made.privacy["encoder_declared"] is False
    schema["columns"]["hired"] = {"kind": "category", "values": ["no", "yes"]}
    declared = export.train(people(), epsilon=2.0, schema=schema, **FEW)
    assert (
        "\nIts ranges, categories and names are those of a schema that is declared public.\n"
        in card(declared)
    )
    assert declared.privacy["encoder_declared"] is True
    assert declared.privacy["encoder"].startswith("ε holds for the encoder as given, which is")
    export.save(made, tmp_path / "m")
    assert export.load(tmp_path / "m").encoder == made.tabled.encoder


def test_a_custom_rule_is_trained_too(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from evenclip import Rule\n"
        "@dataclass(frozen=True)\n"
        "class Half(Rule):\n"
        "    name: ClassVar[str] = 'half'\n"
        "    sigma: float = 1.0\n"
        "    def sensitivity(self, now): return 0.5\n"
        "    def weight(self, norm, group, now): return 0.5 / norm.clamp(min=1.0)\n"
    )
    made = export.train(people(), epsilon=2.0, rule=f"{path}:Half", **FEW)
    assert made.privacy["method"] == "half"
    assert made.result.settings.lr == pytest.approx(0.2)
    assert made.privacy["epsilon"] <= 2


# --- writing ------------------------------------------------------------------------------------


def test_a_model_is_replaced_only_if_asked(trained, folder):
    before = (folder / "model.safetensors").read_bytes()
    assert refusal(ValueError, lambda: export.save(trained, folder)) == (
        f"{folder} already holds a model; give another folder, or --force to replace it."
    )
    (folder / "README.md").write_text("mine")
    export.save(trained, folder, force=True)
    assert (folder / "model.safetensors").read_bytes() == before
    assert (folder / "README.md").read_text() != "mine"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_nothing_else_is_ever_replaced(trained, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("...")
    said = refusal(ValueError, lambda: export.save(trained, tmp_path / "precious", force=True))
    expected = "is not empty and holds 'thesis.tex'; give a new folder."
    assert said == f"{tmp_path / 'precious'} {expected}"
    (tmp_path / "file").write_text("")
    said = refusal(ValueError, lambda: export.save(trained, tmp_path / "file", force=True))
    assert said == f"{tmp_path / 'file'} is a file; give a new folder."
    (tmp_path / "empty").mkdir()
    assert export.load(export.save(trained, tmp_path / "empty")).encoder == trained.tabled.encoder


def test_a_model_with_a_file_of_mine_is_not_replaced(trained, folder):
    (folder / "notes.txt").write_text("mine")
    said = refusal(ValueError, lambda: export.save(trained, folder, force=True))
    assert said == f"{folder} is not empty and holds 'notes.txt'; give a new folder."


def test_a_link_stays_a_link(trained, folder):
    link = folder.parent / "current"
    link.symlink_to(folder)
    (folder / "README.md").write_text("old")
    export.save(trained, link, force=True)
    assert link.is_symlink()
    assert (folder / "README.md").read_text() != "old"


@pytest.mark.parametrize("fails_at", [0, 4])
def test_a_full_disk_leaves_what_was_there(trained, folder, monkeypatch, fails_at):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write, written = folder_module.write_all, []

    def full(handle, content):
        written.append(len(content))
        if len(written) > fails_at:
            raise OSError(28, "No space left on device")
        write(handle, content)

    monkeypatch.setattr(folder_module, "write_all", full)
    assert "No space left" in refusal(OSError, lambda: export.save(trained, folder, force=True))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert "No space left" in refusal(OSError, lambda: export.save(trained, folder.parent / "new"))
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_said_so(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    said = refusal(OSError, lambda: export.check_place(tmp_path / "locked" / "model"))
    place = tmp_path / "locked" / "model"
    assert said == f"{place} cannot be written (Permission denied); choose another place."


# --- refused ------------------------------------------------------------------------------------

REFUSED = {
    "epsilon": ({"epsilon": 0.0}, "epsilon is 0.0; it must be a finite number above 0."),
    "epochs": ({"epochs": 0}, "epochs is 0; it must be a whole number of at least 1."),
    "batch size": (
        {"batch_size": 961},
        "batch_size is 961, but there are 960 training rows; choose at most 960.",
    ),
    "delta": (
        {"delta": 1.0},
        "delta is 1.0; it must lie above 0 and below 1, well below 1/n for n records.",
    ),
    "rule": (
        {"rule": "dpsdg"},
        "There is no rule 'dpsdg'; choose among ",
    ),
    "no noise": (
        {"rule": "non-private"},
        "non-private has no valid ε and cannot train a private model; choose another rule.",
    ),
    "model": (
        {"model": "cnn"},
        "The model is 'cnn', which cannot be exported; choose mlp, mlp:WIDTH,WIDTH, linear or "
        "sigmoid-then-softmax.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_explained(case):
    changes, message = REFUSED[case]
    said = refusal(ValueError, lambda: export.train(people(), **({"epsilon": 2.0} | FEW | changes)))
    assert said.startswith(message)


def test_folders_without_a_model_are_explained(folder, tmp_path):
    none = tmp_path / "none"
    assert refusal(FileNotFoundError, lambda: export.load(none)) == (
        f"{none} holds no model (model.safetensors is missing); give the folder that `evenclip "
        "train --out` wrote."
    )


def changed(folder, tmp_path, name, content):
    """Return a copy with another file."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / name).write_bytes(
        content if isinstance(content, bytes) else json.dumps(content).encode()
    )
    return copy


def forged(folder, tmp_path, name, content):
    """Return a copy with another file and a manifest that lists it."""
    copy = changed(folder, tmp_path, name, content)
    contents = {n: (copy / n).read_bytes() for n in names_of(copy)}
    return files.write_folder(copy, contents, kinds.MODEL, replace=True)


def names_of(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != files.MANIFEST)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.json", "encoder.json", "privacy.json"]
)
def test_a_flipped_bit_or_another_models_file_is_named(trained, folder, tmp_path, name):
    content = (folder / name).read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for damage in (flipped, content[:middle], b"", content + b" "):
        copy = changed(folder, tmp_path, name, damage)
        assert f"{copy / name} is damaged, or of another model" in refusal(
            files.DamagedError, lambda place=copy: export.load(place)
        )
        shutil.rmtree(copy)


def test_a_forged_manifest_allocates_nothing_and_says_why(folder, tmp_path):
    described = json.loads((folder / "model.json").read_text())
    huge = {"inputs": 6, "classes": 2, "hidden": [10**6, 10**6]}
    cases = [
        ("model.json", b"{", "model.json is damaged ("),
        ("model.json", b"[" * 10**5, "nested too deep"),
        (
            "model.json",
            described | {"name": "net"},
            "model.json describes the model 'net' in format 1; this version",
        ),
        (
            "model.json",
            described | {"evenclip_model": 9},
            "model.json describes the model 'mlp' in format 9; this",
        ),
        ("model.safetensors", b"\0" * 40, "do not belong together (model.safetensors is damaged: "),
        (
            "model.json",
            described | {"options": {"inputs": 7, "classes": 2}},
            "do not belong together (the model takes 7 features and the encoder has 6); train the "
            "model again.",
        ),
        (
            "model.json",
            described | {"options": {"inputs": 6, "classes": 2, "hidden": [8]}},
            "do not belong together (Error(s) in loading state_dict for Sequential:",
        ),
        (
            "model.json",
            described | {"options": huge},
            "model.safetensors is too small for a model of [6, 1000000, 1000000, 2]",
        ),
        ("encoder.json", {}, "do not belong together ('columns'); train the model again."),
        ("privacy.json", {"epsilon": 0.1}, "privacy.json has no checksum"),
    ]
    for name, content, message in cases:
        copy = forged(folder, tmp_path, name, content)
        assert message in refusal(ValueError, lambda place=copy: export.load(place))
        shutil.rmtree(copy)


def test_loading_runs_no_pickle(folder):
    code = (
        "import pickle, sys\n"
        "def no(*a, **k): raise SystemExit('unpickled')\n"
        "pickle.load = pickle.loads = pickle.Unpickler = no\n"
        "from evenclip import export\n"
        f"export.load({str(folder)!r})\n"
    )
    fresh(code)


def test_the_start_is_the_one_of_the_seed():
    made = table(people(), target="hired", group="sex")
    described = {"inputs": len(made.encoder.features), "classes": 2, "hidden": [16]}
    start = models.TABULAR["mlp"](**described, seed=0)
    assert torch.equal(start[0].weight, mlp(6, 2, (16,), seed=0)[0].weight)


def test_what_is_published_holds_no_counts_of_private_data(trained, tmp_path):
    counts = {"empty_batches", "non_finite_samples", "clamped_weights"}
    assert counts == set(trained.result.private)  # the trainer may see them
    published = json.loads((export.save(trained, tmp_path / "model") / "privacy.json").read_text())
    assert not counts & set(published)
