"""Averaging the checkpoints of a run into one set of weights, at the end of training or by `reconv average`.

Every checkpoint is verified before it is averaged, and the result does not depend on how often a run was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from reconv.checkpoint.average import average_checkpoints, exponential_weights, uniform_weights
from reconv.checkpoint.locate import EMA, MODEL, find_run, retry_if_deleted
from reconv.checkpoint.safetensors_bytes import encode
from reconv.checkpoint.store import CheckpointStore, open_store
from reconv.checkpoint.weights_metadata import read_metadata, to_header
from reconv.core.errors import CheckpointError, UsageError
from reconv.distributed.process_group import ProcessGroup
from reconv.logging.phases import Phase
from reconv.logging.run_dir import RunDir
from reconv.recipe.loader import load
from reconv.recipe.plan import averaging_window
from reconv.recipe.units import Duration
from reconv.report.run_record import load_run_record
from reconv.storage.files import disk_errors, write_atomic
from reconv.trainer.callbacks.base import TrainerCallback

if TYPE_CHECKING:
    from reconv.trainer.loop import Trainer
    from reconv.trainer.run import TrainingRun

AVERAGED = "averaged"


@dataclass(frozen=True, slots=True)
class AveragedWeights:
    """An average of checkpoints and the file it is in."""

    path: Path
    steps: tuple[int, ...]
    kind: str
    num_deleted: int = 0  # checkpoints of the same part of the run that are no longer there
    warning: str = ""

    def __str__(self) -> str:
        total = len(self.steps) + self.num_deleted
        noun = "checkpoint" if total == 1 else "checkpoints"
        of_total = f"{len(self.steps)} of {total}" if self.num_deleted else f"{total}"
        listed = ", ".join(str(step) for step in self.steps)
        return f"{self.kind} of {of_total} {noun} (step {listed}) in {self.path.name}"


def average(
    run: str | Path,
    *,
    last: str | Duration = "100%",
    discard_last: int = 0,
    kind: str = "mean",
    decay: float = 0.99,
    weights: str = "raw",
    out: str | Path | None = None,
    process_group: ProcessGroup | None = None,
) -> AveragedWeights:
    """Average the raw or EMA weights of the checkpoints of the last epochs, steps or percent of a run.

    The newest `discard_last` checkpoints are left out first; `last` counts back from the newest of the others.
    Checkpoints that were deleted during the run are missing from the average; the result's warning says so. The ranks
    of a process group share the checkpoints to verify and the tensors to average.
    """
    ranks = process_group or ProcessGroup.single()
    folder = find_run(run)
    duration, part = _duration(last), EMA if weights == "ema" else MODEL
    target = folder.averaged if out is None else Path(out)

    def choose_and_write() -> tuple[AveragedWeights, int]:
        store = open_store(folder)
        steps, num_deleted = ranks.on_rank0(lambda: _chosen_steps(folder, store, duration, discard_last))
        return _write(store, steps, target, kind, decay, part, ranks), num_deleted

    # Several ranks do not try again: those that did would wait for the others.
    result, num_deleted = retry_if_deleted(choose_and_write) if ranks.world_size == 1 else choose_and_write()
    if not num_deleted:
        return result
    num_averaged, kept = len(result.steps), load(str(folder.recipe)).recipe.save.keep_last
    total = num_averaged + num_deleted
    warning = (
        f"the average has only {num_averaged} of the {total} checkpoints that save.every wrote in the last {duration}; "
        f"the others were deleted, since save.keep_last is {kept}; to keep them, train with "
        f"--set save.keep_last={total} or --set checkpoint_average.last={duration}"
    )
    return replace(result, num_deleted=num_deleted, warning=warning)


@dataclass(frozen=True, slots=True)
class CheckpointAveraging(TrainerCallback):
    """After training, averages the last checkpoints as the recipe says and evaluates the result."""

    run: TrainingRun

    def on_fit_end(self, trainer: Trainer) -> None:
        run, window, step = self.run, self.run.plan.average, trainer.counters.step
        if window is None:
            return
        config = run.recipe.checkpoint_average

        def write() -> AveragedWeights:
            store = open_store(run.run_dir)
            steps = [saved for saved in store.steps() if window.holds(saved, step)]
            return _write(store, steps, run.run_dir.averaged, config.mode, config.decay, MODEL, ProcessGroup.single())

        result = run.process_group.on_rank0(write)
        run.logger.info(str(result), step)
        summary: dict[str, object] = {"path": result.path.name, "kind": result.kind, "steps": list(result.steps)}
        if run.plan.evaluate is not None:
            with run.phases.during(Phase.EVALUATION):
                evaluation = trainer.evaluator.evaluate_file(AVERAGED, result.path, step)
            run.logger.log(evaluation)
            summary["metrics"] = dict(evaluation.metrics)
        run.finalizer.fields[AVERAGED] = summary


def _write(
    store: CheckpointStore,
    steps: Sequence[int],
    target: Path,
    kind: str,
    decay: float,
    part: str,
    ranks: ProcessGroup,
) -> AveragedWeights:
    if kind not in ("mean", "exponential"):
        raise UsageError(f"unknown average {kind!r}", hint="use mean or exponential")
    folders, share = [store.path(step) for step in steps], slice(ranks.rank, None, ranks.world_size)
    for folder in folders[share]:
        store.verify(folder)
    factors = uniform_weights(len(folders)) if kind == "mean" else exponential_weights(len(folders), decay)
    parts = ranks.all_gather(average_checkpoints([folder / part for folder in folders], factors, share))

    def write() -> None:
        tensors = {name: tensor for own in parts for name, tensor in own.items()}
        with disk_errors(target):
            write_atomic(target, encode(tensors, _header(folders[-1] / part)))

    ranks.on_rank0(write)
    return AveragedWeights(target, tuple(steps), kind)


def _header(newest: Path) -> dict[str, str]:
    """The metadata of an average: that of its newest checkpoint."""
    metadata = read_metadata(newest)
    return {} if metadata is None else to_header(replace(metadata, weights=AVERAGED))


def _duration(last: str | Duration) -> Duration:
    try:
        duration = Duration.parse(last)
    except ValueError as error:
        raise UsageError(f"--last takes {error}, not {last!r}") from error
    if duration.unit == "min" or duration.value == 0:
        raise UsageError(
            f"--last cannot be {duration}", hint="use epochs, steps or percent, for example 5ep, 1000step or 10%"
        )
    return duration


def _chosen_steps(folder: RunDir, store: CheckpointStore, last: Duration, discard: int) -> tuple[list[int], int]:
    """The steps saved by the run's `save.every` within `last` of the newest, and how many others were deleted."""
    stored = store.steps()
    present = stored[: max(0, len(stored) - discard)]
    if stored and not present:
        raise UsageError(
            f"leaving out the newest {discard} checkpoints leaves none",
            where=str(folder.checkpoints),
            why=f"the run has {len(stored)}",
            hint=f"--discard-last {len(stored) - 1} or less",
        )
    planned = load_run_record(folder.path).plan
    if not present or planned is None:
        raise CheckpointError(
            "the run has no checkpoint to average", where=str(folder.checkpoints), hint="wait for its first checkpoint"
        )
    recipe = load(str(folder.recipe)).recipe
    window = averaging_window(recipe, int(planned.steps_per_epoch), planned.total_steps, last)
    if window is None or window.save.minutes is not None:
        # An interval in minutes does not tell regular checkpoints from others.
        return present, 0
    newest = present[-1]
    written = [step for step in range(max(1, newest - window.steps + 1), newest + 1) if window.holds(step, newest)]
    chosen = [step for step in written if step in set(present)]
    return chosen, len(written) - len(chosen)
