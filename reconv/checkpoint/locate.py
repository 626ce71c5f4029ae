"""Finds what RUN on the command line is: a run directory, a directory of runs, a checkpoint or a weights file.

A checkpoint is fully verified before it is returned. One inside a run must be the run's own.

Readers take no lock: when retention deletes what they chose, they choose again
(tests/faults/test_retention_while_reading.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from reconv.checkpoint import manifest
from reconv.checkpoint.best import best_in_state, read_best
from reconv.checkpoint.manifest import check_state
from reconv.checkpoint.store import (
    NUM_TRIES,
    SUFFIX,
    CheckpointStore,
    LoadedCheckpoint,
    check_place,
    is_checkpoint_name,
    open_store,
)
from reconv.core.errors import CheckpointError, ExitCode, UnreadableRunError, UsageError
from reconv.core.text import printable
from reconv.logging.run_dir import RunDir, no_such_run, read_summary, runs_in
from reconv.storage.object_stores.store import is_url

MODEL = f"model{SUFFIX}"
EMA = f"ema{SUFFIX}"

Which = Literal["newest", "best"] | int
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocatedWeights:
    """The checkpoint or weights that RUN refers to, and their run."""

    kind: Literal["run", "checkpoint", "weights"]
    run: RunDir | None  # None: a checkpoint or weights outside of a run directory
    checkpoint: Path | None  # also of a weights file inside a checkpoint; None: a bare weights file
    weights: Path  # of the model; its EMA is in `ema`
    skipped: tuple[tuple[Path, str], ...] = ()  # newer checkpoints that are damaged, and why
    name: str = ""  # of published weights, as in torchvision:resnet50
    which: Which = "newest"  # how it was chosen among the checkpoints of the run
    notes: tuple[str, ...] = ()  # for the log
    loaded: LoadedCheckpoint | None = field(default=None, repr=False, compare=False)  # where it was asked for

    @property
    def ema(self) -> Path | None:
        """The EMA weights of the checkpoint, if it has any and RUN is not a single file."""
        path = None if self.checkpoint is None or self.kind == "weights" else self.checkpoint / EMA
        return path if path is not None and path.is_file() else None


def locate(run: str | Path, *, which: Which = "newest", loads: bool = False) -> LocatedWeights:
    """Find the checkpoint or weights that RUN refers to; `which` chooses among the checkpoints of a run.

    With `loads` a checkpoint is checked while it is loaded, so that its bytes are read once.
    """
    path = Path(_fetch(run))
    if is_tensorflow(path):
        return LocatedWeights("weights", None, None, path)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        raise UsageError(
            f"{path} is a recipe, not a run or a weights file",
            where=str(path),
            why="a recipe has no weights",
            hint=f"train it first: reconv train {path}; then give its run directory, such as runs/{path.stem}/1",
        )
    if path.is_file():
        return LocatedWeights("weights", _containing_run(path.parent), _containing_checkpoint(path), path)
    if path.is_dir() and ((path / manifest.NAME).is_file() or is_checkpoint_name(path.name)):
        run_dir, loaded = _containing_run(path), None  # a named checkpoint that is damaged is an error
        if loads:
            loaded = (CheckpointStore(path.parent) if run_dir is None else open_store(run_dir)).load(path)
        else:
            _verify_named(path)
        return replace(_checkpoint("checkpoint", run_dir, path), loaded=loaded)
    folder = find_run(path)
    return retry_if_deleted(lambda: _choose(folder, which, loads))


def _fetch(run: str | Path) -> str | Path:
    """A path as it is; the run at the address of its copy is downloaded."""
    if not is_url(run):
        return run
    from reconv.checkpoint.mirror.download import fetch_run

    return fetch_run(run)


def retry_if_deleted(read: Callable[[], T]) -> T:
    """Call a function that chooses and reads checkpoints, and again if retention deletes one in between."""
    for _ in range(NUM_TRIES - 1):
        try:
            return read()
        except CheckpointError as error:
            if Path(error.where).exists():
                raise
    return read()


def read_located(located: LocatedWeights, read: Callable[[LocatedWeights], T]) -> T:
    """Read a located checkpoint; if retention has deleted it, that which its run has now."""
    for _ in range(NUM_TRIES - 1):
        try:
            return read(located)
        except CheckpointError:
            if located.kind != "run" or located.run is None or located.weights.exists():
                raise
            located = locate(located.run.path, which=located.which, loads=located.loaded is not None)
    return read(located)


def _choose(folder: RunDir, which: Which, loads: bool) -> LocatedWeights:
    """The newest, the best or a given checkpoint of a run."""
    if not folder.checkpoints.is_dir():
        raise _no_checkpoint(folder, ())
    store = open_store(folder)
    if isinstance(which, int):
        return _chosen(folder, store, which, loads, which=which)
    newest, loaded = store.load_newest() if loads and which == "newest" else (store.newest(), None)
    if newest.path is None:
        raise _no_checkpoint(folder, newest.skipped)
    if which == "newest":
        return replace(_checkpoint("run", folder, newest.path, newest.skipped), loaded=loaded)
    step, notes = _best_step(folder, store, newest.path)
    return _chosen(folder, store, step, loads, newest.skipped, which, notes)


def _chosen(
    folder: RunDir,
    store: CheckpointStore,
    step: int,
    loads: bool,
    skipped: tuple[tuple[Path, str], ...] = (),
    which: Which = "newest",
    notes: tuple[str, ...] = (),
) -> LocatedWeights:
    """The checkpoint of a step, verified or loaded."""
    path = store.path(step)
    if not path.is_dir():
        steps = ", ".join(str(step) for step in store.steps()) or "none"
        raise CheckpointError("no such checkpoint", where=str(path), why=f"the run has steps: {steps}")
    loaded = store.load(path) if loads else None
    if loaded is None:
        store.verify(path)
    return replace(_checkpoint("run", folder, path, skipped, which, notes), loaded=loaded)


def _verify_named(path: Path) -> None:
    """Verify a checkpoint directory that was named; one inside a run must be the run's own."""
    run = _containing_run(path)
    if run is not None:
        open_store(run).verify(path)
    else:
        check_place(path, manifest.verify(path), None)


