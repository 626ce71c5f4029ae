"""The report of a run that is still running: written when training starts and after evaluations.

It takes at most 1 % of the time. If it cannot be written the run logs a warning and continues; only the last report,
after `RunEnded`, does not reload itself (tests/trainer/test_live_report.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reconv.logging.phases import Phase
from reconv.metrics.analysis import analyze_metrics
from reconv.report.evaluation_files import write_classification_analysis, write_detection_analysis
from reconv.report.html import write_report
from reconv.report.page import LivePage
from reconv.trainer.callbacks.base import TrainerCallback

if TYPE_CHECKING:
    from reconv.trainer.loop import Trainer
    from reconv.trainer.run import TrainingRun

MAX_SHARE = 0.01  # of the time is spent on writing reports
MIN_INTERVAL_S = 2.0  # between two reports
MIN_RELOAD_S, MAX_RELOAD_S = 5.0, 60.0
FIRST_STALE_S = 2 * 3600.0  # before the time between two reports is known
STALE_MARGIN_S = 600.0


def write_analysis(run: TrainingRun, trainer: Trainer) -> None:
    """Write the analysis of the last evaluation, which the report shows; nothing for a metric that has none."""
    evaluator = trainer.evaluator
    analysis = analyze_metrics(evaluator.last_metrics, run.datasets.names)
    if analysis is None:
        return
    about = {"step": evaluator.last_step, "weights": evaluator.last_weights, "partial": evaluator.is_partial}
    write = write_detection_analysis if run.recipe.task == "detection" else write_classification_analysis
    write(run.run_dir.path, {**about, **analysis})


@dataclass(slots=True)
class LiveReport(TrainerCallback):
    """Rewrites the report after evaluations, unless the last one was just written; it must not slow training down."""

    run: TrainingRun
    written_s: float | None = field(default=None)  # by the monotonic clock
    cost_s: float = field(default=0.0)  # of the last report
    has_warned: bool = field(default=False)

    def on_fit_start(self, trainer: Trainer) -> None:
        self._write(trainer)

    def on_evaluate_end(self, trainer: Trainer) -> None:
        interval_s = max(MIN_INTERVAL_S, self.cost_s / MAX_SHARE)
        if self.written_s is None or time.monotonic() - self.written_s >= interval_s:
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        """Write analysis and report; a failure is a warning, since the run does not depend on them."""
        if not self.run.process_group.is_rank0:
            return
        start_s = time.monotonic()
        since_s = None if self.written_s is None else start_s - self.written_s
        try:
            with trainer.clock.paused(Phase.REPORTS):
                if trainer.evaluator.last_metrics is not None:
                    write_analysis(self.run, trainer)
                write_report(self.run.run_dir.path, live_page(time.time(), since_s))
        except Exception as error:
            if not self.has_warned:
                self.run.logger.warning(f"the report could not be written: {error}", trainer.counters.step)
            self.has_warned = True
        self.written_s, self.cost_s = start_s, time.monotonic() - start_s


def live_page(now_s: float, since_s: float | None) -> LivePage:
    """Reload settings of the page, from the time since the last report."""
    if since_s is None:
        return LivePage(now_s, MIN_RELOAD_S, FIRST_STALE_S)
    return LivePage(now_s, min(max(since_s / 4, MIN_RELOAD_S), MAX_RELOAD_S), 3 * since_s + STALE_MARGIN_S)
