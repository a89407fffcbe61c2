"""The MetricFrame against Fairlearn's own functions and our tables."""

import sys

import numpy as np
import pytest
import torch

from evenclip.audit import by_group, metric_frame

fairlearn_metrics = pytest.importorskip("fairlearn.metrics", reason="Fairlearn is not installed")


def problem(classes=2, n=300):
    random = np.random.default_rng(5)
    s = torch.from_numpy(random.normal(size=(n, classes)))
    return (
        s,
        torch.from_numpy(random.integers(0, classes, n)),
        torch.from_numpy(random.integers(0, 3, n)),
    )


def test_the_frame_is_our_table_in_shares():
    s, y, group = problem()
    frame, table = metric_frame(s, y, group, ("c", "a", "b")), by_group(s, y, group, 3)
    assert isinstance(frame, fairlearn_metrics.MetricFrame)
    assert list(frame.by_group.columns) == ["accuracy", "selection_rate", "tpr", "fpr"]
    assert frame.by_group.index.name == "group"
    for name in frame.by_group.columns:
        shares = [frame.by_group[name][label] for label in ("c", "a", "b")]
        assert [100 * share for share in shares] == pytest.approx(table[name])


def test_fairlearn_agrees():
    s, y, group = problem()
    frame = metric_frame(s, y, group, ("a", "b", "c"))
    given = {
        "y_true": y.numpy(),
        "y_pred": s.argmax(1).numpy(),
        "sensitive_features": group.numpy(),
    }
    theirs = fairlearn_metrics.MetricFrame(
        metrics={
            "selection_rate": fairlearn_metrics.selection_rate,
            "tpr": fairlearn_metrics.true_positive_rate,
            "fpr": fairlearn_metrics.false_positive_rate,
        },
        **given,
    )
    for name in ("selection_rate", "tpr", "fpr"):
        assert frame.by_group[name].to_numpy() == pytest.approx(theirs.by_group[name].to_numpy())
        assert frame.overall[name] == pytest.approx(theirs.overall[name])
    parity = fairlearn_metrics.demographic_parity_difference(**given)
    assert frame.difference()["selection_rate"] == pytest.approx(parity)
    odds = fairlearn_metrics.equalized_odds_difference(**given)
    assert max(frame.difference()["tpr"], frame.difference()["fpr"]) == pytest.approx(odds)


def test_a_rate_of_an_empty_group_is_nan():
    s = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    frame = metric_frame(s, torch.tensor([1, 1, 0]), torch.tensor([0, 0, 2]), ("a", "empty", "b"))
    assert list(frame.by_group.index) == ["a", "b"]
    assert frame.by_group["tpr"]["a"] == 0.5
    assert np.isnan(frame.by_group["tpr"]["b"])
    assert np.isnan(frame.by_group["fpr"]["a"])


def test_more_than_two_classes_have_an_accuracy_only():
    s, y, group = problem(classes=3)
    frame = metric_frame(s, y, group, ("a", "b", "c"))
    assert list(frame.by_group.columns) == ["accuracy"]
    assert (100 * frame.by_group["accuracy"]).tolist() == pytest.approx(
        by_group(s, y, group, 3)["accuracy"]
    )


def test_scores_that_are_not_finite_are_wrong_here_too():
    s = torch.full((4, 2), torch.nan)
    frame = metric_frame(s, torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1]), ("a", "b"))
    assert frame.by_group["accuracy"].tolist() == [0.0, 0.0]


def test_what_does_not_fit_is_refused():
    s, y, group = problem()
    with pytest.raises(
        ValueError,
        match=r"^group has codes 0 to 2 and group_names has 2 names; name every group\.$",
    ):
        metric_frame(s, y, group, ("a", "b"))
    with pytest.raises(
        ValueError, match=r"^group is \[7\] and there are 300 samples; give one for each\.$"
    ):
        metric_frame(s, y, group[:7], ("a", "b", "c"))


def test_without_fairlearn_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fairlearn.metrics", None)
    with pytest.raises(
        ImportError,
        match=r"^A MetricFrame is Fairlearn's, which is not installed; run `pip install "
        r"'evenclip\[fairlearn\]'`\.$",
    ):
        metric_frame(*problem(), ("a", "b", "c"))
