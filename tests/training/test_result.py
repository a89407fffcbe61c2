"""The result of `fit`: a copy of the model, the trace, and a report that states what ε means."""

from __future__ import annotations

import copy
import io
import json
import math
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from evenclip import DPSGD, DPSGDF, DPSGDGlobalAdapt, NonPrivate, TrainConfig, fit, prepare
from evenclip.data import Dataset, MapDataset
from evenclip.mechanism.accounting import epsilon, epsilon_without_amplification
from evenclip.mechanism.release import Entry, Ledger
from evenclip.mechanism.rounding import TAU
from evenclip.mechanism.statement import paragraph
from evenclip.rules import NO_EPSILON
from evenclip.training.progress import Progress


def settings(rule, **more):
    return {"rule": rule, "batch_size": 8, "epochs": 3, "lr": 0.2, "seed": 9, **more}


# --- the model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_a_copy_and_the_original_as_it_was(toy, rule, training):
    model = toy.mlp(dropout=0.1).train(training)
    model[2].train()  # a module may be in another mode than the model
    before = copy.deepcopy(model)
    result = fit(model, toy.data(), **settings(rule))
    assert result.model is not model
    assert toy.same(model, before)
    assert not toy.same(result.model, before)
    assert all(p.grad is None for p in [*model.parameters(), *result.model.parameters()])
    for module in (model, result.model):
        assert [part.training for part in module.modules()] == [
            part.training for part in before.modules()
        ]
        for part in module.modules():
            hooks = (
                part._forward_hooks,
                part._forward_pre_hooks,
                part._backward_hooks,
                part._backward_pre_hooks,
            )
            assert not any(hooks)
    one, other = list(model.parameters()), list(result.model.parameters())
    assert not {p.data_ptr() for p in one} & {p.data_ptr() for p in other}


def test_hooks_are_gone_after_a_failure_too(toy):
    seen = []

    def fail(step):
        seen.append(step.model)
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        fit(toy.mlp(), toy.data(), **settings(DPSGD()), observers=[fail])
    assert not any(part._forward_hooks for part in seen[0].modules())


def test_frozen_parameters_stay_and_are_not_counted(toy):
    model = toy.mlp()
    model[0].requires_grad_(False)
    result = fit(model, toy.data(), **settings(DPSGD()))
    assert torch.equal(result.model[0].weight, model[0].weight)
    assert not torch.equal(result.model[2].weight, model[2].weight)
    assert result.settings.parameters == 21
    assert [p.requires_grad for p in result.model.parameters()] == [False, False, True, True]


def test_it_learns(toy):
    """Two well separated classes and enough records: the noise does little harm."""
    random = torch.Generator().manual_seed(0)
    y = torch.randint(2, (2000,), generator=random)
    x = torch.randn(2000, 5, generator=random) + 3 * y.unsqueeze(1)
    for rule in (NonPrivate(), DPSGD(), DPSGDGlobalAdapt(), DPSGDF()):
        model = fit(
            nn.Linear(5, 2), (x, y, y), rule=rule, batch_size=200, epochs=3, lr=0.5, seed=0
        ).model
        assert (model(x).argmax(1) == y).float().mean() > 0.95


# --- the trace ----------------------------------------------------------------------------------


def mean_or_none(values):
    return sum(values) / len(values) if values else None


