"""A private classifier with scikit-learn's interface: for pipelines, and for whoever knows `fit`
and `predict`.

    from evenclip.sklearn import PrivateClassifier

    classifier = PrivateClassifier(epsilon=3.0).fit(X, y)
    classifier.predict(X_new), classifier.epsilon_
    classifier.audit(X_test, y_test, sensitive_features=sex_test)

ε covers the parameters of the trained model. It does not cover what is read from the data besides:
the number of records, the names of the classes, and the encoder (means, deviations, categories),
unless `classes` and `schema` give public ones. `privacy_report_` lists what was read. A fitted
estimator holds these things, its settings and nothing else about the data: no traces, no losses, no
random states. It may be pickled and given away on those terms.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection._search import BaseSearchCV
from sklearn.utils import assert_all_finite, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from evenclip import check, models
from evenclip.audit import metrics
from evenclip.comparison import protocol
from evenclip.data import Dataset, columns
from evenclip.data import schema as schemas
from evenclip.data.columns import Column, listed
from evenclip.data.encoder import JOIN, MISSING, Encoder, Labels, fit_columns, ordered
from evenclip.mechanism import accounting
from evenclip.rules import NO_EPSILON, RULES, Rule
from evenclip.training.config import TrainConfig
from evenclip.training.fit import Result, Session, fit_config

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["EXPECTED_FAILED_CHECKS", "PrivateClassifier", "TuningWarning"]

CHUNK = 2**16  # rows that are encoded at a time
PLAIN_LR = 0.1  # of a rule without a largest step, as in `evenclip.fit`
SHARES = (
    "accuracy",
    "selection_rate",
    "tpr",
    "fpr",
)  # percent in `metrics`, shares in scikit-learn
TWO_CLASSES = ("selection_rate", "tpr", "fpr", "auc")

EXPECTED_FAILED_CHECKS: dict[str, str] = {
    name: f"fits twice with one random_state and wants {what}; the noise of each fit is fresh, or "
    "it protects nobody"
    for name, what in {
        "check_classifier_data_not_an_array": "the same predictions from an array and from a "
        "DataFrame",
        "check_fit_idempotent": "the same predictions after the second fit",
        "check_supervised_y_2d": "the same predictions from y and from y as a column",
    }.items()
}
"""The checks of scikit-learn's `check_estimator` that a private estimator fails, with the reason. None of them fails
with `deterministic_noise=True`.
"""


class TuningWarning(UserWarning):
    """Several models are trained on the same private data, and ε is that of one."""


class PrivateClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A neural network, trained with the noise that makes it (ε, δ)-differentially private.

    Guarantee: the joint ε of all releases of one `fit`, by PLD, is at most `epsilon` at δ, for
    adding or removing one row of (X, y, sensitive_features). Each further `fit` on the same rows
    costs the same again.

    Columns of X that are numbers are standardised, dates count in days, categories become
    indicators (a value with fewer than 10 rows shares the indicator "other"), missing values are 0
    with an indicator. At `predict`, unknown categories count as "other", or have no indicator if
    there was none.

    Args:
        epsilon: ε to reach; None: the rule's own noise is used, and `epsilon_` says what it costs.
        delta: δ; the largest power of ten below 1/(2n) unless given.
        rule: the name of a rule or a `Rule`, such as `evenclip.DPSGD(C0=0.5)`, whose noise is
            scaled to reach ε.
        model: called as model(n_features, n_classes), makes a module that gives one score per class
            for features [sample, n_features]; a tanh network with two hidden layers of 256 unless
            given.
        epochs: passes over the rows.
        batch_size: expected batch size B; n where there are fewer rows.
        lr: learning rate η; unless given, the one that makes the expected largest step of one
            sample η·E[S] = 0.1, the one at which this package compares rules: 0.1/C0 for most. 0.1
            for a rule without a largest step.
        classes: all classes, if they are publicly known; otherwise those found in y, which ε does
            not cover.
        schema: public ranges and categories of the columns (see `evenclip.data.schema`), a dict or
            the path of a JSON file; otherwise they are read from X, which ε does not cover. The
            columns of an array are x0, x1, ...
        random_state: fixes how the model starts, and only that.
        deterministic_noise: derive batches and noise from `random_state` too. DANGEROUS: whoever
            knows it can subtract the noise, and it is pickled with the estimator. For tests; never
            for a model that is given away.
        device: where to train.
        verbose: whether to show progress.

    Attributes:
        classes_: the classes, sorted, as in the columns of `predict_proba`.
        n_features_in_: number of columns of X.
        feature_names_in_: their names, where X had some.
        epsilon_: ε that was spent, by the ledger; None where none is valid.
        delta_: δ.
        lr_: learning rate that was used.
        privacy_report_: everything that must be known to judge ε;
            `evenclip.mechanism.statement.paragraph` puts it in words.
        model_: the trained module, on the CPU.
        encoder_: what makes features of rows.
        rule_: the rule with the noise that was used.

    >>> X = np.repeat([[0.0], [1.0]], 500, axis=0)
    >>> y = np.repeat(["no", "yes"], 500)
    >>> classifier = PrivateClassifier(epsilon=2.0).fit(X, y)
    >>> classifier.score(X, y), 1.999 <= classifier.epsilon_ <= 2.0
    (1.0, True)
    """

    def __init__(
        self,
        epsilon: float | None = 3.0,
        *,
        delta: float | None = None,
        rule: str | Rule = "dpsgd-global-adapt",
        model: Callable[[int, int], nn.Module] | None = None,
        epochs: int = 20,
        batch_size: int = 256,
        lr: float | None = None,
        classes: Sequence[Any] | None = None,
        schema: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        random_state: int | np.random.RandomState | None = None,
        deterministic_noise: bool = False,
        device: str = "cpu",
        verbose: bool = False,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.rule = rule
        self.model = model
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.classes = classes
        self.schema = schema
        self.random_state = random_state
        self.deterministic_noise = deterministic_noise
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, *, sensitive_features: Any = None) -> Self:
        """Train on these rows.

        Args:
            X: a DataFrame of numbers, flags, dates, texts and categories, or an array of numbers;
                [sample, column]. NaN is a missing value.
            y: each row's class [sample].
            sensitive_features: each row's group, where the rule uses groups (dpsgd-f); one column
                or several. Other rules do not look at it.

        Raises:
            ValueError: for anything that cannot be trained privately as given; the message says
                what to do.
            TypeError: for something of the wrong kind.
        """
        rule = _rule(self.rule)
        check.natural(epochs=self.epochs, batch_size=self.batch_size)
        seed = self._seed()
        frame = self._frame(X, reset=True)
        target = _target(y, self.classes, len(frame))
        groups = _groups_for(rule, sensitive_features, len(frame), len(target.classes))
        encoder, looked = _encoder(frame, self.schema)
        n = len(frame)
        B = min(int(self.batch_size), n)
        delta = accounting.default_delta(n) if self.delta is None else self.delta
        private = self._calibrated(rule, delta, B, n)
        lr = _step(private, max(1, len(groups.names)), B) if self.lr is None else self.lr
        start = self._start(len(encoder.features), len(target.classes), seed)
        data = Dataset(encoder.encode(frame), target.codes, groups.codes, groups.names)
        config = TrainConfig(
            rule=private, epochs=self.epochs, batch_size=B, lr=lr, delta=delta,
            seed=seed if self.deterministic_noise else None, device=self.device,
        )  # fmt: skip
        result = fit_config(start, data, config, Session(progress=bool(self.verbose)))
        self.classes_, self.encoder_, self.rule_ = target.classes, encoder, private
        self.delta_, self.lr_ = result.settings.delta, result.settings.lr
        self.model_ = result.model.cpu().eval()
        self.privacy_report_ = _report(result, self.epsilon, [*looked, *target.looked])
        self.epsilon_: float | None = self.privacy_report_["epsilon"]
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Each row's class.  # [sample]"""
        codes = self._scores(X).argmax(1).numpy()
        found: NDArray[Any] = self.classes_[codes]
        return found

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Each class's probability, in the order of `classes_`.  # [sample, class]"""
        found: NDArray[np.float64] = self._scores(X).softmax(1).numpy()
        return found

    def audit(self, X: Any, y: Any, *, sensitive_features: Any = None) -> pd.DataFrame:
        """How well each group is served: one line per group. NOT differentially private.

        These figures are computed from the given rows without noise, and ε covers neither test rows
        nor training rows in them.

        Args:
            X: rows, as for `predict`.
            y: their classes.
            sensitive_features: their groups: a Series, an array, or a DataFrame or dict of several
                columns, whose combinations are the groups; None: everybody as one group, "all".

        Returns:
            n, accuracy, loss (cross-entropy) and calibration_error of each group; with two classes
            also selection_rate, tpr, fpr and auc, for the second class. Rates are shares from 0 to
            1, NaN where there is nothing to average. `evenclip.audit.metrics` defines them.

        Raises:
            ValueError: lengths that differ, or a class that training did not know.
        """
        import pandas as pd

        scores = self._scores(X)
        target = _target(y, self.classes_, len(scores))
        everybody = _Groups(None, ("all",), "group")
        groups = (
            everybody if sensitive_features is None else _groups(sensitive_features, len(scores))
        )
        found = metrics.by_group(scores, target.codes, groups.codes, len(groups.names))
        table = pd.DataFrame(found, index=pd.Index(groups.names, name=groups.column)).astype(
            np.float64
        )
        table[list(SHARES)] /= 100
        table = table.rename(columns={"support": "n"}).astype({"n": np.int64})
        return table if len(self.classes_) == 2 else table.drop(columns=list(TWO_CLASSES))

    # --- scikit-learn's protocols ---

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.non_deterministic = not self.deterministic_noise
        return tags

    def __sklearn_clone__(self) -> Any:
        _warn_of_a_search()
        return super().__sklearn_clone__()

    # --- before training ---

    def _frame(self, X: Any, *, reset: bool) -> pd.DataFrame:
        """The rows as a table whose columns are named as in training; scikit-learn's checks of
        number and names.
        """
        import pandas as pd

        if isinstance(X, pd.DataFrame):
            _check_frame(X)
            validate_data(self, X, reset=reset, skip_check_array=True)
        else:
            _refuse_text(X)
            X = pd.DataFrame(validate_data(self, X, reset=reset, ensure_all_finite="allow-nan"))
        names = getattr(self, "feature_names_in_", None)  # absent after training on an array
        return X.set_axis([f"x{i}" for i in range(X.shape[1])] if names is None else names, axis=1)

    def _seed(self) -> int:
        """What the model starts from."""
        if self.deterministic_noise and self.random_state is None:
            raise ValueError(
                "deterministic_noise is True and random_state is None; give the seed as "
                "random_state."
            )
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _calibrated(self, rule: Rule, delta: float, B: int, n: int) -> Rule:
        """The rule with the noise that reaches ε; as it is where there is no ε to be reached."""
        valid = rule.soundness != NO_EPSILON and rule.bounded and rule.poisson and rule.sigma > 0
        if self.epsilon is None:
            return rule
        if not valid:
            warnings.warn(
                f"{rule.name} has no valid ε ({rule.why or 'no noise is added'}): "
                f"epsilon={self.epsilon} is not "
                "reached, and epsilon_ is None. Choose a private rule, or pass epsilon=None if "
                "this is meant.",
                stacklevel=3,  # whoever called fit
            )
            return rule
        return accounting.calibrate(
            rule,
            epsilon=self.epsilon,
            delta=delta,
            q=B / n,
            steps=int(self.epochs) * math.ceil(n / B),
        )

    def _start(self, features: int, classes: int, seed: int) -> nn.Module:
        """The model before training."""
        if self.model is None:
            return models.mlp(features, classes, seed=seed)
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise TypeError(
                f"model is an object of class {type(self.model).__name__}; give a function that "
                "makes a module, called "
                "as model(n_features, n_classes)."
            )
        called = f"model({features}, {classes})"
        with models.seeded(seed):
            try:
                made = self.model(features, classes)
            except Exception as error:
                raise ValueError(f"{called} failed: {type(error).__name__}: {error}") from error
            _check_model(
                made, called, features, classes
            )  # here, because lazy layers start when they are first called
        return made

    # --- after training ---

    def _scores(self, X: Any) -> Tensor:
        """The model's scores.  # [sample, class] float64"""
        check_is_fitted(self)
        frame = self._frame(X, reset=False)
        with torch.no_grad():
            parts = [
                self.model_(self.encoder_.encode(frame.iloc[start : start + CHUNK])).double()
                for start in range(0, len(frame), CHUNK)
            ]
        scores = torch.cat(parts)
        if not bool(scores.isfinite().all()):
            raise ValueError(
                "Training diverged: some scores are not finite. Train with an lr below "
                f"{self.lr_:g}."
            )
        return scores


