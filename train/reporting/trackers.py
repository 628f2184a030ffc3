"""Trackers (`--track`), which get a run's metrics besides its own files. Each is a class over an optional package.

One rank of a job writes, so that a job is one run of the tracker; a resumed run continues the same one. What goes wrong
in a tracker during training is reported once, and training goes on: the run's own files have all metrics.
"""

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from muster.errors import ExitCode, MusterError, one_line
from muster.paths import text_of
from muster.train.checkpoint.storage import write_text


class TensorBoard:
    """Event files in the run's folder. `tensorboard --logdir runs` shows all runs.

    Args:
        step: where the run continues; later steps that were written before are removed from the curves.
        settings: the options of the run.
    """

    def __init__(self, folder: Path, step: int, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        if not step:
            self.writer.add_text("settings", f"```json\n{json.dumps(settings, indent=2)}\n```")

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self, code: int) -> None:
        self.writer.close()


class WandB:
    """Weights & Biases, offline by default: `wandb sync runs/NAME/wandb/offline-*` sends the run later.

    WANDB_MODE, WANDB_PROJECT and its other variables have their usual meaning. Neither the code nor its state in git is
    recorded.
    """

    def __init__(self, folder: Path, step: int, settings: Mapping[str, Any]) -> None:
        import wandb

        known = folder / "wandb.id"
        # A resumed run keeps its id; one that failed before its first checkpoint gets a new one.
        run_id = (text_of(known).strip() if step else "") or uuid.uuid4().hex[:8]
        write_text(known, run_id)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "muster"),
            name=folder.name,
            id=run_id,
            dir=str(folder),
            config=dict(settings),
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, disable_code=True, disable_git=True),
        )
        # Plotted by the optimizer's step, which may go back when a run is resumed; wandb's own count may not.
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, float]) -> None:
        self.run.log({"step": step, **values})

    def close(self, code: int) -> None:
        if code == ExitCode.PREEMPTED:
            self.run.mark_preempting()  # so that the exit code does not count as a failure
        self.run.finish(exit_code=code)


class MLflow:
    """Files in `mlruns/` beside the runs, or the server that MLFLOW_TRACKING_URI names.

    `mlflow ui --backend-store-uri runs/mlruns` shows them.
    """

    def __init__(self, folder: Path, step: int, settings: Mapping[str, Any]) -> None:
        # MLflow 3 has to be told to use files; a database does not work well on the file systems of clusters.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        # By its own defaults a server that does not answer blocks training so long that it counts as a hang.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "4")
        from mlflow import MlflowClient, MlflowException
        from mlflow.entities import Param

        store = os.environ.get("MLFLOW_TRACKING_URI") or (folder.parent / "mlruns").resolve().as_uri()
        self.client = MlflowClient(tracking_uri=store)
        known = folder / "mlflow.id"
        self.run_id = text_of(known).strip() if step else ""
        if self.run_id:
            self.client.update_run(self.run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "muster")
        if (experiment := self.client.get_experiment_by_name(name)) is None:
            try:
                experiment = self.client.get_experiment(self.client.create_experiment(name))
            except MlflowException:  # another run, which begins at the same time, may just have made it
                if (experiment := self.client.get_experiment_by_name(name)) is None:
                    raise
        self.run_id = self.client.create_run(experiment.experiment_id, run_name=folder.name).info.run_id
        self.client.log_batch(self.run_id, params=[Param(key, str(value)) for key, value in settings.items()])
        write_text(known, self.run_id)

    def write(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self.client.log_batch(self.run_id, [Metric(name, value, now_ms, step) for name, value in values.items()])

    def close(self, code: int) -> None:
        is_stopped = code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
        self.client.set_terminated(self.run_id, "KILLED" if is_stopped else "FAILED" if code else "FINISHED")


TRACKERS = {"tensorboard": (TensorBoard, "tensorboard"), "wandb": (WandB, "wandb"), "mlflow": (MLflow, "mlflow-skinny")}
"""By `--track`, which is the name of the module: the class, and the package to install."""


def check(kind: str) -> None:
    """Raises MusterError where the package of the tracker `kind`, as `--track` has it, is not installed."""
    if find_spec(kind) is None:
        raise _not_installed(kind, f"no module named {kind}")


def _not_installed(kind: str, reason: object) -> MusterError:
    return MusterError(
        f"{kind} is not installed: {reason}",
        seen=f"--track={kind}",
        fix=f"pip install {TRACKERS[kind][1]}, or leave out --track: metrics.jsonl has the same numbers",
    )


def open_tracker(
    kind: str, folder: Path, step: int, settings: Mapping[str, Any], note: Callable[[str], None]
) -> "Tracker":
    """Opens the tracker of the run in `folder`, which continues at `step`.

    Args:
        kind: the value of `--track` on the rank that writes; "none" on the others.

    Raises:
        MusterError: its package is not installed, or it can't be opened.
    """
    if kind == "none":
        return Tracker(None, note)
    try:
        return Tracker(TRACKERS[kind][0](folder, step, settings), note)
    except ImportError as error:
        raise _not_installed(kind, error) from error
    except Exception as error:  # each of the packages raises what it likes
        raise MusterError(
            f"{kind} can't start a run: {error!r}",
            seen=f"--track={kind}, {folder}",
            fix="see its own settings in the environment, or leave out --track",
        ) from error


class Tracker:
    """Writes records of a run to a target, if there is one; a context that ends the run there too."""

    def __init__(self, target: TensorBoard | WandB | MLflow | None, note: Callable[[str], None]) -> None:
        self.target = target
        self.note = note

    def write(self, record: Mapping[str, Any]) -> None:
        """Sends the numbers in a line of metrics.jsonl."""
        if self.target is not None:
            try:
                self.target.write(record["step"], numbers_of(record, f"{record['kind']}/"))
            except Exception as error:  # a full disk, a server that is gone: no reason to stop training
                self.target = None
                self.note(f"tracking has stopped: {one_line(repr(error))}")

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        failed = ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.FAILED
        code = ExitCode.DONE if error is None else getattr(error, "code", failed)
        if self.target is not None:
            try:
                self.target.close(code)
            except Exception as problem:
                self.note(f"the tracked run could not be ended: {one_line(repr(problem))}")


def numbers_of(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers in `record` and in the mappings within it, by their names; without its step."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            numbers |= numbers_of(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step" and math.isfinite(value):
            numbers[prefix + name] = float(value)
    return numbers
