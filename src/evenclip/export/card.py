"""The model card: purpose, privacy, accuracy by group, and use of a model."""

from __future__ import annotations

import json

from evenclip.export.train import Trained
from evenclip.mechanism import statement

__all__ = ["card"]


def card(trained: Trained) -> str:
    """Return the model card, as Markdown."""
    encoder, report, tabled = trained.tabled.encoder, trained.privacy, trained.tabled
    columns = ", ".join(f"`{column.column}`" for column in encoder.columns)
    small = (
        "\n\n\\* too small to judge: fewer than 30 test rows, or none of some class."
        if tabled.small
        else ""
    )
    rows = [
        f"| {name}{' *' if name in tabled.small else ''} | {trained.support[name]} | "
        f"{'–' if accuracy is None else f'{accuracy:.1f} %'} |"
        for name, accuracy in trained.accuracy.items()
    ]
    fitted = any(access.startswith("the encoder") for access in tabled.uncovered)
    encoded = (
        "It holds means, deviations and categories of the training rows, without noise: ε does "
        "not cover them. To avoid that, train with a schema of public ranges and categories."
        if fitted
        else "Its ranges and categories are those of a public schema."
    )
    if not fitted and any("found in the data" in access for access in tabled.uncovered):
        encoded += " Its names of classes or groups were read from the data."
    listed = "\n".join(rows)
    target, model = encoder.target.column, trained.model
    options = json.dumps(model["options"])
    return f"""# A private model for `{target}`

Predicts `{target}` ({", ".join(encoder.classes)}) from {len(encoder.columns)} columns of a table:
{columns}. A {model["name"]} with the options {options}, trained on {report["n"]} rows.

## Privacy

{statement.paragraph(report, width=119)}

`privacy.json` has every constant. `encoder.json` defines how raw rows become features. {encoded}

## Accuracy on {sum(trained.support.values())} test rows

| {" × ".join(labels.column for labels in encoder.group)} | test rows | accuracy |
|---|---|---|
{listed}{small}

These figures are not differentially private: they were computed without noise on the test rows,
which were not used for training. Leave them out if the test rows need protection too.

## Use

    evenclip predict MODEL_FOLDER rows.csv

or, in Python, `evenclip.export.load("MODEL_FOLDER").predict(frame)`. Rows are raw rows with the
columns above. Values may be missing, and categories not seen in training count as "other".
"""
