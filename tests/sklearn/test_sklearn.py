"""The estimator: scikit-learn's checks, spent ε, privacy of its state, and use with other tools."""

from __future__ import annotations

import json
import math
import pickle
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import dp_accounting
import dp_accounting.pld
import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from fairlearn.metrics import MetricFrame, demographic_parity_difference, plot_model_comparison
from scipy import sparse
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import accuracy_score, roc_auc_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks, get_tags
from torch import nn

from evenclip import DPSGD, DPSGDF, DPSGDGlobalAdapt, NonPrivate
from evenclip.mechanism import accounting, statement
from evenclip.mechanism.release import Ledger
from evenclip.mechanism.rounding import TAU
from evenclip.mechanism.sampling import drawn_rate
from evenclip.rules import RULES, Rule
from evenclip.sklearn import EXPECTED_FAILED_CHECKS, PrivateClassifier, TuningWarning

DOCS = Path(__file__).parents[2] / "docs" / "sklearn.md"
ENCODED = (
    "the encoder (kinds, categories, means, deviations and gaps of the columns), fitted on the "
    "training rows"
)
FOUND = "the classes, which are those found in y"


def small(inputs, classes):
    """Return a module that trains quickly; defined at module level for pickle."""
    return nn.Linear(inputs, classes)


def deep(inputs, classes):
    """Return a module whose scores are products of parameters, so that training can diverge."""
    return nn.Sequential(nn.Linear(inputs, 4), nn.Linear(4, classes))


# Few rows form one batch, whose ε is computed quickly.
Quick = partial(PrivateClassifier, epochs=2, model=small)


def people(n=200, seed=0):
    """Return columns of every kind, classes that depend on age and job, and two groups."""
    stream = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": stream.integers(18, 80, n).astype(float),
            "job": stream.choice(["baker", "miller"], n),
            "member": stream.random(n) < 0.5,
            "region": pd.Categorical(stream.choice(["north", "south", "west"], n)),
            "since": pd.Timestamp("2020-01-01")
            + pd.to_timedelta(stream.integers(0, 999, n), unit="D"),
        }
    )
    hired = np.where(frame["age"] > 45 + 10 * (frame["job"] == "baker"), "yes", "no")
    return frame, hired, pd.Series(stream.choice(["f", "m"], n), name="sex")


def numbers(n=200, seed=0):
    X = np.random.default_rng(seed).normal(size=(n, 3))
    return X, (X[:, 0] + X[:, 1] > 0).astype(int)


def refusal(error, attempt):
    """Return the message of the error that `attempt` raises."""
    with pytest.raises(error) as caught:
        attempt()
    return str(caught.value)


@dataclass(frozen=True)
class Silent(Rule):
    """A custom rule that claims to be sound and adds no noise."""

    name: ClassVar[str] = "silent"
    sigma: float = 0.0

    def sensitivity(self, now):
        return 1.0

    def weight(self, norm, group, now):
        return (1.0 / norm).clamp(max=1.0)


# --- scikit-learn's checks ----------------------------------------------------------------------


def test_scikit_learn_accepts_the_estimator():
    """With its default ε, model and rule."""
    results = estimator_checks.check_estimator(
        PrivateClassifier(),
        expected_failed_checks=EXPECTED_FAILED_CHECKS,
        on_skip=None,
        on_fail=None,
    )
    status = {result["check_name"]: result["status"] for result in results}
    failed = {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}
    assert not failed
    assert len(status) > 40
    assert {name for name, result in status.items() if result == "skipped"} <= {
        # expects equal scores of two fits; the tag says that they differ
        "check_pipeline_consistency",
        "check_array_api_input",  # runs only where SCIPY_ARRAY_API is set
    }
    assert {name for name, result in status.items() if result == "xfail"} == set(
        EXPECTED_FAILED_CHECKS
    )


def test_few_failures_are_declared_and_each_says_why():
    assert len(EXPECTED_FAILED_CHECKS) <= 5
    reason = "; the privacy guarantee needs fresh noise in each fit"
    assert all(text.endswith(reason) for text in EXPECTED_FAILED_CHECKS.values())


