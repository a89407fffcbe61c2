"""A log in an MLflow run; it needs `pip install 'evenclip[mlflow]'`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from evenclip.training.logs.log import PRIVATE

__all__ = ["MLflow"]


class MLflow:
    """A log in the active MLflow run, or in a new run that ends with the training.

    Values are metrics by epoch, and the privacy report is privacy.json. All but the report is
    private.
    """

    def __init__(self) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ImportError("MLflow is not installed: pip install 'evenclip[mlflow]'.") from error
        self._mlflow: Any = mlflow
        self._started = mlflow.active_run() is None
        if self._started:
            mlflow.start_run()
        mlflow.set_tag("evenclip.private", PRIVATE)

    def epoch(self, number: int, values: Mapping[str, float | None]) -> None:
        """Log every metric; replace characters that MLflow does not allow in names."""
        known = {
            re.sub(r"[^\w\-. /]", "_", name): v
            for name, v in values.items()
            if v is not None and name != "epoch"
        }
        self._mlflow.log_metrics({name: float(value) for name, value in known.items()}, step=number)

    def end(self, report: Mapping[str, Any]) -> None:
        """Log the report, and tags for searching."""
        tags = {name: report[name] for name in ("method", "epsilon", "delta", "soundness")}
        self._mlflow.set_tags({f"evenclip.{name}": str(value) for name, value in tags.items()})
        self._mlflow.log_dict(dict(report), "privacy.json")
        if self._started:
            self._mlflow.end_run()
