"""Wall-clock time of a run, by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

from reconv.core.machine import Machine, process_age_s
from reconv.core.version import IMPORTED_S


class Phase(StrEnum):
    """The phases of a run, in the order of a report."""

    IMPORTS = "imports"  # from the start of the process: the interpreter, the command line, torch
    DEVICE = "device"  # the process group and the device, as in creating the CUDA context
    DATA_INDEX = "data_index"  # opening and listing the datasets
    PLAN = "plan"  # resolving and checking the recipe, the run directory, the micro-batch size
    MODEL = "model"  # network, initial weights or checkpoint, optimizer, data workers
    KERNELS = "kernels"  # listing the kernels to compile ahead, and capturing CUDA graphs
    FIRST_STEP = "first_step"  # with its batch, and with what is compiled or allocated by it
    TRAINING = "training"
    DATA_WAIT = "data_wait"
    EVALUATION = "evaluation"
    SAVES = "saves"  # training is blocked by a checkpoint
    REPORTS = "reports"  # report pages, images and profiles during training
    END = "end"  # what follows the last step


class PhaseTimer:
    """Assigns all time since `start_s` to phases: at any moment exactly one of them is running.

    So the phases add up to the elapsed time. It is used by one thread; others may read it.
    """

    def __init__(self, start_s: float | None = None, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._start_s = self._mark_s = now() if start_s is None else min(start_s, now())
        self._phase = Phase.IMPORTS
        self._seconds: dict[Phase, float] = {}

    def enter(self, phase: Phase) -> Phase:
        """Time counts for `phase` from now on; returns the phase that has ended."""
        now_s, ended = self._now(), self._phase
        self._seconds[ended] = self._seconds.get(ended, 0.0) + now_s - self._mark_s
        self._mark_s, self._phase = now_s, phase
        return ended

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count the time inside for `phase`, then continue with the phase before."""
        outer = self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def move(self, source: Phase, target: Phase, seconds: float) -> None:
        """Count time that was assigned to one phase, which has ended, for another one."""
        self._seconds[source] = self._seconds.get(source, 0.0) - seconds
        self._seconds[target] = self._seconds.get(target, 0.0) + seconds

    @property
    def elapsed_s(self) -> float:
        return self._now() - self._start_s

    def seconds(self) -> dict[str, float]:
        """The seconds of each phase until now, in the order of `Phase`; phases that never ran are left out."""
        running = {self._phase: self._seconds.get(self._phase, 0.0) + self._now() - self._mark_s}
        spent = self._seconds | running
        return {str(phase): spent[phase] for phase in Phase if phase in spent}


def process_start_s() -> float:
    """Start of this process by `time.perf_counter`, or of the import of reconv if the system does not say."""
    age_s = process_age_s(Machine())
    return IMPORTED_S if age_s is None else min(IMPORTED_S, time.perf_counter() - age_s)


def phase_label(name: str) -> str:
    """The name of a phase for people: data wait."""
    return name.replace("_", " ")


def phase_lines(seconds: Mapping[str, float], width: int = 40) -> list[str]:
    """Phases as lines of text, each with its seconds, its share of the total and a bar."""
    total_s = sum(seconds.values()) or 1.0
    shares = {name: spent_s / total_s for name, spent_s in seconds.items()}
    return [
        f"  {phase_label(name):<12} {seconds[name]:8.2f} s  {share:6.1%}  {'#' * round(width * share)}".rstrip()
        for name, share in shares.items()
    ]