def test_the_trace_against_a_slow_recomputation(toy, rule, spy):
    """Compare every value with one-sample autograd at each step's parameters."""
    x, y, group = toy.data(40)
    recomputed = []

    def record(step):
        rows = spy.batches[step.t]
        losses, gradients = toy.gradients(step.model, x[rows], y[rows])
        recomputed.append(
            (group[rows].tolist(), losses.tolist(), gradients.norm(dim=1).tolist(), step)
        )

    result = fit(
        toy.mlp(), (x, y, group), **settings(rule, batch_size=6, steps=17), observers=[record]
    )
    assert [row["steps"] for row in result.trace] == [7, 7, 3]  # the last epoch is cut short
    assert [row["epoch"] for row in result.trace] == [1, 2, 3]
    at = 0
    for row in result.trace:
        steps = recomputed[at : at + row["steps"]]
        at += row["steps"]
        samples = [
            (k, loss, norm)
            for ks, ls, ns, _ in steps
            for k, loss, norm in zip(ks, ls, ns, strict=True)
        ]
        assert row["samples"] == len(samples)
        assert row["group_samples"] == [sum(k == j for k, _, _ in samples) for j in range(3)]
        for name, place in (("loss", 1), ("gradient_norm", 2)):
            expected = [
                mean_or_none([sample[place] for sample in samples if sample[0] == j])
                for j in range(3)
            ]
            assert [value is None for value in row[name]] == [value is None for value in expected]
            for value, known in zip(row[name], expected, strict=True):
                assert value is None or value == pytest.approx(known, rel=1e-9)
        clipped = sum(
            is_clipped(rule, norm, k, step)
            for ks, _, ns, step in steps
            for k, norm in zip(ks, ns, strict=True)
        )
        assert row["clip_fraction"] == pytest.approx(clipped / len(samples), abs=1e-12)
        last = steps[-1][3]
        assert row["state"] == last.public.state.tolist()
        assert row["sensitivity"] == float(last.public.sensitivity)
        assert row["empty_batches"] == sum(len(ks) == 0 for ks, _, _, _ in steps)
        assert row["non_finite"] == row["clamped"] == 0
    assert result.trace[-1]["state"] == result.state.tolist()


def is_clipped(rule, norm, k, step) -> bool:
    """Return whether a gradient exceeds the bound of the method."""
    if rule.name == "non-private":
        return False
    if rule.name == "dpsgd":
        return norm > rule.C0
    if rule.name == "dpsgd-f":
        return norm > float(step.public.now[k])
    return norm > (rule.Z if rule.name == "dpsgd-global" else float(step.public.now))


def test_empty_batches_are_counted(toy, spy):
    result = fit(toy.mlp(), toy.data(), **settings(DPSGD(), batch_size=1, steps=40))
    empty = sum(len(batch) == 0 for batch in spy.batches)
    assert empty > 5
    assert (
        sum(row["empty_batches"] for row in result.trace)
        == empty
        == result.private["empty_batches"]
    )
    assert not set(result.private) & set(result.privacy)
    assert result.ledger.steps == 40  # a step without samples costs as much as any step


def test_an_epoch_of_nothing_but_empty_batches_has_a_row(toy):
    result = fit(toy.mlp(), toy.data(), **settings(DPSGD(), q=1e-9, steps=3))
    (row,) = result.trace
    assert (row["samples"], row["empty_batches"]) == (0, 3)
    assert row["loss"] == row["gradient_norm"] == [None] * 3
    assert row["clip_fraction"] is None


def test_records_of_observers(toy):
    result = fit(
        toy.mlp(),
        toy.data(),
        **settings(DPSGD()),
        observers=[lambda s: {"size": len(s.losses)}, lambda s: None],
    )
    assert [record["t"] for record in result.records] == [t for t in range(15) for _ in range(2)]
    assert sum(record.get("size", 0) for record in result.records) == sum(
        row["samples"] for row in result.trace
    )


# --- the privacy report -------------------------------------------------------------------------

