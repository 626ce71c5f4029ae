"""The training loop: steps until the plan is done, with logging, evaluation and checkpoints when they are due.

An evaluation comes before the checkpoint of the same step, so that every checkpoint is a state that an uninterrupted
run has too.
"""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from reconv.checkpoint.best import best_evaluation
from reconv.core.batch import Batch
from reconv.core.errors import DivergedError, ExitCode, PreemptedError, ReconvError
from reconv.core.stop_signals import signal_name
from reconv.data.pipeline.train_loader import TrainLoader
from reconv.distributed.process_group import ProcessGroup
from reconv.logging.clock import RunClock
from reconv.logging.events import EvalFinished
from reconv.logging.phases import Phase
from reconv.logging.run_logger import RunLogger
from reconv.recipe.plan import Plan
from reconv.tasks.evaluation import EvaluationStopped
from reconv.trainer.callbacks.base import TrainerCallback
from reconv.trainer.checkpointer import RunCheckpointer
from reconv.trainer.evaluator import Evaluator
from reconv.trainer.liveness import LivenessFile
from reconv.trainer.progress import Counters, ProgressLogger
from reconv.trainer.step import TrainStep
from reconv.trainer.stop import StopAfter, StopSignal
from reconv.trainer.verifier import Verifier, WrongBitsError, event_of, faulty_device_error


class StoppedWithoutSaveError(ReconvError):
    """A signal ended a run that saves no checkpoints."""

    def __init__(self, signum: int) -> None:
        super().__init__(
            "stopped without saving a checkpoint",
            why="save.every is off",
            hint="save checkpoints, for example with --set save.every=1ep",
        )
        self.code = ExitCode.INTERRUPTED if signum == signal.SIGINT else ExitCode.TERMINATED


