"""Datasets of the user's own files, `my_data.py:faces`: loaded, checked, compared."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch

import evenclip
from evenclip.cli import main
from evenclip.comparison.plan import choose_protocol
from evenclip.comparison.source import describe_data
from evenclip.sweep import Spec, transfer
from evenclip.sweep.describe import load_data

FACES = """
import torch
from evenclip.data import Dataset, File, Source, Splits

def part(n, shape, random):
    y, group = torch.randint(2, (n,), generator=random), torch.arange(n) % 2
    x = y.view(-1, *(1 for _ in shape)) + torch.rand(n, *shape, generator=random)
    return Dataset(x, y, group, ("light", "dark"))

def faces(seed, shape=(1, 6, 6)):
    print("loading")
    random = torch.Generator().manual_seed(seed)
    return Splits(part(200, shape, random), part(100, shape, random))

def oblong(seed):
    return faces(seed, (1, 6, 7))

def tiny(seed):
    return faces(seed, (1, 4, 4))

def table(seed):
    return faces(seed, (3,))

def _load(seed, directory=None, group="light", side=6):
    return faces(seed, (1, side, side))

SOURCE = Source("portraits", _load, model="mlp:5", pair=("dark", "light"), fixed_test=True,
    files=(File("portraits/all.bin"),), attributes=("light", "sex"), options=("side",))
"""

HALF = """
from dataclasses import dataclass
from evenclip import Rule

@dataclass(frozen=True)
class Half(Rule):
    name = "half"
    sigma: float = 1.0
    def sensitivity(self, now):
        return 1.0
    def weight(self, norm, group, now):
        return 0.5 / norm.clamp(min=1.0)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file with datasets, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EVENCLIP_DATA", raising=False)
    path = tmp_path / "my_data.py"
    path.write_text(FACES)
    return path


@pytest.fixture
def describe(tmp_path):
    """Dataset and options -> its description, which must be plain values."""

    def described(data, target=None, group=None, data_dir=None, **options):
        plain = describe_data(data, target, group, options, data_dir)
        return json.loads(json.dumps(plain))

    return described


def test_images_are_compared(file, here, tmp_path, capsys):
    found = evenclip.compare(
        "my_data.py:faces", ["dpsgd"], seeds=2, epochs=2, batch_size=50, store=tmp_path, on=here
    )
    assert (found.dataset, found.groups) == ("faces", ("light", "dark"))
    assert "my_data.py:faces may compute values from the data" in found.uncovered[0]
    assert len(found.uncovered) == 2
    spec = json.loads(next(tmp_path.glob("*/spec.json")).read_text())
    assert spec["model"]["name"] == "cnn"
    printed = capsys.readouterr()  # standard output may be JSON
    assert (printed.out, set(printed.err.split())) == ("", {"loading"})


def test_workers_load_the_files_of_data_and_rule(file, capsys):
    (file.parent / "half.py").write_text(HALF)
    with pytest.raises(SystemExit) as ended:
        main(["compare", "my_data.py:table", "--rules", "half.py:Half", "--seeds", "1",
              "--epochs", "1", "--lr", "0.1", "--workers", "1", "--batch-size", "50",
              "--json"])  # fmt: skip
    printed = capsys.readouterr()
    assert not ended.value.code, printed.err
    results = json.loads(printed.out)
    assert (results["dataset"], list(results["table"])) == ("table", ["non-private", "half"])


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("faces", {"name": "cnn", "options": {}}),
        ("oblong", {"name": "mlp", "options": {"hidden": [256, 256]}}),
        ("tiny", {"name": "mlp", "options": {"hidden": [256, 256]}}),
        ("table", {"name": "mlp", "options": {"hidden": [256, 256]}}),
        ("SOURCE", {"name": "mlp", "options": {"hidden": [5]}}),
    ],
)
def test_the_default_model_fits_the_data(file, describe, name, model):
    described = describe(f"{file}:{name}")
    train = load_data(described, 0).splits.train
    assert choose_protocol(described, train, ["dpsgd"], False).model == model


