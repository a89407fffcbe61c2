"""Train a private model on a table, and export it with encoder, privacy report and model card.

    export.save(export.train("people.csv", target="hired", group="sex", epsilon=3.0), "model")
    export.load("model").predict(new_rows)

Unless a seed is given, the noise comes from the operating system's entropy and is not kept.
"""

from evenclip.export.folder import check_place, load, save, save_or_rescue
from evenclip.export.predict import Predictor
from evenclip.export.train import Trained, train

__all__ = ["Predictor", "Trained", "check_place", "load", "save", "save_or_rescue", "train"]