@pytest.mark.parametrize("name", EXPECTED_FAILED_CHECKS)
def test_a_declared_failure_fails_because_of_the_noise(name):
    """It fails by default and passes with deterministic noise, so nothing else is wrong."""
    check = getattr(estimator_checks, name)
    with pytest.raises(AssertionError, match=r"Mismatched elements|Not equal to tolerance"):
        check("PrivateClassifier", PrivateClassifier())
    check("PrivateClassifier", PrivateClassifier(deterministic_noise=True, random_state=0))


def test_the_tags_are_true():
    tags = get_tags(PrivateClassifier())
    assert tags.non_deterministic
    assert tags.input_tags.allow_nan
    assert not get_tags(PrivateClassifier(deterministic_noise=True)).non_deterministic


def test_the_answer_for_a_row_does_not_depend_on_its_neighbours():
    """scikit-learn skips this check for estimators whose fits differ.

    Equal up to rounding, because products are computed in float32.
    """
    X, y = numbers()
    classifier = Quick().fit(X, y)
    one_by_one = np.concatenate([classifier.predict_proba(X[i : i + 1]) for i in range(20)])
    np.testing.assert_allclose(classifier.predict_proba(X)[:20], one_by_one, rtol=1e-5)
    np.testing.assert_allclose(
        classifier.predict_proba(X[::-1])[::-1], classifier.predict_proba(X), rtol=1e-5
    )


# --- privacy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["dpsgd", "dpsgd-f", "dpsgd-global", "dpsgd-global-adapt"])
def test_epsilon_is_what_the_mechanism_costs(rule):
    """Computed by dp-accounting from the added noise, without the ledger, and from the ledger."""
    X, y = numbers(250)
    classifier = Quick(epsilon=1.5, rule=rule, epochs=10, batch_size=64).fit(
        X, y, sensitive_features=y
    )
    noise = [m for m in (classifier.rule_.sigma, classifier.rule_.sigma_count) if m is not None]
    joint = float(sum(m**-2 for m in noise) ** -0.5)
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(
        dp_accounting.PoissonSampledDpEvent(64 / 250, dp_accounting.GaussianDpEvent(joint)), 10 * 4
    )
    assert classifier.delta_ == 1e-3  # 1/(2·250) = 2e-3
    assert classifier.epsilon_ == pytest.approx(accountant.get_epsilon(1e-3), rel=2e-3)
    assert 1.5 * 0.9995 <= classifier.epsilon_ <= 1.5
    report = classifier.privacy_report_
    assert (
        report["epsilon"]
        == classifier.epsilon_
        == accounting.epsilon(Ledger.from_json(report["ledger"]), 1e-3)
    )
    assert report["steps"] == 40
    assert report["target_epsilon"] == 1.5


def test_the_noise_of_two_fits_differs_and_the_start_does_not():
    X, y = numbers(100)
    starts = []

    def recorded(inputs, classes):
        starts.append(nn.Linear(inputs, classes))
        return starts[-1]

    fits = [Quick(model=recorded, random_state=seed).fit(X, y) for seed in (0, 0, 1)]
    assert torch.equal(starts[0].weight, starts[1].weight)
    assert not torch.equal(starts[0].weight, starts[2].weight)
    assert not torch.equal(fits[0].model_.weight, fits[1].model_.weight)
    assert fits[0].privacy_report_["seed"] == "from the operating system, not kept"


@pytest.mark.parametrize(
    "model", [None, lambda _, classes: nn.LazyLinear(classes)], ids=["default", "lazy"]
)
def test_other_models_start_from_the_seed_too(model):
    X, y = numbers(60)
    initial = [  # predictions of the initial model, because lr is tiny
        PrivateClassifier(lr=1e-12, epochs=1, random_state=seed, model=model)
        .fit(X, y)
        .predict_proba(X)
        for seed in (0, 0, 1)
    ]
    np.testing.assert_allclose(initial[0], initial[1], atol=1e-6)
    assert np.abs(initial[0] - initial[2]).max() > 1e-3