FIELDS = {  # what a report must state -> the fields that state it
    "trust model": ["trust_model"],
    "unit of privacy": ["unit"],
    "neighbouring relation": ["neighbouring_relation"],
    "what is protected and what is not": ["protected", "not_protected"],
    "accesses not covered": ["not_covered"],
    "ε and δ, δ against 1/n": ["epsilon", "delta", "delta_times_n", "n"],
    "accountant, library, version": ["accountant"],
    "constants of the mechanism": [
        "rule",
        "multipliers",
        "joint_multiplier",
        "steps",
        "q",
        "expected_batch_size",
    ],
    "the divisor": ["divisor"],
    "sampling, and ε without it": ["poisson_sampling", "epsilon_without_amplification"],
    "group labels": ["group_labels_entered_training"],
    "randomness": ["random_generator", "seed", "claim", "sampler"],
    "steps declared and drawn, by which runs": [
        "declared_steps",
        "first_declared_steps",
        "reserved_steps",
        "steps_note",
        "runs",
        "parents",
        "ledger_covers",
    ],
    "rounding, and the rest of the batch": ["bound_inflation", "independence", "company"],
    "soundness": ["method", "soundness", "bound_enforced", "reference"],
    "code version, specification, ledger": ["versions", "specification", "ledger"],
}


def test_the_report_states_everything(toy, rule):
    result = fit(toy.mlp(), toy.data(), **settings(rule))
    report = json.loads(json.dumps(result.privacy, allow_nan=False))
    assert report == result.privacy
    for names in FIELDS.values():
        for name in names:
            assert name in report
    assert report["n"] == 40
    assert report["steps"] == 15
    assert report["delta_times_n"] == pytest.approx(40 * report["delta"])
    assert report["delta_times_n"] < 0.5
    assert report["expected_batch_size"] == 8
    assert report["q"] == (0.2 if rule.poisson else None)
    assert report["poisson_sampling"] == rule.poisson
    assert report["method"] == rule.name
    assert report["soundness"] == rule.soundness
    assert report["group_labels_entered_training"] == (rule.name == "dpsgd-f")
    assert report["accountant"]["library"] == "dp-accounting"
    assert report["random_generator"].startswith("AES-256 in counter mode (noise, batches, and")
    assert ("PCG64" in report["random_generator"]) == (not rule.poisson)
    assert re.fullmatch("[0-9a-f]{64}", report["specification"])
    for constant, value in vars(rule).items():
        assert f"{constant}={value}" in report["rule"]
    assert any("number of records" in access for access in report["not_covered"])
    assert report["versions"]["torch"] == torch.__version__


def test_epsilon_is_that_of_the_ledger(toy, private_rule):
    """Rebuild the ledger from the settings, and compute ε again."""
    result = fit(toy.mlp(), toy.data(), **settings(private_rule, delta=1e-4))
    count = {"dpsgd-f": 3.0, "dpsgd-global-adapt": 2.0}.get(private_rule.name)
    multipliers = (("gradient", 0.8),) if count is None else (("count", count), ("gradient", 0.8))
    numbers = {"count": 6 if count == 3.0 else 1, "gradient": 57}
    sizes = tuple((name, numbers[name]) for name, _ in multipliers)
    ledger = Ledger([Entry(0.2, multipliers, 15, sizes=sizes, tau=TAU)])
    (entry,), (expected,) = result.ledger.entries, ledger.entries
    assert (entry.release, entry.steps) == (expected.release, 15)
    joint = 0.8 if count is None else (0.8**-2 + count**-2) ** -0.5
    assert result.privacy["joint_multiplier"] == pytest.approx(joint, rel=1e-12)
    everything = (("everything", sum(size for _, size in sizes)),)
    alone = Ledger([Entry(0.2, (("everything", joint),), 15, sizes=everything, tau=TAU)])
    for accountant, name in (("pld", "epsilon"), ("rdp", "epsilon_rdp")):
        assert (
            result.epsilon(accountant) == result.privacy[name] == epsilon(ledger, 1e-4, accountant)
        )
        assert result.epsilon(accountant) == pytest.approx(
            epsilon(alone, 1e-4, accountant), rel=1e-6
        )
    assert result.epsilon("rdp", 1e-3) == epsilon(ledger, 1e-3, "rdp") < result.epsilon("rdp")
    assert result.privacy["epsilon_without_amplification"] == epsilon_without_amplification(
        ledger, 1e-4
    )
    assert result.privacy["epsilon_without_amplification"] > result.epsilon()
    assert Ledger.from_json(result.privacy["ledger"]) == result.ledger


