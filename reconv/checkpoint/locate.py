"""What a person means by RUN: a run folder, a folder of runs, a checkpoint folder or a weights file.

Owns that one question. Refuses to load anything. Invariant: what is returned was checked in full where it has a
manifest, and everything else is an error that names the path and what to type instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reconv.checkpoint import manifest
from reconv.checkpoint.interop.tensorflow import is_tensorflow
from reconv.checkpoint.run_dir import RunDir, runs_in
from reconv.checkpoint.store import SUFFIX, CheckpointStore, is_checkpoint_name
from reconv.errors import CheckpointError

MODEL = f"model{SUFFIX}"
EMA = f"ema{SUFFIX}"


@dataclass(frozen=True, slots=True)
class LocatedWeights:
    """What RUN stands for."""

    kind: Literal["run", "checkpoint", "weights"]
    run: RunDir | None  # None: weights or a checkpoint from elsewhere
    checkpoint: Path | None  # of a weights file: the one it lies in; None: a bare weights file
    weights: Path  # of the network itself; `ema` has the averaged ones
    skipped: tuple[tuple[Path, str], ...] = ()  # newer checkpoints passed over, and why

    @property
    def ema(self) -> Path | None:
        """The averaged weights of the checkpoint, if it has any and no file of it was named."""
        path = None if self.checkpoint is None or self.kind == "weights" else self.checkpoint / EMA
        return path if path is not None and path.is_file() else None


def locate(run: str | Path, *, which: Literal["newest", "best"] | int = "newest") -> LocatedWeights:
    """Find the checkpoint or weights that RUN means; `which` chooses a run's checkpoint, by step if a number."""
    path = Path(run)
    if is_tensorflow(path):
        return LocatedWeights("weights", None, None, path)
    if path.is_file():
        return LocatedWeights("weights", _run_around(path.parent), _checkpoint_around(path), path)
    if path.is_dir() and ((path / manifest.NAME).is_file() or is_checkpoint_name(path.name)):
        manifest.verify(path)  # a checkpoint that is named is meant, also when it is damaged
        return _checkpoint("checkpoint", _run_around(path), path)
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
        raise CheckpointError("no such checkpoint", where=str(chosen), why=f"steps there: {steps}", then="choose one")
    manifest.verify(chosen)
    return _checkpoint("run", folder, chosen)


def find_run(run: str | Path) -> RunDir:
    """The run folder that RUN means, with or without checkpoints; of a folder of runs, the newest."""
    path = Path(run)
    if not path.exists():
        like = Path("runs") / path
        then = f"RUN may be '{like}'" if like.exists() else "ls runs/*, or train first: reconv train quickstart"
        raise CheckpointError("no such run", where=str(path), then=then)
    if path.is_dir():
        if RunDir(path).is_run():
            return RunDir(path)
        if runs := runs_in(path):
            return runs[0]
        if (around := _run_around(path)) is not None:
            return around
        recipes = sorted(child.name for child in path.iterdir() if child.is_dir() and runs_in(child))
        if recipes:
            raise CheckpointError(
                "that folder holds the runs of several recipes",
                where=str(path),
                why=f"recipes there: {', '.join(recipes)}",
                then=f"name one, e.g. '{path / recipes[0]}'",
            )
    raise CheckpointError(
        "not a run",
        where=str(path),
        why="a run folder has recipe.yaml, a checkpoint folder has manifest.json",
        then="ls runs/*, or train first: reconv train quickstart",
    )


def _checkpoint(
    kind: Literal["run", "checkpoint"],
    run: RunDir | None,
    path: Path,
    skipped: tuple[tuple[Path, str], ...] = (),
) -> LocatedWeights:
    if not (path / MODEL).is_file():
        raise CheckpointError(f"the checkpoint has no {MODEL}", where=str(path), then="name another checkpoint")
    return LocatedWeights(kind, run, path, path / MODEL, skipped)


def _checkpoint_around(path: Path) -> Path | None:
    """The checkpoint that a network's weights file lies in, checked in full."""
    folder = path.absolute().parent
    if path.name not in (MODEL, EMA) or not (folder / manifest.NAME).is_file():
        return None
    manifest.verify(folder)
    return folder


def _run_around(path: Path) -> RunDir | None:
    """The run that a checkpoint folder, or a file's folder, lies in."""
    inside = path.absolute()
    parents = [inside.parent.parent] if inside.parent.name == "checkpoints" else [inside]
    return next((RunDir(p) for p in parents if RunDir(p).recipe.is_file()), None)


def _best_step(folder: RunDir) -> int:
    best = folder.read_best()
    if best is None:
        raise CheckpointError(
            "the run has no best checkpoint yet",
            where=str(folder.best),
            why="no evaluation was followed by a save",
            then="use its newest checkpoint",
        )
    return best.step


def _no_checkpoint(folder: RunDir, skipped: tuple[tuple[Path, str], ...]) -> CheckpointError:
    reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped)
    return CheckpointError(
        "the run has no valid checkpoint",
        where=str(folder.checkpoints),
        why=reasons or "nothing was saved yet, or save.every is off",
        then="wait for the first save, or train it again",
    )
