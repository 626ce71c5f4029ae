"""Weights and Biases and MLflow, each replaced by a fake that records the calls of its public API.

`tests/external/test_logger_packages.py` runs the same exporters with the real packages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import reconv
from reconv.core.errors import UsageError
from reconv.logging.event_log import read_events
from reconv.logging.events import Event, LogMessage, TrainProgress

SMALL = {
    "length": "6step",
    "data.subset_percent": "20",
    "save.every": "2step",
    "log.every": "1step",
    "evaluate.every": "3step",
    "schedule.warmup": "2step",
}

WANDB = """
import json, os
from types import SimpleNamespace
FAIL_AT_STEP = None
def record(name, **values):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps({"call": name, **values}) + "\\n")
class Settings(SimpleNamespace):
    pass
class Image:
    def __init__(self, path):
        assert os.path.isfile(path), path
        self.path = path
class Run:
    def log(self, values, step):
        if step == FAIL_AT_STEP:
            raise RuntimeError("the service fell over")
        record("log", step=step, values={k: v if isinstance(v, float) else "image" for k, v in values.items()})
    def finish(self, exit_code):
        record("finish", exit_code=exit_code)
def init(*, project, name, id, resume, dir, mode, config, settings):
    record("init", project=project, id=id, resume=resume, dir=dir, mode=mode, config=config, console=settings.console)
    return Run()
"""

MLFLOW_TRACKING = """
import json, os
from pathlib import Path
from types import SimpleNamespace
def record(name, **values):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps({"call": name, **values}) + "\\n")
class MlflowClient:
    def __init__(self, tracking_uri):
        assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
        record("client", uri=tracking_uri)
        self.state = os.environ["CALLS"] + ".runs"
    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="7") if os.path.exists(self.state) else None
    def create_experiment(self, name, artifact_location):
        record("experiment", artifact_location=artifact_location)
        return "7"
    def search_runs(self, experiment_ids, filter_string):
        runs = json.loads(Path(self.state).read_text()) if os.path.exists(self.state) else {}
        found = [run for tag, run in runs.items() if f"'{tag}'" in filter_string]
        return [SimpleNamespace(info=SimpleNamespace(run_id=run)) for run in found]
    def create_run(self, experiment_id, run_name, tags):
        Path(self.state).write_text(json.dumps({tags["reconv.run"]: "r1"}))
        record("run")
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    def update_run(self, run_id, status):
        record("update", run_id=run_id, status=status)
    def log_batch(self, run_id, metrics=(), params=()):
        assert len(params) <= 100 and len(metrics) <= 1000
        record("batch", run_id=run_id, metrics=[list(m) for m in metrics], params=dict(map(list, params)))
    def log_artifact(self, run_id, local_path, artifact_path):
        assert os.path.isfile(local_path)
        record("artifact", path=artifact_path)
    def set_terminated(self, run_id, status):
        record("end", run_id=run_id, status=status)
"""

MLFLOW_ENTITIES = """
from collections import namedtuple
Metric = namedtuple("Metric", "key value timestamp step")
Param = namedtuple("Param", "key value")
"""


class KilledError(Exception):
    """A process that dies in the middle of a run."""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put the fakes on the path; returns the file they write their calls to."""
    packages = tmp_path / "packages"
    (packages / "mlflow").mkdir(parents=True)
    (packages / "wandb.py").write_text(WANDB)
    (packages / "mlflow" / "__init__.py").write_text("")
    (packages / "mlflow" / "tracking.py").write_text(MLFLOW_TRACKING)
    (packages / "mlflow" / "entities.py").write_text(MLFLOW_ENTITIES)
    monkeypatch.syspath_prepend(packages)
    for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_ERROR_REPORTING", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "to be removed again")  # undo what the exporters set
        monkeypatch.delenv(name)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls.jsonl"))
    known = set(sys.modules)
    yield tmp_path / "calls.jsonl"
    for name in set(sys.modules) - known:
        if name.split(".")[0] in ("wandb", "mlflow"):
            del sys.modules[name]