# --- settings -----------------------------------------------------------------------------------


def _rule(given: str | Rule) -> Rule:
    """The rule itself."""
    if isinstance(given, Rule):
        return given
    if not isinstance(given, str) or given not in RULES:
        raise ValueError(
            f"rule is {given!r}; give one of {', '.join(RULES)}, or a rule such as "
            "evenclip.DPSGDGlobalAdapt(C0=1.0)."
        )
    return RULES[given]()


def _step(rule: Rule, groups: int, B: int) -> float:
    """The learning rate that makes the expected largest step of one sample that of the matched
    protocol.
    """
    largest = protocol.expected_sensitivity(rule, groups, float(B))
    return protocol.STEP / largest if math.isfinite(largest) else PLAIN_LR


def _check_model(made: Any, called: str, features: int, classes: int) -> None:
    """Raise unless this gives scores for the features; later messages could not say whose fault it
    is.
    """
    if not isinstance(made, nn.Module):
        raise TypeError(
            f"{called} returned a {type(made).__name__}; it must return a torch.nn.Module."
        )
    with torch.no_grad():
        try:
            scores = made(torch.zeros(2, features))
        except Exception as error:
            raise ValueError(
                f"The module of {called} does not take features [sample, {features}]; torch says: "
                f"{error}"
            ) from error
    shape = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    if shape != [2, classes]:
        raise ValueError(
            f"For 2 samples the module of {called} answers {shape}; expected scores [2, "
            f"{classes}]: give it one output "
            "for each class."
        )