def test_noise_that_can_be_repeated_must_be_asked_for_and_is_reported():
    X, y = numbers(100)
    first, second = (Quick(random_state=7, deterministic_noise=True).fit(X, y) for _ in range(2))
    assert torch.equal(first.model_.weight, second.model_.weight)
    assert first.privacy_report_["seed"].startswith(
        "given and not stated here: reproducible, so not private"
    )
    message = refusal(ValueError, lambda: Quick(deterministic_noise=True).fit(X, y))
    assert (
        message
        == "deterministic_noise is True and random_state is None; give the seed as random_state."
    )


def test_without_a_target_the_rules_own_noise_is_used():
    X, y = numbers(200)
    rule = DPSGD(C0=0.5, sigma=2.0)
    classifier = Quick(epsilon=None, rule=rule, delta=1e-5, batch_size=64).fit(X, y)
    assert classifier.rule_ == rule
    size = sum(p.numel() for p in classifier.model_.parameters())
    entry = {"multipliers": {"gradient": 2.0}, "steps": 2 * 4, "sizes": {"gradient": size}}
    ledger = Ledger.from_json([{"q": drawn_rate(64 / 200), "tau": TAU, **entry}])
    assert classifier.epsilon_ == accounting.epsilon(ledger, 1e-5)
    assert classifier.privacy_report_["target_epsilon"] is None


@pytest.mark.parametrize("rule", ["non-private", "fairlens", Silent()], ids=str)
def test_where_no_epsilon_is_valid_none_is_stated_and_a_warning_says_so(rule):
    X, y = numbers(100)
    with pytest.warns(
        UserWarning,
        match="has no valid ε .*: epsilon=3.0 is not reached, and epsilon_ is None. Choose",
    ):
        classifier = Quick(rule=rule).fit(X, y, sensitive_features=y)
    assert classifier.epsilon_ is None
    assert classifier.privacy_report_["epsilon"] is None
    assert "has no valid ε" in statement.paragraph(classifier.privacy_report_)
    # A warning would be an error here.
    quiet = Quick(rule=rule, epsilon=None).fit(X, y, sensitive_features=y)
    assert quiet.epsilon_ is None


def test_non_private_training_learns():
    X, y = numbers(1000)
    assert PrivateClassifier(None, rule=NonPrivate(), model=small).fit(X, y).score(X, y) > 0.95


def test_the_learning_rate_makes_the_matched_step():
    X, y = numbers(100)
    fitted = [
        Quick(rule=rule).fit(X, y, sensitive_features=y).lr_
        for rule in (DPSGD(C0=0.5), DPSGDF(C0=0.5))
    ]
    typical = 0.5 * (1 + math.sqrt(2))  # of DPSGD-F
    assert fitted == pytest.approx([0.1 / 0.5, 0.1 / typical])
    assert Quick(lr=0.03).fit(X, y).lr_ == 0.03
    assert Quick(None, rule="non-private").fit(X, y).lr_ == 0.1


def test_batches_are_never_larger_than_the_data():
    X, y = numbers(40)
    report = PrivateClassifier(epochs=3, model=small).fit(X, y).privacy_report_
    assert (report["expected_batch_size"], report["q"], report["steps"]) == (40, 1, 3)
    assert report["epsilon"] <= 3


def test_what_is_read_from_the_data_is_listed_and_public_values_replace_it():
    frame, hired, _ = people()
    read = Quick().fit(frame, hired).privacy_report_["not_covered"]
    assert ENCODED in read
    assert FOUND in read
    schema = {
        "evenclip_schema": 1,
        "columns": {
            "age": {"kind": "number", "range": [0, 100]},
            "job": {"kind": "category", "values": ["baker", "miller", "smith"]},
        },
    }
    public = Quick(schema=schema, classes=["no", "perhaps", "yes"]).fit(frame, hired)
    listed = public.privacy_report_["not_covered"]
    assert ENCODED not in listed
    assert FOUND not in listed
    assert "a check that the rows fit the schema, which only ever stops training" in listed
    assert public.classes_.tolist() == ["no", "perhaps", "yes"]
    assert public.encoder_.features == (
        "age", "age=(missing)", "job=baker", "job=miller", "job=smith", "job=(missing)"
    )  # fmt: skip
    other, labels, _ = people(seed=1)
    assert (
        Quick(schema=schema, classes=["no", "yes"]).fit(other, labels).encoder_ == public.encoder_
    )