def _train(loggers: str, *, resume: bool = False, kill_at: int | None = None, out: str = "run") -> Path:
    def on_event(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == kill_at:
            raise KilledError

    overrides = [(field, value, "--set") for field, value in {**SMALL, "loggers": loggers}.items()]
    return reconv.train("quickstart", out=out, overrides=overrides, resume=resume, on_event=on_event).folder


def _calls(calls: Path, name: str) -> list[dict[str, Any]]:
    return [call for line in calls.read_text().splitlines() if (call := json.loads(line))["call"] == name]


def test_wandb_is_offline_and_gets_all_metrics_and_images(calls: Path) -> None:
    run = _train("wandb")
    [start] = _calls(calls, "init")
    assert start["mode"] == "offline"
    assert start["dir"] == str(run)
    assert start["console"] == "off"
    assert start["config"]["schedule.lr"] == 0.1
    logs = _calls(calls, "log")
    assert [log["step"] for log in logs if "train/loss" in log["values"]] == [1, 2, 3, 4, 5, 6]
    assert [log["step"] for log in logs if "val/top1" in log["values"]] == [3, 6]
    assert sum("image" in log["values"].values() for log in logs) == 3
    assert [log["step"] for log in logs] == sorted(log["step"] for log in logs)
    assert [call["exit_code"] for call in _calls(calls, "finish")] == [0]


def test_wandb_goes_online_only_with_wandb_mode(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    _train("wandb")
    assert [call["mode"] for call in _calls(calls, "init")] == ["online"]


def test_all_attempts_of_a_run_share_one_wandb_id(calls: Path) -> None:
    with pytest.raises(KilledError):
        _train("wandb", kill_at=5)
    _train("wandb", resume=True)
    _train("wandb", out="another")
    first, second, another = (call["id"] for call in _calls(calls, "init"))
    assert first == second != another
    assert [call["exit_code"] for call in _calls(calls, "finish")] == [1, 0, 0]


def test_mlflow_continues_the_run_in_the_run_directory(calls: Path) -> None:
    with pytest.raises(KilledError):
        _train("mlflow", kill_at=5)
    run = _train("mlflow", resume=True)
    assert [call["uri"] for call in _calls(calls, "client")] == [
        f"sqlite:///{run.resolve() / 'mlflow' / 'mlflow.db'}"
    ] * 2
    assert len(_calls(calls, "experiment")) == len(_calls(calls, "run")) == 1
    assert [call["status"] for call in _calls(calls, "update")] == ["RUNNING"]
    assert [call["status"] for call in _calls(calls, "end")] == ["FAILED", "FINISHED"]
    batches = _calls(calls, "batch")
    params = {name: value for batch in batches for name, value in batch["params"].items()}
    assert params["model.name"] == "resnet8_cifar"
    losses = [metric[3] for batch in batches for metric in batch["metrics"] if metric[0] == "train/loss"]
    assert losses == [1, 2, 3, 4, 5, 6]
    assert len(_calls(calls, "artifact")) == 3  # the first batch, the mistakes and the uncertain images


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_logger_without_its_package_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError) as error:
        reconv.train("quickstart", overrides=[("loggers", name, "--set")])
    assert error.value.code == 2
    assert f"pip install 'reconv[{name}]'" in error.value.hint
    assert list(Path().iterdir()) == []


def test_a_failing_exporter_is_closed_with_one_warning(calls: Path) -> None:
    (calls.parent / "packages" / "wandb.py").write_text(WANDB.replace("FAIL_AT_STEP = None", "FAIL_AT_STEP = 2"))
    run = _train("wandb,csv")
    events = read_events(run / "events.jsonl")
    warnings = [e.text for e in events if isinstance(e, LogMessage) and e.level == "warning"]
    assert len(warnings) == 1
    assert "wandb" in warnings[0]
    assert "the service fell over" in warnings[0]
    assert [log["step"] for log in _calls(calls, "log")] == [0, 1]
    assert len((run / "training.csv").read_text().splitlines()) == 1 + 6
    assert json.loads((run / "summary.json").read_text())["exit_code"] == 0


def test_an_exporter_that_cannot_be_opened_does_not_stop_the_run(calls: Path) -> None:
    (calls.parent / "packages" / "wandb.py").write_text("raise ImportError('half an installation')")
    run = _train("wandb")
    warnings = [e.text for e in read_events(run / "events.jsonl") if isinstance(e, LogMessage) and e.level == "warning"]
    assert len(warnings) == 1
    assert "half an installation" in warnings[0]
    assert json.loads((run / "summary.json").read_text())["exit_code"] == 0