# --- data ---------------------------------------------------------------------------------------


class _Target(NamedTuple):
    """The classes and what was read from the data for them."""

    codes: Tensor  # [sample] int64
    classes: NDArray[Any]  # [class]
    looked: list[str]


class _Groups(NamedTuple):
    """Who belongs to which group; codes are None where nobody has to know."""

    codes: Tensor | None  # [sample] int64
    names: tuple[str, ...]
    column: str


def _check_frame(frame: pd.DataFrame) -> None:
    """Raise for a table that cannot be read column by column."""
    from pandas.api import types

    if 0 in frame.shape:
        raise ValueError(
            f"X has {len(frame)} rows and {frame.shape[1]} columns; give at least one of each."
        )
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise ValueError(f"X has two columns {twice[0]!r}; rename one of them.")
    for name, series in frame.items():
        if (
            types.is_float_dtype(series.dtype)
            and np.isinf(series.to_numpy(np.float64, na_value=np.nan)).any()
        ):
            raise ValueError(
                f"Column {name!r} of X holds infinity; replace it by a number, or by NaN (missing)."
            )


def _refuse_text(X: Any) -> None:
    """Raise for an array of texts: of which kind a column is, only a DataFrame says."""
    if getattr(getattr(X, "dtype", None), "kind", "O") not in "OUS":
        return
    text = next(
        (value for value in np.asarray(X, dtype=object).flat if isinstance(value, str)), None
    )
    if text is not None:
        raise ValueError(
            f"X holds the text {text!r} and is not a DataFrame; give a pandas DataFrame, whose "
            "columns of texts become "
            "categories, or encode the texts as numbers."
        )


