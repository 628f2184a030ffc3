"""`--track`: each training is one run in TensorBoard, Weights & Biases and MLflow, also after it was resumed."""

import json
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

from muster.config import Options
from muster.errors import MusterError
from muster.train.distributed.world import World
from muster.train.health.preemption import Preempted
from muster.train.reporting import trackers
from muster.train.trainer import Trainer
from tests.clusters.deadline import wait_for

pytestmark = pytest.mark.once

FIRST = ["ddp", "--data=digits", "--image-size=16", "--no-bf16", "--batch-size=8", "--epochs=1", "--name=run"]


LOSSES = {10: 2.0, 20: 1.5, 30: 1.25, 40: 1.0}


def track(kind, folder, first):
    """Tracks 20 steps of a run with LOSSES in `folder`, from step `first` on."""
    with trackers.open_tracker(kind, folder, first, vars(Options(batch_size=8)), print) as tracker:
        for step in (first + 10, first + 20):
            tracker.write({"kind": "steps", "step": step, "train_loss": LOSSES[step]})
        tracker.write({"kind": "run", "step": first + 20, "images_per_second": 100.0})


def test_what_two_ranks_train_and_go_on_to_train_is_one_run_in_tensorboard(train, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs, argv = tmp_path, [*FIRST, f"--runs-dir={tmp_path}", "--track=tensorboard"]
    train([*argv, "--max-steps=20"], 2, ok=True)
    train([*argv, "--max-steps=40", "--resume=auto"], 2, ok=True)
    events = EventAccumulator(str(runs / "run" / "tensorboard"))
    events.Reload()
    assert len(list((runs / "run" / "tensorboard").glob("events*"))) == 2
    points = [(event.step, event.value) for event in events.Scalars("steps/train_loss")]
    lines = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = [(line["step"], line["train_loss"]) for line in lines if line["kind"] == "steps"]
    assert [step for step, _ in points] == [step for step, _ in expected]
    assert points[-1][0] == 40
    assert [value for _, value in points] == pytest.approx([value for _, value in expected])
    assert {"epoch/valid_loss", "epoch/valid_accuracy", "run/images_per_second"} <= set(events.Tags()["scalars"])


def test_a_run_that_begins_in_the_folder_of_one_that_failed_has_none_of_its_points_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for loss in (9.0, 1.0):
        with trackers.open_tracker("tensorboard", tmp_path, 0, {}, print) as tracker:
            tracker.write({"kind": "steps", "step": 1, "train_loss": loss})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("steps/train_loss")] == [1.0]


def test_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow import MlflowClient

    (tmp_path / "run").mkdir()
    for first in (0, 20):
        track("mlflow", tmp_path / "run", first)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("muster")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "run"
    assert found.info.status == "FINISHED"
    assert found.data.params["batch_size"] == "8"
    history = client.get_metric_history(found.info.run_id, "steps/train_loss")
    assert sorted((point.step, point.value) for point in history) == [*LOSSES.items()]
    assert "run/images_per_second" in found.data.metrics


def test_of_runs_that_begin_at_once_another_may_make_the_experiment_in_mlflow(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    (tmp_path / "run").mkdir()
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    find = MlflowClient.get_experiment_by_name

    def too_early(self, name):
        monkeypatch.setattr(MlflowClient, "get_experiment_by_name", find)
        client.create_experiment(name)

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", too_early)
    with trackers.open_tracker("mlflow", tmp_path / "run", 0, {}, print):
        pass
    (found,) = client.search_runs([client.get_experiment_by_name("muster").experiment_id])
    assert found.info.status == "FINISHED"


def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    # The id that an earlier process has left; this process continues its run.
    (tmp_path / "wandb.id").write_text("5f3a91c2")
    track("wandb", tmp_path, 20)
    (file,) = tmp_path.glob("wandb/offline-run-*-5f3a91c2/*.wandb")
    # wandb's own process writes the file a moment after the run has ended here.
    wait_for("wandb to write", lambda: file.read_bytes().count(b"steps/train_loss") >= 2, 60)
    assert (tmp_path / "wandb.id").read_text() == "5f3a91c2"
    assert not list(tmp_path.rglob("*.patch"))


def test_a_failed_run_is_told(train, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    argv = [*FIRST, f"--runs-dir={tmp_path}", "--track=mlflow", "--lr=1e9", "--warmup-steps=0", "--max-steps=60"]
    assert [ended.code for ended in train(argv, 2)] == [1, 1]
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("muster").experiment_id])
    assert found.info.status == "FAILED"