def test_a_source_has_files_options_and_a_pair(file, describe, tmp_path):
    (tmp_path / "data" / "portraits").mkdir(parents=True)
    (tmp_path / "data" / "portraits" / "all.bin").write_bytes(b"four")
    described = describe(f"{file}:SOURCE", group="sex", data_dir=tmp_path / "data", side=8)
    assert described["options"] == {"group": "sex", "side": 8}
    assert described["files"] == {"portraits/all.bin": 4}
    loaded = load_data(described, 1)
    assert loaded.pair == ("dark", "light")
    assert loaded.splits.train.x.shape == (200, 1, 8, 8)
    assert loaded.splits.train.name == "portraits"


def test_another_machine_gets_the_file_and_must_have_the_data(file, describe, tmp_path):
    place, made = tmp_path / "data" / "portraits", tmp_path / "other"
    place.mkdir(parents=True)
    (place / "all.bin").write_bytes(b"four")
    data = describe(f"{file}:SOURCE", data_dir=tmp_path / "data")
    spec = Spec(data, {"name": "mlp"}, {"name": "dpsgd"}, 0.1, 1, 32, None, None, seed=0)
    ((digest, content),) = transfer.contents([spec])
    file.unlink()
    there = transfer.unpacked(spec, {digest: content}.get, made)
    assert there.hash == spec.hash
    assert load_data(there.data, 0).splits.train.name == "portraits"
    (place / "all.bin").write_bytes(b"fives")
    with pytest.raises(ValueError, match=r"^portraits/all\.bin of the dataset SOURCE has another"):
        transfer.unpacked(spec, {digest: content}.get, made)


def test_a_changed_file_is_another_run_and_not_loaded_as_the_first(file, describe):
    before = describe(f"{file}:faces")
    file.write_text(FACES.replace("rand(n, *shape", "randn(n, *shape"))
    after = describe(f"{file}:faces")
    assert before["sha256"] != after["sha256"]
    assert before["content"] != after["content"]
    # A worker is a new process, which has not loaded the first version.
    sys.modules.pop(f"evenclip_given_{before['sha256']}")
    with pytest.raises(ValueError, match=r"my_data\.py has changed since the comparison began; st"):
        load_data(before, 0)


def test_a_change_within_a_second_is_noticed(file, describe):
    """Python's cache of compiled files compares size and second only."""
    found = set()
    for n in (200, 300):
        file.write_text(FACES.replace("part(200", f"part({n}"))
        found.add(len(load_data(describe(f"{file}:faces"), 0).splits.train))
    assert found == {200, 300}
    assert not (file.parent / "__pycache__").exists()


def test_other_data_in_the_files_that_it_reads_are_another_run(file, describe):
    file.write_text(
        "import torch\nfrom evenclip.data import Splits, Dataset\ndef faces(seed):\n"
        "    x = torch.load('x.pt')\n"
        "    data = Dataset(x, torch.arange(4) % 2, torch.arange(4) % 2, ('a', 'b'))\n"
        "    return Splits(data, data)\n"
    )
    torch.save(torch.zeros(4, 2), "x.pt")
    before = describe(f"{file}:faces")
    torch.save(torch.ones(4, 2), "x.pt")
    assert describe(f"{file}:faces")["content"] != before["content"]
    with pytest.raises(ValueError, match=r"^my_data\.py:faces returned other data for seed 0 than"):
        load_data(before, 0)


def test_a_random_dataset_is_refused(file, describe):
    file.write_text(FACES.replace(".manual_seed(seed)", ""))
    described = describe(f"{file}:faces")
    assert load_data(described, 0)  # torch's default seed is the same every time
    file.write_text(FACES.replace("generator=random", "generator=None"))
    described = describe(f"{file}:faces")
    with pytest.raises(ValueError, match="take every random number from a generator with this se"):
        load_data(described, 0)


