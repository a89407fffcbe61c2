"""Precision of float32 products on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["precision"]


@contextmanager
def precision(tf32: bool) -> Iterator[None]:
    """Compute float32 GPU products in TF32 (11-bit operands) or in full; restore on exit."""
    settings: Any = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "tf32" if tf32 else "ieee"
        yield
    finally:
        for setting, was in zip(settings, before, strict=True):
            setting.fp32_precision = was
