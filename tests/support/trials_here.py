"""Trials of `reconv tune` that are trained in the test's own process: the same runs, without Python's start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import reconv
from reconv.core.errors import ReconvError
from reconv.recipe.loader import Override
from reconv.tuner.launch import JobEnd, TrialJob
from reconv.tuner.result import TuneResult
from reconv.tuner.tune import TuneOptions, Tuner

# A run of four epochs with 16 steps, in a quarter of a second.
SMALL: tuple[Override, ...] = (
    ("length", "4ep", "--set"),
    ("data.subset_percent", 20, "--set"),
)
SPACE = ("schedule.lr=0.01:1:log", "optimizer.momentum=0.5|0.9")


class TrialsHere:
    """Trains a job as soon as it is started; `jobs` are those that were."""

    def __init__(self, before: Callable[[TrialJob], None] = lambda job: None) -> None:
        self.jobs: list[TrialJob] = []
        self.stopped = 0
        self._before = before
        self._ended: dict[Path, JobEnd] = {}

    def start(self, job: TrialJob) -> None:
        self.jobs.append(job)
        try:
            self._before(job)
            values = [(name, value, "--set") for name, value in job.values.items()]
            overrides = [*SMALL, *values, ("save.keep_last", 1, "tune"), ("save.keep_best", False, "tune")]
            reconv.train("quickstart", out=job.run, overrides=overrides, resume=True, stop_at=job.stop_at)
            self._ended[job.run] = JobEnd(0)
        except ReconvError as error:
            self._ended[job.run] = JobEnd(int(error.code), f"exit code {int(error.code)}: {error.what}")

    def poll(self) -> dict[Path, JobEnd]:
        ended, self._ended = self._ended, {}
        return ended

    def stop(self) -> str:
        self.stopped += 1
        return ""


def options(out: Path, **more: object) -> TuneOptions:
    """A study of four trials in rounds of three."""
    values: dict[str, object] = {
        "recipe": "quickstart",
        "overrides": SMALL,
        "space": SPACE,
        "trials": 4,
        "rungs": 2,
        "reduction": 3,
        "confirm": 0,
        "out": out,
    }
    return TuneOptions(**{**values, **more})  # type: ignore[arg-type]


def run_here(study: TuneOptions, launcher: TrialsHere | None = None) -> TuneResult:
    """Run a study in this process."""
    return Tuner(study, lambda text: None, launcher or TrialsHere()).run()