BAD = {
    "def faces(seed:": "{path} cannot be loaded: SyntaxError: '(' was never closed (my_data.py, "
    "line 1).",
    "1 / 0": "{path} cannot be loaded: ZeroDivisionError: division by zero (line 1).",
    "import sys\nsys.exit(3)": "{path} cannot be loaded: SystemExit: 3 (line 2).",
    "import beside": "{path} cannot be loaded: ModuleNotFoundError: No module named 'beside' "
    "(line 1). Runs are named by the content of this one file, and only this file is sent to "
    "workers: move what it needs of beside into it, or install beside as a package.",
    "import nowhere_at_all": "{path} cannot be loaded: ModuleNotFoundError: No module named "
    "'nowhere_at_all' (line 1).",
    "def face(seed): pass\ndef _f(): pass": "my_data.py has no dataset 'faces'; give file.py:name "
    "with a function of the seed or a Source, such as face.",
    "x = 1": "my_data.py has no dataset 'faces'; give file.py:name with a function of the seed or "
    "a Source, such as faces(seed).",
    "faces = 3": "my_data.py:faces is an int; it must be a function of the seed that returns "
    "Splits, or an evenclip.data.Source.",
    "def faces(seed):\n    x = {}\n    return x['k']": "my_data.py:faces failed: KeyError: 'k' "
    "(line 3).",
    "def faces(seed): raise SystemExit": "my_data.py:faces failed: SystemExit (line 1).",
    "def faces(seed): return 3": "my_data.py:faces returned an int; it must return Splits(train, "
    "test), or Splits(train, test, validation), from evenclip.data.",
    "import numpy, evenclip\ndef faces(seed): return evenclip.data.Dataset(numpy.eye(2), 1)": (
        "my_data.py:faces failed: TypeError: x is a ndarray; Dataset holds tensors: use "
        "torch.as_tensor, or evenclip.data.as_dataset for all of (x, y, group) (line 2)."
    ),
}


@pytest.mark.parametrize("text", BAD)
def test_a_mistake_in_the_file_is_one_sentence(text, file, describe):
    (file.parent / "beside.py").write_text("")
    file.write_text(text)
    with pytest.raises((TypeError, ValueError)) as raised:
        describe(f"{file}:faces")
    assert str(raised.value) == BAD[text].format(path=file)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.py:faces"], "none.py does not exist; give the path of a file."),
        (
            ["my_data.py"],
            "my_data.py is a Python file; name the dataset that it defines, as in my_data.py:name.",
        ),
        (
            ["my_data.py:faces", "--target", "y"],
            "'my_data.py:faces' is a dataset with a fixed target; leave --target out.",
        ),
        (
            ["my_data.py:faces", "--group", "sex"],
            "--group is sex; my_data.py:faces has its own groups: leave --group out.",
        ),
        (
            ["my_data.py:faces", "--test", "test.csv"],
            "--test is not for my_data.py:faces; it is for tables.",
        ),
        (
            ["my_data.py:faces", "--allow-partial"],
            "--allow-partial is not for my_data.py:faces; it is for celeba.",
        ),
        (
            ["my_data.py:oblong", "--model", "cnn"],
            "The model cnn needs square images, but the data have shape [1, 6, 7]; use mlp.",
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(arguments, says, file, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments, "--batch-size", "50", "--epochs", "1", "--lr", "0.1"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.replace("loading\n", "") == f"evenclip: {says}\n"


def test_features_of_another_type_are_refused_before_anything_is_trained(file, here):
    file.write_text(FACES.replace("Dataset(x,", "Dataset(x.double(),"))
    says = (
        "The model cnn needs float32 features, but x is torch.float64; convert it with x.float(), "
        "or give your own model."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        evenclip.compare("my_data.py:faces", seeds=1, epochs=1, batch_size=50, lr=0.1, on=here)