def test_the_columns_of_an_array_have_names_in_a_schema(tmp_path):
    X, y = numbers()
    path = tmp_path / "schema.json"
    path.write_text(
        json.dumps({"evenclip_schema": 1, "columns": {"x1": {"kind": "number", "range": [-9, 9]}}})
    )
    assert Quick(schema=path).fit(X, y).encoder_.features == ("x1", "x1=(missing)")
    path.write_text(
        json.dumps({"evenclip_schema": 1, "columns": {"x1": {"kind": "number", "range": [0, 9]}}})
    )
    with pytest.warns(
        UserWarning,
        match="values of 'x1' lie outside of the schema's range and count as its nearer",
    ):
        Quick(schema=path).fit(X, y)


def test_a_fitted_estimator_keeps_no_private_values():
    """Its pickle holds only public or listed values: no row, no trace, no count of batches."""
    X = np.random.default_rng(0).normal(size=(200, 2))
    y = (X[:, 0] > 0).astype(int)
    classifier = Quick().fit(X, y)
    kept = {name for name in vars(classifier) if name not in classifier.get_params()}
    assert kept == {
        "classes_",
        "delta_",
        "encoder_",
        "epsilon_",
        "lr_",
        "model_",
        "n_features_in_",
        "privacy_report_",
        "rule_",
    }
    packed = pickle.dumps(classifier)
    assert not [
        value
        for value in X.ravel()
        if value.tobytes() in packed or value.astype("f4").tobytes() in packed
    ]
    assert not {"empty_batches", "non_finite_samples", "clamped_weights", "trace"} & set(
        classifier.privacy_report_
    )
    json.dumps(classifier.privacy_report_)


# --- inputs -------------------------------------------------------------------------------------


def test_a_table_of_every_kind_is_learnt():
    frame, hired, _ = people(2000)
    classifier = PrivateClassifier(epsilon=4.0, random_state=0).fit(frame, hired)
    assert classifier.score(frame, hired) > 0.9
    assert classifier.feature_names_in_.tolist() == list(frame.columns)
    assert classifier.n_features_in_ == 5
    assert classifier.encoder_.features == (
        "age",
        "job=baker",
        "job=miller",
        "member",
        "region=north",
        "region=south",
        "region=west",
        "since",
    )


def test_unknown_categories_and_gaps_are_predicted_as_neither():
    frame, hired, _ = people()
    classifier = Quick().fit(frame, hired)
    new = frame.iloc[:2].assign(job=["smith", None], region=["east", "north"], age=[np.nan, 30.0])
    x = classifier.encoder_.encode(new)
    assert x[:, 1:3].tolist() == [[0, 0], [0, 0]]
    assert x[0, 0] == 0  # the mean of the training rows
    with pytest.warns(UserWarning, match="'job': 1 of 2 values are not among its categories"):
        proba = classifier.predict_proba(new)
    np.testing.assert_allclose(proba, classifier.model_(x).softmax(1).detach().numpy(), rtol=1e-5)
    with pytest.warns(UserWarning, match="such as 'smith'"):
        assert set(classifier.predict(new)) <= {"no", "yes"}


def test_gaps_in_the_training_rows_have_an_indicator():
    X, y = numbers()
    X[::7, 1] = np.nan
    classifier = Quick().fit(X, y)
    assert classifier.encoder_.features == ("x0", "x1", "x1=(missing)", "x2")
    assert np.isfinite(classifier.predict_proba(X)).all()


def test_every_column_that_is_given_is_used():
    """`table` leaves useless columns out; here that choice would depend on the private data."""
    _, y = numbers()
    frame = pd.DataFrame(
        {"id": range(200), "one": 1.0, "name": [f"person {i}" for i in range(200)]}
    )
    classifier = Quick().fit(frame, y)
    assert classifier.encoder_.features == ("id", "one", "name=(other)")
    with pytest.warns(
        UserWarning, match="200 of 200 values are not among its categories .read as other"
    ):
        assert np.isfinite(classifier.predict_proba(frame)).all()


