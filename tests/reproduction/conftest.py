"""Stored records with known numbers and without training, so that their drawings are known."""

import pytest

from evenclip.comparison.presets import PUBLISHED

SEEDS = 5


def rows(base, step=0.1):
    """[seed, group]: two groups, seed by seed a little more."""
    return [[base + step * seed, base + 10 + step * seed] for seed in range(SEEDS)]


def record(name="adult", quick=False, **changes):
    """A table's record in which every rule has its own known accuracy and loss."""
    dataset = name.removesuffix("-matched")
    rules = {}
    for i, method in enumerate(PUBLISHED[dataset].methods):
        private = method.rule.sigma and method.rule.bounded
        rules[method.name] = {
            "rule": repr(method.rule),
            "lr": [method.lr] * SEEDS,
            "soundness": method.rule.soundness,
            "epsilon": {"pld": 3.1035, "rdp": 3.4075} if private else {"pld": None, "rdp": None},
            "delta": 1e-6,
            "accuracy": rows(80.0 - 2 * i),
            "train_loss": [
                [0.4 + 0.1 * i + 0.001 * s, 0.2 + 0.05 * i + 0.001 * s] for s in range(SEEDS)
            ],
            "test_loss": [[0.5 + 0.1 * i, 0.3 + 0.05 * i]] * SEEDS,
            "overall": {"accuracy": [80.0] * SEEDS, "loss": [0.5] * SEEDS},
            "seconds": [1.0] * SEEDS,
        }
    return {
        "format": 1,
        "table": name,
        "quick": quick,
        "seeds": list(range(SEEDS)),
        "groups": ["Male", "Female"],
        "n_train": [23_000 + i for i in range(SEEDS)],
        "says": "Settings as published.",
        "notes": ["A note."],
        "rules": rules,
        "made_with": {"device": "cpu"},
        **changes,
    }


def watched(rule, dataset="adult", match=False, looks=6):
    """The record of an observed run, with numbers that are easy to check by hand."""
    names = "non_private", "clip", "mag", "dir", "noise", "mag_star", "dir_star"
    groups = [
        {
            "group": k, "n": 100, "of": 100, "loss_gradient_norm": 1.0 + k, "slopes": [0.5 + k],
            "clipped_slopes": [0.2 + k], "trace": [3.0, 0.1], "cosine": 0.5, "clipped_cosine": 0.4,
            "extremes": [-0.5 if k else 0.1, 4.0],
            "terms": {name: [(i + 1) * 0.01 * (k + 1), 0.001] for i, name in enumerate(names)},
        }
        for k in (0, 1)
    ]  # fmt: skip
    return {
        "watch": {"dataset": dataset, "rule": rule, "match": match},
        "hash": "none",
        "lr": 0.01,
        "rule": rule,
        "groups": ["Male", "Female"],
        "shares": [0.5, 0.5],
        "n": 1000,
        "q": 0.01,
        "B": 256.0,
        "steps": 100,
        "loss": [[0.7 - 0.05 * e, 0.5 - 0.05 * e] for e in range(4)],
        "norm": [[1.0, 0.8 - 0.1 * e, 0.5 - 0.1 * e] for e in range(4)],
        "risk": [
            {"t": 10 * i, "risk": groups, "norms": [[1.0], [0.4]], "sensitivity": 0.5, "lr": 0.01}
            for i in range(looks)
        ],
    }


@pytest.fixture(scope="session")
def kept():
    return record


@pytest.fixture(scope="session")
def seen():
    return watched
