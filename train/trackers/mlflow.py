"""MLflow: files in `mlruns/` beside the runs, or the server that MLFLOW_TRACKING_URI names.

`mlflow ui --backend-store-uri runs/mlruns` shows them.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# MLflow 3 wants to be told that files are meant; a database is no good on the file systems of clusters.
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

MAX_PARAMS = 100
"""As many as MLflow takes at a time."""


class Run:
    """A run there."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self.client = client
        self.run_id = run_id

    def write(self, step: int, values: dict[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, step) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def close(self, *, failed: bool) -> None:
        self.client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


def open_target(folder: Path, step: int, settings: Mapping[str, Any]) -> Run:
    """The run in `folder`, the same as before where it is resumed."""
    store = os.environ.get("MLFLOW_TRACKING_URI") or (folder.parent / "mlruns").resolve().as_uri()
    client = MlflowClient(tracking_uri=store)
    known = folder / "mlflow.id"
    if known.exists():
        run_id = known.read_text().strip()
        client.update_run(run_id, status="RUNNING")
        return Run(client, run_id)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "muster")
    experiment = client.get_experiment_by_name(name)
    experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
    run_id = client.create_run(experiment_id, run_name=folder.name).info.run_id
    params = [Param(key, str(value)) for key, value in settings.items()]
    for start in range(0, len(params), MAX_PARAMS):
        client.log_batch(run_id, params=params[start : start + MAX_PARAMS])
    known.write_text(run_id)
    return Run(client, run_id)