def test_notes_of_the_encoder_are_warnings():
    _, y = numbers()
    frame = pd.DataFrame({"age": [str(i % 60) for i in range(199)] + ["unknown"]})
    with pytest.warns(
        UserWarning, match="'age' holds numbers and 'unknown', which count as missing"
    ):
        Quick().fit(frame, y)


def test_labels_of_any_kind_come_back():
    X, y = numbers(120)
    for labels in (
        y.astype(bool),
        np.where(y, "b", "a"),
        y - 1,
        pd.Series(np.where(y, "b", "a"), dtype="category"),
        pd.Series(y.astype(bool), dtype="boolean"),
        pd.Series(y, dtype="Int64"),
        pd.Series(np.where(y, "b", "a"), dtype="string"),
    ):
        classifier = Quick().fit(X, labels)
        assert classifier.classes_.tolist() == sorted(set(labels))
        assert set(classifier.predict(X).tolist()) <= set(labels)
        assert [type(label) for label in classifier.classes_.tolist()] == [
            type(label) for label in sorted(set(labels.tolist()))
        ]
        assert classifier.predict_proba(X).shape == (120, 2)


def test_a_rule_that_needs_groups_gets_them():
    frame, hired, sex = people()
    message = refusal(ValueError, lambda: Quick(rule="dpsgd-f").fit(frame, hired))
    assert message == (
        "dpsgd-f needs every row's group; pass fit(X, y, sensitive_features=...), or choose a "
        "rule that does not use groups, such as 'dpsgd-global-adapt'."
    )
    classifier = Quick(rule="dpsgd-f").fit(frame, hired, sensitive_features=sex)
    assert classifier.privacy_report_["group_labels_entered_training"]
    assert "sound here, unsound as published" in statement.paragraph(
        classifier.privacy_report_
    ).replace("\n", " ")
    assert refusal(
        ValueError, lambda: Quick(rule="dpsgd-f").fit(frame, hired, sensitive_features=sex[:9])
    ) == ("X has 200 rows and sensitive_features has 9; give each row its group.")
    assert refusal(
        ValueError,
        lambda: Quick(rule="fairlens").fit(frame, hired, sensitive_features=frame["region"]),
    ).startswith(
        "fairlens is not for these data: it is for two groups and two classes, and there are 3 "
        "and 2."
    )


