"""What TensorBoard's own reader finds in the files of a run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import reconv
from reconv.logging.event_log import latest_by_step, read_events
from reconv.logging.events import Event, TrainProgress

SMALL = {
    "length": "6step",
    "data.subset_percent": "20",
    "save.every": "2step",
    "log.every": "1step",
    "evaluate.every": "3step",
    "schedule.warmup": "2step",
    "loggers": "tensorboard",
}


class KilledError(Exception):
    """A process that dies in the middle of a run."""


def _train(*, resume: bool = False, kill_at: int | None = None) -> Path:
    def on_event(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == kill_at:
            raise KilledError

    overrides = [(field, value, "--set") for field, value in SMALL.items()]
    return reconv.train("quickstart", out="run", overrides=overrides, resume=resume, on_event=on_event).folder


def _read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0, "scalars": 0})
    found.Reload()
    return found


def _events(run: Path) -> list[TrainProgress]:
    return [e for e in latest_by_step(read_events(run / "events.jsonl")) if isinstance(e, TrainProgress)]


def test_scalars_images_and_hyperparameters_are_read_back() -> None:
    run = _train()
    found = _read(run)
    losses = [(s.step, s.value) for s in found.Scalars("train/loss")]
    assert losses == [(e.step, pytest.approx(e.loss)) for e in _events(run)]
    assert len(losses) == 6
    assert [s.step for s in found.Scalars("val/top1")] == [3, 6]
    assert {"train/lr", "train/top1", "speed/images_per_s", "val/loss"} <= set(found.Tags()["scalars"])

    images_by_title = {
        "First training batch": "first-batch.png",
        "Worst mistakes": "mistakes.png",
        "Most uncertain images": "uncertain.png",
    }
    assert set(found.Tags()["images"]) == set(images_by_title)
    for title, name in images_by_title.items():
        [image] = found.Images(title)
        with Image.open(run / "images" / name) as ours, Image.open(io.BytesIO(image.encoded_image_string)) as theirs:
            assert theirs.convert("RGB").tobytes() == ours.convert("RGB").tobytes()

    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    settings = HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["schedule.lr"].number_value == pytest.approx(0.1)
    assert settings["model.name"].string_value == "resnet8_cifar"
    [score] = found.Scalars("hparam/top1")
    assert score.value == found.Scalars("val/top1")[-1].value


def test_steps_that_a_resume_discards_are_purged() -> None:
    with pytest.raises(KilledError):
        _train(kill_at=6)
    run = _train(resume=True)
    found = _read(run)
    assert [(s.step, s.value) for s in found.Scalars("train/loss")] == [
        (e.step, pytest.approx(e.loss)) for e in _events(run)
    ]
    assert len(found.Scalars("train/loss")) == 6
