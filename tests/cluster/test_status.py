"""What `reconv status` says about runs, from their files and Slurm's queue."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from run_example import BATCH, START_S, write_run

from reconv.cluster.status import find_runs, read_status
from reconv.cluster.submit.slurm_queue import QueuedJob, SubmittedJob, write_job
from reconv.core.errors import CheckpointError
from reconv.logging.run_dir import RunDir

RUNNING, PENDING = QueuedJob("RUNNING", "None", "n[1-2]"), QueuedJob("PENDING", "Priority", "")


def running(folder: Path, age_s: float = 3.0) -> tuple[RunDir, float]:
    """A run in step 100 of 440 whose loop made progress `age_s` ago, and the time now."""
    run_dir = RunDir(write_run(folder, stop_at=100, exit_code=None, with_images=False))
    run_dir.alive.touch()
    os.utime(run_dir.alive, (START_S + 100, START_S + 100))
    return run_dir, START_S + 100 + age_s


def test_a_running_run_has_step_rate_remaining_time_and_last_save(tmp_path: Path) -> None:
    run_dir, now_s = running(tmp_path / "run")
    status = read_status(run_dir, None, now_s)
    assert (status.state, status.recipe, status.step, status.total_steps) == ("running", "quickstart", 100, 440)
    assert status.images_per_s is not None and status.images_per_s > 0
    assert status.eta_s is not None and status.eta_s >= 0
    assert status.saved_step == 88
    assert status.saved_age_s is not None and 0 < status.saved_age_s < 103


def test_how_a_run_ended_is_its_state(tmp_path: Path) -> None:
    ends = {"finished": 0, "stopped": 75, "diverged": 5, "failed": 6}
    for state, code in ends.items():
        stop_at = None if code == 0 else 100
        folder = write_run(tmp_path / state, stop_at=stop_at, exit_code=code, with_images=False)
        assert read_status(RunDir(folder), None).state == state


def test_a_stopped_run_says_how_long_the_rest_would_take(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", stop_at=100, exit_code=75, with_images=False)
    status = read_status(RunDir(folder), None)
    assert status.images_per_s is not None
    assert status.eta_s == pytest.approx((440 - 100) * BATCH / status.images_per_s)


def test_silence_is_a_stall_or_a_kill_if_the_process_or_the_job_is_gone(tmp_path: Path) -> None:
    run_dir, now_s = running(tmp_path / "run", age_s=3600)
    assert read_status(run_dir, None, now_s).state == "stalled"
    run_dir.lock_file.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    assert read_status(run_dir, None, now_s - 3590).state == "running"
    run_dir.lock_file.write_text(json.dumps({"pid": 2**22 + 1, "host": socket.gethostname()}))  # above the largest
    assert read_status(run_dir, None, now_s - 3590).state == "killed"
    run_dir.lock_file.write_text(json.dumps({"pid": 2**22 + 1, "host": "elsewhere"}))
    assert read_status(run_dir, None, now_s - 3590).state == "running"
    write_job(run_dir.path, SubmittedJob("slurm", "7", START_S))
    assert read_status(run_dir, {}, now_s - 3590).state == "killed"
    assert read_status(run_dir, {"7": RUNNING}, now_s - 3590).state == "running"


def test_the_queue_says_whether_a_stopped_run_goes_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", stop_at=100, exit_code=75, with_images=False)
    write_job(folder, SubmittedJob("slurm", "7", START_S))
    found = [read_status(RunDir(folder), queue) for queue in ({}, {"7": PENDING}, {"7": RUNNING}, None)]
    assert [status.state for status in found] == ["stopped", "pending", "starting", "stopped"]
    assert found[1].detail == "Priority"


def test_a_submitted_run_is_listed_before_it_has_started(tmp_path: Path) -> None:
    folder = tmp_path / "runs/quickstart/1"
    folder.mkdir(parents=True)
    write_job(folder, SubmittedJob("slurm", "7", START_S))
    (run_dir,) = find_runs(tmp_path / "runs")
    states = [read_status(run_dir, queue).state for queue in ({"7": PENDING}, {"7": RUNNING}, {}, None)]
    assert states == ["pending", "starting", "failed", "pending"]


def test_runs_are_found_below_a_folder_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("a/10", "a/9", "mine"):
        write_run(tmp_path / "runs" / name, epochs=1, with_images=False)
    (tmp_path / "runs/other/deep").mkdir(parents=True)
    found = [str(run_dir.path.relative_to(tmp_path / "runs")) for run_dir in find_runs(tmp_path / "runs")]
    assert found == ["a/9", "a/10", "mine"]
    with pytest.raises(CheckpointError, match="no such run"):
        find_runs(tmp_path / "nothing")


def test_a_damaged_run_is_listed_as_unreadable(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", epochs=1, with_images=False)
    (folder / "recipe.yaml").write_text("name: [")
    assert read_status(RunDir(folder), None).state == "unreadable"