def _target(y: Any, public: Sequence[Any] | NDArray[Any] | None, n: int) -> _Target:
    """Each row's class; the classes are the public ones, or those found in y."""
    import pandas as pd

    if y is None:
        raise ValueError(
            "PrivateClassifier requires y to be passed, but the target y is None; give each row's "
            "class."
        )
    values = column_or_1d(y, warn=True)
    if len(values) != n:
        raise ValueError(f"X has {n} rows and y has {len(values)}; give each row of X its class.")
    assert_all_finite(values, input_name="y")
    if pd.isna(values).any():
        raise ValueError(
            f"{int(pd.isna(values).sum())} of {n} rows have no class in y; leave them out."
        )
    try:
        check_classification_targets(values)
        classes = np.unique(values if public is None else np.asarray(public))
    except TypeError as error:
        raise TypeError(
            f"The classes are of different kinds ({error}); give numbers only, or texts only."
        ) from error
    if len(classes) < 2:
        raise ValueError(
            f"There is one class only, {classes.tolist()}; there must be two or more to tell apart."
        )
    position = {label: code for code, label in enumerate(classes.tolist())}
    unknown = [label for label in dict.fromkeys(values.tolist()) if label not in position]
    if unknown:
        raise ValueError(
            f"y holds the class {unknown[0]!r}, which is not one of "
            f"{listed(classes.tolist(), 20)}; leave these rows "
            "out, or name the class in `classes` before training."
        )
    codes = torch.tensor([position[label] for label in values.tolist()], dtype=torch.int64)
    return _Target(
        codes, classes, ["the classes, which are those found in y"] if public is None else []
    )


