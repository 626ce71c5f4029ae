"""Which run folder a command means, and whether an existing run may be gone on with.

Owns the rules of `--out` and `--resume`. Refuses to know how a run works. Invariant: a folder that holds a run is
never written to unless resuming was asked for and the recipe is the same where it must be.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reconv.checkpoint.run_dir import RunDir
from reconv.checkpoint.store import CheckpointStore, LoadedCheckpoint
from reconv.errors import CheckpointError, RecipeError, UsageError
from reconv.recipe.loader import differences, load, may_change
from reconv.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class ChosenRunDir:
    """The folder of a run, whether a run is in it already, and what should be said about that."""

    folder: RunDir
    exists: bool
    notes: tuple[str, ...] = ()


def existing_run(recipe: Recipe, *, out: Path | None, runs: Path) -> RunDir | None:
    """The run that `--resume` means, if there is one: the one in `--out`, else the newest, unfinished ones first."""
    if out is not None:
        return RunDir(out) if RunDir(out).is_run() else None
    return RunDir.newest_unfinished(runs, recipe.name) or next(iter(RunDir.all(runs, recipe.name)), None)


def known_data_path(folder: RunDir) -> str | None:
    """Where a run found its data."""
    return load(str(folder.recipe)).recipe.data.path if folder.recipe.is_file() else None


def refuse_taken(out: Path | None, resume: bool) -> None:
    """Refuse a folder that holds a run, unless that run is to go on."""
    if out is not None and RunDir(out).is_run() and not resume:
        raise UsageError(
            f"{out} already holds a run",
            where=str(RunDir(out).recipe),
            then="add --resume to go on with it, or choose another --out",
        )


def choose_folder(recipe: Recipe, *, out: Path | None, resume: bool, runs: Path) -> ChosenRunDir:
    """The folder a command means."""
    if out is not None:
        refuse_taken(out, resume)
        exists = RunDir(out).is_run()
        nothing = (f"nothing to resume in {out}: starting afresh",) if resume and not exists else ()
        return ChosenRunDir(RunDir.at(out), exists, nothing)
    if resume:
        found = existing_run(recipe, out=None, runs=runs)
        if found is not None:
            return ChosenRunDir(found, exists=True)
        return ChosenRunDir(
            RunDir.create(runs, recipe.name), False, (f"no run of {recipe.name} in {runs}: starting afresh",)
        )
    return ChosenRunDir(RunDir.create(runs, recipe.name), exists=False)


def check_same_run(folder: RunDir, recipe: Recipe) -> tuple[str, ...]:
    """Refuse a recipe that would make it another run; say which harmless settings changed."""
    old = load(str(folder.recipe)).recipe
    changed = differences(old, recipe)
    said: list[str] = []
    refused: list[str] = []
    for name, (before, after) in sorted(changed.items()):
        if name == "length" and _longer(old, recipe):
            said.append(f"length: {before} -> {after}; the run is extended and its schedule stretched")
        elif name == "batch.micro" and recipe.batch.group != "micro":
            order = "" if recipe.parallel.reduce == "ordered" else "; from here on sums are added in another order"
            said.append(f"{name}: {before} -> {after}{order}")
        elif may_change(name):
            said.append(f"{name}: {before} -> {after}")
        else:
            refused.append(f"{name}: the run has {before}, the command says {after}")
    if refused:
        raise RecipeError(
            "the recipe has changed since this run was started:\n" + "\n".join(f"    {line}" for line in refused),
            where=str(folder.recipe),
            then="repeat the settings of the first command, name another run with --out, or start a new one",
        )
    return tuple(said)


def _longer(old: Recipe, new: Recipe) -> bool:
    return old.length.unit == new.length.unit and new.length.value > old.length.value


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The newest valid checkpoint, or nothing when the run was ended before its first save."""

    loaded: LoadedCheckpoint | None
    notes: tuple[str, ...]

    @property
    def state(self) -> dict[str, Any]:
        return dict(self.loaded.state) if self.loaded is not None else {}


def find_restore_point(store: CheckpointStore) -> RestorePoint:
    """The newest checkpoint that is whole; torn ones are named."""
    newest = store.newest()
    notes = tuple(f"checkpoint {path.name} is not usable ({reason}); fell back" for path, reason in newest.skipped)
    if newest.path is None:
        if newest.skipped:
            path, reason = newest.skipped[0]
            raise CheckpointError(
                f"no checkpoint of this run is usable; the newest is not ({reason})",
                where=str(path),
                then="start a new run without --resume; nothing was deleted",
            )
        return RestorePoint(None, ("no checkpoint was written yet: starting from step 0",))
    return RestorePoint(store.load(newest.path), notes)
