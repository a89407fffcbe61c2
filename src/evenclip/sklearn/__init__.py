"""A private classifier with scikit-learn's interface.

    from evenclip.sklearn import PrivateClassifier

    classifier = PrivateClassifier(epsilon=3.0).fit(X, y)
    classifier.predict(X_new), classifier.epsilon_
    classifier.audit(X_test, y_test, sensitive_features=sex_test)

ε covers the parameters of the trained model. It does not cover what else is read from the data: the
number of records, the names of the classes, and the encoder (means, deviations, categories), unless
`classes` and `schema` give public ones. `privacy_report_` lists what was read. A fitted estimator
holds these values, its settings and nothing else about the data: no traces, no losses, no random
states. On those terms it may be pickled and published.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from evenclip import check, models
from evenclip.arguments import check_kinds, shown
from evenclip.audit import metrics
from evenclip.comparison import protocol
from evenclip.data import Dataset
from evenclip.mechanism import accounting
from evenclip.mechanism.calibration import calibrate
from evenclip.rules import NO_EPSILON, RULES, Constants, Rule
from evenclip.sklearn import inputs
from evenclip.sklearn.initial import initial_model
from evenclip.sklearn.search import TuningWarning, warn_of_a_search
from evenclip.training.config import TrainConfig
from evenclip.training.fit import fit_config
from evenclip.training.result import Result
from evenclip.training.session import Session

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["EXPECTED_FAILED_CHECKS", "PrivateClassifier", "TuningWarning"]

CHUNK = 2**16  # rows encoded at a time
PLAIN_LR = 0.1  # of a rule without a largest step, as in `evenclip.fit`
SHARES = ("accuracy", "selection_rate", "tpr", "fpr")  # percent in `metrics`, shares here
TWO_CLASSES = ("selection_rate", "tpr", "fpr", "auc")

EXPECTED_FAILED_CHECKS: dict[str, str] = {
    name: f"fits twice with one random_state and expects {what}; the privacy guarantee needs fresh "
    "noise in each fit"
    for name, what in {
        "check_classifier_data_not_an_array": "the same predictions from an array and from a "
        "DataFrame",
        "check_fit_idempotent": "the same predictions after the second fit",
        "check_supervised_y_2d": "the same predictions from y and from y as a column",
    }.items()
}
"""The checks of scikit-learn's `check_estimator` that a private estimator fails, with the reason.

