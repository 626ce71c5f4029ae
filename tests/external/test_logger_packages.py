"""Every logger of a run that is killed and resumed is read back by the package it was written for.

    pip install 'reconv[tensorboard,wandb,mlflow]' && make external
    unshare --map-root-user --net .venv/bin/python -m pytest -m external tests/external/test_logger_packages.py

The second command shows that no network is needed.
"""

from __future__ import annotations

import csv
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import reconv
from reconv.logging.event_log import latest_by_step, read_events
from reconv.logging.events import Event, LogMessage, TrainProgress

SETTINGS = {
    "length": "8step",
    "data.subset_percent": "20",
    "save.every": "3step",
    "log.every": "1step",
    "evaluate.every": "4step",
    "schedule.warmup": "2step",
    "records": "csv,tensorboard,wandb,mlflow,mlperf",
}
STEPS = list(range(1, 9))


class KilledError(Exception):
    """Stands for a process that ends in the middle of a run."""


def train(out: Path, *, resume: bool = False, kill_at: int | None = None) -> None:
    """Train the short run, up to a step or to its end."""

    def watch(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == kill_at:
            raise KilledError

    overrides = [(field, value, "--set") for field, value in SETTINGS.items()]
    reconv.train("quickstart", out=out, overrides=overrides, resume=resume, on_event=watch)


def losses_of(run: Path) -> dict[int, float]:
    """The values in the run's own event log."""
    events = read_events(run / "events.jsonl")
    warnings = [e.text for e in events if isinstance(e, LogMessage) and e.level == "warning"]
    assert not warnings, warnings
    return {e.step: e.loss for e in latest_by_step(events) if isinstance(e, TrainProgress)}


def read_csv(run: Path) -> dict[int, float]:
    with (run / "training.csv").open(newline="") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}


def read_tensorboard(run: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Any = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    assert found.Tags()["images"], "no images"
    return {scalar.step: scalar.value for scalar in found.Scalars("train/loss")}


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a log of 32 KiB blocks as LevelDB writes them, after seven bytes of header."""
    assert content[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # too little room for a header: the next block
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_wandb(run: Path) -> dict[int, float]:
    from wandb.proto import wandb_internal_pb2

    found: dict[int, float] = {}
    ids = set()
    for file in sorted((run / "wandb").glob("offline-run-*/run-*.wandb")):
        ids.add(file.stem)
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            values = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "train/loss" in values:
                found[int(record.history.step.num)] = float(values["train/loss"])
    assert len(ids) == 1, f"the attempts do not share one id: {ids}"
    return found


def read_mlflow(run: Path) -> dict[int, float]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.resolve() / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("reconv")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED", found.info.status
    assert found.data.params["model.name"] == "resnet8_cifar"
    assert [a.path for a in client.list_artifacts(found.info.run_id)] == ["images"]
    return {metric.step: metric.value for metric in client.get_metric_history(found.info.run_id, "train/loss")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every logger, killed at step 5 and resumed."""
    for package in ("tensorboard", "wandb", "mlflow"):
        pytest.importorskip(package, reason="pip install 'reconv[tensorboard,wandb,mlflow]'")
    folder = tmp_path_factory.mktemp("loggers") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
            patch.delenv(name, raising=False)
        with pytest.raises(KilledError):
            train(folder, kill_at=5)
        train(folder, resume=True)
    return folder


@pytest.mark.filterwarnings("default")  # of the packages
@pytest.mark.parametrize("read", [read_csv, read_tensorboard, read_wandb, read_mlflow])
def test_losses_are_read_back_as_the_run_logged_them(run: Path, read: Callable[[Path], dict[int, float]]) -> None:
    expected = losses_of(run)
    assert list(expected) == STEPS
    assert read(run) == pytest.approx(expected, abs=1e-6)
