"""Logs of a run, written during training: `fit(..., logs=[JSONL("epochs.jsonl")])`.

A log receives the statistics of every epoch when it ends, and the privacy report at the end. All it
writes is private except for the report: losses, norms and counts of records are without noise.
"""

from evenclip.training.logs.csv import CSV
from evenclip.training.logs.jsonl import JSONL
from evenclip.training.logs.log import PRIVATE, Log, flat
from evenclip.training.logs.mlflow import MLflow
from evenclip.training.logs.tensorboard import TensorBoard

__all__ = ["CSV", "JSONL", "PRIVATE", "Log", "MLflow", "TensorBoard", "flat"]