@dataclass(slots=True)
class Trainer:
    """Trains a model; `fit` is the loop."""

    plan: Plan
    step: TrainStep
    loader: TrainLoader
    evaluator: Evaluator
    checkpointer: RunCheckpointer
    progress: ProgressLogger
    logger: RunLogger
    clock: RunClock
    process_group: ProcessGroup
    stop_signal: StopSignal
    callbacks: Sequence[TrainerCallback]
    counters: Counters
    stop_after: StopAfter = field(default_factory=StopAfter)
    liveness: LivenessFile = field(default_factory=LivenessFile)
    verifier: Verifier | None = None
    stop_reason: str = field(default="")  # set by a callback to end the run early
    rewind_reason: str = ""  # set by a callback to go back to the best checkpoint
    is_paused: bool = False  # by stop_after: the run is not finished

    def fit(self) -> None:
        """Train from the current step to the end of the plan."""
        try:
            self._fit()
        except Exception:
            with suppress(Exception):  # of a device that has failed
                self.progress.flush()
            raise
        finally:
            self.clock.phases.enter(Phase.END)
            for callback in self.callbacks:
                callback.teardown(self)

    def _fit(self) -> None:
        for callback in self.callbacks:
            callback.on_fit_start(self)
        self.process_group.on_rank0(self.logger.check)
        self.checkpointer.complete_last_save(self.counters)
        if self.verifier is None:
            self._train()
        else:
            self._train_verified(self.verifier)
        if self.is_paused:
            return
        self.checkpointer.complete_last_save(self.counters)
        for callback in self.callbacks:
            callback.on_fit_end(self)
        self.process_group.on_rank0(self.logger.check)

    def _train(self) -> None:
        """Train until the end of the plan, or until the run is stopped or paused, and wait for its checkpoints."""
        self._run_missed_evaluation()
        self.clock.phases.enter(Phase.FIRST_STEP)
        for micro_batches, again in self._batches():
            self._train_step(micro_batches, again)
            if self.plan.log.due(self.counters.step, self.plan.total_steps):
                self.progress.log(self.counters.step)
            improved = self._evaluate_if_due()
            if self.rewind_reason:
                self._rewind()
            else:
                self._save_if_due(improved)
            if not self.stop_reason:
                self._exit_if_requested()
            if self.is_paused:
                break
            if self.verifier is not None and self.verifier.wants_copy(self.counters.step):
                self._keep_state(self.verifier)
        self.progress.log(self.counters.step)
        self.progress.flush()
        self.clock.phases.enter(Phase.END)
        if self.is_paused:
            self._pause()
            return
        if self.stop_reason:
            self.logger.info(f"stopped early: {self.stop_reason}", self.counters.step)
        self._wait_for_checkpoints()

    def _train_verified(self, verifier: Verifier) -> None:
        """Train, and go back to the last proved state where bits are found wrong."""
        verifier.start()
        self._keep_state(verifier)
        diverged: set[str] = set()
        while True:
            try:
                self._train()
                return
            except WrongBitsError as error:
                self._go_back(verifier, error)
            except DivergedError as error:
                if error.what in diverged:  # the same step again: hardware is not the cause
                    raise
                diverged.add(error.what)
                self.logger.warning(f"{error.what}: going back to compute it again, twice", self.counters.step)
                self._go_back(verifier, verifier.after_divergence(self.counters.step))

    def _keep_state(self, verifier: Verifier) -> None:
        """Prove the state after the current step and keep a copy of it."""
        is_saving = self._check_state()
        for callback in self.callbacks:
            callback.on_save_start(self)
        groups = self.checkpointer.micro_batch_size.max_groups
        verifier.keep(self.counters, self.progress.state(), groups, hold_older=is_saving)

    def _check_state(self) -> bool:
        """Raise if the state, or a checkpoint, is not what it should be; whether a checkpoint is being written."""
        if self.verifier is None:
            return False
        self.verifier.findings += self.checkpointer.take_findings()
        return self.verifier.check_now(self.counters.step, self.checkpointer.is_saving)

    def _go_back(self, verifier: Verifier, error: WrongBitsError) -> None:
        """Continue from the last proved state, or end the run where a rank was wrong for the second time."""
        verifier.count(error.findings)
        state = verifier.restore(error.last_step)
        if state is None:
            self.counters.go_back(self.checkpointer.reload(error.last_step))
            verifier.start()
            self.progress.reset()
        else:
            self.counters.go_back(copy.deepcopy(state.counters))
            self.progress.go_back(state.progress)
            self.checkpointer.micro_batch_size.max_groups = state.micro_groups
        self.step.reset()
        self.is_paused, self.stop_reason, self.rewind_reason = False, "", ""
        self.checkpointer.go_back(self.counters)
        for callback in self.callbacks:
            callback.on_rollback(self)
        for finding in error.findings:
            self.logger.log(event_of(finding, self.counters.step))
        if state is None:
            self._keep_state(verifier)
        ranks = verifier.faulty_ranks()
        if ranks:
            if self.plan.save is not None:
                self._pause()
            raise faulty_device_error(ranks, error.findings, self.counters.step, is_saved=self.plan.save is not None)

    def _wait_for_checkpoints(self) -> None:
        with self.clock.paused(Phase.SAVES):
            self.checkpointer.wait()
        self._check_state()

    def _batches(self) -> Iterator[tuple[Sequence[Batch], Sequence[Batch]]]:
        """The micro-batches of every step until the end, or until a callback stops the run, twice.

        With `engine.verify: full` they are loaded twice.
        """
        first, total = self.counters.step, self.plan.total_steps
        batches = self.loader.steps(first, total)
        loads_twice = self.verifier is not None and self.verifier.mode == "full"
        again = self.loader.steps(first, total) if loads_twice else None
        for step in range(first, total):
            if self.stop_reason:
                return
            for callback in self.callbacks:
                callback.on_batch_fetch_start(self, step)
            with self.clock.waiting():
                micro_batches = next(batches)
                loaded_again = micro_batches if again is None else next(again)
            for callback in self.callbacks:
                callback.on_batch_fetch_end(self, step)
            yield micro_batches, loaded_again

    def _train_step(self, micro_batches: Sequence[Batch], again: Sequence[Batch]) -> None:
        step = self.counters.step
        with self._phase("training"):
            if self.verifier is None:
                result = self.step(step, micro_batches)
            else:
                result = self.verifier.run_step(self.step, step, micro_batches, again)
            self.progress.flush()  # of the step before: the device has the next one to work on
        for callback in self.callbacks:
            callback.on_step_end(self, step, result, micro_batches)
        self.progress.add(result)
        self.clock.count_step(self.plan.global_batch)
        self.liveness.touch()
        self.counters.step = step + 1
        self.checkpointer.poll()

    def _evaluation_is_due(self) -> bool:
        step, schedule = self.counters.step, self.plan.evaluate
        is_due = schedule is not None and step > 0 and schedule.due(step, self.plan.total_steps)
        return is_due and not self.counters.evaluated_at(step)

    def _evaluate_if_due(self) -> bool:
        """Evaluate, and return whether the monitored metric is the best so far."""
        if not self._evaluation_is_due():
            return False
        self.progress.flush()
        self._check_state()
        step, evaluator, history = self.counters.step, self.evaluator, self.counters.history
        before = best_evaluation(history, evaluator.metric, evaluator.monitored_weights)
        try:
            with self.clock.paused(Phase.EVALUATION), self._phase("evaluating"):
                results = evaluator.evaluate(step, self._stop_requested)
        except EvaluationStopped:  # it runs again after the resume
            return False
        history += [_history_entry(result) for result in results]
        after = best_evaluation(history, evaluator.metric, evaluator.monitored_weights)
        improved = after is not None and (before is None or after.value > before.value)
        for result in results:
            self.logger.log(replace(result, best=improved and result.weights == evaluator.monitored_weights))
        for callback in self.callbacks:
            callback.on_evaluate_end(self)
        return improved

    def _run_missed_evaluation(self) -> None:
        """Run the evaluation that a stop signal interrupted before the resume."""
        if not self._evaluation_is_due():
            return
        self._evaluate_if_due()
        if self._evaluation_is_due():
            self._exit()
        if self.plan.save is not None:
            self._save("end" if self._is_last_step() else "interval")

    def _is_last_step(self) -> bool:
        return bool(self.stop_reason) or self.counters.step == self.plan.total_steps

    def _save_if_due(self, improved: bool) -> None:
        is_last = self._is_last_step()
        reason = self.checkpointer.reason_to_save(self.counters.step, is_last=is_last, improved=improved)
        if reason:
            self._save(reason)

    def _rewind(self) -> None:
        """Take back the state of the best checkpoint and continue at this step of the schedule with a smaller rate.

        The state is saved at once: a checkpoint of before would come here again, and one of the diverged state is
        never the newest.
        """
        reason, self.rewind_reason = self.rewind_reason, ""
        self.progress.flush()
        self._check_state()
        with self.clock.paused(Phase.SAVES), self._phase("rewinding"):
            step, factor = self.checkpointer.rewind(self.counters, reason)
        if self.verifier is not None:
            self.verifier.start()
        what = f"back to the weights of step {step:,}, from here on with {factor:g} times the recipe's learning rates"
        self.logger.warning(f"{reason}; {what}", self.counters.step)
        self._save("rewind")

    def _save(self, reason: str) -> None:
        self.progress.flush()
        self._check_state()
        with self.clock.paused(Phase.SAVES), self._phase("saving"):
            for callback in self.callbacks:
                callback.on_save_start(self)
            self.checkpointer.save(self.counters, reason)

    def _stop_requested(self) -> bool:
        """Asked after every batch of an evaluation."""
        self.liveness.touch()
        return self.stop_signal.requested

    def _exit_if_requested(self) -> None:
        """Exit if any rank has received a stop signal; ranks may receive it at different steps."""
        number = self.stop_signal.signal_number or 0
        flags = [
            number,
            self.checkpointer.is_time_to_save(),
            self.stop_after.time_is_up(),
            self.logger.failure is not None,
            self.verifier is not None and bool(self.verifier.findings or self.checkpointer.findings),
        ]
        signum, save_due, time_is_up, log_failed, is_wrong = self.process_group.all_reduce_max(flags)
        self.checkpointer.set_time_to_save(bool(save_due))
        if is_wrong:
            self._check_state()
        if log_failed:
            self._exit_without_log()
        is_last = self.counters.step == self.plan.total_steps
        if self._evaluation_is_due() or (signum and not is_last):
            self._exit(number or signum)
        self.is_paused = not is_last and bool(time_is_up or self.stop_after.is_reached(self.counters.step))

    def _exit_without_log(self) -> None:
        """Save a checkpoint, where that is still possible, and end the run with the error of the event log."""
        if self.plan.save is not None:
            self._pause()
        self.process_group.on_rank0(self.logger.check)

    def _pause(self) -> None:
        """Save a checkpoint, unless this step has one; the run can be resumed."""
        if self.plan.save is not None and self.checkpointer.saved_step != self.counters.step:
            self._save("stop")
        self._wait_for_checkpoints()

    def _exit(self, signum: int = 0) -> None:
        """Save a checkpoint, unless this step has one, and end the run; `signum` 0: another rank got the signal."""
        signum = signum or self.stop_signal.signal_number or signal.SIGTERM
        step = self.counters.step
        if self.plan.save is None:
            raise StoppedWithoutSaveError(signum)
        if self.checkpointer.saved_step != step:
            self._save("stop")
        self._wait_for_checkpoints()
        raise PreemptedError(
            f"stopped by {signal_name(signum)} after step {step} of {self.plan.total_steps}; checkpoint saved",
            hint="run the same command with --resume",
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Name the current phase, for the error message if this rank is lost."""
        self.process_group.set_phase(name)
        try:
            yield
        finally:
            self.process_group.set_phase("waiting for data")


def _history_entry(result: EvalFinished) -> dict[str, Any]:
    """Entry of an evaluation in the history that checkpoints keep."""
    entry = {"step": result.step, "weights": result.weights, "metrics": dict(result.metrics)}
    return {**entry, "confidence": dict(result.confidence)} if result.confidence else entry
