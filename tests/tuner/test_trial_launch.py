"""Where the runs of trials are started: processes of this machine, Slurm and Ray, with stand-ins for the programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm

from reconv.core.errors import PreemptedError
from reconv.recipe.units import BatchPerDevice
from reconv.tuner.launch import (
    JobEnd,
    LocalLauncher,
    SlurmLauncher,
    TrialCommand,
    TrialJob,
    TrialLauncher,
    make_launcher,
    stopping,
)

# Python, for a test that starts processes: it notes its words, and ends as its first run or its later ones should.
PYTHON = """#!/bin/bash
printf '%s\\0' "$@" >> "$FAKE_PYTHON/words"
echo >> "$FAKE_PYTHON/starts"
[ -z "$FAKE_TEXT" ] || printf '%b' "$FAKE_TEXT" >&2
trap 'echo saved >> "$FAKE_PYTHON/saved"; exit 75' TERM
[ -z "$FAKE_WAIT" ] || { echo > "$FAKE_PYTHON/ready"; while true; do sleep 0.05; done; }
[ -z "$FAKE_SIGNAL" ] || kill -"$FAKE_SIGNAL" $$
if [ "$(wc -l < "$FAKE_PYTHON/starts")" -gt "${FAKE_FIRST_STARTS:-0}" ]; then exit "${FAKE_CODE:-0}"; fi
exit "$FAKE_FIRST_CODE"
"""
SUBMIT_OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("partition", "account", "time", "cpus_per_device", "memory_per_node", "setup", "program", "name")),
    "nic": None,
    "address": None,
    "nodes": "1",
    "devices_per_node": 2,
    "stop_before": 300,
    "sbatch_options": (),
}


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "python"
    folder.mkdir()
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    for name in ("TEXT", "WAIT", "SIGNAL", "FIRST_STARTS", "CODE", "FIRST_CODE"):
        monkeypatch.setenv(f"FAKE_{name}", "")
    monkeypatch.setenv("FAKE_PYTHON", str(folder))
    monkeypatch.setenv("FAKE_CODE", "0")
    monkeypatch.setenv("FAKE_FIRST_STARTS", "0")
    return folder


def command() -> TrialCommand:
    overrides = [("length", "4ep", "--epochs"), ("batch.size", BatchPerDevice(8, 2), "--set"), ("metrics", [], "--set")]
    return TrialCommand(recipe="quickstart", overrides=overrides, data="/photos", device="cpu")


def job(tmp_path: Path, stop_at: str | None = "33.333333%") -> TrialJob:
    return TrialJob(tmp_path / "runs" / "3", {"schedule.lr": 0.05, "optimizer.nesterov": "true", "seed": 7}, stop_at)


def ended(launcher: TrialLauncher, run: Path) -> JobEnd:
    limit_s = time.monotonic() + 60
    while time.monotonic() < limit_s:
        found = launcher.poll()
        if found:
            assert list(found) == [run]
            return found[run]
    raise AssertionError("the job does not end")


def test_a_local_job_is_reconv_train_that_continues_its_run_and_stops_at_the_rung(python: Path, tmp_path: Path) -> None:
    launcher = LocalLauncher(command())
    launcher.start(job(tmp_path))
    assert ended(launcher, tmp_path / "runs/3") == JobEnd(0)
    assert (python / "words").read_text().split("\0")[:-1] == [
        *("-m", "reconv", "train", "quickstart", "--out", str(tmp_path / "runs/3"), "--resume"),
        *("--set", "length=4ep", "--set", "batch.size=16", "--set", "metrics=[]"),
        *("--set", "schedule.lr=0.05", "--set", "optimizer.nesterov=true", "--set", "seed=7"),
        *("--data", "/photos", "--device", "cpu", "--stop-at", "33.333333%", "--quiet"),
    ]


@pytest.mark.parametrize(
    ("code", "text", "reason"),
    [
        ("5", "error: step 7: the loss is not finite\\n  why: x\\n", "exit code 5: step 7: the loss is not finite"),
        ("6", "error: Out of memory\\n  hint:  use a smaller\\n", "exit code 6: Out of memory"),
        ("1", "Traceback\\nValueError: \\x1b[31mred\\n", "exit code 1: ValueError: \\x1b[31mred"),
        ("3", "", "exit code 3"),
    ],
)
def test_the_reason_of_a_failure_is_the_error_that_the_run_printed(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, text: str, reason: str
) -> None:
    log = tmp_path / "runs/3/logs/tune.log"
    log.parent.mkdir(parents=True)
    log.write_text("error: that of an earlier start\n")
    monkeypatch.setenv("FAKE_CODE", code)
    monkeypatch.setenv("FAKE_TEXT", text)
    launcher = LocalLauncher(command())
    launcher.start(job(tmp_path))
    assert ended(launcher, tmp_path / "runs/3") == JobEnd(int(code), reason)


def test_a_killed_run_has_failed_and_one_that_others_stop_is_continued(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = LocalLauncher(command())
    monkeypatch.setenv("FAKE_SIGNAL", "KILL")
    launcher.start(job(tmp_path))
    assert ended(launcher, tmp_path / "runs/3") == JobEnd(-signal.SIGKILL, "killed by SIGKILL")
    monkeypatch.setenv("FAKE_SIGNAL", "")
    for code, first_starts, starts in (("75", 2, 3), ("8", 1, 2), ("75", 9, 4)):
        (python / "starts").write_text("")
        monkeypatch.setenv("FAKE_FIRST_CODE", code)
        monkeypatch.setenv("FAKE_FIRST_STARTS", str(first_starts))
        launcher.start(job(tmp_path))
        assert ended(launcher, tmp_path / "runs/3").code == (75 if first_starts == 9 else 0)
        assert len((python / "starts").read_text().splitlines()) == starts


def test_jobs_save_and_end_when_the_study_is_stopped(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WAIT", "1")
    launcher = LocalLauncher(command())
    with pytest.raises(PreemptedError), stopping(launcher):
        launcher.start(job(tmp_path))
        while not (python / "ready").exists():
            assert launcher.poll() == {}
        raise PreemptedError("stopped")
    assert (python / "saved").read_text() == "saved\n"
    assert launcher.poll() == {}


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_jobs_save_and_end_when_the_study_is_killed(python: Path, tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib; sys.executable = sys.argv[1]\n"
        "from reconv.tuner.launch import *\n"
        "launcher = LocalLauncher(TrialCommand(recipe='quickstart', overrides=()))\n"
        "launcher.start(TrialJob(pathlib.Path(sys.argv[2]), {}, None))\n"
        "while True: launcher.poll()\n"
    )
    real = sys.orig_argv[0]
    with subprocess.Popen(
        [real, "-c", program, sys.executable, str(tmp_path / "run")], env={**os.environ, "FAKE_WAIT": "1"}
    ) as study:
        limit_s = time.monotonic() + 60
        while not (python / "ready").exists():
            assert time.monotonic() < limit_s
            time.sleep(0.02)
        study.kill()
    while not (python / "saved").exists():
        assert time.monotonic() < limit_s
        time.sleep(0.02)


def test_trials_on_ray_are_driven_by_submit(python: Path, tmp_path: Path) -> None:
    options = {**SUBMIT_OPTIONS, "nodes": "1:2", "address": "head:6379", "cpus_per_device": 4}
    launcher = make_launcher(command(), "ray", options)
    launcher.start(job(tmp_path, None))
    assert ended(launcher, tmp_path / "runs/3") == JobEnd(0)
    words = (python / "words").read_text().split("\0")[:-1]
    assert words[:7] == ["-m", "reconv", "submit", "quickstart", "--out", str(tmp_path / "runs/3"), "--resume"]
    assert (
        words[-8:]
        == [
            *(
                "--to",
                "ray",
                "--nodes",
                "1:2",
                "--devices-per-node",
                "2",
                "--cpus-per-device",
                "4",
                "--address",
                "head:6379",
            )
        ][-8:]
    )
    assert "--stop-at" not in words


def test_a_trial_is_a_job_of_slurm_whose_start_and_restarts_stop_at_the_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm.install(tmp_path / "bin")
    for name, value in slurm.variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "photos").mkdir()
    run = tmp_path / "runs" / "3"
    shared = TrialCommand(
        recipe="quickstart", overrides=[("length", "4ep", "--epochs")], data=str(tmp_path / "photos"), device="cpu"
    )
    launcher = SlurmLauncher(shared, SUBMIT_OPTIONS, poll_s=0.0)
    launcher.start(TrialJob(run, {"schedule.lr": 0.05}, "50%"))
    (slurm.folder / "queue").write_text("4711|RUNNING|None|n1\n")
    assert launcher.poll() == {}
    assert slurm.run(run / "slurm.sh", 0).returncode == 0
    assert slurm.words("srun")[2:] == [
        *(sys.executable, "-m", "reconv", "train", "quickstart", "--out", str(run), "--resume", "--set", "length=4ep"),
        *(
            "--set",
            "schedule.lr=0.05",
            "--data",
            str(tmp_path / "photos"),
            "--device",
            "cpu",
            "--stop-at",
            "50%",
            "--quiet",
        ),
    ]
    (run / "recipe.yaml").write_text("")
    (run / "events.jsonl").write_text("")
    slurm.run(run / "slurm.sh", 0)
    assert slurm.words("srun")[2:] == [
        *(sys.executable, "-m", "reconv", "resume", str(run), "--device", "cpu", "--stop-at", "50%")
    ]

    (slurm.folder / "sbatch-words").unlink()
    again = SlurmLauncher(shared, SUBMIT_OPTIONS, poll_s=0.0)  # the study was killed; the job goes on
    again.start(TrialJob(run, {"schedule.lr": 0.05}, "50%"))
    assert not (slurm.folder / "sbatch-words").exists()
    assert again.poll() == {}
    assert again.stop() == "jobs 4711 go on in Slurm; to end them, too: scancel 4711"

    half = {"steps": 8, "total_steps": 16}
    again.start(TrialJob(run, {"schedule.lr": 0.05}, "50%"))
    (slurm.folder / "queue").write_text("")
    (run / "summary.json").write_text(json.dumps({**half, "exit_code": 0}))
    assert again.poll() == {run: JobEnd(0)}
    (run / "summary.json").write_text(json.dumps({**half, "exit_code": 5, "reason": "the loss is not finite"}))
    again.start(TrialJob(run, {"schedule.lr": 0.05}, "100%"))  # the next rung
    assert (slurm.folder / "sbatch-words").exists()
    assert again.poll() == {run: JobEnd(5, "exit code 5: the loss is not finite")}
