"""The file whose modification time is that of the last progress."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import reconv
from reconv.logging.events import EvalFinished, Event, TrainProgress
from reconv.logging.run_dir import RunDir
from reconv.trainer.liveness import LivenessFile

TINY = {"length": "3step", "schedule.warmup": "0ep", "data.subset_percent": "25", "batch.size": "32"}
TINY |= {"save.every": "off", "evaluate.every": "off", "engine.num_threads": "1"}


def test_it_is_touched_at_most_once_per_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = tmp_path / "alive"
    liveness = LivenessFile(alive)
    monkeypatch.setattr(LivenessFile, "interval_s", 3600.0)
    liveness.touch()
    os.utime(alive, (0, 0))
    liveness.touch()
    assert alive.stat().st_mtime == 0
    monkeypatch.setattr(LivenessFile, "interval_s", 0.0)
    liveness.touch()
    assert alive.stat().st_mtime > 0


def test_a_folder_that_is_gone_or_no_path_changes_nothing(tmp_path: Path) -> None:
    LivenessFile(tmp_path / "gone" / "alive").touch()
    LivenessFile().touch()
    assert list(tmp_path.iterdir()) == []


def test_training_steps_and_evaluations_touch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LivenessFile, "interval_s", 0.0)
    run, seen = RunDir(Path.cwd() / "run"), list[str]()

    def observe(event: Event) -> None:
        if isinstance(event, TrainProgress | EvalFinished):
            seen.append(type(event).__name__)
            assert run.alive.stat().st_mtime > 0, seen
            os.utime(run.alive, (0, 0))

    settings = {**TINY, "evaluate.every": "3step", "log.every": "1step"}
    reconv.train("quickstart", out=run.path, overrides=[(k, v, "--set") for k, v in settings.items()], on_event=observe)
    assert seen == ["TrainProgress"] * 3 + ["EvalFinished"]
