"""Logs get every epoch once and the privacy report last, also if a run was resumed."""

import csv
import json

import pytest

from evenclip import DPSGDGlobalAdapt, fit
from evenclip.training.logs import CSV, JSONL, PRIVATE, MLflow, TensorBoard

GIVEN = {
    "epochs": 3,
    "batch_size": 16,
    "lr": 0.1,
    "seed": 4,
    "progress": False,
    "rule": DPSGDGlobalAdapt(),
}


class ListLog:
    """A log that keeps its calls in lists."""

    def __init__(self):
        self.epochs, self.reports = [], []

    def epoch(self, number, values):
        assert values["epoch"] == number
        self.epochs.append((number, values))

    def end(self, report):
        self.reports.append(report)


def test_every_epoch_is_logged_once_and_the_report_at_the_end(toy):
    log = ListLog()
    result = fit(toy.mlp(), toy.data(), logs=[log], **GIVEN)
    assert [number for number, _ in log.epochs] == [1, 2, 3]
    for (_, values), row in zip(log.epochs, result.trace, strict=True):
        names = [name for name in values if name.startswith("loss/")]
        assert [values[name] for name in names] == row["loss"]
        assert values["clip_fraction"] == row["clip_fraction"]
    assert log.reports == [result.privacy]


def test_told_is_the_same_run(toy):
    one, other = (
        fit(toy.mlp(), toy.data(), **GIVEN),
        fit(toy.mlp(), toy.data(), logs=[ListLog()], **GIVEN),
    )
    assert toy.vector(one.model).equal(toy.vector(other.model))


def test_files(toy, tmp_path):
    logs = [JSONL(tmp_path / "new" / "epochs.jsonl"), CSV(tmp_path / "epochs.csv")]
    result = fit(toy.mlp(), toy.data(), logs=logs, **GIVEN)
    lines = [
        json.loads(line) for line in (tmp_path / "new" / "epochs.jsonl").read_text().splitlines()
    ]
    assert lines[0] == {"private": PRIVATE}
    assert [line["epoch"] for line in lines[1:-1]] == [1, 2, 3]
    assert lines[-1]["privacy"]["epsilon"] == result.epsilon()
    with (tmp_path / "epochs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3]
    assert [float(row["clip_fraction"]) for row in rows] == [
        row["clip_fraction"] for row in result.trace
    ]


def test_a_resumed_run_goes_on_in_its_files(toy, tmp_path):
    def logs():
        return [JSONL(tmp_path / "epochs.jsonl"), CSV(tmp_path / "epochs.csv")]

    def stop(step):
        if step.t == -(-len(toy.data()[1]) // 16) + 1:  # in the second epoch
            raise RuntimeError("the machine went down")

    given = {**GIVEN, "checkpoint": tmp_path / "checkpoint"}
    with pytest.raises(RuntimeError, match="went down"):
        fit(toy.mlp(), toy.data(), logs=logs(), observers=[stop], **given)
    before = (tmp_path / "epochs.csv").read_text().count("\n") - 1
    assert before > 0
    fit(toy.mlp(), toy.data(), logs=logs(), resume="exact", **given)
    whole = ListLog()
    fit(toy.mlp(), toy.data(), logs=[whole], **GIVEN)
    lines = [json.loads(line) for line in (tmp_path / "epochs.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if "epoch" in line] == [1, 2, 3]
    assert [line for line in lines if "epoch" in line] == [{**values} for _, values in whole.epochs]
    assert (tmp_path / "epochs.csv").read_text().count("\n") == 4


def test_a_file_of_another_run_is_refused(tmp_path):
    (tmp_path / "epochs.csv").write_text("epoch,other\n1,2\n")
    with pytest.raises(ValueError, match="has other columns, of another run; choose another file"):
        CSV(tmp_path / "epochs.csv").epoch(1, {"epoch": 1, "loss/a": 0.5})
    assert (tmp_path / "epochs.csv").read_text() == "epoch,other\n1,2\n"


@pytest.mark.parametrize("log", [CSV, JSONL])
def test_what_cannot_be_written_is_said_before_training(log, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be written .*; choose another file for the log"):
        log(tmp_path / "file" / "epochs")


@pytest.mark.filterwarnings("ignore")  # warnings of tensorboard
def test_tensorboard(toy, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = fit(toy.mlp(), toy.data(), logs=[TensorBoard(tmp_path)], **GIVEN)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    seen = events.Scalars("clip_fraction")
    assert [event.step for event in seen] == [1, 2, 3]
    assert [event.value for event in seen] == pytest.approx(
        [row["clip_fraction"] for row in result.trace]
    )
    assert "privacy/text_summary" in events.Tags()["tensors"]


@pytest.mark.filterwarnings("ignore")
def test_mlflow(toy, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_experiment("here")
    with mlflow.start_run() as given:
        result = fit(toy.mlp(), toy.data(), logs=[MLflow()], **GIVEN)
        assert mlflow.active_run() is not None  # the caller's run, which the log leaves open
    history = mlflow.MlflowClient().get_metric_history(given.info.run_id, "clip_fraction")
    seen = {metric.step: metric.value for metric in history}
    assert seen == pytest.approx({row["epoch"]: row["clip_fraction"] for row in result.trace})
    tags = mlflow.get_run(given.info.run_id).data.tags
    assert tags["evenclip.epsilon"] == str(result.epsilon())


@pytest.mark.parametrize(("log", "module", "extra"), [
    (TensorBoard, "torch.utils.tensorboard", "tensorboard"), (MLflow, "mlflow", "mlflow"),
])  # fmt: skip
def test_what_is_not_installed_is_named(log, module, extra, monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'evenclip\[{extra}\]'"):
        log(*([tmp_path] if log is TensorBoard else []))