def find_run(run: str | Path) -> RunDir:
    """The run directory that RUN refers to, with or without checkpoints; of a directory of runs, the newest."""
    path = Path(_fetch(run))
    if not path.exists():
        raise no_such_run(path)
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
                hint=f"choose one, such as '{path / recipes[0]}'",
            )
    raise CheckpointError(
        "not a run directory",
        where=str(path),
        why="a run directory has recipe.yaml, a checkpoint directory has manifest.json",
        hint="ls runs/*, or train first: reconv train quickstart",
    )


def _checkpoint(
    kind: Literal["run", "checkpoint"],
    run: RunDir | None,
    path: Path,
    skipped: tuple[tuple[Path, str], ...] = (),
    which: Which = "newest",
    notes: tuple[str, ...] = (),
) -> LocatedWeights:
    if not (path / MODEL).is_file():
        raise CheckpointError(f"the checkpoint has no {MODEL}", where=str(path), hint="use another checkpoint")
    return LocatedWeights(kind, run, path, path / MODEL, skipped, which=which, notes=notes)


def _containing_checkpoint(path: Path) -> Path | None:
    """The verified checkpoint that contains a weights file."""
    folder = path.absolute().parent
    if path.name not in (MODEL, EMA) or not (folder / manifest.NAME).is_file():
        return None
    _verify_named(folder)
    return folder


def _containing_run(path: Path) -> RunDir | None:
    """The run that contains a checkpoint directory, or the directory of a weights file."""
    path = path.absolute()
    run = RunDir(path.parent.parent if path.parent.name == "checkpoints" else path)
    return run if run.recipe.is_file() else None


