"""A private model to give away: trained on a table, with its encoder, its privacy report and a model card.

    shipped = ship.load(ship.save(ship.train("people.csv", target="hired", group="sex", epsilon=3.0), "model"))
    shipped.predict(new_rows)

    model/
        model.safetensors   the parameters; differentially private
        model.json          the architecture, by name: nothing is unpickled
        encoder.json        from raw rows to features; read from the training rows without noise, unless by a schema
        privacy.json        the privacy report
        README.md           the model card

The noise comes from the operating system's entropy and is not kept, unless a seed is given. The folder is written
beside its place and moved there when it is complete.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evenclip import accounting, check, models, privacy, protocol
from evenclip.audit import metrics
from evenclip.data.encoder import Encoder
from evenclip.data.table import Tabled, table
from evenclip.rules import NO_EPSILON, Rule
from evenclip.runs.parts import describe_model, named_rule
from evenclip.training.config import TrainConfig
from evenclip.training.fit import Result, Session, fit_config

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Shipped", "Trained", "check_place", "load", "save", "train"]

FORMAT = 1
BATCH_SIZE = 256
CHUNK = 2**16  # rows that are encoded at a time
FILES = ("model.safetensors", "model.json", "encoder.json", "privacy.json", "README.md")

# The architectures that are known by name; each takes `inputs` and `classes` besides its options.
MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": models.mlp, "sigmoid-then-softmax": models.sigmoid_then_softmax}


@dataclass(frozen=True)
class Trained:
    """A model that was trained on a table, and all that is known about it.

    Attributes:
        model: the description that it can be made from again: name and options.
        result: what `fit` returned.
        tabled: the table it was trained on. Private.
        privacy: the privacy report, with the accesses that preparing the table made.
        accuracy: of each group's test rows, in percent; None for a group without any. Not differentially private.
        support: number of each group's test rows. Not differentially private.
    """

    model: dict[str, Any]
    result: Result
    tabled: Tabled
    privacy: dict[str, Any]
    accuracy: dict[str, float | None]
    support: dict[str, int]


@dataclass(frozen=True)
class Shipped:
    """A model that predicts on raw rows.

    Attributes:
        model: gives scores for features.
        encoder: gives features for raw rows.
        privacy: the privacy report.
    """

    model: nn.Module
    encoder: Encoder
    privacy: dict[str, Any]

    def predict(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The class and the probability of every class for these raw rows, in their order and with their index.

        Target and group are not needed, other columns are ignored, unknown categories are handled by the encoder.

        Raises:
            ValueError: a column that the model was trained with is not there.
        """
        import pandas as pd

        parts = [
            self._probabilities(frame.iloc[start : start + CHUNK]) for start in range(0, max(len(frame), 1), CHUNK)
        ]
        probability = torch.cat(parts)  # [row, class]
        classes = self.encoder.classes
        found = pd.DataFrame({"prediction": [classes[code] for code in probability.argmax(1).tolist()]}, dtype=object)
        for code, name in enumerate(classes):
            found[f"P({name})"] = probability[:, code].numpy()
        return found.set_axis(frame.index, axis=0)

    def _probabilities(self, frame: pd.DataFrame) -> Tensor:
        with torch.no_grad():
            scores: Tensor = self.model(self.encoder.encode(frame))
            return scores.double().softmax(1)


# --- training --------------------------------------------------------------------------------------------------------