def test_the_paragraph_reads_at_79_columns_and_has_the_numbers(toy, private_rule):
    result = fit(toy.mlp(), toy.data(), **settings(private_rule))
    text = paragraph(result.privacy)
    assert max(map(len, text.splitlines())) <= 79
    words = " ".join(text.split())
    printed = re.search(r"with ε = (\S+) at δ = (\S+) \(by PLD; (\S+) by RDP\)", words)
    assert printed is not None
    assert (
        0 <= float(printed[1]) - result.epsilon() <= 0.01 * result.epsilon()
    )  # rounded, and never down
    assert 0 <= float(printed[3]) - result.epsilon("rdp") <= 0.01 * result.epsilon("rdp")
    assert float(printed[2]) == pytest.approx(result.settings.delta)
    assert f"trained by {private_rule.name} ({private_rule.soundness})" in words
    assert "15 steps at rate q = 0.2" in words
    assert "0.8 (gradient)" in words
    assert (
        "The seed is given and not stated here: reproducible, so not private against anyone who "
        "knows it." in words
    )
    assert f"The rule {'used' if private_rule.uses_groups else 'did not use'} group labels" in words
    assert all(access in words for access in result.privacy["not_covered"])
    assert not re.search(r"None|nan|inf\b|\[|\{|array|tensor", text)


def test_a_seed_of_the_operating_system_is_not_told(toy):
    result = fit(toy.mlp(), toy.data(), **settings(DPSGD(), seed=None))
    assert "The seed is from the operating system, not kept." in " ".join(
        paragraph(result.privacy).split()
    )


def test_plain_sgd_has_no_epsilon_and_prints_none(toy):
    result = fit(toy.mlp(), toy.data(), **settings(NonPrivate()))
    assert result.epsilon() is result.epsilon("rdp") is None
    for name in ("epsilon", "epsilon_rdp", "epsilon_without_amplification"):
        assert result.privacy[name] is None
    text = paragraph(result.privacy)
    assert max(map(len, text.splitlines())) <= 79
    first = text.split("\n\n")[0]
    assert " ".join(first.split()) == (
        "This model was trained by non-private and has no valid ε (no noise is added): it "
        "promises no privacy to the records it was trained on."
    )
    assert not re.search(r"ε\s*[=≈<]|\binf", text)


@dataclass(frozen=True)
class Unsound(DPSGD):
    """Noise and Poisson batches, but a published claim that does not hold."""

    name: ClassVar[str] = "unsound"
    soundness: ClassVar[str] = NO_EPSILON


def test_a_rule_that_claims_no_epsilon_gets_none_though_its_ledger_has_one(toy):
    result = fit(toy.mlp(), toy.data(), **settings(Unsound()))
    assert result.ledger.is_private
    assert result.epsilon() is result.epsilon("rdp") is None
    for name in ("epsilon", "epsilon_rdp", "epsilon_without_amplification"):
        assert result.privacy[name] is None
    assert "has no valid ε" in " ".join(paragraph(result.privacy).split())


def test_a_seed_is_not_printed(toy):
    given = settings(DPSGD()) | {"seed": 123_456_789}
    config = TrainConfig(rule=DPSGD(), seed=given["seed"])
    result = fit(toy.mlp(), toy.data(), **given)
    run = prepare(toy.mlp(), toy.data(), **given)
    for value in (result, result.settings, run, run.settings, config):
        assert "123456789" not in repr(value)
    assert "123456789" not in json.dumps(result.privacy)


def test_what_is_private_is_not_printed(toy):
    text = repr(fit(toy.mlp(), toy.data(), **settings(DPSGD()), observers=[lambda s: {"loss": 1}]))
    assert "trace" not in text
    assert "records" not in text