def _best_step(folder: RunDir, store: CheckpointStore, newest: Path) -> tuple[int, tuple[str, ...]]:
    """The step of the best evaluation that the newest checkpoint records, and a note if `best.json` says otherwise."""
    state = store.read_state(newest)
    check_state(state, newest)
    best = best_in_state(state)
    if best is None:
        raise CheckpointError(
            "the run has no best checkpoint yet",
            where=str(newest),
            why="no checkpoint was saved after an evaluation yet",
            hint="use its newest checkpoint instead",
        )
    try:
        listed = read_best(folder)
    except CheckpointError:
        listed = None
    if listed == best:
        return best.step, ()
    says = "is missing or damaged" if listed is None else f"says step {listed.step:,}"
    return best.step, (
        f"{folder.best.name} {says}; the evaluations in {newest.name} say step {best.step:,}, which is used",
    )


def _no_checkpoint(folder: RunDir, skipped: tuple[tuple[Path, str], ...]) -> CheckpointError:
    reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped)
    failure = "" if skipped else _failure(folder)
    if failure:
        return CheckpointError(
            "the run failed before its first save",
            where=str(folder.path),
            why=failure,
            hint=f"correct the cause, then: reconv resume {shlex.quote(str(folder.path))}",
        )
    return CheckpointError(
        "the run has no valid checkpoint",
        where=str(folder.checkpoints),
        why=reasons or "nothing was saved yet, or save.every is off",
        hint="wait for the first save, or start the training again",
    )


def _failure(folder: RunDir) -> str:
    """Reason why a run has failed, from its summary; empty if it has not."""
    try:
        summary = read_summary(folder.path)
    except (OSError, ValueError, UnreadableRunError):
        return ""
    is_failed = summary.get("exit_code") not in (None, ExitCode.OK, ExitCode.INTERRUPTED, ExitCode.PREEMPTED)
    return printable(str(summary.get("reason") or "")) if is_failed else ""


INDEX_SUFFIX = ".index"


_DATA_NAME = re.compile(r"(.+)\.data-\d{5}-of-\d{5}")


_STATE_FILE = "checkpoint"  # names the newest checkpoint of a folder


_STATE_LINE = re.compile(r'^model_checkpoint_path: "(.+)"$', re.MULTILINE)


_STATE_MAX_BYTES = 1 << 20


def is_tensorflow(path: Path) -> bool:
    """True if a path is a TensorFlow checkpoint: its prefix, its index, a data file, or a folder of checkpoints."""
    return tensorflow_prefix(path) is not None


def tensorflow_prefix(path: Path) -> Path | None:
    """The common prefix of the index and data files."""
    if path.is_dir():
        return _newest_in(path)
    if path.with_name(path.name + INDEX_SUFFIX).is_file():
        return path
    if path.name.endswith(INDEX_SUFFIX) and path.name != INDEX_SUFFIX and path.is_file():
        return path.with_name(path.name.removesuffix(INDEX_SUFFIX))
    match = _DATA_NAME.fullmatch(path.name)
    if match and path.with_name(match[1] + INDEX_SUFFIX).is_file():
        return path.with_name(match[1])
    return None


def _newest_in(folder: Path) -> Path | None:
    """The newest checkpoint of a folder; of the path in its `checkpoint` file only the name is used."""
    state = folder / _STATE_FILE
    if not state.is_file() or state.stat().st_size > _STATE_MAX_BYTES:
        return None
    try:
        line = _STATE_LINE.search(state.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise CheckpointError(
            "the `checkpoint` file of the directory cannot be read", where=str(state), why=str(error)
        ) from error
    prefix = folder / Path(line[1]).name if line else None
    return prefix if prefix and prefix.with_name(prefix.name + INDEX_SUFFIX).is_file() else None


HTTP = ("http://", "https://")


PACKAGES = ("torchvision:", "timm:")
HUB = "hf:/"  # of the Hugging Face Hub; a Path has lost one of its slashes


def is_remote(name: str) -> bool:
    """True if a name refers to weights that may have to be downloaded."""
    return name.startswith((*HTTP, *PACKAGES, HUB))
