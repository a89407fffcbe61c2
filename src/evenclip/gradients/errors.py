"""The error for models that cannot be trained privately."""

from __future__ import annotations

import textwrap

__all__ = ["ModelError", "first_line", "no_batch_of_one"]


class ModelError(ValueError):
    """A model that cannot be trained privately; the message says why and what to do.

    Attributes:
        unverified: whether no way to compute its gradients agreed with autograd on some samples;
            on others one may.
    """

    unverified = False


def no_batch_of_one(error: Exception) -> ModelError:
    """Return the error for a model that raised this error for a batch of one sample."""
    return ModelError(
        f"The model or its loss does not take a batch of one sample ({first_line(error)}). The "
        "gradient of a sample is that of a batch with this sample alone, so each must pass "
        "alone; use layers that normalise within one sample."
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return textwrap.shorten(line, 120, placeholder=" …")
