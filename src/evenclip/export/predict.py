"""Predict the classes of raw rows with a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evenclip.data.encoder import Encoder

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Predictor"]

CHUNK = 2**16  # rows encoded at a time


@dataclass(frozen=True)
class Predictor:
    """A model that predicts on raw rows.

    Attributes:
        model: maps features to scores.
        encoder: maps raw rows to features.
        privacy: the privacy report.
    """

    model: nn.Module
    encoder: Encoder
    privacy: dict[str, Any]

    def predict(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the predicted class and the probability of every class, with the frame's index.

        Target and group columns are not needed, other columns are ignored, and the encoder handles
        unknown categories.

        Raises:
            ValueError: a column that the model was trained with is missing.
        """
        import pandas as pd

        chunks = [
            self._probabilities(frame.iloc[start : start + CHUNK])
            for start in range(0, max(len(frame), 1), CHUNK)
        ]
        probability = torch.cat(chunks)  # [row, class]
        classes = self.encoder.classes
        predictions = pd.DataFrame(
            {"prediction": [classes[code] for code in probability.argmax(1).tolist()]}, dtype=object
        )
        for code, name in enumerate(classes):
            predictions[f"P({name})"] = probability[:, code].numpy()
        return predictions.set_axis(frame.index, axis=0)

    def _probabilities(self, frame: pd.DataFrame) -> Tensor:
        with torch.no_grad():
            scores: Tensor = self.model(self.encoder.encode(frame))
            return scores.double().softmax(1)
