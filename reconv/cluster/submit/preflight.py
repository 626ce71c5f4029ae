"""Checks before a job is submitted: the recipe on so many devices, its data, and the run directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from reconv.cluster.submit.slurm_queue import queued_jobs, read_job
from reconv.core.errors import DataError, ResourceError, UsageError
from reconv.logging.formatting import resume_command
from reconv.logging.run_dir import RunDir
from reconv.recipe.batch_split import num_copies, split_batch
from reconv.recipe.load.resolved import Resolved
from reconv.recipe.loader import Override, load
from reconv.recipe.parts.code import names_code
from reconv.recipe.parts.data import NEED_NO_PATH
from reconv.storage.mounts import is_local
from reconv.storage.object_stores.store import is_url


def check_recipe(recipe: str, overrides: Sequence[Override], data: str | None, num_devices: int) -> Resolved:
    """Load the recipe, and check that its batch can be split over the devices and that its data is there."""
    given = [("data.path", data, "--data")] if data is not None else []
    resolved = load(recipe, [*overrides, *given])
    if not resolved.is_open("batch.size"):
        split_batch(resolved.recipe, num_copies(resolved.recipe, num_devices))
    return resolved


def check_data(resolved: Resolved) -> Path | None:
    """The absolute path of the recipe's data, which must exist here; None if it needs none, or is not a path."""
    config = resolved.recipe.data
    if config.source in NEED_NO_PATH or names_code(config.source):
        return None
    text = config.path or os.environ.get("DATA_DIR")
    if text is None:
        raise DataError(
            f"{resolved.recipe.name} needs a dataset", where="data.path", hint="add --data DIR, or set DATA_DIR"
        )
    if is_url(text):
        return None
    path = Path(text).expanduser().absolute()
    if not path.exists():
        raise DataError(
            "the dataset does not exist on this machine",
            where=str(path),
            why="jobs read it at the same path on every node",
            hint="give the path of a shared folder with --data DIR",
        )
    return path


def check_run(run_dir: RunDir, resume: bool) -> str:
    """Refuse a run directory that is in use or finished; returns what submitting will do."""
    job = read_job(run_dir.path)
    queued = (queued_jobs() or {}).get(job.job_id) if job is not None else None
    if job is not None and queued is not None:
        raise UsageError(
            f"job {job.job_id} is already {queued.state.lower()} for this run",
            where=str(run_dir.path),
            hint=f"follow it with `reconv status {run_dir.path}`, cancel it with `scancel {job.job_id}`, "
            "or choose another --out",
        )
    if not run_dir.is_run():
        return "a new run"
    if run_dir.is_finished():
        raise UsageError(
            "this run is already finished",
            where=str(run_dir.path),
            hint=f"choose another --out, or extend it: {resume_command(run_dir.path)} --epochs N",
        )
    if not resume:
        raise UsageError(
            f"{run_dir.path} already contains a run",
            where=str(run_dir.recipe),
            hint="add --resume to continue it, or choose another --out",
        )
    return "continues the run from its newest checkpoint"


def check_writable(folder: Path) -> str:
    """Refuse a folder that cannot be written to; returns a note if it is on a disk of this machine alone."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ResourceError(
            "the run directory cannot be written",
            where=str(folder),
            why="it is not a folder" if not existing.is_dir() else "no right to write",
            hint="choose another with --out DIR",
        )
    if not is_local(existing):
        return ""
    return f"{folder} is on a disk of this machine: the nodes must have it at the same path"
