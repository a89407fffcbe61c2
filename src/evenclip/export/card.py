"""The model card: purpose, privacy, accuracy by group, and use of a model."""

from __future__ import annotations

import json

from evenclip.data.table import Tabled
from evenclip.export.train import Trained
from evenclip.mechanism import statement

__all__ = ["card"]


def card(trained: Trained) -> str:
    """Return the model card, as Markdown."""
    encoder, report, model = trained.tabled.encoder, trained.privacy, trained.model
    columns = ", ".join(f"`{column.column}`" for column in encoder.columns)
    target, options = encoder.target.column, json.dumps(model["options"])
    return f"""# A private model for `{target}`

Predicts `{target}` ({", ".join(encoder.classes)}) from {len(encoder.columns)} columns of a table:
{columns}. A {model["name"]} with the options {options}, trained on {report["n"]} rows.

## Privacy

{statement.paragraph(report, width=119)}

`privacy.json` has every constant. `encoder.json` defines how raw rows become features.
{_encoder_note(trained.tabled)}

## Accuracy on {sum(trained.support.values())} test rows

{_accuracy(trained)}

These figures are not differentially private: they were computed without noise on the test rows,
which were not used for training. Leave them out if the test rows need protection too.

## Use

    evenclip predict MODEL_FOLDER rows.csv

or, in Python, `evenclip.export.load("MODEL_FOLDER").predict(frame)`. Rows are raw rows with the
columns above. Values may be missing, and categories not seen in training count as "other".
"""


def _encoder_note(tabled: Tabled) -> str:
    """Return what the encoder contains of the training rows."""
    if any(access.startswith("the encoder") for access in tabled.uncovered):
        return (
            "It holds means, deviations and categories of the training rows, without noise: ε does "
            "not cover them. To avoid that, train with a schema of public ranges and categories."
        )
    note = "Its ranges and categories are those of a public schema."
    if any("found in the data" in access for access in tabled.uncovered):
        note += " Its names of classes or groups were read from the data."
    return note


def _accuracy(trained: Trained) -> str:
    """Return the table of accuracies by group, with a note if a group is too small."""
    small = trained.tabled.small
    lines = [
        f"| {' × '.join(labels.column for labels in trained.tabled.encoder.group)} | test rows | "
        "accuracy |",
        "|---|---|---|",
    ]
    for name, accuracy in trained.accuracy.items():
        percent = "–" if accuracy is None else f"{accuracy:.1f} %"
        mark = " *" if name in small else ""
        lines.append(f"| {name}{mark} | {trained.support[name]} | {percent} |")
    if small:
        lines += ["", "\\* too small to judge: fewer than 30 test rows, or none of some class."]
    return "\n".join(lines)