X, Y = numbers(60)
FRAME = pd.DataFrame(X, columns=["a", "b", "c"])
REFUSED = [
    (
        TypeError,
        {},
        (sparse.csr_array(X), Y),
        "Sparse data was passed for X, but dense data is required.",
    ),
    (ValueError, {}, (np.where(X > 0, np.inf, X), Y), "Input X contains infinity"),
    (
        ValueError,
        {},
        (FRAME.assign(b=np.inf), Y),
        "Column 'b' of X holds infinity; replace it by a number, or by NaN",
    ),
    (
        ValueError,
        {},
        (np.array([["u", "v"]] * 60), Y),
        "X holds the text 'u' and is not a DataFrame; give a pandas",
    ),
    (
        ValueError,
        {},
        ([[1, "v"]] * 60, Y),
        "X holds the text 'v' and is not a DataFrame; give a pandas DataFrame,",
    ),
    (
        TypeError,
        {},
        (FRAME.assign(b=[[1]] * 60), Y),
        "Column 'b' of X holds neither numbers nor texts nor dates",
    ),
    (
        ValueError,
        {},
        (FRAME.set_axis(["a", "b", "a"], axis=1), Y),
        "X has two columns 'a'; rename one of them.",
    ),
    (ValueError, {}, (FRAME[:0], Y[:0]), "X has 0 rows and 3 columns; give at least one of each."),
    (ValueError, {}, (X, Y[:-1]), "X has 60 rows and y has 59; give each row of X its class."),
    (
        ValueError,
        {},
        (X, np.zeros(60)),
        "There is one class only in y, [0.0]; there must be two or more to tell apart.",
    ),
    (ValueError, {}, (X, [None, "a"] * 30), "30 of 60 rows have no class in y; leave them out."),
    (
        TypeError,
        {},
        (X, np.array(["a", 1] * 30, dtype=object)),
        "The classes are of different kinds; give",
    ),
    (ValueError, {}, (X, X[:, 0]), "Unknown label type: continuous."),
    (
        ValueError,
        {"classes": [0, 2]},
        (X, Y),
        "y holds the class 1, which is not one of 0, 2; leave these rows out",
    ),
    (
        ValueError,
        {"rule": "sgd"},
        (X, Y),
        "rule is 'sgd'; give one of non-private, dpsgd, dpsgd-f, dpsgd-global, dp",
    ),
    (
        ValueError,
        {"rule": DPSGD},
        (X, Y),
        "rule is <class 'evenclip.rules.dpsgd.DPSGD'>; give one of non-private,",
    ),
    (ValueError, {"epsilon": 0}, (X, Y), "epsilon is 0; it must be a finite number above 0."),
    (
        ValueError,
        {"delta": 1.0},
        (X, Y),
        "delta is 1.0; it must lie above 0 and below 1, well below 1/n for n",
    ),
    (ValueError, {"epochs": 0}, (X, Y), "epochs is 0; it must be a whole number of at least 1."),
    (
        TypeError,
        {"batch_size": 0.5},
        (X, Y),
        "batch_size is 0.5; it must be a whole number.",
    ),
    (ValueError, {"lr": -1}, (X, Y), "lr is -1; it must be a finite number above 0."),
    (
        TypeError,
        {"model": nn.Linear(3, 2)},
        (X, Y),
        "model is an object of class Linear; give a function that makes a",
    ),
    (
        TypeError,
        {"model": lambda f, c: 1},
        (X, Y),
        "model(3, 2) returned a int; it must return a torch.nn.Module.",
    ),
    (
        ValueError,
        {"model": lambda f, c: 1 / 0},
        (X, Y),
        "model(3, 2) failed; it raised ZeroDivisionError: division by zero.",
    ),
    (
        ValueError,
        {"model": lambda f, c: nn.Linear(4, c)},
        (X, Y),
        "The module of model(3, 2) does not take features [",
    ),
    (
        ValueError,
        {"model": lambda f, c: nn.Linear(f, 3)},
        (X, Y),
        "For 2 samples the module of model(3, 2) returns [2",
    ),
    (
        ValueError,
        {"schema": {"columns": {}}},
        (X, Y),
        'The schema has "evenclip_schema": null; this version of evenc',
    ),
    (
        ValueError,
        {"schema": {"evenclip_schema": 1, "columns": {}}},
        (X, Y),
        "The schema leaves no column of X to",
    ),
]


@pytest.mark.parametrize(
    ("error", "settings", "data", "start"), REFUSED, ids=[row[-1] for row in REFUSED]
)
def test_refusals_say_what_to_do(error, settings, data, start):
    assert refusal(error, lambda: Quick(**settings).fit(*data)).startswith(start)


def test_predicting_is_refused_before_training_and_for_other_columns():
    frame, hired, _ = people()
    for method in ("predict", "predict_proba"):
        assert "is not fitted yet" in refusal(
            NotFittedError, lambda name=method: getattr(Quick(), name)(frame)
        )
    classifier = Quick().fit(frame, hired)
    assert "now missing:\n- age" in refusal(
        ValueError, lambda: classifier.predict(frame.drop(columns="age"))
    )
    assert refusal(ValueError, lambda: classifier.predict(frame.to_numpy())).startswith(
        "X holds the text 'baker' and"
    )


def test_a_model_that_diverged_is_reported():
    X, y = numbers()
    classifier = Quick(None, rule="non-private", lr=1e18, epochs=5, model=deep).fit(X, y)
    assert refusal(ValueError, lambda: classifier.predict(X)) == (
        "Training diverged: some scores are not finite. Train with an lr below 1e+18."
    )


# --- audit --------------------------------------------------------------------------------------


