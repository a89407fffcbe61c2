"""A log for TensorBoard; it needs `pip install 'evenclip[tensorboard]'`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from evenclip.arguments import check_kinds
from evenclip.training.logs.log import PRIVATE

__all__ = ["TensorBoard"]


class TensorBoard:
    """A log for TensorBoard: scalars by epoch, and the privacy report as text.

    The groups of one quantity are shown side by side. All but the report is private.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check_kinds(TensorBoard.__init__, locals())
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoard is not installed: pip install 'evenclip[tensorboard]'."
            ) from error
        self._writer: Any = SummaryWriter(os.fspath(folder))
        self._writer.add_text("private", PRIVATE)

    def epoch(self, number: int, values: Mapping[str, float | None]) -> None:
        """Add a point to every curve."""
        for name, value in values.items():
            if value is not None and name != "epoch":
                self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def end(self, report: Mapping[str, Any]) -> None:
        """Add the report as text."""
        from evenclip.mechanism import statement

        self._writer.add_text("privacy", statement.paragraph(dict(report)))
        self._writer.close()
