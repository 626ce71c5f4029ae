"""`reconv submit` and plain `srun` on a real Slurm: one controller and three nodes on this machine (`slurm_cluster`).

Needs Linux, root and: apt-get install --no-install-recommends slurm-wlm munge iproute2. Every disturbed run must end
with the weights of an undisturbed one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paced_run import write_recipe
from slurm_nodes import SLURM, missing_slurm, slurm

RECONV = [sys.executable, "-m", "reconv"]
LIMIT_S = 240
STEPS, MANY_STEPS = 200, 300
SETTINGS = {
    "schedule.warmup": "0ep",
    "batch.group": "16",
    "save.every": "50step",
    "evaluate.every": "off",
    "engine.num_threads": "1",
    "parallel.reduce": "ordered",
    "log.every": "20step",
}


def train_options(steps: int) -> list[str]:
    fields = {"length": f"{steps}step", **SETTINGS}
    return ["--device", "cpu", *(word for name, value in fields.items() for word in ("--set", f"{name}={value}"))]


def run(*command: str, **variables: str) -> str:
    """Run a command that must succeed; returns what it prints."""
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A started cluster; SLURM_CONF names it."""
    if why := missing_slurm():
        pytest.skip(why)
    with slurm(tmp_path_factory.mktemp("cluster")) as folder:
        yield folder


