"""An MLflow run in a database in the run directory's `mlflow/`, or at MLFLOW_TRACKING_URI; a resume continues it."""

from __future__ import annotations

import importlib
import logging
import os
import time
from typing import Any

from reconv.core.errors import ExitCode
from reconv.logging.events import EvalFinished, Event, ImageLogged, RunEnded, ScalarLogged, TrainProgress
from reconv.logging.exporters.base import ExportedRun, series

_EXPERIMENT = "reconv"
_TAG = "reconv.run"
_MAX_PARAM_CHARS = 500  # the limit of every MLflow store
_PARAMS_PER_CALL = 100


class MlflowExporter:
    """Writes the metrics of all attempts to one MLflow run."""

    def __init__(self, run: ExportedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read at import
        tracking: Any = importlib.import_module("mlflow.tracking")
        self._entities: Any = importlib.import_module("mlflow.entities")
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it logs every table it creates
        folder = (run.run_dir / "mlflow").resolve()
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            folder.mkdir(exist_ok=True)
        self._exported = run
        self._client: Any = tracking.MlflowClient(tracking_uri=uri or f"sqlite:///{folder / 'mlflow.db'}")
        self._run_id = self._find_or_create(None if uri else (folder / "artifacts").as_uri())

    def on_event(self, event: Event) -> None:
        match event:
            case TrainProgress() | EvalFinished() | ScalarLogged():
                time_ms = round(1000 * (event.time_s or time.time()))
                metrics = [self._entities.Metric(n, v, time_ms, event.step) for n, v in series(event).items()]
                self._client.log_batch(self._run_id, metrics=metrics)
            case ImageLogged():
                self._client.log_artifact(self._run_id, str(event.file(self._exported.run_dir)), "images")
            case RunEnded():
                stopped = event.exit_code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED, ExitCode.TERMINATED)
                status = "FINISHED" if event.exit_code == ExitCode.OK else "KILLED" if stopped else "FAILED"
                self._client.set_terminated(self._run_id, status)

    def close(self) -> None:
        """Nothing to do: events are stored as they come."""

    def _find_or_create(self, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(_EXPERIMENT)
        experiment = (
            found.experiment_id
            if found is not None
            else self._client.create_experiment(_EXPERIMENT, artifact_location=artifacts)
        )
        tag = f"tags.`{_TAG}` = '{self._exported.run_id}'"
        earlier = self._client.search_runs([experiment], filter_string=tag)
        if len(earlier):
            run_id = str(earlier[0].info.run_id)
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        run = self._client.create_run(experiment, run_name=self._exported.label, tags={_TAG: self._exported.run_id})
        params = [
            self._entities.Param(name, str(value)[:_MAX_PARAM_CHARS])
            for name, value in self._exported.settings().items()
        ]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(run.info.run_id, params=params[start : start + _PARAMS_PER_CALL])
        return str(run.info.run_id)