def _groups_for(rule: Rule, sensitive_features: Any, n: int, classes: int) -> _Groups:
    """The groups that the rule asks for; nobody's where it asks for none."""
    if not rule.uses_groups:
        return _Groups(None, (), "group")
    if sensitive_features is None:
        raise ValueError(
            f"{rule.name} needs every row's group; pass fit(X, y, sensitive_features=...), or "
            "choose a rule that does "
            "not use groups, such as 'dpsgd-global-adapt'."
        )
    groups = _groups(sensitive_features, n)
    reason = rule.unsuited(len(groups.names), classes)
    if reason is not None:
        raise ValueError(f"{rule.name} is not for these data: {reason} Choose another rule.")
    return groups


def _groups(sensitive_features: Any, n: int) -> _Groups:
    """The combinations of values that occur; rows without a value are a group of their own."""
    import pandas as pd

    given = sensitive_features
    if isinstance(given, pd.Series):
        given = given.to_frame("group" if given.name is None else given.name)
    frame = pd.DataFrame(given if isinstance(given, pd.DataFrame | dict) else np.asarray(given))
    if not isinstance(given, pd.DataFrame | dict):
        frame.columns = (
            ["group"] if frame.shape[1] == 1 else [f"group {i + 1}" for i in range(frame.shape[1])]
        )
    if len(frame) != n:
        raise ValueError(
            f"X has {n} rows and sensitive_features has {len(frame)}; give each row its group."
        )
    parts = []
    for i in range(frame.shape[1]):
        factor = columns.factor(frame.iloc[:, i])
        parts.append(np.array([*factor.names, MISSING], dtype=object)[factor.codes])
    labels = [JOIN.join(row) for row in zip(*parts, strict=True)]
    found = tuple(ordered(set(labels)))
    position = {name: code for code, name in enumerate(found)}
    codes = torch.tensor([position[label] for label in labels], dtype=torch.int64)
    return _Groups(codes, found, JOIN.join(str(name) for name in frame.columns))


