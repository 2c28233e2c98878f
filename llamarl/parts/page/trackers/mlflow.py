"""Records an MLflow run in the experiment `llamarl`, at `MLFLOW_TRACKING_URI` or in `mlruns/` next to the run
folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar

from llamarl.observability.sinks import Subject
from llamarl.observability.spans import now_s
from llamarl.parts.page.trackers._base import Tracker

EXPERIMENT = "llamarl"
MAX_LETTERS = 500
"""Maximum characters of a setting's value."""


class Mlflow(Tracker):
    """Records metrics in MLflow. A resumed run becomes another MLflow run of the same name."""

    PACKAGE: ClassVar[str] = "mlflow"

    def __init__(self, subject: Subject) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            uri = (subject.folder.resolve().parent / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else it asks for a database
        from mlflow.entities import Metric, Param  # pyrefly: ignore
        from mlflow.tracking import MlflowClient  # pyrefly: ignore

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = known.experiment_id if known else self._client.create_experiment(EXPERIMENT)
        self._id = self._client.create_run(experiment, run_name=subject.name).info.run_id
        params = [Param(name, str(value)[:MAX_LETTERS]) for name, value in subject.settings.items()]
        self._client.log_batch(self._id, params=params[:100])
        self._client.log_batch(self._id, params=params[100:])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(1000 * now_s())
        metrics = [self._metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)
