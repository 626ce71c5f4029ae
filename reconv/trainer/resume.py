"""Resuming a run: which run directory a command refers to, whether it may be resumed, and from which checkpoint.

A directory that contains a run is written to only with --resume, with a compatible recipe, and by the process that
holds its lock.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from reconv.checkpoint.run_identity import read_identity
from reconv.checkpoint.state import check_state
from reconv.checkpoint.store import LoadedCheckpoint, open_store
from reconv.core.errors import CheckpointError, ExitCode, RecipeError, ReconvError, RemoteRankError, UsageError, one_of
from reconv.core.message import message
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
from reconv.recipe.plan_text import count as plural
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
        """What the checkpoint stores besides tensors; empty without one."""
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
                then="move this checkpoint away and use an older one",
            )


def find_run(recipe: Recipe, *, out: Path | None, runs: Path) -> RunDir | None:
    """The run that --resume refers to: the one in --out, else the newest one of this recipe, unfinished ones first."""
    if out is not None:
        return RunDir(out) if RunDir(out).is_run() else None
    return RunDir.newest_unfinished(runs, recipe.name) or next(iter(RunDir.all(runs, recipe.name)), None)


def read_data_path(run_dir: RunDir) -> str | None:
    """Where a run read its data from."""
    return load(str(run_dir.recipe)).recipe.data.path if run_dir.recipe.is_file() else None


def check_out_is_free(out: Path | None, resume: bool) -> None:
    """Raise if the directory contains a run, unless that run is resumed."""
    if out is not None and RunDir(out).is_run() and not resume:
        raise UsageError(
            f"{out} already contains a run",
            where=str(RunDir(out).recipe),
            then="add --resume to continue it, or choose another --out",
        )


def with_durations_of_run(resolved: Resolved, out: Path | None, runs: Path) -> Resolved:
    """The recipe with the durations of the run that is resumed, where the command gives none."""
    run_dir = find_run(resolved.recipe, out=out, runs=runs)
    if run_dir is None or not run_dir.recipe.is_file():
        return resolved
    return resolved.with_durations_of(load(str(run_dir.recipe)).recipe)


def open_existing(
    recipe: Recipe,
    *,
    out: Path | None,
    runs: Path,
    stack: ExitStack,
    launch_env: LaunchEnv,
    command: Sequence[str] = (),
) -> tuple[ExistingRun | None, tuple[str, ...]]:
    """Lock the run to resume until the stack is closed, and check the recipe; without one, a note for the log."""
    run_dir = find_run(recipe, out=out, runs=runs)
    if run_dir is None:
        where = f"no run to resume in {out}" if out is not None else f"no run of {recipe.name} in {runs}"
        return None, (f"{where}: starting a new one",)
    lock_run_dir(run_dir, stack, launch_env)
    notes, is_longer = check_same_run(run_dir, recipe, command)
    if run_dir.is_finished() and not is_longer:
        damage = _damage_of_last_checkpoint(run_dir)
        if not damage:
            return ExistingRun(run_dir, notes, is_finished=True, summary=read_summary(run_dir.path)), ()
        notes = (*notes, f"the run is finished, but {damage}: training its last steps again")
    return ExistingRun(run_dir, notes), ()


def _damage_of_last_checkpoint(run_dir: RunDir) -> str:
    """What is wrong with the newest checkpoint where an older one is valid; empty if nothing is."""
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


def check_same_run(run_dir: RunDir, recipe: Recipe, command: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Raise on settings that cannot change on resume; returns notes on the others, and whether the run gets longer."""
    check_recipe_unchanged(run_dir)
    old = load(str(run_dir.recipe)).recipe
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
    """What a command would change, and the commands that continue the run or start a new one."""
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
        then=one_of(*continued, _new_run_command(command, run_dir.path)),
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


def check_recipe_unchanged(run_dir: RunDir) -> None:
    """Raise if `recipe.yaml` of a run was edited in fields that determine the result."""
    if recipe_digest(yaml_document.read_file(run_dir.recipe)) in read_identity(run_dir).recipe_digests:
        return
    raise RecipeError(
        "\n    ".join(["recipe.yaml was changed since the run was started:", *_edited_fields(run_dir)]),
        where=str(run_dir.recipe),
        why="these settings determine the result, and the checkpoints of this run were trained with other ones",
        then=f"undo the change, or train it as a new run: reconv train '{run_dir.recipe}' --out DIR",
    )


def _edited_fields(run_dir: RunDir) -> list[str]:
    """How `recipe.yaml` differs from the recipe in the newest checkpoint, if there is one that can be read."""
    store = open_store(run_dir)
    newest = store.newest().path
    if newest is None:
        return ["fields that determine the result differ"]
    try:
        trained = Recipe.model_validate(store.read_state(newest).get("recipe"))
    except ValueError:  # of another version
        return [f"fields that determine the result differ from those in {newest.name}"]
    changed = differences(trained, load(str(run_dir.recipe)).recipe)
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
    newest = store.newest()
    notes = tuple(
        f"checkpoint {path.name} is damaged ({reason}): using an older one" for path, reason in newest.skipped
    )
    if newest.path is None:
        if newest.skipped:
            path, reason = newest.skipped[0]
            raise CheckpointError(
                f"all checkpoints of this run are damaged; the newest: {reason}",
                where=str(path),
                then="start a new run without --resume; nothing was deleted",
            )
        return RestorePoint(None, (_no_checkpoint_note(run_dir),))
    loaded = store.load(newest.path)
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
            then="put them back; or start again at step 0 with a new run, without --resume",
        )
    done = max((event.step for event in events if isinstance(event, TrainProgress)), default=0)
    lost = f" ({done:,} steps are lost)" if done else ""
    return f"the run has no checkpoint yet{lost}: starting from step 0"