def _encoder(frame: pd.DataFrame, schema: Any) -> tuple[Encoder, list[str]]:
    """How rows become features, by the public schema or else by these rows; what ε does not cover
    in that.
    """
    if schema is None:
        found, notes = _fitted(frame)
        looked = [
            "the encoder (kinds, categories, means, deviations and gaps of the columns), fitted "
            "on the training rows"
        ]
    else:
        plain = (
            schemas.load(schema)
            if isinstance(schema, str | os.PathLike)
            else schemas.validated(schema)
        )
        notes = list(schemas.check(plain, frame))
        entries = {
            name: entry for name, entry in plain["columns"].items() if entry["kind"] != "ignore"
        }
        found = [schemas.column(name, entries[name]) for name in frame.columns if name in entries]
        looked = ["a check that the rows fit the schema, which only ever stops training"]
    if not found:
        raise ValueError("The schema leaves no column of X to learn from; give one of them a kind.")
    for note in notes:
        warnings.warn(note, stacklevel=3)  # whoever called fit
    return Encoder(tuple(found), Labels("y", ()), (), ()), looked


def _fitted(frame: pd.DataFrame) -> tuple[list[Column], list[str]]:
    """How each column becomes features, by these rows; what the reader should know."""
    rows = np.arange(len(frame))
    found: list[Column] = []
    notes: list[str] = []
    for name in frame.columns:
        try:
            column, said = fit_columns(
                frame, rows, [name], keep=[name]
            )  # whoever gave a column wants it used
        except TypeError as error:
            raise TypeError(
                f"Column {name!r} of X holds neither numbers nor texts nor dates ({error})."
            ) from error
        found += column
        notes += said
    return found, notes


# --- what comes out -----------------------------------------------------------------------------


def _report(result: Result, target: float | None, looked: list[str]) -> dict[str, Any]:
    """The privacy report, with what was read from the data for this estimator, without counts of
    private data.
    """
    counts = ("empty_batches", "non_finite_samples", "clamped_weights")
    report = {name: value for name, value in result.privacy.items() if name not in counts}
    unprotected = [what for what in report["not_protected"] if not what.startswith("the counts of")]
    return report | {
        "target_epsilon": None if target is None else float(target),
        "not_covered": [*report["not_covered"], *looked],
        "not_protected": [*unprotected, "what `audit` and `score` say of the training rows"],
    }


# --- searches -----------------------------------------------------------------------------------

_WARNED: WeakSet[BaseSearchCV] = WeakSet()


def _warn_of_a_search() -> None:
    """Warn, once for each, where a search such as GridSearchCV is cloning what it is about to fit
    many times.

    An estimator is not told who fits it, and the fits may run in other processes. Its clones are
    made in this one, in a call that stands above on the stack.
    """
    frame = sys._getframe(1)
    level, search = 2, None  # as `warnings.warn` counts: 1 is here
    while frame.f_back is not None and search is None:
        frame, level = frame.f_back, level + 1
        here = frame.f_locals.get("self") if frame.f_code.co_name == "fit" else None
        search = here if isinstance(here, BaseSearchCV) else None
    if search is None or search in _WARNED:
        return
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("sklearn.", "joblib.")
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{type(search).__name__} trains many private models on the same rows and chooses by "
        "figures that are not "
        "private: neither epsilon_ of the best one nor the sum of all ε covers the choice. Tune "
        "on public data.",
        TuningWarning,
        stacklevel=level,
    )
    _WARNED.add(search)
