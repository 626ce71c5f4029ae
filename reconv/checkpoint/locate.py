"""Finds what RUN on the command line is: a run directory, a directory of runs, a checkpoint or a weights file.

A checkpoint is fully verified before it is returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reconv.checkpoint import manifest
from reconv.checkpoint.interop.tensorflow import is_tensorflow
from reconv.checkpoint.run_dir import RunDir, runs_in
from reconv.checkpoint.store import SUFFIX, CheckpointStore, is_checkpoint_name
from reconv.errors import CheckpointError, UsageError

MODEL = f"model{SUFFIX}"
EMA = f"ema{SUFFIX}"


@dataclass(frozen=True, slots=True)
class LocatedWeights:
    """The checkpoint or weights that RUN refers to, and their run."""

    kind: Literal["run", "checkpoint", "weights"]
    run: RunDir | None  # None: a checkpoint or weights outside of a run directory
    checkpoint: Path | None  # also of a weights file inside a checkpoint; None: a bare weights file
    weights: Path  # of the model; its EMA is in `ema`
    skipped: tuple[tuple[Path, str], ...] = ()  # newer checkpoints that are damaged, and why
    name: str = ""  # of published weights, as in torchvision:resnet50

    @property
    def ema(self) -> Path | None:
        """The EMA weights of the checkpoint, if it has any and RUN is not a single file."""
        path = None if self.checkpoint is None or self.kind == "weights" else self.checkpoint / EMA
        return path if path is not None and path.is_file() else None


def locate(run: str | Path, *, which: Literal["newest", "best"] | int = "newest") -> LocatedWeights:
    """Find the checkpoint or weights that RUN refers to; `which` chooses among the checkpoints of a run."""
    path = Path(run)
    if is_tensorflow(path):
        return LocatedWeights("weights", None, None, path)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        raise UsageError(
            f"{path} is a recipe, not a run or a weights file",
            where=str(path),
            why="a recipe has no weights",
            then=f"train it first: reconv train {path}; then give its run directory, such as runs/{path.stem}/1",
        )
    if path.is_file():
        return LocatedWeights("weights", _containing_run(path.parent), _containing_checkpoint(path), path)
    if path.is_dir() and ((path / manifest.NAME).is_file() or is_checkpoint_name(path.name)):
        manifest.verify(path)  # a named checkpoint that is damaged is an error
        return _checkpoint("checkpoint", _containing_run(path), path)
    folder = find_run(path)
    store = CheckpointStore(folder.checkpoints)
    if which == "newest":
        newest = store.newest()
        if newest.path is None:
            raise _no_checkpoint(folder, newest.skipped)
        return _checkpoint("run", folder, newest.path, newest.skipped)
    chosen = store.path(_best_step(folder) if which == "best" else which)
    if not chosen.is_dir():
        steps = ", ".join(str(step) for step in store.steps()) or "none"
        raise CheckpointError("no such checkpoint", where=str(chosen), why=f"the run has steps: {steps}")
    manifest.verify(chosen)
    return _checkpoint("run", folder, chosen)


def find_run(run: str | Path) -> RunDir:
    """The run directory that RUN refers to, with or without checkpoints; of a directory of runs, the newest."""
    path = Path(run)
    if not path.exists():
        like = Path("runs") / path
        then = f"did you mean '{like}'?" if like.exists() else "ls runs/*, or train first: reconv train quickstart"
        raise CheckpointError("no such run", where=str(path), then=then)
    if path.is_dir():
        if RunDir(path).is_run():
            return RunDir(path)
        if runs := runs_in(path):
            return runs[0]
        if (containing := _containing_run(path)) is not None:
            return containing
        recipes = sorted(child.name for child in path.iterdir() if child.is_dir() and runs_in(child))
        if recipes:
            raise CheckpointError(
                "this directory has runs of several recipes",
                where=str(path),
                why=f"recipes: {', '.join(recipes)}",
                then=f"choose one, such as '{path / recipes[0]}'",
            )
    raise CheckpointError(
        "not a run directory",
        where=str(path),
        why="a run directory has recipe.yaml, a checkpoint directory has manifest.json",
        then="ls runs/*, or train first: reconv train quickstart",
    )


def _checkpoint(
    kind: Literal["run", "checkpoint"],
    run: RunDir | None,
    path: Path,
    skipped: tuple[tuple[Path, str], ...] = (),
) -> LocatedWeights:
    if not (path / MODEL).is_file():
        raise CheckpointError(f"the checkpoint has no {MODEL}", where=str(path), then="use another checkpoint")
    return LocatedWeights(kind, run, path, path / MODEL, skipped)


def _containing_checkpoint(path: Path) -> Path | None:
    """The verified checkpoint that contains a weights file."""
    folder = path.absolute().parent
    if path.name not in (MODEL, EMA) or not (folder / manifest.NAME).is_file():
        return None
    manifest.verify(folder)
    return folder


def _containing_run(path: Path) -> RunDir | None:
    """The run that contains a checkpoint directory, or the directory of a weights file."""
    path = path.absolute()
    run = RunDir(path.parent.parent if path.parent.name == "checkpoints" else path)
    return run if run.recipe.is_file() else None


def _best_step(folder: RunDir) -> int:
    best = folder.read_best()
    if best is None:
        raise CheckpointError(
            "the run has no best checkpoint yet",
            where=str(folder.best),
            why="no checkpoint was saved after an evaluation yet",
            then="use its newest checkpoint instead",
        )
    return best.step


def _no_checkpoint(folder: RunDir, skipped: tuple[tuple[Path, str], ...]) -> CheckpointError:
    reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped)
    return CheckpointError(
        "the run has no valid checkpoint",
        where=str(folder.checkpoints),
        why=reasons or "nothing was saved yet, or save.every is off",
        then="wait for the first save, or start the training again",
    )
