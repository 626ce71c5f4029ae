"""How a run ends: one `RunEnded` event with exit code and reason, then the summary and the report."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reconv.core.errors import ExitCode, ReconvError, UnreadableRunError
from reconv.core.text import printable_lines
from reconv.device import is_out_of_memory
from reconv.logging.clock import RunClock
from reconv.logging.events import RunEnded
from reconv.logging.phases import phase_lines
from reconv.logging.run_dir import RunDir, read_summary
from reconv.logging.run_logger import RunLogger
from reconv.report.html import write_report
from reconv.report.summary import write_summary
from reconv.storage.files import system_error
from reconv.trainer.step import out_of_memory_error

if TYPE_CHECKING:
    from reconv.trainer.loop import Trainer
    from reconv.trainer.prepare_run import PreparedRun


@dataclass(frozen=True, slots=True, repr=False)
class RunOutcome:
    """The run directory, its summary and its exit code."""

    folder: Path
    summary: dict[str, Any]
    exit_code: int
    was_finished: bool = False  # before this command, which had nothing to do


class RunFinalizer:
    """Logs the end of a run, once, in whatever way it ends."""

    def __init__(self, run: PreparedRun, run_dir: RunDir, clock: RunClock, logger: RunLogger) -> None:
        self._run = run
        self._run_dir = run_dir
        self._clock = clock
        self._logger = logger
        self._start_s = time.perf_counter()
        self._is_logged = False
        self._first_step = run.restore_point.step
        self.trainer: Trainer | None = None
        self.result: RunOutcome | None = None  # None until the run has ended
        self.fields: dict[str, Any] = {}  # further fields of the event and the summary
        self.exit_code = ExitCode.UNEXPECTED
        self.reason = "unexpected error"

    @contextmanager
    def finalize(self) -> Iterator[None]:
        """Log how the code inside ends, write summary and report, and keep the result."""
        try:
            with self.handle_errors():
                yield
        finally:
            self.log_end()
        self._run.process_group.on_rank0(self._logger.check)  # of the event log, if the end could not be written
        path = self._run_dir.path
        summary = self._run.process_group.on_rank0(lambda: read_summary(path))
        self.result = RunOutcome(path, summary, int(self.exit_code))

    @contextmanager
    def handle_errors(self) -> Iterator[None]:
        """Remember how the code inside ends; a lost rank and an out-of-memory error are raised as what they are."""
        try:
            yield
        except ReconvError as error:
            self.exit_code, self.reason = error.code, error.what
            raise
        except KeyboardInterrupt:
            self.exit_code, self.reason = ExitCode.INTERRUPTED, "interrupted without saving a checkpoint"
            raise
        except Exception as error:
            lost = self._run.process_group.diagnose(error)
            if lost is not None:
                self.exit_code, self.reason = lost.code, lost.what
                raise lost from error
            if is_out_of_memory(error):
                self.exit_code, self.reason = ExitCode.RESOURCES, "out of memory"
                raise out_of_memory_error(self._run) from error
            if isinstance(error, OSError) and error.errno is not None:
                refused = system_error(error, self._run_dir.path)
                self.exit_code, self.reason = refused.code, refused.what
                raise refused from error
            raise
        self.exit_code, self.reason = ExitCode.OK, "finished"
        trainer = self.trainer
        self.fields["stopped_early"] = (trainer.stop_reason or None) if trainer is not None else None
        if trainer is not None and trainer.is_paused:
            self.fields["stopped_after"] = trainer.stop_after.text
            step, total = trainer.counters.step, trainer.plan.total_steps
            self.reason = f"stopped after step {step} of {total} by --stop-after {trainer.stop_after.text}"
        elif trainer is not None and trainer.stop_reason:
            self.reason = f"stopped early: {trainer.stop_reason}"

    def log_end(self) -> None:
        """Log how the run ended and write its summary and report."""
        self._log_end(self.exit_code, self.reason)

    def log_error(self, error: ReconvError) -> None:
        """Log that this error ends the run; called from another thread when a rank is lost."""
        self._log_end(error.code, error.what)

    def _log_end(self, exit_code: ExitCode, reason: str) -> None:
        if self._is_logged:
            return
        self._is_logged = True
        step = self._first_step if self.trainer is None else self.trainer.counters.step
        phases = self._run.phases.seconds()
        if self._run.recipe.profile != "off":
            table = [f"where the time went, {sum(phases.values()):.2f} s so far:", *phase_lines(phases)]
            self._logger.info(printable_lines(*table), step)
        self._logger.log(
            RunEnded(
                step=step,
                exit_code=int(exit_code),
                reason=reason,
                wall_s=time.perf_counter() - self._start_s,
                images=max(0, step - self._first_step) * self._run.plan.global_batch,
                peak_memory_bytes=self._run.device.peak_memory_bytes(),
                train_s=self._clock.train_s,
                wait_s=self._clock.wait_s,
                timed_images=self._clock.timed_images,
                startup_s=self._clock.startup_s,
                phases=phases,
                fields=self.fields,
            )
        )
        if self._run.process_group.is_rank0:
            _write_results(self._run_dir)


def _write_results(run_dir: RunDir) -> None:
    """Write the summary and the report; a failing disk must not hide the error that ended the run."""
    error = sys.exc_info()[1]
    try:
        write_summary(run_dir.path)
        write_report(run_dir.path)
    except (OSError, UnreadableRunError) as write_error:
        if error is None:
            raise
        error.add_note(f"the summary and report could not be written: {write_error}")
