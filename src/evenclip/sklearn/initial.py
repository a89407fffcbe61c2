"""The initial model of the estimator: the default network, or the one of the user's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from evenclip import check, models

__all__ = ["initial_model"]


def initial_model(
    make: Callable[[int, int], nn.Module] | None, features: int, classes: int, seed: int
) -> nn.Module:
    """Return the model before training.

    Args:
        make: called as make(features, classes); None: a tanh network.
        features: number of features of a row.
        classes: number of classes.
        seed: of the parameters.

    Raises:
        TypeError: `make` is no function, or returns no module.
        ValueError: it fails, or its module does not return one score for each class.
    """
    if make is None:
        return models.mlp(features, classes, seed=seed)
    if isinstance(make, nn.Module) or not callable(make):
        raise TypeError(
            f"model is an object of class {type(make).__name__}; give a function that "
            "makes a module, called as model(n_features, n_classes)."
        )
    called = f"model({features}, {classes})"
    with models.seeded(seed):
        try:
            module = make(features, classes)
        except Exception as error:
            raise ValueError(f"{called} failed; it raised {check.reason(error)}") from error
        # Inside the block, because the first call initialises lazy layers.
        _check_model(module, called, features, classes)
    return module


def _check_model(module: Any, called: str, features: int, classes: int) -> None:
    """Raise unless the module returns scores for the features.

    Errors during training could not name the cause.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{called} returned a {type(module).__name__}; it must return a torch.nn.Module."
        )
    with torch.no_grad():
        try:
            scores = module(torch.zeros(2, features))
        except Exception as error:
            raise ValueError(
                f"The module of {called} does not take features [sample, {features}]; it raised "
                f"{check.reason(error)}"
            ) from error
    shape = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    if shape != [2, classes]:
        raise ValueError(
            f"For 2 samples the module of {called} returns {shape}; expected scores [2, "
            f"{classes}]: give it one output for each class."
        )
