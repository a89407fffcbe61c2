"""Predictions of a trained model on raw rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evenclip.data.encoder import Encoder

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Predictor"]

CHUNK = 2**16  # rows that are encoded at a time


@dataclass(frozen=True)
class Predictor:
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
        """The class and the probability of every class for these raw rows, in their order and with
        their index.

        Target and group are not needed, other columns are ignored, unknown categories are handled
        by the encoder.

        Raises:
            ValueError: a column that the model was trained with is not there.
        """
        import pandas as pd

        parts = [
            self._probabilities(frame.iloc[start : start + CHUNK])
            for start in range(0, max(len(frame), 1), CHUNK)
        ]
        probability = torch.cat(parts)  # [row, class]
        classes = self.encoder.classes
        found = pd.DataFrame(
            {"prediction": [classes[code] for code in probability.argmax(1).tolist()]}, dtype=object
        )
        for code, name in enumerate(classes):
            found[f"P({name})"] = probability[:, code].numpy()
        return found.set_axis(frame.index, axis=0)

    def _probabilities(self, frame: pd.DataFrame) -> Tensor:
        with torch.no_grad():
            scores: Tensor = self.model(self.encoder.encode(frame))
            return scores.double().softmax(1)