def train(
    source: Any,
    *,
    target: str,
    group: Any,
    epsilon: float = 3.0,
    rule: Rule | str = "dpsgd-global-adapt",
    model: str = "mlp",
    progress: bool | None = None,
    **settings: Any,
) -> Trained:
    """Train a model on a table's training rows, with the noise that makes it (ε, δ)-differentially private.

    Guarantee: the joint ε of all releases, by PLD, is at most `epsilon`.

    Args:
        source: a file or a DataFrame.
        target: the column to predict.
        group: the protected column or columns.
        epsilon: ε.
        rule: a rule or its name. By name it has C0 = 1 and Z = 10.
        model: "mlp", "mlp:128,64", "linear" or "sigmoid-then-softmax".
        progress: whether to show progress; on a terminal unless given.
        **settings: delta, epochs, batch_size, lr, seed and device as in `TrainConfig`, and the options of
            `evenclip.data.table.TableOptions`. Unless given: 20 epochs; B = 256, or n where there are fewer training
            rows; the learning rate that makes the largest expected step η·E[S] = 0.1; the operating system's seed (the
            split and the model's start are then those of seed 0).

    Raises:
        ValueError: for anything that cannot be trained privately as given; the message says what to do.
    """
    check.positive(epsilon=epsilon)
    lr, size = settings.pop("lr", None), settings.pop("batch_size", None)
    given = {name: settings.pop(name) for name in ("delta", "epochs", "seed", "device") if name in settings}
    config = TrainConfig(epochs=20, device="cpu").but(**given)
    check.natural(epochs=config.epochs)
    described, seed = _described(model), 0 if config.seed is None else config.seed
    tabled = table(source, target=target, group=group, seed=seed, **settings)
    data, encoder = tabled.splits.train, tabled.encoder
    n, B = len(data), _batch_size(size, len(data))
    delta = accounting.default_delta(n) if config.delta is None else config.delta
    accounting.check_delta(delta)
    steps = config.epochs * math.ceil(n / B)
    private = accounting.calibrate(_rule(rule, data.K), epsilon=epsilon, delta=delta, q=B / n, steps=steps)
    described["options"] |= {"inputs": len(encoder.features), "classes": len(encoder.classes)}
    start = MODELS[described["name"]](**described["options"], seed=seed)
    lr = protocol.STEP / protocol.expected_sensitivity(private, data.K, float(B)) if lr is None else lr
    config = config.but(rule=private, batch_size=B, lr=lr, delta=delta)
    result = fit_config(start, data, config, Session(progress=progress))
    result = dataclasses.replace(result, model=result.model.cpu().eval())
    test = tabled.splits.test
    found = metrics.by_group(metrics.scores(result.model, test), test.y, test.group, test.K)
    accuracy = dict(zip(test.group_names, found["accuracy"], strict=True))
    support = {name: int(n or 0) for name, n in zip(test.group_names, found["support"], strict=True)}
    return Trained(described, result, tabled, _report(result, tabled, epsilon), accuracy, support)


def _described(model: str) -> dict[str, Any]:
    """The model by name and options, if it is one that can be loaded without anybody's code."""
    found = describe_model(model)
    if found.get("name") not in MODELS:
        raise ValueError(
            f"The model is {model!r}; one that is given away must be known by name and take the columns of a table: "
            "choose mlp, mlp:WIDTH,WIDTH, linear or sigmoid-then-softmax."
        )
    return {"name": found["name"], "options": dict(found["options"])}


def _rule(rule: Rule | str, groups: int) -> Rule:
    """The rule with the defaults for tables; refused where it has no ε."""
    if isinstance(rule, str):
        named = named_rule(rule)
        found = protocol.for_table(groups).only([named]).methods[0].rule if isinstance(named, str) else named
    else:
        found = rule
    if found.soundness == NO_EPSILON or found.sigma == 0:
        raise ValueError(f"{found.name} has no valid ε, so no private model comes out of it; choose another rule.")
    return found


def _batch_size(given: int | None, n: int) -> int:
    if given is None:
        return min(BATCH_SIZE, n)
    check.natural(batch_size=given)
    if given > n:
        raise ValueError(f"batch_size is {given} and there are {n} training rows; choose at most {n}.")
    return int(given)


def _report(result: Result, tabled: Tabled, target: float) -> dict[str, Any]:
    """The privacy report of the run, with what preparing the table adds to it."""
    counts = ("empty_batches", "non_finite_samples", "clamped_weights")  # of private data, without noise
    report = {name: value for name, value in result.privacy.items() if name not in counts}
    added: dict[str, Any] = {
        "target_epsilon": float(target),
        "not_covered": [*report["not_covered"], *tabled.uncovered],
    }
    if tabled.unit is not None:
        added["unit"] = f"one person, as the column {tabled.unit!r} tells them apart: one row of each was kept"
    return report | added


# --- writing ---------------------------------------------------------------------------------------------------------


def check_place(folder: str | os.PathLike[str], force: bool = False) -> Path:
    """Raise unless a model can be written there; better before training than after.

    Raises:
        ValueError: something is there already, and is no model to be replaced.
        OSError: nothing can be written there.
    """
    place = Path(folder).absolute()
    if place.exists() and not place.is_dir():
        raise ValueError(f"{folder} is a file; give a folder that is not there yet.")
    if place.is_dir() and any(place.iterdir()):
        ours = all((place / name).is_file() for name in FILES[:4])
        if not ours:
            raise ValueError(f"{folder} holds other things than a model; give a folder that is not there yet.")
        if not force:
            raise ValueError(f"{folder} already holds a model; give another folder, or --force to replace it.")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{place.parent} cannot be made ({error.strerror}); choose another folder.") from error
    if not os.access(place.parent, os.W_OK):
        raise PermissionError(f"{place.parent} cannot be written to; choose another folder.")
    return place