@pytest.mark.parametrize("error", [Preempted(20, "SIGTERM"), KeyboardInterrupt()], ids=["preempted", "Ctrl-C"])
def test_a_run_that_was_stopped_has_not_failed_in_mlflow(tmp_path, monkeypatch, error):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    (tmp_path / "run").mkdir()
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    statuses = []
    for step, raised in ((0, error), (20, None)):
        with suppress(Preempted, KeyboardInterrupt), trackers.open_tracker("mlflow", tmp_path / "run", step, {}, print):
            if raised is not None:
                raise raised
        (found,) = client.search_runs([client.get_experiment_by_name("muster").experiment_id])
        statuses.append(found.info.status)
    assert statuses == ["KILLED", "FINISHED"]


def test_a_run_that_does_not_know_its_id_or_begins_anew_is_another_in_mlflow(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mlflow.id").touch()
    with trackers.open_tracker("mlflow", tmp_path / "run", 20, {}, print):
        pass
    first = (tmp_path / "run" / "mlflow.id").read_text()
    assert first
    # A run that begins in the folder of one that failed before its first checkpoint gets a new id too.
    with trackers.open_tracker("mlflow", tmp_path / "run", 0, {}, print):
        pass
    assert (tmp_path / "run" / "mlflow.id").read_text() not in ("", first)


def test_a_preempted_run_is_no_crash_in_wandb(tmp_path, monkeypatch):
    said = []

    class StandIn:
        """Stands for a run of wandb, which counts as preempted if it was marked and its exit code is not 0."""

        def define_metric(self, name, step_metric):
            """Does nothing: no metrics are shown here."""

        def mark_preempting(self):
            said.append("preempting")

        def finish(self, exit_code):
            said.append(exit_code)

    package = SimpleNamespace(init=lambda **_: StandIn(), Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", package)
    with suppress(Preempted), trackers.open_tracker("wandb", tmp_path, 0, {}, print):
        raise Preempted(20, "SIGTERM")
    with suppress(OSError), trackers.open_tracker("wandb", tmp_path, 0, {}, print):
        raise OSError
    before = (tmp_path / "wandb.id").read_text()
    with trackers.open_tracker("wandb", tmp_path, 0, {}, print):
        pass
    assert said == ["preempting", 75, 1, 0]
    # A training that begins anew is a new run.
    assert (tmp_path / "wandb.id").read_text() not in ("", before)


@pytest.mark.parametrize(("kind", "package"), [("wandb", "wandb"), ("mlflow", "mlflow-skinny")])
def test_a_package_that_is_missing(tmp_path, monkeypatch, kind, package):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(MusterError, match=f"{kind} is not installed") as raised:
        trackers.open_tracker(kind, tmp_path, 0, {}, print)
    assert f"pip install {package}" in raised.value.fix
    # The error comes before the search for the data, which may take minutes.
    options = Options(track=kind, data=f"imagefolder:{tmp_path}/none", runs_dir=str(tmp_path))
    with pytest.raises(MusterError, match=f"{kind} is not installed"):
        Trainer("single", options, World()).build()


def test_a_target_that_breaks_ends_no_training():
    class Broken:
        """Stands for a server that is gone, or a full disk."""

        calls = 0

        def write(self, step, values):
            self.calls += 1
            raise OSError("no space left\non device")

        def close(self, code):
            raise AssertionError("it is let go of")

    notes, target = [], Broken()
    with trackers.Tracker(target, notes.append) as tracker:
        tracker.write({"kind": "steps", "step": 1, "train_loss": 1.0})
        tracker.write({"kind": "steps", "step": 2, "train_loss": 1.0})
    assert target.calls == 1
    assert notes == ["tracking has stopped: OSError('no space left\\non device')"]


def test_a_target_that_cannot_begin(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://server")
    with pytest.raises(MusterError, match="mlflow can't start a run") as raised:
        trackers.open_tracker("mlflow", tmp_path, 0, {}, print)
    assert "--track=mlflow" in raised.value.seen


def test_an_mlflow_server_that_does_not_answer_is_given_up_before_that_counts_as_a_hang(tmp_path, monkeypatch):
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "")  # so that monkeypatch removes what the tracker sets
        monkeypatch.delenv(name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "run").mkdir()
    trackers.open_tracker("mlflow", tmp_path / "run", 0, {}, print)
    from mlflow import environment_variables as its

    retries = its.MLFLOW_HTTP_REQUEST_MAX_RETRIES.get()
    pauses_s = sum(its.MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR.get() * 2**number for number in range(retries))
    assert (retries + 1) * its.MLFLOW_HTTP_REQUEST_TIMEOUT.get() + pauses_s < Options().hang_s / 2


def test_numbers_of():
    record = {"kind": "steps", "step": 3, "loss": 1, "nan": float("nan"), "ok": True, "t": {"p50": 0.5}, "none": None}
    assert trackers.numbers_of(record, "steps/") == {"steps/loss": 1.0, "steps/t/p50": 0.5}