def test_the_audit_is_what_the_predictions_say():
    frame, hired, sex = people(400)
    classifier = PrivateClassifier(epochs=5, random_state=0).fit(frame, hired)
    table = classifier.audit(frame, hired, sensitive_features=sex)
    assert list(table.index) == ["f", "m"]
    assert table.index.name == "sex"
    assert list(table.columns) == [
        "n",
        "accuracy",
        "loss",
        "selection_rate",
        "tpr",
        "fpr",
        "auc",
        "calibration_error",
    ]
    proba, predicted = classifier.predict_proba(frame), classifier.predict(frame)
    truth = hired == "yes"
    for group in "fm":
        mine = (sex == group).to_numpy()
        yes = predicted[mine] == "yes"
        line = table.loc[group]
        assert line["n"] == mine.sum()
        assert line["accuracy"] == pytest.approx(accuracy_score(hired[mine], predicted[mine]))
        assert line["loss"] == pytest.approx(-np.log(proba[mine, truth[mine].astype(int)]).mean())
        assert line["selection_rate"] == pytest.approx(yes.mean())
        assert line["tpr"] == pytest.approx(yes[truth[mine]].mean())
        assert line["fpr"] == pytest.approx(yes[~truth[mine]].mean())
        assert line["auc"] == pytest.approx(roc_auc_score(truth[mine], proba[mine, 1]))
    assert "NOT differentially private" in PrivateClassifier.audit.__doc__


def test_the_audit_of_several_attributes_of_more_classes_and_of_everybody():
    frame, _, sex = people()
    jobs = frame["region"].astype(str)
    classifier = Quick().fit(frame[["age"]], jobs)
    both = classifier.audit(
        frame[["age"]], jobs, sensitive_features=pd.DataFrame({"sex": sex, "job": frame["job"]})
    )
    assert list(both.index) == ["f × baker", "f × miller", "m × baker", "m × miller"]
    assert both.index.name == "sex × job"
    assert list(both.columns) == ["n", "accuracy", "loss", "calibration_error"]
    assert both["n"].sum() == 200
    overall = classifier.audit(frame[["age"]], jobs)
    assert list(overall.index) == ["all"]
    assert overall.loc["all", "accuracy"] == pytest.approx(classifier.score(frame[["age"]], jobs))
    gaps = classifier.audit(frame[["age"]], jobs, sensitive_features=sex.where(sex == "f"))
    assert list(gaps.index) == ["f", "missing"]
    for form in (sex.tolist(), sex.to_numpy(), {"sex": sex}):
        assert classifier.audit(frame[["age"]], jobs, sensitive_features=form)["n"].tolist() == [
            int((sex == "f").sum()), int((sex == "m").sum())
        ]  # fmt: skip


def test_the_audit_refuses_what_it_cannot_judge():
    frame, hired, sex = people()
    classifier = Quick().fit(frame, hired)
    assert refusal(
        ValueError, lambda: classifier.audit(frame, hired, sensitive_features=sex[:5])
    ) == ("X has 200 rows and sensitive_features has 5; give each row its group.")
    assert refusal(ValueError, lambda: classifier.audit(frame, ["perhaps"] * 200)).startswith(
        "y holds the class 'perhaps', which is not one of 'no', 'yes';"
    )


# --- scikit-learn's and Fairlearn's tools -------------------------------------------------------


def test_it_is_pickled_with_its_predictions():
    frame, hired, _ = people()
    classifier = Quick(rule=DPSGDGlobalAdapt(C0=2.0)).fit(frame, hired)
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(again.predict_proba(frame), classifier.predict_proba(frame))
    assert (again.epsilon_, again.rule_) == (classifier.epsilon_, classifier.rule_)


def test_it_is_cloned_with_its_settings_and_without_a_model():
    X, y = numbers(60)
    classifier = Quick(rule=DPSGD(C0=0.3), classes=[0, 1], random_state=3).fit(X, y)
    fresh = clone(classifier)
    assert fresh.get_params() == classifier.get_params()
    assert not [name for name in vars(fresh) if name.endswith("_")]


def test_it_works_in_a_pipeline():
    X, y = numbers(200)
    pipeline = make_pipeline(StandardScaler(), Quick(rule="dpsgd-f"))
    pipeline.fit(X, y, privateclassifier__sensitive_features=y)
    assert pipeline.predict(X).shape == (200,)
    assert pipeline[-1].epsilon_ <= 3


