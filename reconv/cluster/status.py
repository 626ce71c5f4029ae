"""Status of runs: state, step, rate, remaining time and last save, from their run directories and Slurm's queue."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from reconv.cluster.submit.slurm import JOB_FILE
from reconv.cluster.submit.slurm_queue import QueuedJob, SubmittedJob, queued_jobs, read_job
from reconv.core.errors import ReconvError
from reconv.core.machine import process_exists
from reconv.logging import formatting as fmt
from reconv.logging.run_dir import RunDir, no_such_run
from reconv.report.run_record import RunRecord, load_run_record

ACTIVE = ("pending", "starting", "running")  # states in which a run goes on by itself
STALLED_S = 900.0  # without progress; a first step, a save or a report may take minutes
_MAX_DEPTH = 3  # of run directories below a folder: runs/RECIPE/N, and one more


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Current status of a run; unknown fields are None."""

    run: str
    state: str  # one of ACTIVE, or stalled, stopped, finished, diverged, failed, killed, unreadable
    detail: str  # why, in a few words
    recipe: str | None = None
    step: int | None = None
    total_steps: int | None = None
    images_per_s: float | None = None
    eta_s: float | None = None  # of a run that is not running: how long it would take
    saved_step: int | None = None
    saved_age_s: float | None = None
    progress_age_s: float | None = None
    attempts: int = 0
    job_id: str | None = None

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE


def find_runs(path: Path) -> list[RunDir]:
    """The run directory at a path, or those below it, with and without a first step."""
    if not path.exists():
        raise no_such_run(path)
    return sorted(_runs_below(path, _MAX_DEPTH), key=lambda run: _natural(run.path))


def _runs_below(path: Path, depth: int) -> Iterator[RunDir]:
    run = RunDir(path)
    if run.is_run() or (path / JOB_FILE).is_file():
        yield run
    elif depth and path.is_dir():
        with os.scandir(path) as entries:
            folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        for folder in folders:
            yield from _runs_below(folder, depth - 1)


def _natural(path: Path) -> list[tuple[int, str]]:
    """A key that sorts run 10 after run 9."""
    return [(int(part) if part.isdecimal() else -1, part) for part in path.parts]


def read_status(run_dir: RunDir, queue: Mapping[str, QueuedJob] | None, now_s: float | None = None) -> RunStatus:
    """The status of a run; `queue` are the jobs in Slurm's queue, None if they are not known."""
    now_s = time.time() if now_s is None else now_s
    job = read_job(run_dir.path)
    job_id = None if job is None else job.job_id
    queued = queue.get(job.job_id) if queue is not None and job is not None else None
    if not run_dir.events.is_file():
        state, detail = _state_without_events(job, queue, queued)
        return RunStatus(str(run_dir.path), state, detail, job_id=job_id)
    try:
        record = load_run_record(run_dir.path)
    except ReconvError as error:
        return RunStatus(str(run_dir.path), "unreadable", error.what, job_id=job_id)
    progress_age_s = _progress_age_s(run_dir, record, now_s)
    state, detail = _state(run_dir, record, job, queue, queued, progress_age_s)
    saved = record.checkpoints[-1] if record.checkpoints else None
    return RunStatus(
        run=str(run_dir.path),
        state=state,
        detail=detail,
        recipe=record.name,
        step=record.steps,
        total_steps=record.plan.total_steps if record.plan else None,
        images_per_s=next((event.images_per_s for event in reversed(record.progress) if event.images_per_s), None),
        eta_s=_eta_s(record, now_s, is_running=state == "running"),
        saved_step=saved.step if saved else None,
        saved_age_s=max(0.0, now_s - saved.time_s) if saved and saved.time_s is not None else None,
        progress_age_s=progress_age_s,
        attempts=len(record.attempts),
        job_id=job_id,
    )


def read_statuses(run_dirs: list[RunDir]) -> list[RunStatus]:
    """The status of each run; Slurm is asked once, if any of them was submitted to it."""
    queue = queued_jobs() if any(read_job(run_dir.path) is not None for run_dir in run_dirs) else None
    return [read_status(run_dir, queue) for run_dir in run_dirs]


def _state_without_events(
    job: SubmittedJob | None, queue: Mapping[str, QueuedJob] | None, queued: QueuedJob | None
) -> tuple[str, str]:
    """The state of a run that has not written anything yet."""
    if queued is not None:
        return _queued_state(queued)
    if job is not None and queue is None:
        return "pending", "submitted; Slurm's queue is not known here"
    return "failed", "ended before its first step: see logs/" if job is not None else "it has no events.jsonl"


def _queued_state(queued: QueuedJob) -> tuple[str, str]:
    return ("starting", f"on {queued.nodes}") if queued.is_running else ("pending", queued.reason)


def _state(
    run_dir: RunDir,
    record: RunRecord,
    job: SubmittedJob | None,
    queue: Mapping[str, QueuedJob] | None,
    queued: QueuedJob | None,
    progress_age_s: float | None,
) -> tuple[str, str]:
    """The state of a run that was started, and why."""
    end = record.end
    if queued is not None and (end is not None or not queued.is_running):
        return _queued_state(queued)
    if end is not None:
        state = fmt.state(
            {"exit_code": end.exit_code, "resume_command": end.fields.get("stopped_after"), "expect": None}
        )
        return state, "" if state == "finished" else end.reason
    age = f"no progress for {fmt.duration(progress_age_s)}"
    is_gone = job is not None and queue is not None and queued is None
    if is_gone or _is_holder_gone(run_dir):
        return "killed", age
    is_stalled = progress_age_s is not None and progress_age_s > STALLED_S
    return ("stalled", age) if is_stalled else ("running", f"on {queued.nodes}" if queued else "")


def _is_holder_gone(run_dir: RunDir) -> bool:
    """True if the process that locked the run ran on this machine and no longer exists."""
    try:
        holder = json.loads(run_dir.lock_file.read_bytes()[:4096])
        return holder["host"] == socket.gethostname() and not process_exists(int(holder["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _progress_age_s(run_dir: RunDir, record: RunRecord, now_s: float) -> float | None:
    """Seconds since the training loop last made progress, or else the last attempt started."""
    stamps = [record.attempts[-1].start.time_s] if record.attempts else []
    with suppress(OSError):  # none yet
        stamps.append(run_dir.alive.stat().st_mtime)
    known = [stamp for stamp in stamps if stamp is not None]
    return max(0.0, now_s - max(known)) if known else None


def _eta_s(record: RunRecord, now_s: float, is_running: bool) -> float | None:
    """The remaining time: as the run has estimated it, or at its last rate if it is not running."""
    if record.plan is None or not record.progress or record.steps >= record.plan.total_steps:
        return None
    last = record.progress[-1]
    if is_running and last.eta_s is not None and last.time_s is not None:
        return max(0.0, last.eta_s - (now_s - last.time_s))
    rate = next((event.images_per_s for event in reversed(record.progress) if event.images_per_s), None)
    images = (record.plan.total_steps - record.steps) * record.plan.global_batch_size
    return images / rate if rate else None
