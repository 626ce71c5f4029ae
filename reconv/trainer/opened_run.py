"""The run that a command resumes: which directory it is, whether it may go on, and from which checkpoint.

A process looks for it once, reads its recipe once and hashes each byte of its checkpoint once, while it loads it
(`tests/trainer/test_opened_run.py` counts).

A directory that contains a run is written to only with --resume, with a compatible recipe, and by the process that
holds its lock.

`--resume` takes the newest unfinished run of the recipe, or `--out DIR`; if there is none a new run starts, and a
finished one exits with 0. Settings that do not determine the result may change (`recipe/load/identity` lists them),
and epochs may be added; other changes are refused with a list (tests/laws/test_law_resume.py).
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from reconv.checkpoint.manifest import check_state
from reconv.checkpoint.run_identity import read_identity
from reconv.checkpoint.store import LoadedCheckpoint, open_store
from reconv.core.errors import (
    CheckpointError,
    ExitCode,
    RecipeError,
    ReconvError,
    RemoteRankError,
    RunLockedError,
    UsageError,
    one_of,
)
from reconv.core.message import message
from reconv.core.text import count as plural
from reconv.core.text import printable_lines
from reconv.distributed.environment import LaunchEnv
from reconv.logging.event_log import read_events
from reconv.logging.events import CheckpointSaved, TrainProgress
from reconv.logging.formatting import fork_command, resume_command
from reconv.logging.run_dir import RunDir, read_summary
from reconv.recipe.load import document as yaml_document
from reconv.recipe.load.adapt import show
from reconv.recipe.load.identity import differences, may_change, recipe_digest
from reconv.recipe.load.resolved import Resolved
from reconv.recipe.loader import load
from reconv.recipe.schema import Recipe
from reconv.storage.files import write_atomic
from reconv.trainer.imported_state import ImportedState

# What a fork of a run may change although it determines the result.
_FORKABLE = ("schedule.", "batch.", "optimizer.", "augment.", "loss.", "evaluate.", "early_stopping.", "ema.")
# An elastic agent restarts processes after any exit code; retrying after these codes cannot succeed,
# or a stop was requested.
NON_RETRYABLE = (ExitCode.USAGE, ExitCode.DATA, ExitCode.CHECKPOINT, ExitCode.DIVERGED, ExitCode.PREEMPTED)


@message
@dataclass(frozen=True, slots=True)
class ExistingRun:
    """A run that is resumed, with its directory locked."""

    run_dir: RunDir
    notes: tuple[str, ...]  # settings that have changed
    is_finished: bool = False
    summary: dict[str, Any] = field(default_factory=dict)  # of a finished run


@message
@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The checkpoint a run continues from, or nothing."""

    loaded: LoadedCheckpoint | None = None
    notes: tuple[str, ...] = ()
    imported: ImportedState | None = None  # of another program, where there is no checkpoint of ours yet

    @property
    def state(self) -> dict[str, Any]:
        """State in the checkpoint besides tensors; empty without one."""
        return dict(self.loaded.state) if self.loaded is not None else {}

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.imported.step if self.imported is not None else self.saved_step

    @property
    def saved_step(self) -> int:
        """The step of the checkpoint; 0 without one."""
        return int(self.state.get("step", 0))

    @property
    def is_resumed(self) -> bool:
        return self.loaded is not None or self.imported is not None

    def check_step(self, total_steps: int) -> None:
        """Raise if the checkpoint is from after the end of the run."""
        if self.step > total_steps:
            raise CheckpointError(
                f"the newest checkpoint is of step {self.step:,}, but the run has {total_steps:,} steps",
                why="its checksums are right, so another program or version wrote it",
                hint="move this checkpoint away and use an older one",
            )


