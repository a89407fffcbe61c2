"""Metrics by group against scikit-learn, manual counts, and invariances."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as oracle
from torch import nn

from evenclip.audit import NAMES, by_group, overall, predictions, scores, worst
from evenclip.data import Dataset, MapDataset
from fresh import fresh


def problem(seed, n=200, classes=2, K=3, coarse=False):
    """(scores, y, group); coarse scores have many ties."""
    random = np.random.default_rng(seed)
    s = random.normal(size=(n, classes)) * 2
    s = torch.tensor(np.round(s) if coarse else s, dtype=torch.float32)
    y, group = random.integers(0, classes, n), random.integers(0, K, n)
    return s, torch.from_numpy(y), torch.from_numpy(group)


problems = st.builds(
    problem,
    seed=st.integers(0, 10**6),
    n=st.integers(1, 60),
    classes=st.integers(2, 4),
    K=st.integers(1, 5),
    coarse=st.booleans(),
)


def same(actual, expected):
    """Assert that tables are equal up to rounding; None equals only None."""
    assert actual.keys() == expected.keys()
    for name in actual:
        for a, b in zip(actual[name], expected[name], strict=True):
            assert (a is None) == (b is None), name
            assert a is None or a == pytest.approx(b, rel=1e-12, abs=1e-12), name


# Other routes


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_scikit_learn_agrees_on_two_classes(seed, coarse):
    s, y, group = problem(seed, coarse=coarse)
    table = by_group(s, y, group, 3)
    for k in range(3):
        rows = (group == k).numpy()
        target, mine = y.numpy()[rows], s.double().numpy()[rows]
        predicted = mine.argmax(1)
        probability = torch.from_numpy(mine).softmax(1).numpy()
        tn, fp, fn, tp = oracle.confusion_matrix(target, predicted).ravel()
        assert table["support"][k] == rows.sum()
        assert table["accuracy"][k] == pytest.approx(100 * oracle.accuracy_score(target, predicted))
        assert table["loss"][k] == pytest.approx(oracle.log_loss(target, probability), rel=1e-12)
        assert table["selection_rate"][k] == pytest.approx(100 * predicted.mean())
        assert table["tpr"][k] == pytest.approx(100 * tp / (tp + fn))
        assert table["fpr"][k] == pytest.approx(100 * fp / (fp + tn))
        assert table["auc"][k] == pytest.approx(
            oracle.roc_auc_score(target, mine[:, 1] - mine[:, 0]), rel=1e-12
        )


@given(problems)
def test_auc_is_the_share_of_pairs_in_order(given):
    s, y, group = given
    if s.shape[1] > 2:
        return
    for k, auc in enumerate(by_group(s, y, group, 5)["auc"]):
        margin = (s[:, 1].double() - s[:, 0].double()).numpy()
        high, low = (margin[((group == k) & (y == c)).numpy()] for c in (1, 0))
        pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in high for b in low]
        assert (auc is None) == (not pairs)
        assert auc is None or auc == pytest.approx(sum(pairs) / len(pairs), rel=1e-12, abs=1e-12)


@given(problems)
def test_calibration_error_is_its_definition_and_bounded(given):
    s, y, _ = given
    probability = s.double().softmax(1).numpy()
    confidence, right = probability.max(1), (s.argmax(1) == y).numpy()
    error = 0.0
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    actual = overall(s, y)["calibration_error"]
    assert actual == pytest.approx(error, abs=1e-12)
    # The error lies between |accuracy − mean confidence| and that with one bin per sample: bins can
    # hide an error but not create one.
    assert (
        abs(right.mean() - confidence.mean()) - 1e-12
        <= actual
        <= np.abs(right - confidence).mean() + 1e-12
        <= 1
    )


def test_calibration_error_by_hand():
    # Confidence 0.8 four times, right three times; confidence 0.6 twice, right once: 4/6·0.05 +
    # 2/6·0.1
    margins = torch.tensor([math.log(4)] * 4 + [math.log(1.5)] * 2, dtype=torch.float64)
    s = torch.stack([margins, torch.zeros(6)], dim=1)
    y = torch.tensor([0, 0, 0, 1, 0, 1])
    assert overall(s, y)["calibration_error"] == pytest.approx(
        4 / 6 * 0.05 + 2 / 6 * 0.1, abs=1e-12
    )


def test_a_confidence_of_one_lies_in_the_last_bin_with_those_just_below():
    s = torch.tensor(
        [[1000.0, 0.0], [math.log(19), 0.0]], dtype=torch.float64
    )  # confidence 1, wrong; 0.95, right
    assert overall(s, torch.tensor([1, 0]))["calibration_error"] == pytest.approx(
        (1 - 0.05) / 2, abs=1e-12
    )


def test_loss_is_summed_in_double_precision():
    n = 300_000
    s = torch.zeros(n, 2)
    s[:, 0] = 1e-4
    loss = overall(s, torch.zeros(n, dtype=torch.int64))["loss"]
    assert loss == pytest.approx(math.log1p(math.exp(-float(s[0, 0]))), rel=1e-13)


# What must not change anything


@given(problems, st.integers(0, 1000))
def test_the_order_of_samples_does_not_matter(given, seed):
    s, y, group = given
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(y)))
    same(by_group(s, y, group, 5), by_group(s[order], y[order], group[order], 5))


@given(problems)
def test_groups_merge_by_their_weights(given):
    s, y, group = given
    groups, whole = by_group(s, y, group, 5), overall(s, y)
    weights = {
        "accuracy": groups["support"],
        "loss": groups["support"],
        "selection_rate": groups["support"],
        "tpr": [int(((group == k) & (y == 1)).sum()) for k in range(5)],
        "fpr": [int(((group == k) & (y == 0)).sum()) for k in range(5)],
    }
    assert sum(groups["support"]) == whole["support"] == len(y)
    for name, weight in weights.items():
        if whole[name] is None:
            assert groups[name] == [None] * 5
            continue
        known = [(w, v) for w, v in zip(weight, groups[name], strict=True) if w]
        assert whole[name] == pytest.approx(
            sum(w * v for w, v in known) / sum(weight), rel=1e-9, abs=1e-9
        )


@given(problems)
def test_one_group_is_everybody(given):
    s, y, _ = given
    everybody = {name: [value] for name, value in overall(s, y).items()}
    assert by_group(s, y, None, 1) == by_group(s, y, torch.zeros_like(y), 1) == everybody
    assert tuple(everybody) == NAMES


@given(problems, st.floats(-50, 50))
def test_a_constant_on_all_scores_of_a_sample_changes_nothing(given, shift):
    s, y, group = given
    same(by_group(s.double(), y, group, 5), by_group(s.double() + round(shift), y, group, 5))


def test_swapping_the_classes_mirrors_the_rates():
    s, y, group = problem(3)
    table, flipped = by_group(s, y, group, 3), by_group(s.flip(1), 1 - y, group, 3)
    assert [100 - value for value in table["tpr"]] == pytest.approx(flipped["fpr"])
    assert [100 - value for value in table["selection_rate"]] == pytest.approx(
        flipped["selection_rate"]
    )
    assert table["auc"] == pytest.approx(flipped["auc"])  # classes and scores are both flipped
    assert table["accuracy"] == flipped["accuracy"]


# Edges


def test_an_empty_group_has_a_support_and_nothing_else():
    s, y, group = problem(0, K=2)
    table = by_group(s, y, group, 4)
    for name in NAMES:
        assert table[name][2:] == ([0, 0] if name == "support" else [None, None])
        assert None not in table[name][:2]


@pytest.mark.parametrize(("only", "defined", "undefined"), [(1, "tpr", "fpr"), (0, "fpr", "tpr")])
def test_a_group_with_one_class_lacks_what_needs_the_other(only, defined, undefined):
    s, _, _ = problem(0)
    line = overall(s, torch.full((200,), only))
    assert line[undefined] is None
    assert line["auc"] is None
    assert (
        line[defined]
        == line["selection_rate"]
        == pytest.approx(100 * float((s[:, 1] > s[:, 0]).double().mean()))
    )


def test_more_than_two_classes_have_no_rates():
    s, y, group = problem(1, classes=4)
    table = by_group(s, y, group, 3)
    for name in ("selection_rate", "tpr", "fpr", "auc"):
        assert table[name] == [None] * 3
    for k in range(3):
        rows = group == k
        probability = s[rows].double().softmax(1).numpy()
        assert table["loss"][k] == pytest.approx(
            oracle.log_loss(y[rows].numpy(), probability, labels=range(4))
        )


def test_a_tie_is_predicted_as_the_first_class():
    assert overall(torch.zeros(4, 2), torch.tensor([0, 0, 0, 1]))["accuracy"] == 75.0
    assert overall(torch.zeros(4, 2), torch.tensor([0, 0, 0, 1]))["auc"] == 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 1])
def test_a_score_that_is_not_finite_is_wrong_in_every_column(bad, column):
    good = torch.tensor([[3.0, -3.0], [-3.0, 3.0], [3.0, -3.0], [-3.0, 3.0]])
    y = torch.tensor([0, 1, 0, 1])
    for row in range(4):
        s = good.clone()
        s[row, column] = bad
        line, wrong = overall(s, y), good.clone()
        wrong[row] = -200 * good[row]  # wrong with full confidence
        expected = overall(wrong, y) | {"loss": math.inf}
        assert line == pytest.approx(expected)
        assert predictions(s, y).tolist() == predictions(wrong, y).tolist()


def test_a_model_that_broke_down_is_not_rewarded():
    y, group = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])
    table = by_group(torch.full((4, 2), math.nan), y, group, 2)
    assert table["accuracy"] == table["tpr"] == table["auc"] == [0.0, 0.0]
    assert table["fpr"] == [100.0, 100.0]
    assert table["loss"] == [math.inf, math.inf]
    assert table["calibration_error"] == [1.0, 1.0]
    three = overall(torch.full((3, 3), math.nan), torch.tensor([0, 1, 2]))
    assert three["accuracy"] == 0.0
    assert three["loss"] == math.inf


def test_huge_scores_overflow_nothing():
    s = torch.tensor([[3e38, -3e38], [-3e38, 3e38]])
    assert overall(s, torch.tensor([0, 1]))["loss"] == 0.0
    assert overall(s, torch.tensor([1, 1]))["loss"] == pytest.approx(3e38, rel=1e-6)
    assert overall(s, torch.tensor([0, 1]))["auc"] == 1.0


def test_values_are_plain_numbers():
    for values in by_group(*problem(0), 3).values():
        assert all(type(value) in (int, float) for value in values)


def test_the_worst_group():
    assert worst([90.0, 85.5, 99.0]) == 85.5
    assert worst([0.2, 0.7, 0.1], highest=True) == 0.7
    assert worst([None, 3.0, math.nan]) == worst([None, 3.0, math.nan], highest=True) == 3.0
    assert worst([0.3, math.inf], highest=True) == math.inf
    assert worst([]) is None
    assert worst([None, math.nan]) is None


# Scores


class Tower(nn.Module):
    """A model with layers that behave differently in training."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
        )

    def forward(self, x):
        assert not any(part.training for part in self.modules())
        assert not torch.is_grad_enabled()
        return self.body(x)


