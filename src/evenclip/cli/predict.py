"""`evenclip predict`: predict the classes of new rows with a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenclip import files, terminal
from evenclip.files import kinds

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["predict"]


def predict(
    model: Annotated[Path, typer.Argument(help="Folder that `evenclip train --out` wrote.")],
    file: Annotated[Path, typer.Argument(help="Raw rows: .csv, .tsv, .parquet or .feather.")],
    keep: Annotated[
        list[str] | None, typer.Option(help="Column of the rows to copy into the predictions.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="CSV file for the predictions; default: print.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write JSON instead of CSV, one object per row.")
    ] = False,
) -> None:
    """Predict the class of every row of a file, with probabilities, in the order of the file.

    Rows are numbered from 1, or by the file's first column if that has no name.

    Example: evenclip predict model/ new.csv --out predictions.csv
    """
    from evenclip import export
    from evenclip.data.table import read

    predictor = export.load(model)
    rows = read(file, text=predictor.encoder.texts)
    absent = [name for name in keep or () if name not in rows.columns]
    if absent:
        raise ValueError(f"--keep is {absent[0]!r}, but {file} has no such column; leave it out.")
    if out is not None and out.exists() and out.samefile(file):
        raise ValueError(f"--out is {out}, the input file; give another file.")
    predictions = _numbered(rows, predictor.predict(rows), keep or [])
    text = (
        predictions.to_json(orient="records", force_ascii=False, indent=1) + "\n"
        if as_json
        else predictions.to_csv(index=False)
    )
    if out is None:
        terminal.say_data(text)
    else:
        files.write(out, text, kinds.PREDICTIONS)


def _numbered(rows: pd.DataFrame, predictions: pd.DataFrame, keep: list[str]) -> pd.DataFrame:
    """Put the row number and the kept columns before the predictions."""
    first = rows.columns[0]
    if str(first).startswith("Unnamed: "):  # pandas' name for an unnamed column
        predictions.insert(0, "row", rows[first].to_numpy())
    else:
        predictions.insert(0, "row", range(1, len(rows) + 1))
    for place, name in enumerate(keep, 1):
        predictions.insert(place, name, rows[name].to_numpy(), allow_duplicates=True)
    return predictions