@dataclass(slots=True)
class OpenedRun:
    """The directory of a run that is resumed, with what was read there."""

    run_dir: RunDir
    _text: str | None = None  # of the recipe
    _recipe: Recipe | None = None
    _stamp: tuple[int, int, int] | None = None  # of the recipe's file when it was read

    @property
    def recipe_text(self) -> str:
        """The text of the run's own recipe."""
        if self._text is None:
            self._stamp = self._recipe_stamp()
            self._text = yaml_document.read_file(self.run_dir.recipe)
        return self._text

    @property
    def recipe(self) -> Recipe:
        """The run's own recipe."""
        if self._recipe is None:
            document = yaml_document.read(self.recipe_text)
            with suppress(ValidationError):  # of another version, or edited
                self._recipe = None if document.problems else Recipe.model_validate(document.tree)
            if self._recipe is None:
                self._recipe = load(str(self.run_dir.recipe)).recipe  # raises errors with their lines
        return self._recipe

    def lock(self, stack: ExitStack, launch_env: LaunchEnv) -> None:
        """Lock the directory until the stack is closed; raises if the recipe has changed since it was read."""
        lock_run_dir(self.run_dir, stack, launch_env)
        if self._stamp is not None and self._stamp != self._recipe_stamp():
            raise RunLockedError(
                "another process has just used this run",
                where=str(self.run_dir.recipe),
                why="the recipe changed while the run was opened",
                hint="start the same command again",
            )

    def _recipe_stamp(self) -> tuple[int, int, int] | None:
        with suppress(OSError):
            status = self.run_dir.recipe.stat()
            return status.st_mtime_ns, status.st_size, status.st_ino
        return None


@dataclass(slots=True)
class ResumeLookup:
    """Finds the run that --resume refers to, once: later calls return what the first has found."""

    out: Path | None
    runs: Path
    is_resumed: bool = True
    _found: OpenedRun | None = None
    _is_done: bool = False

    def find(self, recipe: Recipe) -> OpenedRun | None:
        """The run in --out, else the newest one of this recipe, unfinished ones first; None if nothing is resumed."""
        if self.is_resumed and not self._is_done:
            run_dir = find_run(recipe, out=self.out, runs=self.runs)
            self._found = None if run_dir is None else OpenedRun(run_dir)
            self._is_done = True
        return self._found


def find_run(recipe: Recipe, *, out: Path | None, runs: Path) -> RunDir | None:
    """The directory of the run that --resume refers to."""
    if out is not None:
        return RunDir(out) if RunDir(out).is_run() else None
    return RunDir.newest_unfinished(runs, recipe.name) or next(iter(RunDir.all(runs, recipe.name)), None)


def check_out_is_free(out: Path | None, resume: bool) -> None:
    """Raise if the directory contains a run, unless that run is resumed."""
    if out is not None and RunDir(out).is_run() and not resume:
        raise UsageError(
            f"{out} already contains a run",
            where=str(RunDir(out).recipe),
            hint="add --resume to continue it, or choose another --out",
        )


def with_durations_of_run(resolved: Resolved, lookup: ResumeLookup) -> Resolved:
    """The recipe with the durations of the run that is resumed, where the command gives none."""
    run = lookup.find(resolved.recipe)
    if run is None or not run.run_dir.recipe.is_file():
        return resolved
    return resolved.with_durations_of(run.recipe)


def open_existing(
    recipe: Recipe,
    lookup: ResumeLookup,
    *,
    stack: ExitStack,
    launch_env: LaunchEnv,
    command: Sequence[str] = (),
) -> tuple[ExistingRun | None, tuple[str, ...]]:
    """Lock the run to resume until the stack is closed, and check the recipe; without one, a note for the log."""
    run = lookup.find(recipe)
    if run is None:
        out = lookup.out
        where = f"no run to resume in {out}" if out is not None else f"no run of {recipe.name} in {lookup.runs}"
        return None, (f"{where}: starting a new one",)
    run.lock(stack, launch_env)
    run_dir = run.run_dir
    notes, is_longer = check_same_run(run, recipe, command)
    if run_dir.is_finished() and not is_longer:
        damage = _damage_of_last_checkpoint(run_dir)
        if not damage:
            return ExistingRun(run_dir, notes, is_finished=True, summary=read_summary(run_dir.path)), ()
        notes = (*notes, f"the run is finished, but {damage}: training its last steps again")
    return ExistingRun(run_dir, notes), ()


