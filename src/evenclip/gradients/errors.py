"""The error for models that cannot be trained privately."""

from __future__ import annotations

__all__ = ["ModelError", "first_line"]


class ModelError(ValueError):
    """A model that cannot be trained privately; the message says why and what to do.

    Attributes:
        unverified: whether no way to compute its gradients agreed with autograd on some samples;
            on others one may.
    """

    unverified = False


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