@pytest.mark.parametrize("refit", [True, False])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a pipeline"])
def test_a_search_warns_once(inside, refit):
    X, y = numbers(90)
    estimator = make_pipeline(StandardScaler(), Quick()) if inside else Quick()
    name = "privateclassifier__epsilon" if inside else "epsilon"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        search = GridSearchCV(estimator, {name: [1.0, 2.0]}, cv=2, refit=refit).fit(X, y)
    shown = [warning for warning in caught if warning.category is TuningWarning]
    assert len(shown) == 1
    assert str(shown[0].message) == (
        "GridSearchCV trains many private models on the same rows and chooses by figures that "
        "are not private: neither epsilon_ of the best one nor the sum of all ε covers the "
        "choice. Tune on public data."
    )
    assert shown[0].filename == __file__  # the caller of the search, not scikit-learn
    assert search.cv_results_["mean_test_score"].shape == (2,)


def test_a_search_warns_where_it_was_called_and_before_any_fit():
    """It is shown even if the fits run in other processes, and no ε is spent if it is an error."""
    X, y = numbers(60)
    made = []
    search = GridSearchCV(
        Quick(model=lambda f, c: made.append(f) or small(f, c)), {"lr": [0.1]}, cv=2
    )
    for _ in range(2):  # a warning that stopped a search is given again
        with pytest.raises(TuningWarning):  # warnings are errors here
            search.fit(X, y)
    assert made == []
    warnings.simplefilter("ignore", TuningWarning)
    search.fit(X, y)
    assert made == [3] * 3


def test_nothing_else_warns():
    """Neither cloning nor fitting outside of a search; warnings are errors here."""
    X, y = numbers(60)
    clone(Quick()).fit(X, y)
    assert len(cross_val_score(Quick(), X, y, cv=2)) == 2


def test_sensitive_features_are_routed():
    """scikit-learn's metadata routing passes each fold's rows through a pipeline and a search."""
    frame, hired, sex = people(120)
    with sklearn.config_context(enable_metadata_routing=True):
        classifier = Quick(rule="dpsgd-f", epochs=1).set_fit_request(sensitive_features=True)
        pipeline = make_pipeline(StandardScaler(), classifier).fit(
            frame[["age"]], hired, sensitive_features=sex
        )
        assert pipeline[-1].epsilon_ <= 3
        with pytest.warns(TuningWarning):
            search = GridSearchCV(classifier, {"epsilon": [2.0]}, cv=2).fit(
                frame, hired, sensitive_features=sex
            )
        assert search.best_estimator_.epsilon_ <= 2


def test_fairlearn_takes_its_predictions():
    frame, hired, sex = people()
    classifier = Quick().fit(frame, hired)
    accuracy = MetricFrame(
        metrics=accuracy_score,
        y_true=hired,
        y_pred=classifier.predict(frame),
        sensitive_features=sex,
    ).by_group
    table = classifier.audit(frame, hired, sensitive_features=sex)
    np.testing.assert_allclose(accuracy.to_numpy(), table["accuracy"].to_numpy())


# pandas, matplotlib and Fairlearn warn about each other.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fairlearn_plots_its_predictions():
    """Fairlearn's comparison plot shows private classifiers."""
    import matplotlib

    matplotlib.use("Agg")
    frame, hired, sex = people()
    predicted = {
        f"ε = {epsilon}": Quick(epsilon).fit(frame, hired).predict(frame) for epsilon in (1.0, 3.0)
    }
    codes = (hired == "yes").astype(int)
    predicted = {name: (labels == "yes").astype(int) for name, labels in predicted.items()}
    axes = plot_model_comparison(
        x_axis_metric=accuracy_score, y_axis_metric=demographic_parity_difference, y_true=codes,
        y_preds=predicted, sensitive_features=sex,
    )  # fmt: skip
    (drawn,) = axes.collections
    expected = [
        (accuracy_score(codes, p), demographic_parity_difference(codes, p, sensitive_features=sex))
        for p in predicted.values()
    ]
    np.testing.assert_allclose(drawn.get_offsets(), expected)


def test_every_rule_has_its_name_here():
    X, y = numbers(60)
    for name in RULES:
        assert Quick(None, rule=name, epochs=1).fit(X, y, sensitive_features=y).rule_.name == name


# --- documentation ------------------------------------------------------------------------------


def test_the_page_lists_the_failures():
    page = DOCS.read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in EXPECTED_FAILED_CHECKS)