def _damage_of_last_checkpoint(run_dir: RunDir) -> str:
    """Problem with the newest checkpoint if an older one is valid; empty if there is none."""
    newest = open_store(run_dir).newest() if run_dir.checkpoints.exists() else None
    if newest is None or newest.path is None or not newest.skipped:
        return ""
    path, why = newest.skipped[0]
    return f"{path.name} is damaged ({why})"


def create_run_dir(recipe: Recipe, *, out: Path | None, runs: Path, stack: ExitStack, launch_env: LaunchEnv) -> RunDir:
    """Create the directory of a new run and lock it until the stack is closed."""
    run_dir = RunDir.create(runs, recipe.name) if out is None else RunDir.at(out)
    lock_run_dir(run_dir, stack, launch_env)
    return run_dir


def lock_run_dir(run_dir: RunDir, stack: ExitStack, launch_env: LaunchEnv) -> None:
    """Lock a run directory; raises if an elastic agent restarts a run that ended with a non-retryable error."""
    stack.enter_context(run_dir.lock())
    stack.push(_record_final_error(run_dir, launch_env))


def _record_final_error(
    run_dir: RunDir, launch_env: LaunchEnv
) -> Callable[[object, BaseException | None, object], None]:
    """Re-raise the non-retryable error of the previous attempt; the returned exit callback records this one's."""
    file = run_dir.path / f"ended-{os.environ.get('TORCHELASTIC_RUN_ID', 'alone')}.json"
    if launch_env.restart_count == 0:
        file.unlink(missing_ok=True)
    elif file.exists():
        raise RemoteRankError.from_dict(json.loads(file.read_text()))

    def record(kind: object, error: BaseException | None, trace: object) -> None:
        may_restart = "TORCHELASTIC_RUN_ID" in os.environ and not launch_env.failure_dir
        if isinstance(error, ReconvError) and error.code in NON_RETRYABLE and may_restart:
            write_atomic(file, json.dumps(error.to_dict()))

    return record


