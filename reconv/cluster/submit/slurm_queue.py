"""Jobs in the queue of Slurm, by sbatch and squeue, and the file that says which job a run directory belongs to."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from reconv.cluster.submit.slurm import JOB_FILE, SCRIPT_NAME
from reconv.core.errors import ResourceError, UsageError
from reconv.logging.run_dir import RunDir
from reconv.storage import read_limits
from reconv.storage.bounded import NotRegularFileError, NotTextError, TooLargeError, read_json_object
from reconv.storage.files import disk_errors, write_atomic

_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """The job that was last submitted for a run."""

    scheduler: str
    job_id: str
    submitted_s: float  # Unix seconds


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job as `squeue` lists it."""

    state: str  # PENDING, RUNNING, COMPLETING, ...
    reason: str
    nodes: str

    @property
    def is_running(self) -> bool:
        return self.state not in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING")


def write_job(run: Path, job: SubmittedJob) -> None:
    """Record the job of a run."""
    write_atomic(run / JOB_FILE, json.dumps(asdict(job), indent=2) + "\n")


def read_job(run: Path) -> SubmittedJob | None:
    """The job that was last submitted for a run; None if there is none, or its file cannot be read."""
    try:
        record = read_json_object(run / JOB_FILE, read_limits.SUMMARY_BYTES)
        return SubmittedJob(str(record["scheduler"]), str(record["job_id"]), float(record["submitted_s"]))
    except (OSError, NotRegularFileError, TooLargeError, NotTextError, ValueError, KeyError, TypeError):
        return None


def has_slurm() -> bool:
    """True if jobs can be submitted from this machine."""
    return shutil.which("sbatch") is not None


def submit_script(run_dir: RunDir, text: str) -> SubmittedJob:
    """Write the batch script of a run, submit it and record the job; a refused job leaves no new run directory."""
    script = run_dir.path / SCRIPT_NAME
    with disk_errors(script):
        run_dir.logs.mkdir(exist_ok=True)  # Slurm opens its log before the script starts
        write_atomic(script, text)
        script.chmod(0o755)
    try:
        job = sbatch(script)
    except UsageError:
        if not run_dir.is_run():
            with suppress(OSError):  # what else is in the folder stays
                script.unlink()
                run_dir.logs.rmdir()
                run_dir.path.rmdir()
        raise
    write_job(run_dir.path, job)
    return job


def sbatch(script: Path) -> SubmittedJob:
    """Submit a batch script."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise UsageError(
            "this machine has no Slurm: sbatch is not on the PATH",
            hint="submit from a login node of the cluster, or print the script with --dry-run",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ResourceError(
            f"sbatch did not return within {_TIMEOUT_S} s", hint="look at `squeue` before you submit it again"
        ) from error
    job_id = re.match(r"\d+", done.stdout.strip())  # may be followed by the name of the cluster
    if done.returncode != 0 or job_id is None:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"sbatch exited with code {done.returncode}"]
        raise UsageError(
            "Slurm refused the job",
            where=str(script),
            why=lines[-1],
            hint="change the options, or give more with --sbatch OPTION",
        )
    return SubmittedJob("slurm", job_id[0], round(time.time(), 3))


def queued_jobs() -> dict[str, QueuedJob] | None:
    """The jobs of this user by id; None if that is not known."""
    command = ["squeue", "--noheader", f"--user={os.geteuid()}", "--format=%A|%T|%r|%N"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    fields = (line.split("|", 3) for line in done.stdout.splitlines())
    return {field[0].strip(): QueuedJob(*field[1:]) for field in fields if len(field) == 4}
