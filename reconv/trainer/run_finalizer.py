"""How a run ends: one `end` event with a code and a reason, then the summary and the report.

Owns what each error is called at the end of a run, and that the end is told once. Refuses to know what was run.
Invariant: whatever ends the work, and whoever tells it first, there is one `end` event, and the error goes on its way.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from reconv.checkpoint.run_dir import RunDir
from reconv.device import is_out_of_memory
from reconv.errors import ExitCode, ReconvError
from reconv.logging.clock import RunClock
from reconv.logging.events import RunEnded
from reconv.logging.run_logger import RunLogger
from reconv.report.html import write_report
from reconv.report.summary import write_summary
from reconv.trainer.build.train_state import TrainingRun
from reconv.trainer.micro_batch import out_of_memory
from reconv.trainer.trainer import Counters


class RunFinalizer:
    """What will be told when a run ends; whoever works on the run keeps it current."""

    def __init__(self, job: TrainingRun, clock: RunClock, logger: RunLogger) -> None:
        self._job = job
        self._clock = clock
        self._logger = logger
        self._start_s = time.perf_counter()
        self._has_been_told = False
        self.first_step = int(job.point.state.get("step", 0))
        self.counters = Counters(self.first_step)
        self.ended_early = ""  # why, if it did
        self.fields: dict[str, Any] = {}  # of the end event
        self.code: int = ExitCode.UNEXPECTED
        self.reason = "unexpected error"

    @contextmanager
    def named(self) -> Iterator[None]:
        """Keep code and reason of how the work inside ends; an error that has better words is raised in those."""
        try:
            yield
        except ReconvError as error:
            self.code, self.reason = error.code, error.what
            raise
        except KeyboardInterrupt:
            self.code, self.reason = ExitCode.INTERRUPTED, "interrupted without a save"
            raise
        except Exception as error:
            lost = self._job.process_group.diagnose(error)
            if lost is not None:
                self.code, self.reason = lost.code, lost.what
                raise lost from error
            if is_out_of_memory(error):
                self.code, self.reason = ExitCode.RESOURCES, "out of memory"
                raise out_of_memory(self._job) from error
            raise
        self.code = ExitCode.OK
        self.reason = f"finished early: {self.ended_early}" if self.ended_early else "finished"

    def tell(self) -> None:
        """Tell how the work ended."""
        self._tell(self.code, self.reason)

    def tell_error(self, error: ReconvError) -> None:
        """Tell that this error has ended the run, whatever becomes of the work."""
        self._tell(error.code, error.what)

    def _tell(self, code: int, reason: str) -> None:
        if self._has_been_told:  # another thread was faster: it has noticed that a process is lost
            return
        self._has_been_told = True
        self._logger.log(
            RunEnded(
                step=self.counters.step,
                exit_code=int(code),
                reason=reason,
                wall_s=time.perf_counter() - self._start_s,
                images=max(0, self.counters.step - self.first_step) * self._job.plan.global_batch,
                peak_memory_bytes=self._job.device.peak_memory_bytes(),
                train_s=self._clock.train_s,
                wait_s=self._clock.wait_s,
                timed_images=self._clock.timed_images,
                fields=self.fields,
            )
        )
        if self._job.process_group.is_rank0:
            _write_results(self._job.folder)


def _write_results(folder: RunDir) -> None:
    """The summary and the report; a disk that has no room for them must not hide why the run ended."""
    ending = sys.exc_info()[1]
    try:
        write_summary(folder.path)
        write_report(folder.path)
    except OSError as error:
        if ending is None:
            raise
        ending.add_note(f"the summary and report could not be written: {error}")
