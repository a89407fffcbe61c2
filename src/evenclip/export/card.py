"""The model card: purpose, privacy, accuracy by group, and use of a model.

Names of columns, groups and classes come from the data; all text passes through
`evenclip.export.markdown`.
"""

from __future__ import annotations

import json

from evenclip.data import schema as schemas
from evenclip.data.table import Tabled
from evenclip.export.markdown import escape, wrapped
from evenclip.export.train import Trained
from evenclip.mechanism.paragraph import sentences

__all__ = ["card"]

WITHOUT_FIGURES = """## Accuracy

This folder has no figures of test rows: they are not differentially private. `evenclip train
--with-group-figures` puts them here."""


def card(trained: Trained, *, with_group_figures: bool = False) -> str:
    """Return the model card, as Markdown.

    Args:
        trained: the model.
        with_group_figures: whether to include the number of test rows and the accuracy of each
            group. They are exact, and not differentially private.
    """
    encoder, report, model = trained.tabled.encoder, trained.privacy, trained.model
    columns = ", ".join(column.column for column in encoder.columns)
    about = (
        f"Predicts {encoder.target.column} ({', '.join(encoder.classes)}) from "
        f"{len(encoder.columns)} columns of a table: {columns}."
    )
    privacy = "\n\n".join(wrapped(text) for text in sentences(report))
    return f"""# A private model for {escape(encoder.target.column)}

{wrapped(about)}

The model is a {model["name"]} with the options `{json.dumps(model["options"])}`, trained on
{report["n"]} rows.

## Privacy

{privacy}

`privacy.json` has every constant. `encoder.json` defines how raw rows become features.
{wrapped(_encoder_note(trained.tabled))}

{_accuracy(trained) if with_group_figures else WITHOUT_FIGURES}

## Use

    evenclip predict MODEL_FOLDER rows.csv

or, in Python, `evenclip.export.load("MODEL_FOLDER").predict(frame)`. Rows are raw rows with the
columns above. Values may be missing, and categories not seen in training count as "other".
"""


def _encoder_note(tabled: Tabled) -> str:
    """Return what the encoder contains of the training rows."""
    if tabled.declared:
        return "Its ranges, categories and names are those of a schema that is declared public."
    if schemas.READ in tabled.uncovered:
        return (
            "Its ranges, categories and names were read from the data, without noise: ε does not "
            'cover them. The schema that it was trained with still has its "warning". To avoid '
            "that, train with a schema of public ranges and categories."
        )
    if any(access.startswith("the encoder") for access in tabled.uncovered):
        return (
            "It holds means, deviations and categories of the training rows, without noise: ε does "
            "not cover them. To avoid that, train with a schema of public ranges and categories."
        )
    return (
        "Its ranges and categories are those of a schema that is declared public. Its names or "
        "limits of classes or groups were read from the data."
    )


def _accuracy(trained: Trained) -> str:
    """Return the section with the accuracies by group, with a note if a group is too small."""
    small = trained.tabled.small
    what = escape(" × ".join(labels.column for labels in trained.tabled.encoder.group))
    lines = [
        f"## Accuracy on {sum(trained.support.values())} test rows",
        "",
        f"| {what} | test rows | accuracy |",
        "|---|---|---|",
    ]
    for name, accuracy in trained.accuracy.items():
        percent = "–" if accuracy is None else f"{accuracy:.1f} %"
        mark = " \\*" if name in small else ""
        lines.append(f"| {escape(name)}{mark} | {trained.support[name]} | {percent} |")
    if small:
        lines += ["", "\\* too small to judge: fewer than 30 test rows, or none of some class."]
    return "\n".join(
        [
            *lines,
            "",
            "These figures are not differentially private: they were computed without noise on the "
            "test rows,",
            "which were not used for training. Leave them out if the test rows need protection "
            "too.",
        ]
    )