def save(trained: Trained, folder: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write a model to give away; whole, or not at all.

    Args:
        trained: what `train` returned. Its table and traces are not written.
        folder: where to; it must not be there, or be empty.
        force: whether to replace a model that is there.

    Raises:
        ValueError: something is there already.
        OSError: nothing can be written there.
    """
    place = check_place(folder, force)
    scratch = place.with_name(f".{place.name}.writing-{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        for name, content in _contents(trained).items():
            _write(scratch / name, content)
        _move(scratch, place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return place


def _contents(trained: Trained) -> dict[str, bytes]:
    """The files."""
    from safetensors.torch import save as packed

    parameters = {name: value.contiguous() for name, value in trained.result.model.state_dict().items()}
    return {
        "model.safetensors": packed(parameters),
        "model.json": _json({"evenclip_model": FORMAT, **trained.model}),
        "encoder.json": _json(trained.tabled.encoder.to_json()),
        "privacy.json": _json(trained.privacy),
        "README.md": card(trained).encode(),
    }


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    """Write and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _move(scratch: Path, place: Path) -> None:
    """Put the finished folder in its place; what was there goes last."""
    old = place.with_name(f".{place.name}.replaced-{os.getpid()}")
    if place.exists():
        os.replace(place, old)
    try:
        os.replace(scratch, place)
    except OSError:
        if old.exists():
            os.replace(old, place)
        raise
    shutil.rmtree(old, ignore_errors=True)


def card(trained: Trained) -> str:
    """The model card."""
    encoder, report, tabled = trained.tabled.encoder, trained.privacy, trained.tabled
    columns = ", ".join(f"`{column.column}`" for column in encoder.columns)
    small = "\n\n\\* too small to judge: fewer than 30 test rows, or none of some class." if tabled.small else ""
    rows = [
        f"| {name}{' *' if name in tabled.small else ''} | {trained.support[name]} | "
        f"{'–' if accuracy is None else f'{accuracy:.1f} %'} |"
        for name, accuracy in trained.accuracy.items()
    ]
    fitted = any(access.startswith("the encoder") for access in tabled.uncovered)
    encoded = (
        "It holds means, deviations and categories of the training rows, without noise: ε does not cover them. Train "
        "with a schema of public ranges and categories to have none in it."
        if fitted
        else "Its ranges and categories are those of a public schema."
    )
    if not fitted and any("found in the data" in access for access in tabled.uncovered):
        encoded += " The names of classes or groups in it were found in the data."
    listed = "\n".join(rows)
    return f"""# A private model for `{encoder.target.column}`

Predicts `{encoder.target.column}` ({", ".join(encoder.classes)}) from {len(encoder.columns)} columns of a table:
{columns}. A {trained.model["name"]} with the options {json.dumps(trained.model["options"])}, trained on {report["n"]}
rows.

## Privacy

{privacy.paragraph(report, width=119)}

`privacy.json` has every constant. `encoder.json` says how raw rows become features. {encoded}

## Accuracy on {sum(trained.support.values())} test rows

| {" × ".join(labels.column for labels in encoder.group)} | test rows | accuracy |
|---|---|---|
{listed}{small}

These figures are not differentially private: they were computed on the test rows without noise, which were not used for
training. Leave them out where the test rows need protection too.

## Use

    evenclip predict MODEL_FOLDER rows.csv

or, in Python, `evenclip.ship.load("MODEL_FOLDER").predict(frame)`. Rows are given as they are, with the columns above;
values may be missing, and categories that were not seen in training are taken for others.
"""


# --- loading ---------------------------------------------------------------------------------------------------------


def load(folder: str | os.PathLike[str]) -> Shipped:
    """The model in a folder that `save` wrote; no code and no pickle is run.

    Raises:
        FileNotFoundError: there is no model.
        ValueError: its files do not belong together, or were written by another version.
    """
    place = Path(folder)
    absent = [name for name in FILES[:4] if not (place / name).is_file()]
    if absent:
        raise FileNotFoundError(
            f"{folder} holds no model ({absent[0]} is not there); give the folder that `evenclip train --out` wrote."
        )
    described, encoded, report = (_read(place / name) for name in FILES[1:4])
    if described.get("evenclip_model") != FORMAT or described.get("name") not in MODELS:
        raise ValueError(
            f"{place / 'model.json'} describes the model {described.get('name')!r} in format "
            f"{described.get('evenclip_model')!r}; this version of evenclip knows {', '.join(MODELS)} in format "
            f"{FORMAT}."
        )
    try:
        encoder = Encoder.from_json(encoded)
        model = MODELS[described["name"]](**described["options"]).eval()
        if described["options"]["inputs"] != len(encoder.features):
            raise ValueError(
                f"the model takes {described['options']['inputs']} features and the encoder has {len(encoder.features)}"
            )
        model.load_state_dict(_parameters(place / FILES[0]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"The files in {folder} do not belong together ({said}); train the model again.") from error
    return Shipped(model, encoder, report)


def _read(path: Path) -> dict[str, Any]:
    """A JSON file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); train the model again.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (no JSON object); train the model again.")
    return found


def _parameters(path: Path) -> dict[str, Tensor]:
    """The parameters in a file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error