None of them fails with `deterministic_noise=True`.
"""


# scikit-learn has no types.
class PrivateClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A neural network trained with (ε, δ)-differential privacy.

    Guarantee: the joint ε of all releases of one `fit`, by PLD, is at most `epsilon` at δ, for
    adding or removing one row of (X, y, sensitive_features). Each further `fit` on the same rows
    costs the same again.

    Numeric columns of X are standardised, dates are converted to days, and categories to indicators
    (values with fewer than 10 rows share the indicator "other"). Missing values are 0 with an
    indicator. At `predict`, unknown categories count as "other", or have no indicator if "other"
    does not exist.

    Args:
        epsilon: ε to reach; None: the rule's own noise is used, and `epsilon_` is its cost.
        delta: δ; by default the largest power of ten below 1/(2n).
        rule: the name of a rule or a `Rule`, such as `evenclip.DPSGD(C0=0.5)`, whose noise is
            scaled to reach ε.
        model: function, called as model(n_features, n_classes), that returns a module with one
            score per class for features [sample, n_features]; by default a tanh network with two
            hidden layers of 256.
        epochs: passes over the rows.
        batch_size: expected batch size B; n if there are fewer rows.
        lr: learning rate η; by default the one that makes the expected largest step of one sample
            η·E[S] = 0.1, at which this package compares rules: 0.1/C0 for most rules, and 0.1 for a
            rule without a largest step.
        classes: all classes, if they are publicly known; otherwise they are read from y, and ε does
            not cover that.
        schema: public ranges and categories of the columns (see `evenclip.data.schema`), a dict or
            the path of a JSON file; otherwise they are read from X, and ε does not cover that. The
            columns of an array are x0, x1, ...
        random_state: determines the initial model, and nothing else.
        deterministic_noise: derive batches and noise from `random_state` too. DANGEROUS: everyone
            who knows it can subtract the noise, and it is pickled with the estimator. Use it for
            tests, never for a model that you publish.
        records: public number of rows, from which q, T and δ are computed; otherwise n is counted,
            and ε does not cover that.
        device: device to train on.
        verbose: whether to show progress.

    Attributes:
        classes_: the classes, sorted, as in the columns of `predict_proba`.
        n_features_in_: number of columns of X.
        feature_names_in_: their names, if X had names.
        epsilon_: ε spent, from the ledger; None if no ε is valid.
        delta_: δ.
        lr_: the learning rate used.
        privacy_report_: everything needed to judge ε; `evenclip.mechanism.statement.paragraph`
            formats it as text.
        model_: the trained module, on the CPU.
        encoder_: converts rows to features.
        rule_: the rule with the noise used.

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
        records: int | None = None,
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
        self.records = records
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, *, sensitive_features: Any = None) -> Self:
        """Train a model on the given rows.

        Args:
            X: a DataFrame of numbers, flags, dates, texts and categories, or an array of numbers;
                [sample, column]. NaN is a missing value.
            y: each row's class [sample].
            sensitive_features: each row's group, for rules that use groups (dpsgd-f); one column or
                several. Other rules ignore it.

        Raises:
            ValueError: the rows or settings cannot be trained privately; the message says what to
                do.
            TypeError: an argument has the wrong type.
        """
        rule = _rule(self.rule)
        check_kinds(type(self).__init__, vars(self))
        check.natural(epochs=self.epochs, batch_size=self.batch_size)
        seed = self._seed()
        frame = self._frame(X, reset=True)
        target = inputs.target_of(y, self.classes, len(frame))
        groups = inputs.groups_for(rule, sensitive_features, len(frame), len(target.classes))
        encoder, uncovered = inputs.encoder_of(frame, self.schema)
        if self.records is not None:
            check.natural(records=self.records)
        n = len(frame) if self.records is None else int(self.records)
        B = min(int(self.batch_size), n)
        delta = accounting.default_delta(n) if self.delta is None else self.delta
        start = initial_model(self.model, len(encoder.features), len(target.classes), seed)
        private = self._calibrated(rule, delta, B, n, models.trainable(start))
        data = Dataset(encoder.encode(frame), target.codes, groups.codes, groups.names)
        config = TrainConfig(
            rule=private, epochs=self.epochs, batch_size=B, delta=delta,
            seed=seed if self.deterministic_noise else None, device=self.device,
            records=self.records,
        )  # fmt: skip
        constants = config.settings(start, n, max(1, len(groups.names))).constants(
            len(target.classes)
        )
        config = config.but(lr=_step(private, constants) if self.lr is None else self.lr)
        result = fit_config(start, data, config, Session(progress=bool(self.verbose)))
        self.classes_, self.encoder_, self.rule_ = target.classes, encoder, private
        self.delta_, self.lr_ = result.settings.delta, result.settings.lr
        self.model_ = result.model.cpu().eval()
        self.privacy_report_ = _report(result, self.epsilon, [*uncovered, *target.uncovered])
        self.epsilon_: float | None = self.privacy_report_["epsilon"]
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Return each row's class [sample]."""
        codes = self._scores(X).argmax(1).numpy()
        classes: NDArray[Any] = self.classes_[codes]
        return classes

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return the probabilities [sample, class], in the order of `classes_`."""
        probabilities: NDArray[np.float64] = self._scores(X).softmax(1).numpy()
        return probabilities

    def audit(self, X: Any, y: Any, *, sensitive_features: Any = None) -> pd.DataFrame:
        """Return metrics of each group, one row per group. NOT differentially private.

        The metrics are computed from the given rows without noise; ε covers neither test rows nor
        training rows in them.

        Args:
            X: rows, as for `predict`.
            y: their classes.
            sensitive_features: their groups: a Series, an array, or a DataFrame or dict of several
                columns, whose combinations are the groups; None: all rows form one group, "all".

        Returns:
            n, accuracy, loss (cross-entropy) and calibration_error of each group; with two classes
            also selection_rate, tpr, fpr and auc, for the second class. Rates are shares from 0 to
            1, NaN if there is nothing to average. `evenclip.audit.metrics` defines them.

        Raises:
            ValueError: lengths differ, or a class did not occur in training.
        """
        import pandas as pd

        scores = self._scores(X)
        target = inputs.target_of(y, self.classes_, len(scores))
        groups = inputs.Groups(None, ("all",), "group")
        if sensitive_features is not None:
            groups = inputs.groups_of(sensitive_features, len(scores))
        by_group = metrics.by_group(scores, target.codes, groups.codes, len(groups.names))
        table = pd.DataFrame(by_group, index=pd.Index(groups.names, name=groups.column))
        table = table.astype(np.float64)
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
        warn_of_a_search()
        return super().__sklearn_clone__()

    # --- before training ---

    def _frame(self, X: Any, *, reset: bool) -> pd.DataFrame:
        """Return the rows with the column names of training, after scikit-learn's checks."""
        import pandas as pd

        if isinstance(X, pd.DataFrame):
            inputs.check_frame(X)
            validate_data(self, X, reset=reset, skip_check_array=True)
        else:
            with inputs.in_one_line("X"):
                inputs.refuse_text(X)
                array = validate_data(self, X, reset=reset, ensure_all_finite="allow-nan")
            X = pd.DataFrame(array)
        names = getattr(self, "feature_names_in_", None)  # absent after training on an array
        return X.set_axis([f"x{i}" for i in range(X.shape[1])] if names is None else names, axis=1)

    def _seed(self) -> int:
        """Return the seed of the initial model."""
        if self.deterministic_noise and self.random_state is None:
            raise ValueError(
                "deterministic_noise is True and random_state is None; give the seed as "
                "random_state."
            )
        try:
            random = check_random_state(self.random_state)
        except ValueError:
            raise ValueError(
                f"random_state is {shown(self.random_state)}; give a whole number from 0 to "
                "2^32 − 1, a numpy RandomState, or None."
            ) from None
        return int(random.randint(2**31 - 1))

    def _calibrated(self, rule: Rule, delta: float, B: int, n: int, parameters: int) -> Rule:
        """Return the rule with the noise that reaches ε; unchanged if there is no ε to reach."""
        valid = rule.soundness != NO_EPSILON and rule.bounded and rule.poisson and rule.sigma > 0
        if self.epsilon is None:
            return rule
        if not valid:
            warnings.warn(
                f"{rule.name} has no valid ε ({rule.why or 'no noise is added'}): "
                f"epsilon={self.epsilon} is not reached, and epsilon_ is None. Choose a private "
                "rule, or pass epsilon=None if this is intended.",
                stacklevel=3,  # the caller of fit
            )
            return rule
        return calibrate(
            rule,
            epsilon=self.epsilon,
            delta=delta,
            q=B / n,
            steps=int(self.epochs) * math.ceil(n / B),
            parameters=parameters,
        )

    # --- after training ---

    def _scores(self, X: Any) -> Tensor:
        """Return the model's scores [sample, class] float64."""
        check_is_fitted(self)
        frame = self._frame(X, reset=False)
        chunks, readings = [], []
        for start in range(0, len(frame), CHUNK):
            features, reading = self.encoder_.read(frame.iloc[start : start + CHUNK])
            with torch.no_grad():
                chunks.append(self.model_(features).double())
            readings.append(reading)
        inputs.warn_of_unlike(readings)
        scores = torch.cat(chunks)
        if not bool(scores.isfinite().all()):
            raise ValueError(
                "Training diverged: some scores are not finite. Train with an lr below "
                f"{self.lr_:g}."
            )
        return scores


# --- settings -----------------------------------------------------------------------------------


def _rule(given: str | Rule) -> Rule:
    """Return the rule of a name, or the given rule."""
    if isinstance(given, Rule):
        return given
    if not isinstance(given, str) or given not in RULES:
        raise ValueError(
            f"rule is {shown(given)}; give one of {', '.join(RULES)}, or a rule such as "
            "evenclip.DPSGDGlobalAdapt(C0=1.0)."
        )
    return RULES[given]()


def _step(rule: Rule, constants: Constants) -> float:
    """Return the learning rate at which a sample's expected largest step is the protocol's."""
    if not rule.sigma:
        return PLAIN_LR
    return protocol.STEP / protocol.expected_sensitivity(rule, constants)


# --- results ------------------------------------------------------------------------------------


def _report(result: Result, target: float | None, uncovered: list[str]) -> dict[str, Any]:
    """Return the privacy report with the accesses of this estimator."""
    report = result.privacy
    return report | {
        "target_epsilon": None if target is None else float(target),
        "not_covered": [*report["not_covered"], *uncovered],
        "not_protected": [
            *report["not_protected"],
            "what `audit` and `score` say of the training rows",
        ],
    }
