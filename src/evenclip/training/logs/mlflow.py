"""Epochs as metrics of an MLflow run: pip install 'evenclip[mlflow]'."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from evenclip.training.logs.log import PRIVATE

__all__ = ["MLflow"]


class MLflow:
    """Metrics by epoch and the privacy report as privacy.json, in the run that is active; else in
    one of its own, ended with the training. Private but for the report.
    """

    def __init__(self) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ImportError("MLflow is not installed: pip install 'evenclip[mlflow]'.") from error
        self._mlflow: Any = mlflow
        self._own = mlflow.active_run() is None
        if self._own:
            mlflow.start_run()
        mlflow.set_tag("evenclip.private", PRIVATE)

    def epoch(self, number: int, values: Mapping[str, float | None]) -> None:
        """A point of every metric; MLflow allows fewer characters in names than groups may have."""
        known = {
            re.sub(r"[^\w\-. /]", "_", name): v
            for name, v in values.items()
            if v is not None and name != "epoch"
        }
        self._mlflow.log_metrics({name: float(value) for name, value in known.items()}, step=number)

    def end(self, report: Mapping[str, Any]) -> None:
        """The report, and what can be searched for."""
        found = {name: report[name] for name in ("method", "epsilon", "delta", "soundness")}
        self._mlflow.set_tags({f"evenclip.{name}": str(value) for name, value in found.items()})
        self._mlflow.log_dict(dict(report), "privacy.json")
        if self._own:
            self._mlflow.end_run()