@pytest.fixture(autouse=True)
def _idle_nodes(cluster: Path) -> Iterator[None]:
    """No job is left of the test before, and all nodes are idle."""
    yield
    run("scancel", "--user=root")
    for number in (1, 2, 3):
        if not (cluster / f"run/n{number}.pid").exists():
            with (cluster / "revived.out").open("a") as out:
                subprocess.run([SLURM, "revive", cluster, str(number)], stdout=out, stderr=out, check=True)
    wait_for(lambda: run("sinfo", "--noheader", "--partition=low", "--states=idle", "--format=%D").strip() == "3")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that returns the final weights of one process without Slurm."""
    found: dict[int, bytes] = {}

    def of(steps: int) -> bytes:
        if steps not in found:
            out = tmp_path_factory.mktemp("undisturbed") / "run"
            run(*RECONV, "train", "quickstart", "--out", str(out), "--quiet", *train_options(steps))
            found[steps] = weights(out, steps)
        return found[steps]

    return of


def weights(run_directory: Path, steps: int = STEPS) -> bytes:
    return (run_directory / f"checkpoints/step-{steps:09d}/model.safetensors").read_bytes()


def wait_for(is_true: Any, what: str = "", limit_s: float = LIMIT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline_s, what or "waited in vain"
        time.sleep(0.2)


def submit(out: Path, *options: str, steps: int = STEPS, recipe: str = "quickstart") -> str:
    """Submit a run on two nodes with two ranks each; returns the id of the job."""
    words = ["submit", recipe, "--to", "slurm", "--nodes", "2", "--devices-per-node", "2", "--out", str(out)]
    printed = run(*RECONV, *words, "--time", "20", "--stop-before", "60", *train_options(steps), *options, "--json")
    return str(json.loads(printed)["job_id"])


def status(out: Path) -> dict[str, Any]:
    (found,) = json.loads(run(*RECONV, "status", str(out), "--json"))
    assert isinstance(found, dict)
    return found


def log_of(out: Path) -> str:
    return "".join(file.read_text() for file in sorted((out / "logs").glob("slurm-*.log")))


def job_field(job: str, name: str) -> str:
    match = re.search(rf"\b{name}=(\S*)", run("scontrol", "show", "job", job))
    assert match is not None
    return match[1]


def wait_until_step(out: Path, step: int) -> None:
    wait_for(lambda: f"step {step}/" in log_of(out), f"step {step} of {out}:\n{log_of(out)}")


def wait_until_finished(out: Path) -> None:
    wait_for(lambda: "the run is finished" in log_of(out), f"the end of {out}")
    wait_for(lambda: status(out)["state"] == "finished", "state finished")


def test_two_nodes_with_two_ranks_each_give_the_weights_of_one_process(tmp_path: Path, undisturbed: Any) -> None:
    out = tmp_path / 'my run\'s "$HOME" 100%'
    job = submit(out)
    wait_until_step(out, 20)
    found = status(out)
    assert (found["state"], found["job_id"], found["total_steps"]) == ("running", job, STEPS)
    assert found["eta_s"] is not None and found["images_per_s"] > 0
    wait_until_finished(out)
    assert "4 processes on 2 machines, started by Slurm" in log_of(out)
    assert weights(out) == undisturbed(STEPS)


def test_a_run_longer_than_the_time_limit_is_saved_and_requeued_until_it_is_finished(
    tmp_path: Path, undisturbed: Any
) -> None:
    out = tmp_path / "run"
    # Steps that take half a second on any machine, so that the run takes longer than one start: at most two minutes.
    recipe = write_recipe(tmp_path, pause_s=0.5)
    options = ["--time", "3", "--set", "save.every=1000000step"]
    job = submit(out, *options, steps=MANY_STEPS, recipe=str(recipe))
    wait_until_step(out, 20)
    recipe.write_text("extends: resnet50\n")  # the run keeps the recipe that it was started with
    wait_for(lambda: "the run is finished" in log_of(out), limit_s=900)
    assert log_of(out).count("stopped by SIGUSR1") >= 1
    assert log_of(out).count("a checkpoint was saved: requeueing") >= 1
    assert int(job_field(job, "Restarts")) >= 1
    assert weights(out, MANY_STEPS) == undisturbed(MANY_STEPS)


def test_a_preempted_run_is_saved_and_continues_when_slurm_requeues_it(tmp_path: Path, undisturbed: Any) -> None:
    out = tmp_path / "run"
    job = submit(out, "--set", "save.every=1000000step")
    wait_until_step(out, 40)
    run("sbatch", "--partition=high", "--nodes=3", "--ntasks-per-node=4", "--output=/dev/null", "--wrap=sleep 8")
    wait_for(lambda: "Slurm is ending the job" in log_of(out), "the preemption")
    wait_until_finished(out)
    assert log_of(out).count("stopped by SIGTERM") == 1
    assert "a checkpoint was saved: requeueing" not in log_of(out)  # Slurm does it
    assert int(job_field(job, "Restarts")) == 1
    assert weights(out) == undisturbed(STEPS)


@pytest.mark.parametrize("victim", ["first", "last"])
def test_a_run_continues_on_other_nodes_when_one_is_lost(
    victim: str, cluster: Path, tmp_path: Path, undisturbed: Any
) -> None:
    """The first node runs the batch script and rank 0, the last one only ranks."""
    out = tmp_path / "run"
    job = submit(out)
    wait_until_step(out, 60)
    nodes = run("scontrol", "show", "hostnames", job_field(job, "NodeList")).split()
    lost = nodes[0] if victim == "first" else nodes[-1]
    subprocess.run([SLURM, "kill", cluster, lost.removeprefix("n")], check=True, timeout=60)
    wait_until_finished(out)
    restarts = int(job_field(job, "Restarts"))
    assert restarts == 1 and lost not in run("scontrol", "show", "hostnames", job_field(job, "NodeList")).split()
    if victim == "last":
        assert re.search(rf"error: rank [23] is lost.*\n  where: {lost},", log_of(out))
    assert weights(out) == undisturbed(STEPS)


def test_a_cancelled_run_is_saved_and_not_requeued_until_it_is_submitted_again(
    tmp_path: Path, undisturbed: Any
) -> None:
    out = tmp_path / "run"
    job = submit(out, "--set", "save.every=1000000step")
    wait_until_step(out, 40)
    run("scancel", job)
    wait_for(lambda: status(out)["state"] == "stopped", "state stopped")
    wait_for(lambda: job_field(job, "JobState") == "CANCELLED", "state CANCELLED")
    assert status(out)["saved_step"] == status(out)["step"] >= 40
    again = submit(out, "--resume")
    assert again != job
    wait_until_finished(out)
    assert weights(out) == undisturbed(STEPS)


def test_a_run_is_not_submitted_twice(tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = submit(out, steps=MANY_STEPS)
    words = [*RECONV, "submit", "quickstart", "--to", "slurm", "--out", str(out), "--resume"]
    refused = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert refused.returncode == 2
    assert f"job {job} is already" in refused.stderr


def test_plain_srun_gives_the_weights_of_one_process(tmp_path: Path, undisturbed: Any) -> None:
    out = tmp_path / "run"
    words = ["srun", "--nodes=2", "--ntasks-per-node=2", *RECONV, "train", "quickstart", "--out", str(out), "--quiet"]
    run(*words, *train_options(STEPS))
    assert "4 processes on 2 machines, started by Slurm" in (out / "events.jsonl").read_text()
    assert weights(out) == undisturbed(STEPS)


def test_a_master_that_cannot_be_resolved_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    words = ["srun", "--nodes=2", "--ntasks-per-node=2", *RECONV, "train", "quickstart", "--out", str(tmp_path / "run")]
    failed = subprocess.run(
        [*words, *train_options(STEPS)],
        env={**os.environ, "MASTER_ADDR": "nowhere.invalid"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert failed.returncode == 2
    assert "'nowhere.invalid', cannot be resolved" in failed.stderr
    assert "waiting for" not in failed.stderr
