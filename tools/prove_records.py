"""Train a short run with every record, kill it, resume it, and read each record back with its own package.

    pip install 'reconv[tensorboard,wandb,mlflow]'
    unshare --map-root-user --net python tools/prove_records.py       # where there is no network at all

Prints one line a record and ends with an error at the first thing that is not as it should be. What it printed, and
when, is in docs/records.md.
"""

from __future__ import annotations

import csv
import importlib.metadata
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reconv
from reconv.logging.events import Event, LogMessage, TrainProgress, latest_by_step, read_events

SETTINGS = {
    "length": "8step",
    "data.percent": "20",
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

    given = [(field, value, "--set") for field, value in SETTINGS.items()]
    reconv.train("quickstart", out=out, overrides=given, resume=resume, on_event=watch)


def losses_of(run: Path) -> dict[int, float]:
    """What the run itself says."""
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


def main() -> None:
    """Write the records, then read each back."""
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        try:
            train(run, kill_at=5)
        except KilledError:
            train(run, resume=True)
        expected = losses_of(run)
        assert list(expected) == STEPS
        readers = {"csv": read_csv, "tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}
        for name, read in readers.items():
            found = read(run)
            assert list(found) == STEPS, f"{name}: steps {list(found)}"
            assert all(abs(found[step] - expected[step]) < 1e-6 for step in STEPS), f"{name}: {found} {expected}"
            version = "" if name == "csv" else f" {importlib.metadata.version(name)}"
            print(f"{name}{version}: {len(found)} losses read back, equal to the run's own")


if __name__ == "__main__":
    main()
