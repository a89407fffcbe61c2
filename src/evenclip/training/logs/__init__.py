"""Where the course of training is written to while it runs: `fit(...,
logs=[JSONL("epochs.jsonl")])`.

A log is told every epoch when it has ended, and the privacy report at the end. What it writes is
private but for the report: losses, norms and counts of records carry no noise.
"""

from evenclip.training.logs.csv import CSV
from evenclip.training.logs.jsonl import JSONL
from evenclip.training.logs.log import PRIVATE, Log, flat
from evenclip.training.logs.mlflow import MLflow
from evenclip.training.logs.tensorboard import TensorBoard

__all__ = ["CSV", "JSONL", "PRIVATE", "Log", "MLflow", "TensorBoard", "flat"]