def check_same_run(run: OpenedRun, recipe: Recipe, command: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Raise on settings that cannot change on resume; returns notes on the others, and whether the run gets longer."""
    check_recipe_unchanged(run)
    run_dir, old = run.run_dir, run.recipe
    notes: list[str] = []
    refused: dict[str, tuple[Any, Any]] = {}
    is_longer = _is_longer(old, recipe)
    for name, (before, after) in sorted(differences(old, recipe).items()):
        if name == "length" and is_longer:
            notes.append(f"length: {before} -> {after}; the run is extended and its schedule stretched")
        elif name == "batch.micro" and recipe.batch.group != "micro":
            order = "" if recipe.parallel.reduce == "ordered" else "; from here on gradients are added in another order"
            notes.append(f"{name}: {before} -> {after}{order}")
        elif name == "description":  # lists other changes
            continue
        elif may_change(name):
            notes.append(f"{name}: {before} -> {after}")
        else:
            refused[name] = (before, after)
    if refused:
        raise _changed_recipe(run_dir, refused, command)
    return tuple(notes), is_longer


def _changed_recipe(run_dir: RunDir, refused: Mapping[str, tuple[Any, Any]], command: Sequence[str]) -> RecipeError:
    """Error on what a command would change, with the commands that continue the run or start a new one."""
    is_finished = run_dir.is_finished()
    what = "the run is finished with another recipe" if is_finished else "the recipe has changed since the run started"
    continued = [] if is_finished else [resume_command(run_dir.path)]
    if not is_finished and all(name.startswith(_FORKABLE) for name in refused):
        continued.append(fork_command(run_dir.path, {name: after for name, (_, after) in refused.items()}))
    lines = [f"{n}: {show(before)} in the run, {show(after)} in this command" for n, (before, after) in refused.items()]
    return RecipeError(
        printable_lines(f"{what}:", *(f"    {line}" for line in lines)),
        where=str(run_dir.recipe),
        why="these settings determine the result; only epochs may be added",
        hint=one_of(*continued, _new_run_command(command, run_dir.path)),
    )


def _new_run_command(command: Sequence[str], run_dir: Path) -> str:
    """The command that starts a new run with these settings, in another directory if one was given."""
    words = [word for word in command if word != "--resume"]
    if not words or words[1:2] == ["resume"]:
        return "start a new run, without resuming this one"
    for position, word in enumerate(words):
        if word == "--out" or word.startswith("--out="):
            free = next(path for n in count(2) if not (path := Path(f"{run_dir}-{n}")).exists())
            words[position : position + 2 if word == "--out" else position + 1] = ["--out", str(free)]
            break
    return shlex.join(words)


def check_recipe_unchanged(run: OpenedRun) -> None:
    """Raise if `recipe.yaml` of a run was edited in fields that determine the result."""
    run_dir = run.run_dir
    if recipe_digest(run.recipe_text) in read_identity(run_dir).recipe_digests:
        return
    raise RecipeError(
        "\n    ".join(["recipe.yaml was changed since the run was started:", *_edited_fields(run)]),
        where=str(run_dir.recipe),
        why="these settings determine the result, and the checkpoints of this run were trained with other ones",
        hint=f"undo the change, or train it as a new run: reconv train '{run_dir.recipe}' --out DIR",
    )


def _edited_fields(run: OpenedRun) -> list[str]:
    """Differences between `recipe.yaml` and the recipe in the newest checkpoint, if there is one that can be read."""
    store = open_store(run.run_dir)
    newest = store.newest().path
    if newest is None:
        return ["fields that determine the result differ"]
    try:
        trained = Recipe.model_validate(store.read_state(newest).get("recipe"))
    except ValueError:  # of another version
        return [f"fields that determine the result differ from those in {newest.name}"]
    changed = differences(trained, run.recipe)
    return [
        f"{name}: {show(before)} in {newest.name}, {show(after)} in recipe.yaml"
        for name, (before, after) in changed.items()
        if not may_change(name)
    ]


def _is_longer(old: Recipe, new: Recipe) -> bool:
    return old.length.unit == new.length.unit and new.length.value > old.length.value


def find_restore_point(run_dir: RunDir) -> RestorePoint:
    """Load the newest intact checkpoint of a run; damaged ones are skipped with a note."""
    store = open_store(run_dir)
    newest, loaded = store.load_newest()
    notes = tuple(
        f"checkpoint {path.name} is damaged ({reason}): using an older one" for path, reason in newest.skipped
    )
    if newest.path is None or loaded is None:
        if newest.skipped:
            path, reason = newest.skipped[0]
            raise CheckpointError(
                f"all checkpoints of this run are damaged; the newest: {reason}",
                where=str(path),
                hint="start a new run without --resume; nothing was deleted",
            )
        return RestorePoint(None, (_no_checkpoint_note(run_dir),))
    check_state(loaded.state, newest.path)
    return RestorePoint(loaded, notes)


def _no_checkpoint_note(run_dir: RunDir) -> str:
    """The note for a run that was ended before its first checkpoint; raises if its checkpoints are gone."""
    events = read_events(run_dir.events) if run_dir.events.exists() else []  # the run had just begun
    saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
    if saved:
        raise CheckpointError(
            "the checkpoints of this run are gone",
            where=str(run_dir.checkpoints),
            why=f"events.jsonl has {plural(len(saved), 'save')}, the last one at step {saved[-1]:,}: the checkpoints "
            "were deleted or moved, or a disk is not mounted",
            hint="put them back; or start again at step 0 with a new run, without --resume",
        )
    done = max((event.step for event in events if isinstance(event, TrainProgress)), default=0)
    lost = f" ({done:,} steps are lost)" if done else ""
    return f"the run has no checkpoint yet{lost}: starting from step 0"
