"""Predict the classes of raw rows with a trained model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evenclip.data.encoder import Encoder
from evenclip.data.reading import Reading

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Predictor"]

CHUNK = 2**16  # rows encoded at a time
DAMAGED = "train the model again, or take an undamaged copy"


@dataclass(frozen=True)
class Predictor:
    """A model that predicts on raw rows.

    Attributes:
        model: maps features to scores.
        encoder: maps raw rows to features.
        privacy: the privacy report.

    Raises:
        ValueError: a parameter of the model is NaN or infinite, class names repeat, or the model
            has another number of inputs or outputs than the encoder has features or classes.
    """

    model: nn.Module
    encoder: Encoder
    privacy: dict[str, Any]

    def __post_init__(self) -> None:
        _check_finite(self.model)
        _check_shape(self.model, self.encoder)

    def read(self, frame: pd.DataFrame) -> tuple[Tensor, Reading]:
        """Return the features [row, feature] of raw rows, and how each column was read.

        Columns are found by their names as texts. A column of which no value can be read is in the
        reading, and `predict` refuses it.

        Raises:
            ValueError: a column that the model was trained with is missing, or is there twice.
            TypeError: a column holds values such as lists.
        """
        return self.encoder.read(_named(frame))

    def predict(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the predicted class and the probability of every class, with the frame's index.

        Target and group columns are not needed, and other columns are ignored. A value that cannot
        be read as training read its column counts as missing, and an unknown category as "other" or
        none; a warning counts both for each column.

        Raises:
            ValueError: a column that the model was trained with is missing or cannot be read at
                all, or a probability is not a number.
            TypeError: a column holds values such as lists.
        """
        predictions, reading = self.predict_and_read(frame)
        if reading.notes:
            warnings.warn(" ".join(reading.notes), stacklevel=2)
        return predictions

    def predict_and_read(self, frame: pd.DataFrame) -> tuple[pd.DataFrame, Reading]:
        """Return what `predict` does and, in the place of a warning, how the columns were read."""
        import pandas as pd

        frame = _named(frame)
        starts = range(0, max(len(frame), 1), CHUNK)
        parts = [self._chunk(frame.iloc[start : start + CHUNK], start) for start in starts]
        reading = parts[0][1]
        for _, further in parts[1:]:
            reading = reading.merged(further)
        reading.check()
        probability = torch.cat([chunk for chunk, _ in parts])  # [row, class]
        classes = self.encoder.classes
        predictions = pd.DataFrame(
            {"prediction": [classes[code] for code in probability.argmax(1).tolist()]}, dtype=object
        )
        for code, name in enumerate(classes):
            predictions[f"P({name})"] = probability[:, code].numpy()
        return predictions.set_axis(frame.index, axis=0), reading

    def _chunk(self, frame: pd.DataFrame, start: int) -> tuple[Tensor, Reading]:
        """Return the probabilities [row, class] of some rows, and how they were read."""
        features, reading = self.encoder.read(frame)
        with torch.no_grad():
            scores: Tensor = self.model(features)
            probability = scores.double().softmax(1)
        wrong = ~probability.isfinite().all(1)
        if wrong.any():
            row = start + int(wrong.nonzero()[0]) + 1
            raise ValueError(
                f"The model gives row {row} no probabilities, because a score is not a finite "
                f"number; its parameters are too large or damaged: {DAMAGED}."
            )
        return probability, reading


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with texts as the names of columns, as training has them."""
    if all(isinstance(name, str) for name in frame.columns):
        return frame
    return frame.set_axis([str(name) for name in frame.columns], axis=1)


def _check_finite(model: nn.Module) -> None:
    """Raise if a parameter is NaN or infinite."""
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and not bool(value.isfinite().all()):
            wrong = int((~value.isfinite()).sum())
            raise ValueError(
                f"The model's parameter {name!r} has {wrong} values that are NaN or infinite; "
                f"{DAMAGED}."
            )


def _check_shape(model: nn.Module, encoder: Encoder) -> None:
    """Raise unless the model has an input for every feature and an output for every class."""
    classes = encoder.classes
    if len(set(classes)) < len(classes) or len(classes) < 2:
        raise ValueError(
            f"The encoder has the classes {', '.join(map(repr, classes[:20]))}, which must be two "
            f"or more different names; {DAMAGED}."
        )
    parameter = next(model.parameters(), torch.empty(0))
    row = torch.zeros(1, len(encoder.features), device=parameter.device)
    try:
        with torch.no_grad():
            outputs = list(model(row).shape)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"The model does not take the {len(encoder.features)} features of its encoder "
            f"({reason}); {DAMAGED}."
        ) from error
    if outputs != [1, len(classes)]:
        raise ValueError(
            f"The model has outputs of shape {outputs} for one row and the encoder has "
            f"{len(classes)} classes, {', '.join(map(repr, classes[:20]))}; {DAMAGED}."
        )
