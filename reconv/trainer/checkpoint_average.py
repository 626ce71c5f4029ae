"""One set of weights from a run's checkpoints: at the end of a run that asks for it, or by command.

Owns which checkpoints are taken and where the average goes. Refuses to know the arithmetic (checkpoint.average).
Invariant: every checkpoint taken was checked in full, and the result does not depend on how often the run was
interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reconv.checkpoint import manifest
from reconv.checkpoint.average_checkpoints import average_checkpoints, exponential_weights, uniform_weights
from reconv.checkpoint.locate import EMA, MODEL, find_run
from reconv.checkpoint.run_dir import RunDir
from reconv.checkpoint.store import CheckpointStore, encode
from reconv.distributed.process_group import ProcessGroup
from reconv.errors import CheckpointError, UsageError
from reconv.io.atomic import disk_errors, write_atomic
from reconv.logging.run_logger import RunLogger
from reconv.recipe.loader import load
from reconv.recipe.plan import Plan, averaging_window
from reconv.recipe.schema import Recipe
from reconv.recipe.units import Duration
from reconv.report.run_record import load_run_record
from reconv.trainer.evaluator import Evaluation

AVERAGED = "averaged"


@dataclass(frozen=True, slots=True)
class Averaged:
    """Where the average lies and what went into it."""

    path: Path
    steps: tuple[int, ...]
    kind: str

    def __str__(self) -> str:
        noun = "checkpoint" if len(self.steps) == 1 else "checkpoints"
        listed = ", ".join(str(step) for step in self.steps)
        return f"{self.kind} of {len(self.steps)} {noun} (step {listed}) in {self.path.name}"


def average(
    run: str | Path,
    *,
    last: str | Duration = "100%",
    kind: str = "mean",
    decay: float = 0.99,
    weights: str = "raw",
    out: str | Path | None = None,
) -> Averaged:
    """Average the checkpoints that a run saved in its last epochs, steps or share, raw weights or EMA."""
    folder = find_run(run)
    store = CheckpointStore(folder.checkpoints)
    steps = _chosen_steps(folder, store, _duration(last))
    target = folder.averaged if out is None else Path(out)
    return _write(store, steps, target, kind, decay, EMA if weights == "ema" else MODEL)


def average_at_end(
    recipe: Recipe,
    plan: Plan,
    folder: RunDir,
    process_group: ProcessGroup,
    done: int,
    evaluation: Evaluation,
    logger: RunLogger,
) -> dict[str, Any]:
    """Average as the recipe says, score the result, and return what the summary should tell of it."""
    if plan.average is None:
        return {}
    store, window = CheckpointStore(folder.checkpoints), plan.average

    def write() -> Averaged:
        steps = [step for step in store.steps() if window.holds(step, done)]
        return _write(
            store, steps, folder.averaged, recipe.checkpoint_average.mode, recipe.checkpoint_average.decay, MODEL
        )

    result = process_group.on_rank0(write)
    logger.info(str(result), done)
    told: dict[str, Any] = {"path": result.path.name, "kind": result.kind, "steps": list(result.steps)}
    if plan.evaluate is not None:
        scored = evaluation.score_file(AVERAGED, result.path, done, done / plan.steps_per_epoch)
        logger.log(scored)
        told["metrics"] = dict(scored.metrics)
    return {AVERAGED: told}


def _write(store: CheckpointStore, steps: Sequence[int], target: Path, kind: str, decay: float, part: str) -> Averaged:
    if kind not in ("mean", "exponential"):
        raise UsageError(f"there is no average of kind {kind!r}", then="mean or exponential")
    folders = [store.path(step) for step in steps]
    for folder in folders:
        manifest.verify(folder)
    shares = uniform_weights(len(folders)) if kind == "mean" else exponential_weights(len(folders), decay)
    tensors = average_checkpoints([folder / part for folder in folders], shares)
    with disk_errors(target):
        write_atomic(target, encode(tensors))
    return Averaged(target, tuple(steps), kind)


def _duration(last: str | Duration) -> Duration:
    try:
        duration = Duration.parse(last)
    except ValueError as error:
        raise UsageError(f"--last takes {error}, not {last!r}") from error
    if duration.unit == "min" or duration.value == 0:
        raise UsageError(f"--last cannot be {duration}", then="epochs, steps or a share, as in 5ep, 1000step or 10%")
    return duration


def _chosen_steps(folder: RunDir, store: CheckpointStore, last: Duration) -> list[int]:
    """The steps on disk that the run's own saving interval wrote within `last` of the newest."""
    present = store.steps()
    planned = load_run_record(folder.path).plan
    if not present or planned is None:
        raise CheckpointError(
            "there is no checkpoint to average", where=str(folder.checkpoints), then="wait for the first save"
        )
    recipe = load(str(folder.recipe)).recipe
    window = averaging_window(recipe, int(planned.steps_per_epoch), planned.total_steps, last)
    if window is None or window.save.minutes is not None:
        # CheckpointSaved by the clock or by hand: there is no interval to tell regular checkpoints from others.
        return present
    return [step for step in present if window.holds(step, present[-1])]
