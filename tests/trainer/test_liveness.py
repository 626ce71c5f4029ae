"""The file whose modification time is that of the last progress."""

from __future__ import annotations

import os
from pathlib import Path

import reconv
from reconv.checkpoint.run_dir import RunDir
from reconv.logging.events import AttemptStarted, EvalFinished, Event
from reconv.trainer.liveness import LivenessFile

TINY = {"length": "3step", "schedule.warmup": "0ep", "data.subset_percent": "25", "batch.size": "32"}
TINY |= {"save.every": "off", "evaluate.every": "off", "engine.num_threads": "1"}


def test_it_is_touched_at_most_once_per_interval(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    often, seldom = LivenessFile(alive, interval_s=0), LivenessFile(alive, interval_s=3600)
    seldom.touch()
    os.utime(alive, (0, 0))
    seldom.touch()
    assert alive.stat().st_mtime == 0
    often.touch()
    assert alive.stat().st_mtime > 0


def test_a_folder_that_is_gone_or_no_path_changes_nothing(tmp_path: Path) -> None:
    LivenessFile(tmp_path / "gone" / "alive").touch()
    LivenessFile().touch()
    assert list(tmp_path.iterdir()) == []


def test_a_run_touches_it() -> None:
    run = RunDir(Path.cwd() / "run")
    times: list[float] = []

    def observe(event: Event) -> None:
        if isinstance(event, AttemptStarted):
            assert not run.alive.exists()
        if isinstance(event, EvalFinished):
            times.append(run.alive.stat().st_mtime)

    settings = {**TINY, "evaluate.every": "3step"}
    reconv.train("quickstart", out=run.path, overrides=[(k, v, "--set") for k, v in settings.items()], on_event=observe)
    assert len(times) == 1 and times[0] > run.recipe.stat().st_mtime
