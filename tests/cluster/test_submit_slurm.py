"""The batch script of `reconv submit --to slurm`, run by bash with stand-ins for srun, squeue and scontrol."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from reconv.cluster.submit.slurm import SlurmJob, batch_script, seconds_of
from reconv.core.errors import UsageError

AWKWARD = "a b'c\"d%e#f$g;(h)"
TRAIN = ["reconv", "train", "my recipe.yaml", "--set", "name=$(touch hacked) 'x' \"y\" `id`"]


def example(folder: Path, name: str = "run") -> SlurmJob:
    run = folder / name
    (run / "logs").mkdir(parents=True)
    return SlurmJob(
        name="test",
        run=run,
        folder=folder,
        nodes=2,
        devices_per_node=8,
        train=TRAIN,
        resume=["reconv", "resume", str(run)],
    )


def write(job: SlurmJob) -> Path:
    script = job.run / "slurm.sh"
    script.write_text(batch_script(job))
    return script


@pytest.mark.parametrize(
    ("code", "state", "requeues"),
    [
        (0, "RUNNING", 0),
        (75, "RUNNING", 1),
        (75, "COMPLETING", 0),  # scancel, or a preemption: Slurm decides
        (2, "RUNNING", 0),
        (5, "RUNNING", 0),
        (7, "RUNNING", 0),  # a lost rank
        (7, "COMPLETING", 0),  # a lost node: Slurm requeues
        (137, "RUNNING", 0),
        (143, "COMPLETING", 0),
    ],
)
def test_only_a_saved_run_that_slurm_does_not_end_is_requeued(
    code: int, state: str, requeues: int, tmp_path: Path
) -> None:
    slurm = FakeSlurm.install(tmp_path / "bin")
    done = slurm.run(write(example(tmp_path)), code, state)
    assert (done.returncode, slurm.requeues(), done.stderr) == (code, requeues, "")
    assert done.stdout.startswith("slurm.sh: ")


def test_requeueing_is_tried_again_while_the_controller_is_down(tmp_path: Path) -> None:
    slurm = FakeSlurm.install(tmp_path / "bin")
    script = write(example(tmp_path))
    done = slurm.run(script, 75, FAKE_SCONTROL_CODE="1")
    assert (done.returncode, slurm.requeues()) == (75, 10)
    assert f"to continue: sbatch {script}" in done.stdout


@pytest.mark.parametrize(
    "name", ["a'b", 'a"b', "a`touch hacked`b", "a$(touch hacked)b", "a$HOME b", "a\u00e9 100%", "-a"]
)
def test_any_name_of_a_run_directory_is_only_a_name(name: str, tmp_path: Path) -> None:
    slurm = FakeSlurm.install(tmp_path / "bin")
    script = write(example(tmp_path, name))
    for code in (7, 75):
        done = slurm.run(script, code, FAKE_SCONTROL_CODE="1")
        again = shlex.split(re.findall(r": (sbatch .*)", done.stdout)[-1])
        assert (done.returncode, done.stderr, again) == (code, "", ["sbatch", str(script)])
    assert list(tmp_path.rglob("hacked")) == []


@pytest.mark.parametrize("code", [138, 143])
def test_starts_that_reach_no_step_before_the_signal_are_requeued_until_the_third_in_a_row(
    code: int, tmp_path: Path
) -> None:
    slurm = FakeSlurm.install(tmp_path / "bin")
    script = write(example(tmp_path))
    assert [(slurm.run(script, code).returncode, slurm.requeues()) for _ in range(2)] == [(code, 1), (code, 2)]
    slurm.run(script, 75)  # one that has saved: counting starts again
    found = [(slurm.run(script, code).returncode, slurm.requeues()) for _ in range(3)]
    assert found == [(code, 4), (code, 5), (code, 5)]


def test_the_first_start_trains_and_later_ones_resume_word_for_word(tmp_path: Path) -> None:
    slurm = FakeSlurm.install(tmp_path / "bin")
    folder = tmp_path / AWKWARD
    job = example(folder, "my run")
    script = write(job)
    assert slurm.run(script, 75).returncode == 75
    assert slurm.words("srun") == ["--kill-on-bad-exit=0", "--wait=0", *TRAIN]
    assert (slurm.folder / "srun-folder").read_text() == f"{folder}\n"
    assert not (folder / "hacked").exists()
    for name in ("recipe.yaml", "events.jsonl"):
        (job.run / name).touch()
    slurm.run(script, 0)
    assert slurm.words("srun")[2:] == ["reconv", "resume", str(job.run)]
    assert json.loads((job.run / "job.json").read_text())["job_id"] == "4711"


def test_the_options_ask_for_a_process_per_device_and_a_signal_before_the_limit(tmp_path: Path) -> None:
    job = replace(example(tmp_path), time="8:00:00", partition="gpu", account="lab", memory_per_node="64G")
    lines = batch_script(replace(job, cpus_per_device=12, stop_before_s=600)).splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    expected = ["--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=12", "--mem=64G"]
    expected += ["--partition=gpu", "--account=lab", "--time=8:00:00"]
    expected += ["--signal=USR1@600", "--requeue", "--open-mode=append"]
    assert [option for option in options if option in expected] == expected
    assert 'srun --cpus-per-task=12 --kill-on-bad-exit=0 --wait=0 "${command[@]}"' in lines


def test_options_of_the_user_come_through_and_replace_the_request_for_gpus(tmp_path: Path) -> None:
    script = batch_script(replace(example(tmp_path), sbatch_options=["--gres=gpu:a100:8", "--qos=high"]))
    assert "#SBATCH --gres=gpu:a100:8\n#SBATCH --qos=high\n" in script
    assert "--gpus-per-node" not in script
    by_device = {"cpu": "", "hpu": "--gres=hpu:8", "cuda": "--gpus-per-node=8"}
    for device, option in by_device.items():
        script = batch_script(replace(example(tmp_path, device), device=device))
        assert re.findall(r"--g\S+", script) == [option] * bool(option)


def test_setup_lines_run_before_the_ranks(tmp_path: Path) -> None:
    slurm = FakeSlurm.install(tmp_path / "bin")
    slurm.run(write(replace(example(tmp_path), setup="export MODULE='cuda 12'  # {braces}\n")), 0)
    assert "MODULE=cuda 12" in (slurm.folder / "srun-environment").read_text().splitlines()


@pytest.mark.parametrize(
    "change",
    [
        {"name": "two words"},
        {"name": "x\n#SBATCH --uid=0"},
        {"partition": "gpu --uid=0"},
        {"account": "a b"},
        {"memory_per_node": "lots"},
        {"sbatch_options": ["qos=high"]},
        {"sbatch_options": ["--qos=high\nrm -rf /"]},
        {"time": "tomorrow"},
        {"time": "9"},  # minutes: less than twice --stop-before
        {"run": Path("/runs/a\\b")},
        {"run": Path("/runs/a\nb")},
    ],
)
def test_what_slurm_would_read_as_something_else_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        batch_script(replace(example(tmp_path), **change))  # type: ignore[arg-type]


def test_time_limits_are_read_as_sbatch_does() -> None:
    limits = {"90": 5400, "1:30": 90, "8:00:00": 28800, "2-12": 216000, "1-0:30": 88200, "1-00:00:01": 86401}
    assert {time: seconds_of(time) for time in limits} == limits
