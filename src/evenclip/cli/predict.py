"""`evenclip predict`: predict the classes of new rows with a trained model."""

from __future__ import annotations

import csv
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenclip import files, terminal

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["predict"]

# What makes a spreadsheet read a cell as a formula (OWASP, CSV injection), also after blanks.
_FORMULA = re.compile(r"[\t\r\n]|\s*[=+\-@＝＋－＠]")


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
    for_spreadsheets: Annotated[
        bool,
        typer.Option(
            "--for-spreadsheets",
            help="Put ' before texts that a spreadsheet would run as formulas.",
        ),
    ] = False,
) -> None:
    """Predict the class of every row of a file, with probabilities, in the order of the file.

    Rows are numbered from 1, or by the file's first column if that has no name. What could not be
    read as training read it is counted on stderr, column by column.

    Example: evenclip predict model/ new.csv --out predictions.csv
    """
    if as_json and for_spreadsheets:
        raise ValueError("--for-spreadsheets is for CSV, and --json is given; leave out one.")
    if out is not None:
        _check_out(out, model, file)
    from evenclip import export
    from evenclip.data.formats import read_noted

    predictor = export.load(model)
    encoder = predictor.encoder
    rows, notes = read_noted(file, text=encoder.texts, values=encoder.listed)
    absent = [name for name in keep or () if name not in rows.columns]
    if absent:
        raise ValueError(f"--keep is {absent[0]!r}, but {file} has no such column; leave it out.")
    predicted, reading = predictor.predict_and_read(rows)
    for note in (*notes, reading.text()):
        if note:
            terminal.say(_wrapped(note), error=True)
    text = _text(_numbered(rows, predicted, keep or []), as_json, for_spreadsheets)
    if out is None:
        terminal.say_data(text)
    else:
        files.write(out, text, files.kinds.PREDICTIONS)


def _check_out(out: Path, model: Path, file: Path) -> None:
    """Raise if the predictions would replace the input or be written into the model's folder."""
    if out.exists() and file.exists() and out.samefile(file):
        raise ValueError(f"--out is {out}, the input file; give another file.")
    held = list(model.rglob("*")) if model.is_dir() else []
    same = [path for path in held if out.exists() and path.exists() and path.samefile(out)]
    above = [
        folder for folder in (out, *out.resolve().parents) if folder.exists() and model.is_dir()
    ]
    if same or any(folder.samefile(model) for folder in above):
        raise ValueError(
            f"--out is {out}, which is in the model's folder {model}; give a file elsewhere."
        )
    files.check_name(out)


def _wrapped(note: str) -> str:
    """Return a note in lines of at most 80 columns."""
    lines = f"evenclip: {note}".splitlines()
    return "\n".join(
        part
        for line in lines
        for part in (textwrap.wrap(line, 80, subsequent_indent="  ") if len(line) > 80 else [line])
    )


def _text(predictions: pd.DataFrame, as_json: bool, for_spreadsheets: bool) -> str:
    """Return the predictions as JSON or CSV."""
    if as_json:
        text = predictions.to_json(orient="records", force_ascii=False, indent=1)
        return str(text) + "\n"
    if not for_spreadsheets:
        # The csv module does not quote a carriage return, which ends a row for its readers.
        broken = predictions.select_dtypes(["object", "str"]).map(lambda cell: "\r" in str(cell))
        quoting = csv.QUOTE_NONNUMERIC if broken.to_numpy().any() else csv.QUOTE_MINIMAL
        return str(predictions.to_csv(index=False, quoting=quoting))
    columns = {
        place: predictions.iloc[:, place].map(_harmless) for place in range(predictions.shape[1])
    }
    import pandas as pd

    safe = pd.DataFrame(columns)
    safe.columns = [_harmless(name) for name in predictions.columns]
    # Quoted, no text is split at a semicolon or a tab into a cell that begins with a formula.
    return str(safe.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC))


def _harmless(cell: Any) -> Any:
    """Return a cell that no spreadsheet runs as a formula; numbers are unchanged.

    >>> _harmless("=1+1"), _harmless(" @x"), _harmless("a=b"), _harmless(-1.5)
    ("'=1+1", "' @x", 'a=b', -1.5)
    """
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell


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
