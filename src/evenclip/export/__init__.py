"""A private model to give away: trained on a table, with its encoder, its privacy report and a
model card.

    export.save(export.train("people.csv", target="hired", group="sex", epsilon=3.0), "model")
    export.load("model").predict(new_rows)

The noise comes from the operating system's entropy and is not kept, unless a seed is given.
"""

from evenclip.export.folder import check_place, load, save
from evenclip.export.predict import Predictor
from evenclip.export.train import Trained, train

__all__ = ["Predictor", "Trained", "check_place", "load", "save", "train"]