def data_of(n=37):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    return Dataset(x, (x[:, 0] > 0).long(), (x[:, 1] > 0).long(), ("a", "b"))


@pytest.mark.parametrize("rows", [1, 5, 37, 4096])
def test_scores_are_the_outputs_of_the_model_in_evaluation(rows):
    model, data = Tower(), data_of()
    frozen = model.body[1].eval()  # one module is frozen
    before = {name: value.clone() for name, value in model.state_dict().items()}
    actual = scores(model, data, rows=rows)
    assert model.training
    assert model.body[2].training
    assert not frozen.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        expected = model.eval()(data.x)
    assert actual.dtype == torch.float32
    assert not actual.requires_grad
    torch.testing.assert_close(actual, expected)


def test_the_mode_is_restored_after_an_error():
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout())
    with pytest.raises(ValueError, match="shapes cannot be multiplied"):
        scores(model, data_of())
    assert all(part.training for part in model.modules())


def test_scores_of_a_double_model_are_single():
    data = data_of()
    double = Dataset(data.x.double(), data.y)
    assert scores(nn.Linear(3, 2).double(), double).dtype == torch.float32


class Rows(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data.x[i], self.data.y[i], self.data.group[i]


def test_data_that_are_read_when_needed_and_models_with_several_inputs():
    data, model = data_of(), nn.Linear(3, 2)
    expected = scores(model, data)
    torch.testing.assert_close(scores(model, MapDataset(Rows(data), ("a", "b")), rows=10), expected)
    named = Dataset({"input": data.x}, data.y)
    torch.testing.assert_close(scores(model, named, rows=10), expected)


# Mistakes


def test_a_model_that_does_not_classify_is_refused():
    with pytest.raises(
        ValueError,
        match=r"^For 37 samples the model answered \[37, 1\]; expected scores \[37, class\] with "
        r"at least two classes: "
        r"give a classifier with one output for each class\.$",
    ):
        scores(nn.Linear(3, 1), data_of())
    with pytest.raises(ValueError, match=r"^rows is 0; it must be a whole number of at least 1\.$"):
        scores(nn.Linear(3, 2), data_of(), rows=0)
    with pytest.raises(
        ValueError,
        match=r"^Device 'meta' is not supported; use 'cpu' or 'cuda'\.$",
    ):
        scores(nn.Linear(3, 2), data_of(), device="meta")


def test_tables_that_do_not_fit_are_refused():
    s, y, group = problem(0, n=4)
    wrong = [
        (
            (s[:, 0], y, group, 3),
            r"^scores is \[4\]; expected \[sample, class\] with at least two classes: give one",
        ),
        (
            (s, y[:3], group, 3),
            r"^y is \[3\] and scores is \[4, 2\]; give one class for each row of scores\.$",
        ),
        (
            (s, y.double(), group, 3),
            r"^y is of torch.float64; expected classes as whole numbers: metrics here",
        ),
        (
            (s, torch.tensor([0, 1, 2, 0]), group, 3),
            r"^y has classes 0 to 2 and there are scores for 2, 0 to 1; give",
        ),
        (
            (s, y, None, 3),
            r"^group is None and K is 3; give each sample's group, or K = 1 for everybody as "
            r"one\.$",
        ),
        (
            (s, y, group[:3], 3),
            r"^group is \[3\] and there are 4 samples; give one group for each sample\.$",
        ),
        (
            (s, y, torch.tensor([0, 1, 5, 0]), 3),
            r"^group has codes 0 to 5 and K is 3; expected codes 0 to 2\.$",
        ),
        ((s, y, group, 0), r"^K is 0; it must be a whole number of at least 1\.$"),
    ]
    for arguments, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            by_group(*arguments)


def test_importing_imports_nothing_heavy():
    heavy = ("scipy", "sklearn", "pandas", "fairlearn")
    code = f"import evenclip.audit, sys; print([name for name in {heavy} if name in sys.modules])"
    assert fresh(code) == "[]\n"
