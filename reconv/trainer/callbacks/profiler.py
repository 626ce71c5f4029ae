"""Profiling of some training steps: a trace for timeline viewers and a table of where the time went.

Profiling changes no result, and steps outside the range are not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from reconv.core.batch import Batch
from reconv.core.errors import UsageError
from reconv.core.text import printable_lines
from reconv.device import Device
from reconv.logging.phases import Phase
from reconv.logging.run_logger import RunLogger
from reconv.recipe.plan import Plan
from reconv.recipe.schema import Recipe
from reconv.trainer.callbacks.base import TrainerCallback
from reconv.trainer.step import StepResult
from reconv.trainer.stop import StopAfter

if TYPE_CHECKING:
    from reconv.trainer.loop import Trainer
    from reconv.trainer.run import TrainingRun

DATA_WAIT = "data wait"
MAX_OPERATORS = 10
_NO_STEPS = (0, 0)  # steps count from 1


def check_profile_range(recipe: Recipe, plan: Plan, stop_after: StopAfter) -> None:
    """Refuse to profile steps that the run, or the part of it before --stop-after, will not reach."""
    is_capped = stop_after.step is not None and stop_after.step < plan.total_steps
    last = stop_after.step if is_capped and stop_after.step is not None else plan.total_steps
    if recipe.profile != "off" and recipe.profile[1] > last:
        raise UsageError(
            f"step {recipe.profile[1]} cannot be profiled",
            where="profile",
            why=f"{stop_after.option} {stop_after.text} ends at step {last:,}"
            if is_capped
            else f"the run has {last:,} steps",
            hint=f"--profile {max(1, last - 3)},{last}",
        )


@dataclass(slots=True)
class StepProfiler(TrainerCallback):
    """Profiles steps `first` to `last`, counted from 1 and both included."""

    first: int
    last: int
    out_dir: Path
    device: Device
    logger: RunLogger
    paused: Callable[[], AbstractContextManager[Any]] = nullcontext  # keeps the profiler's own cost out of step times
    _profiler: Any = None
    _start_s: float = 0.0
    _first_step: int = 0
    _last_step: int = 0
    _data_wait: AbstractContextManager[None] | None = None
    _parts: list[tuple[str, Callable[[], float]]] = field(default_factory=list)

    @classmethod
    def for_run(cls, run: TrainingRun) -> StepProfiler:
        """The profiler a recipe asks for; with `profile: off` it never starts."""
        first, last = _NO_STEPS if run.recipe.profile == "off" else run.recipe.profile
        step = run.restore_point.step
        if (first, last) != _NO_STEPS and last <= step:
            run.logger.warning(f"nothing is profiled: steps {first} to {last} are already done", step)
        return cls(
            first, last, run.run_dir.path / "traces", run.device, run.logger, partial(run.clock.paused, Phase.REPORTS)
        )

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """Name and time what runs inside, while a step is profiled."""
        return self._timed(name) if self._profiler is not None else nullcontext()

    def on_batch_fetch_start(self, trainer: Trainer, step: int) -> None:
        if self._profiler is None and self.first <= step + 1 <= self.last:
            self._first_step = step + 1
            with self.paused():
                self._start()
        self._data_wait = self.annotate(DATA_WAIT)
        self._data_wait.__enter__()

    def on_batch_fetch_end(self, trainer: Trainer, step: int) -> None:
        assert self._data_wait is not None
        self._data_wait.__exit__(None, None, None)

    def on_step_end(self, trainer: Trainer, step: int, result: StepResult, micro_batches: Sequence[Batch]) -> None:
        if self._profiler is not None:
            self._last_step = step + 1
            if step + 1 == self.last:
                self.stop()

    def teardown(self, trainer: Trainer) -> None:
        self.stop()

    def stop(self) -> None:
        """Write the trace and the table of what was profiled, if anything was."""
        try:
            with self.paused():
                self._finish()
        except OSError as error:  # a full disk must not end the run that is profiled
            self.logger.warning(f"the trace could not be written: {error}", self._last_step)

    def _finish(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self.device.synchronize()
        wall_s = time.perf_counter() - self._start_s
        profiler.stop()
        num_steps = self._last_step - self._first_step + 1
        if num_steps <= 0:
            return  # training ended before the first profiled step did
        self.out_dir.mkdir(parents=True, exist_ok=True)
        name = f"steps-{self._first_step}-{self._last_step}"
        profiler.export_chrome_trace(str(self.out_dir / f"{name}.json"))
        table = self._table(profiler, wall_s, num_steps)
        (self.out_dir / f"{name}.txt").write_text("\n".join(table) + "\n", encoding="utf-8")
        trace = f"trace: {self.out_dir / f'{name}.json'} (open it in https://ui.perfetto.dev)"
        self.logger.info(printable_lines(*table, trace), self._last_step)

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.kind == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.device.synchronize()
        profiler = profile(activities=activities, acc_events=True)
        profiler.start()
        self._profiler = profiler
        self._parts.clear()
        self._start_s = time.perf_counter()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        with record_function(name):
            # The wait for data is host time. The rest is device time, read from CUDA events so that the host does not
            # synchronize and the trace shows the step as it normally runs.
            if self.device.kind == "cuda" and name != DATA_WAIT:
                start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
                start.record()
                yield
                end.record()
                self._parts.append((name, lambda: start.elapsed_time(end) / 1000))
            else:
                start_s = time.perf_counter()
                yield
                spent_s = time.perf_counter() - start_s
                self._parts.append((name, lambda: spent_s))

    def _table(self, profiler: Any, wall_s: float, num_steps: int) -> list[str]:
        """The time of the parts of a step, then of the operators that took most."""
        parts: dict[str, float] = {}
        for name, read_s in self._parts:
            parts[name] = parts.get(name, 0.0) + read_s()
        rest_s = wall_s - sum(parts.values())
        rows = [*parts.items(), ("everything else", max(0.0, rest_s))]
        steps = f"step {self._first_step}" if num_steps == 1 else f"steps {self._first_step} to {self._last_step}"
        on_device = self.device.kind == "cuda"
        lines = [f"{steps}: {1000 * wall_s / num_steps:.2f} ms a step"]
        lines += [_row(name, spent_s, wall_s, num_steps) for name, spent_s in rows]
        found = _operators(profiler, set(parts), on_device)
        total_s = sum(spent_s for _, spent_s, _ in found)
        where = "device" if on_device else "CPU"
        lines.append(f"operators by {where} time, {1000 * total_s / num_steps:.2f} ms a step in all:")
        lines += [
            f"{_row(name, spent_s, total_s, num_steps)}  x {calls / num_steps:g}"
            for name, spent_s, calls in found[:MAX_OPERATORS]
        ]
        return lines


def _row(name: str, spent_s: float, total_s: float, num_steps: int) -> str:
    share = spent_s / total_s if total_s > 0 else 0.0
    return f"  {name:<40} {1000 * spent_s / num_steps:9.2f} ms  {share:6.1%}"


def _operators(profiler: Any, parts: set[str], on_device: bool) -> list[tuple[str, float, int]]:
    """Operators by self time, largest first: name, seconds, calls."""
    found = [
        (str(e.key), (e.self_device_time_total if on_device else e.self_cpu_time_total) / 1e6, int(e.count))
        for e in profiler.key_averages()
        if e.key not in parts
    ]
    return sorted((o for o in found if o[1] > 0), key=lambda operator: -operator[1])
