"""Unsuitable input is refused before training; the message says what was given and what to do."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from evenclip import (
    DPSGD,
    DPSGDF,
    DPSGDGlobal,
    DPSGDGlobalAdapt,
    ModelError,
    NonPrivate,
    Performance,
    Rule,
    fit,
)
from evenclip.data import MapDataset
from evenclip.training.checkpoint import CheckpointError


@pytest.fixture
def refused(toy):
    """Call `fit` and return the whole message of the error."""

    def ask(kind=ValueError, model=None, data=None, **given):
        with pytest.raises(kind) as caught:
            fit(
                toy.mlp() if model is None else model,
                toy.data() if data is None else data,
                **{"batch_size": 8, **given},
            )
        assert type(caught.value) is kind
        return str(caught.value)

    return ask


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["epochs", "batch_size", "steps", "checkpoint_every"])
@pytest.mark.parametrize("value", [0, -1])
def test_whole_numbers(refused, name, value):
    says = f"{name} is {value}; it must be a whole number of at least 1."
    assert refused(**{name: value}) == says
    assert refused(TypeError, **{name: 1.5}).startswith(f"{name} is 1.5; it must be a whole number")


@pytest.mark.parametrize("name", ["epochs", "batch_size", "steps", "checkpoint_every", "lr", "q"])
def test_a_flag_is_no_number(refused, name):
    said = refused(TypeError, **{name: True})
    assert said.startswith(f"{name} is True; it must be a ")


@pytest.mark.parametrize("value", [0.0, -0.1, math.nan, math.inf])
def test_learning_rate(refused, value):
    assert refused(lr=value) == f"lr is {value}; it must be a finite number above 0."


@pytest.mark.parametrize("value", [0.0, -0.1, 1.01, math.nan])
def test_sampling_rate(refused, value):
    assert refused(q=value) == f"q is {value}; it must lie above 0 and at most at 1."


def test_a_batch_larger_than_the_data(refused):
    assert refused(batch_size=41) == (
        "batch_size is 41 and there are 40 records, so the sampling rate q = batch_size/n would "
        "be above 1; choose a batch_size of at most 40."
    )


def test_a_batch_of_all_the_data_is_fine(toy):
    for rule in (DPSGD(), NonPrivate()):
        assert fit(toy.mlp(), toy.data(), rule=rule, batch_size=40).settings.steps == 1
    assert (
        fit(toy.mlp(), toy.data(), rule=NonPrivate(), batch_size=256).settings.steps == 1
    )  # shuffled batches may be smaller than batch_size


@pytest.mark.parametrize("value", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_delta_outside_its_range(refused, value):
    assert (
        refused(delta=value)
        == f"delta is {value}; it must lie above 0 and below 1, well below 1/n for n records."
    )


@pytest.mark.parametrize("value", [0.025, 0.5])
def test_a_delta_that_allows_to_publish_a_record_is_warned_of(toy, value):
    with pytest.warns(UserWarning, match="^delta is") as caught:
        fit(toy.mlp(), toy.data(), delta=value, batch_size=8)
    assert [str(warning.message) for warning in caught] == [
        f"delta is {value:g}, not below 1/n = 2.5e-02: publishing one whole record would satisfy "
        "it. Choose at most 0.01."
    ]
    assert caught[0].filename == __file__  # the line that called fit


def test_delta_just_below_is_not_warned_of(toy):
    assert fit(toy.mlp(), toy.data(), delta=0.0249, batch_size=8).settings.delta == 0.0249


@pytest.mark.parametrize(
    ("n", "delta"), [(3, 0.1), (40, 0.01), (49, 0.01), (50, 0.001), (51, 0.001), (23_484, 1e-5)]
)
def test_the_delta_that_is_chosen_is_the_largest_power_of_ten_below_half_a_record(n, delta):
    data = torch.zeros(n, 1), torch.zeros(n, dtype=torch.int64)
    chosen = fit(nn.Linear(1, 2), data, rule=DPSGD(), batch_size=1, steps=1).settings.delta
    assert chosen == pytest.approx(delta, rel=1e-12)
    assert chosen < 1 / (2 * n) <= 10 * chosen * (1 + 1e-12)


def test_seed(refused):
    assert refused(seed=-1) == "seed is -1; it must be a whole number of at least 0."
    assert refused(TypeError, seed=1.5) == "seed is 1.5; it must be a whole number or None."


def test_a_text_is_no_seed(refused):
    assert refused(TypeError, seed="7") == "seed is '7'; it must be a whole number or None."


@pytest.mark.parametrize("rule", [DPSGD, DPSGDF, DPSGDGlobal, DPSGDGlobalAdapt])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_noise_multipliers(rule, value):
    with pytest.raises(
        ValueError, match=re.escape(f"sigma is {value}; it must be a finite number above 0.")
    ):
        rule(sigma=value)


def test_numbers_of_numpy_are_numbers(toy):
    given = {
        "rule": DPSGD(),
        "batch_size": 8,
        "epochs": 2,
        "lr": 0.5,
        "delta": 0.001953125,
        "seed": 3,
    }
    numpys = given | {
        "batch_size": np.int64(8),
        "epochs": np.int32(2),
        "lr": np.float32(0.5),
        "delta": np.float32(0.001953125),
        "seed": np.int64(3),
    }
    one, other = fit(toy.mlp(), toy.data(), **given), fit(toy.mlp(), toy.data(), **numpys)
    assert toy.same(one.model, other.model)
    assert one.settings == other.settings
    stepped = fit(
        toy.mlp(),
        toy.data(),
        rule=DPSGD(),
        batch_size=8,
        q=np.float32(0.25),
        steps=np.int64(3),
        seed=0,
    )
    assert (stepped.settings.q, stepped.settings.steps) == (0.25, 3)


@pytest.mark.parametrize("value", [0, -3])
def test_chunks(value):
    with pytest.raises(
        ValueError, match=f"^chunk is {value}; it must be a whole number of at least 1.$"
    ):
        Performance(chunk=value)


# --- data ---------------------------------------------------------------------------------------


def test_no_samples(toy, refused):
    empty = tuple(column[:0] for column in toy.data())
    assert refused(data=empty[:2]) == (
        "The dataset has 0 samples; training needs at least one: was everything filtered out?"
    )


def test_features_that_are_not_numbers(toy, refused):
    x, y, group = toy.data()
    x[7, 2], x[7, 3], x[30, 0] = math.nan, math.inf, math.nan
    assert refused(data=(x, y, group)) == (
        "x has 3 non-finite values in 2 of 40 rows (first: row 7); remove or impute them before "
        "training."
    )


def test_a_width_that_the_model_does_not_take(toy, refused):
    x, y, group = toy.data()
    assert refused(data=(x[:, :4], y, group)) == (
        "The model does not take this input, of shape [sample, 4] and dtype torch.float64; torch "
        "says: mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)."
    )


def test_a_dtype_that_the_model_does_not_take(toy, refused):
    x, y, group = toy.data()
    message = refused(data=(x.float(), y, group))
    assert message.startswith(
        "The model does not take this input, of shape [sample, 5] and dtype torch.float32; torch "
        "says: "
    )


def test_a_tuple_of_inputs_for_a_model_of_one(toy, refused):
    x, y, _ = toy.data()
    message = refused(data=((x, x), y))
    assert message.startswith(
        "The model does not take this input, of shape 0: [sample, 5] and dtype torch.float64; 1: "
        "[sample, 5] and dtype torch.float64; torch says: "
    )


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss()], ids=["function", "module"])
@pytest.mark.parametrize(("shift", "lowest", "highest"), [(1, 1, 3), (-1, -1, 1)])
def test_labels_without_an_output(toy, refused, loss, shift, lowest, highest):
    x, y, group = toy.data()
    message = refused(data=(x, y + shift, group), **({} if loss is None else {"loss": loss}))
    assert message == (
        f"The labels run from {lowest} to {highest} and the model has 3 outputs, for the labels 0 "
        "to 2; number the classes from 0, or give the model more outputs."
    )


def test_labels_that_the_loss_ignores_are_fine(toy):
    x, y, group = toy.data()
    y[5] = -7
    result = fit(
        toy.mlp(),
        (x, y, group),
        rule=DPSGD(),
        loss=nn.CrossEntropyLoss(ignore_index=-7),
        batch_size=8,
        seed=0,
    )
    assert torch.isfinite(toy.vector(result.model)).all()


def test_labels_that_are_not_whole_numbers(toy, refused):
    x, y, group = toy.data()
    assert refused(data=(x, y.double(), group)).startswith(
        "The loss does not take the model's output, of shape [sample, 3] and dtype "
        "torch.float64, with these targets, of shape [sample] and dtype torch.float64; torch "
        "says: "
    )


def test_targets_that_torch_would_stretch_over_the_batch(toy, refused):
    x, y, _ = toy.data()
    message = refused(data=(x, y.double()), model=nn.Linear(5, 1).double(), loss=mse_loss)
    assert message.startswith(
        "The loss does not take the model's output, of shape [sample, 1] and dtype "
        "torch.float64, with these targets, of shape [sample] and dtype torch.float64; torch "
        "says: Using a target size (torch.Size([3])) that is different"
    )


def test_a_rule_by_groups_without_groups(toy, refused):
    x, y, _ = toy.data()
    assert refused(data=(x, y), rule=DPSGDF()) == (
        "dpsgd-f needs every sample's group and the data have none; pass (x, y, group), or "
        "choose a rule that does not use group labels, such as DPSGDGlobalAdapt."
    )


def test_a_data_frame(toy, refused):
    x, y, _ = toy.data()
    frame = pd.DataFrame(x.numpy())
    assert refused(TypeError, data=frame) == (
        "data is a DataFrame; give (x, y) or (x, y, group) as a tuple of tensors or numpy "
        "arrays, an evenclip Dataset, or a map-style torch dataset whose items are (x, y) or (x, "
        "y, group). Encode the columns of a DataFrame as numbers and pass their .to_numpy()."
    )
    assert refused(TypeError, data=(frame, y)) == (
        "x is a DataFrame; give a tensor or a numpy array. Encode the columns of a DataFrame as "
        "numbers and pass their .to_numpy()."
    )


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


def test_a_stream_of_data(refused):
    assert refused(TypeError, data=Stream()) == (
        "data is a Stream, an IterableDataset, which is read in its own order; Poisson sampling "
        "draws every row independently at each step and needs random access: give (x, y) or (x, "
        "y, group) as a tuple of tensors or numpy arrays, an evenclip Dataset, or a map-style "
        "torch dataset whose items are (x, y) or (x, y, group)."
    )


def test_a_data_loader(toy, refused):
    loader = DataLoader(TensorDataset(*toy.data()), batch_size=8)
    assert refused(TypeError, data=loader).endswith(" Pass the .dataset of a DataLoader.")


def test_rows_of_a_group_without_names(toy, refused):
    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, i):
            return tuple(column[i] for column in toy.data())

    assert (
        refused(data=Rows())
        == "There is a group but no group_names; give the public names of all groups."
    )
    assert isinstance(MapDataset(Rows(), ("a", "b", "c")), MapDataset)


# --- models, rules and other objects ------------------------------------------------------------


def test_a_model_whose_samples_influence_each_other(toy, refused):
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = (
        "1 (BatchNorm1d) computes its statistics over the batch, so every sample influences "
        "every other and no per-sample gradient exists. Replace it by nn.GroupNorm, nn.LayerNorm "
        "or nn.InstanceNorm (without running statistics)."
    )
    assert refused(ModelError, model=model) == expected
    x, y, group = toy.data()
    assert (
        refused(ModelError, model=model, data=(x[:1], y[:1], group[:1] * 0), batch_size=1)
        == expected
    )
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize(
    "model", [nn.Flatten(), nn.Linear(5, 3).double().requires_grad_(False)], ids=["none", "frozen"]
)
def test_a_model_with_nothing_to_train(refused, model):
    assert refused(ModelError, model=model) == (
        "The model has no trainable parameter; set requires_grad=True on what is to be trained."
    )


def test_a_model_that_is_none(refused):
    assert refused(TypeError, model="mlp") == "model is 'mlp'; it must be a torch.nn.Module."


@pytest.mark.parametrize("rule", ["dpsgd", DPSGD, 1.0], ids=["name", "class", "number"])
def test_a_rule_that_is_none(refused, rule):
    assert refused(TypeError, rule=rule) == (
        f"rule is {rule!r}; it must be a rule such as DPSGDGlobalAdapt(C0=1.0, sigma=1.0), or a "
        "frozen dataclass that derives from evenclip.Rule."
    )


class Plain(Rule):
    """Not a dataclass: its constants would not be in the report, and its repr would differ between
    processes.
    """

    name: ClassVar[str] = "plain"
    sigma = 1.0

    def sensitivity(self, now):
        return 1.0

    def weight(self, norm, group, now):
        return 1.0 / (1.0 + norm)


def test_a_rule_that_is_no_dataclass(refused):
    assert refused(TypeError, rule=Plain()).startswith("rule is a Plain; it must")


@dataclass(frozen=True)
class Counting(Plain):
    """A rule with a statistic but without a noise multiplier for it."""

    name: ClassVar[str] = "counting"

    sigma: float = 1.0

    def statistic(self, norm, group, state):
        return torch.stack([norm > 1, norm > 2]).double() / 2


def test_a_rule_that_counts_without_noise(refused):
    assert refused(rule=Counting()) == (
        "counting has a statistic of 2 numbers and no sigma_count; give it the noise multiplier "
        "of that release."
    )


def test_an_optimiser_or_scheduler_that_is_made_already(toy, refused):
    model = toy.mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    assert refused(TypeError, model=model, optimizer=optimizer) == (
        "optimizer is an object of class SGD; give a function that constructs one, such "
        "as torch.optim.Adam or functools.partial(torch.optim.SGD, momentum=0.9), because the "
        "model that is trained is a copy."
    )
    assert refused(TypeError, model=model, scheduler=StepLR(optimizer, 1)) == (
        "scheduler is an object of class StepLR; give a function that constructs one, such as "
        "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10), because the model "
        "that is trained is a copy."
    )
    fit(model, toy.data(), rule=DPSGD(), batch_size=8, optimizer=partial(SGD, momentum=0.9))


def test_an_optimizer_or_a_schedule_that_uses_private_numbers(refused):
    assert refused(optimizer=torch.optim.LBFGS) == (
        "LBFGS.step() requires 'closure', which would use the batch a second time; "
        "use another optimizer, such as SGD or Adam."
    )
    assert refused(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau) == (
        "ReduceLROnPlateau.step() requires 'metrics', but every measurement of the training is "
        "private; use a scheduler that counts epochs, such as StepLR or CosineAnnealingLR."
    )


# --- places -------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(refused):
    assert refused(device="cuda") == (
        f"device is 'cuda' and torch {torch.__version__} finds no CUDA device; pass device='cpu', "
        "or install a CUDA build of torch and its driver."
    )


def test_a_device_that_does_not_exist(refused):
    assert refused(device="gpu") == "device is 'gpu'; give cpu, cuda or cuda:NUMBER."


def test_a_device_that_is_not_supported(refused):
    assert refused(device="meta") == "Device 'meta' is not supported; use 'cpu' or 'cuda'."
    assert refused(device="cpu:7").startswith("device is 'cpu:7', and there is 1 of that kind")


def test_resume_from_nowhere(refused):
    assert (
        refused(resume=True)
        == "resume=True needs the folder with the checkpoint; pass checkpoint=DIR too."
    )


def test_a_folder_that_cannot_be_made(refused, tmp_path):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file"
    assert refused(CheckpointError, checkpoint=place) == (
        f"{place} cannot hold checkpoints (File exists); choose another folder."
    )


def test_nothing_is_written_for_what_is_refused(refused, tmp_path):
    refused(checkpoint=tmp_path / "run", lr=-1.0)
    refused(checkpoint=tmp_path / "run", checkpoint_every=0)
    assert list(tmp_path.iterdir()) == []
