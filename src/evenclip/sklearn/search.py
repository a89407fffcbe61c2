"""A warning against searches, which train many private models on the same rows."""

from __future__ import annotations

import sys
import warnings
from weakref import WeakSet

from sklearn.model_selection._search import BaseSearchCV

__all__ = ["TuningWarning", "warn_of_a_search"]


class TuningWarning(UserWarning):
    """Several models are trained on the same private data, and ε is that of one."""


_WARNED: WeakSet[BaseSearchCV] = WeakSet()


def warn_of_a_search() -> None:
    """Warn once per search, such as GridSearchCV, when it clones the estimator.

    An estimator does not know its caller, and the fits may run in other processes. The clones are
    made in this process, in a call of the search's `fit` that is on the stack.
    """
    frame = sys._getframe(1)
    level, search = 2, None  # as `warnings.warn` counts: 1 is this function
    while frame.f_back is not None and search is None:
        frame, level = frame.f_back, level + 1
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "fit" else None
        search = owner if isinstance(owner, BaseSearchCV) else None
    if search is None or search in _WARNED:
        return
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("sklearn.", "joblib.")
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{type(search).__name__} trains many private models on the same rows and chooses by "
        "figures that are not private: neither epsilon_ of the best one nor the sum of all ε "
        "covers the choice. Tune on public data.",
        TuningWarning,
        stacklevel=level,
    )
    _WARNED.add(search)