# --- kinds of data ------------------------------------------------------------------------------


class Two(nn.Module):
    """A model with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 3).double(), nn.Linear(3, 3).double()

    def forward(self, left, right):
        return self.left(left) + self.right(right)


class Joined(nn.Module):
    """The same model with one input."""

    def __init__(self) -> None:
        super().__init__()
        self.two = Two()

    def forward(self, x):
        return self.two(x[:, :2], x[:, 2:])


def joined() -> Joined:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Joined()


@pytest.mark.parametrize("kind", [tuple, dict])
def test_several_inputs(toy, kind, one_stream):
    """A tuple or dict of inputs gives the same model as the same columns in one tensor."""
    x, y, group = toy.data(40)
    parts = (x[:, :2], x[:, 2:]) if kind is tuple else {"right": x[:, 2:], "left": x[:, :2]}
    several = fit(joined().two, (parts, y, group), **settings(DPSGDF()))
    together = fit(joined(), (x, y, group), **settings(DPSGDF()))
    torch.testing.assert_close(
        toy.vector(several.model), toy.vector(together.model), rtol=1e-10, atol=1e-12
    )


class Rows(TorchDataset):
    """A map-style dataset of (x, y, group)."""

    def __init__(self, *columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[1])

    def __getitem__(self, i):
        return tuple(column[i] for column in self.columns)


def test_every_form_of_the_same_data_trains_the_same_model(toy, rule, one_stream):
    x, y, group = toy.data(40, torch.float32)
    names = ("a", "b", "c")
    arrays = (
        x.double().numpy(),
        y.numpy(),
        group.numpy(),
    )  # numpy's floats become torch's default, float32
    forms = [
        (x, y, group),
        arrays,
        Dataset(x, y, group, names),
        TensorDataset(x, y, group),
        MapDataset(Rows(x, y, group), names),
        MapDataset(Rows(*arrays), names),
    ]
    results = [fit(toy.mlp(torch.float32, dropout=0.2), data, **settings(rule)) for data in forms]
    for result in results[1:]:
        assert toy.same(result.model, results[0].model)
        assert result.trace == results[0].trace


def test_a_torch_dataset_without_groups(toy, one_stream):
    x, y, _ = toy.data()
    one, other = (fit(toy.mlp(), data, **settings(DPSGD())) for data in ((x, y), Rows(x, y)))
    assert toy.same(one.model, other.model)
    assert one.settings.groups == 1


def test_another_loss(toy, one_stream):
    """For a mean, a sum or one value per sample, the loss of a sample is the loss of a batch of
    one.
    """
    x, y, group = toy.data()
    losses = [
        cross_entropy,
        nn.CrossEntropyLoss(reduction="sum"),
        lambda output, target: cross_entropy(output, target, reduction="none"),
        lambda output, target: cross_entropy(output, target),
    ]
    models = [
        fit(toy.mlp(), (x, y, group), **settings(DPSGD()), loss=loss).model for loss in losses
    ]
    for model in models[1:]:
        torch.testing.assert_close(toy.vector(model), toy.vector(models[0]), rtol=1e-10, atol=1e-12)


# --- optimisers ---------------------------------------------------------------------------------

OPTIMIZERS = {
    "momentum": partial(SGD, momentum=0.9),
    "Adam": Adam,
    "weight decay": partial(SGD, weight_decay=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_optimiser_gets_the_released_gradient_and_nothing_else(toy, kind):
    seen = []
    given = settings(DPSGDGlobalAdapt(), optimizer=OPTIMIZERS[kind])
    result = fit(
        toy.mlp(), toy.data(), **given, observers=[lambda s: seen.append(s.public.gradient.clone())]
    )
    model = toy.mlp()
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.2)
    for gradient in seen:
        at = 0
        for parameter in model.parameters():
            parameter.grad = gradient[at : at + parameter.numel()].view_as(parameter).clone()
            at += parameter.numel()
        optimizer.step()
    assert toy.same(result.model, model)


def test_the_scheduler_moves_the_learning_rate_after_every_epoch(toy):
    rates, thetas, gradients = [], [], []

    def record(step):
        thetas.append(toy.vector(step.model))
        gradients.append(step.public.gradient)

    made = []

    def scheduler(optimizer):
        made.append(ExponentialLR(optimizer, gamma=0.5))
        return made[0]

    result = fit(
        toy.mlp(), toy.data(), **settings(DPSGD()), scheduler=scheduler, observers=[record]
    )
    thetas.append(toy.vector(result.model))
    for before, after, gradient in zip(thetas, thetas[1:], gradients, strict=False):
        rates.append(float(((before - after) @ gradient) / (gradient @ gradient)))
    assert rates == pytest.approx([0.2] * 5 + [0.1] * 5 + [0.05] * 5, rel=1e-9)
    assert made[0].get_last_lr() == [0.025]


# --- settings -----------------------------------------------------------------------------------


def test_the_public_constants(toy):
    constants = fit(toy.mlp(), toy.data(41), rule=DPSGD(), batch_size=8, epochs=2, seed=0).settings
    assert (
        constants.n,
        constants.groups,
        constants.B,
        constants.q,
        constants.epoch,
        constants.steps,
    ) == (
        41,
        3,
        8.0,
        8 / 41,
        6,
        12,
    )
    given = fit(
        toy.mlp(), toy.data(41), rule=DPSGD(), batch_size=8, q=1 / 6, epochs=2, seed=0
    ).settings
    assert (given.q, given.B, given.epoch, given.steps) == (1 / 6, 8.0, 6, 12)
    assert constants.specification != given.specification
    assert replace(given, seed=0) == given


def test_the_default_rule_is_global_adapt(toy):
    assert fit(toy.mlp(), toy.data(), batch_size=8, seed=0).settings.rule == DPSGDGlobalAdapt()


# --- progress -----------------------------------------------------------------------------------


def test_it_is_silent_where_there_is_no_terminal(toy, capfd):
    fit(toy.mlp(), toy.data(), **settings(DPSGD()))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_it_shows_one_line_of_progress(toy, capsys):
    fit(toy.mlp(), toy.data(), **settings(DPSGD()), progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    lines = captured.err.rstrip("\n").split("\r")
    assert lines[0] == ""  # each rewrites the one before
    assert all(len(line) <= 79 for line in lines)
    assert re.fullmatch(r"step 15/15  epoch 3  \d+ steps/s  0 s left *", lines[-1])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_fits_into_the_line_and_covers_what_was_there(monkeypatch):
    times = iter(float(t) for t in range(1000))
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    stream = Terminal()
    progress = Progress(10**30, stream=stream)
    progress(10**29, "a note that is longer than the whole line " * 3)
    progress(10**29 + 1, "short")
    progress.close()
    first, second = stream.getvalue().rstrip("\n").split("\r")[1:]
    assert len(first) == 79
    assert len(second) == 79
    assert stream.getvalue().endswith("\n")


def test_progress_is_not_written_at_every_step(monkeypatch):
    """It is written a few times a second, and at the end."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stream = Terminal()
    progress = Progress(1000, stream=stream)
    for done in range(1, 1001):
        now[0] += 0.001
        progress(done, "epoch 1")
    assert 2 <= stream.getvalue().count("\r") <= 7
    assert "step 1000/1000" in stream.getvalue()
    assert math.isclose(
        float(re.search(r"(\d+) steps/s  0 s left *$", stream.getvalue())[1]), 1000, rel_tol=0.02
    )


def test_progress_says_nothing_private(toy, capsys):
    """It shows only the numbers of steps and epochs, and the speed."""
    fit(toy.mlp(), toy.data(), **settings(DPSGD()), progress=True)
    assert not re.search("loss|norm|clip", capsys.readouterr().err)
