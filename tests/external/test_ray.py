"""Runs on a Ray cluster of simulated machines end with the weights of an undisturbed run, whatever happens to nodes.

Each machine is a network namespace with an address and a raylet of its own. Needs Linux, root, iproute2, util-linux and
pip install 'reconv[ray]'; TorchTrainer also pip install 'ray[train]'.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from node_namespaces import Machine, machines, missing_tools

pytest.importorskip("ray")
pytestmark = [pytest.mark.external, pytest.mark.skipif(bool(missing_tools()), reason=missing_tools() or "-")]

# A lost node is noticed in seconds; Ray's own defaults take most of a minute.
FAST_CHECKS = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}
LIMIT_S = 300
STEPS = 240
SETTINGS = {
    "length": f"{STEPS}step",
    "schedule.warmup": "0ep",
    "batch.size": 32,
    "batch.group": 8,
    "save.every": "60step",
    "evaluate.every": "off",
    "log.every": "5step",
    "engine.num_threads": 1,
    "data.num_workers": 0,
    "parallel.reduce": "ordered",
    "parallel.heartbeat_timeout_s": 10,
}
WORDS = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
PACED_STEPS = """
import time
import reconv


class PacedSteps(reconv.Callback):
    def on_step_end(self, run):
        time.sleep(0.05)
"""


@dataclass(slots=True)
class RayMachines:
    """A head without CPUs on the first machine, and a raylet with one CPU on each of the others."""

    machines: list[Machine]
    folder: Path
    number: int = 0  # of the nodes that have been started
    drivers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{self.machines[0].address}:6379"

    def start(self) -> None:
        where = ["--port=6379", f"--node-ip-address={self.machines[0].address}", "--num-cpus=0"]
        self._ray(0, "--head", "--include-dashboard=false", f"--system-config={json.dumps(FAST_CHECKS)}", *where)
        self.wait_for_nodes(1)

    def add(self) -> None:
        """Start the node of another machine, and wait until the head knows it."""
        self.number += 1
        where = f"--node-ip-address={self.machines[self.number].address}"
        self._ray(self.number, f"--address={self.address}", where, "--num-cpus=1")
        self.wait_for_nodes(1 + self.number)

    def lose_last(self) -> None:
        """Cut the power of the last machine: no connection is closed, and all its processes end."""
        self.machines[self.number].set_link("down")
        self.machines[self.number].kill()

    def submit(self, recipe: Path, out: Path, number: str, *more: str) -> subprocess.Popen[bytes]:
        """Start a driver on the first machine; it prints to a file beside the run."""
        place = ["--nodes", number, "--address", self.address, "--device", "cpu", "--out", str(out)]
        command = [sys.executable, "-m", "reconv", "submit", str(recipe), "--to", "ray", *place, *WORDS, *more]
        return self.machines[0].start(command, log_of(out))

    def wait_for_nodes(self, number: int) -> None:
        code = f"import ray; ray.init('{self.address}', logging_level='ERROR', log_to_driver=False); " + (
            "import time\nwhile sum(n['Alive'] for n in ray.nodes()) < " + f"{number}: time.sleep(0.1)"
        )
        deadline_s = time.monotonic() + LIMIT_S
        while self.machines[0].start([sys.executable, "-c", code], self.folder / "ready.txt").wait(LIMIT_S):
            assert time.monotonic() < deadline_s, (self.folder / "ready.txt").read_text()[-3000:]

    def _ray(self, number: int, *words: str) -> None:
        program = str(Path(sys.executable).with_name("ray"))
        command = [program, "start", "--block", f"--object-store-memory={80 << 20}", *words]
        variables = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        self.machines[number].start(command, self.folder / f"ray-{number}.txt", **variables)


def log_of(out: Path) -> Path:
    return out.with_suffix(".txt")


@pytest.fixture
def ray_machines(tmp_path: Path) -> Iterator[RayMachines]:
    (tmp_path / "ray").mkdir()
    with machines(3, "rcv-ray", "10.79.0") as made:
        cluster = RayMachines(made, tmp_path / "ray")
        cluster.start()
        yield cluster


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "paced_steps.py").write_text(PACED_STEPS)
    file = tmp_path / "paced.yaml"
    file.write_text("extends: quickstart\nname: quickstart\ncallbacks: [paced_steps:PacedSteps]\n")
    return file


def train_alone(recipe: Path, out: Path) -> str:
    command = [sys.executable, "-m", "reconv", "train", str(recipe), "--quiet", "--out", str(out), *WORDS]
    subprocess.run(command, check=True, timeout=300)
    return weights(out)


def wait_for_step(out: Path, step: int) -> None:
    events, limit_s = out / "events.jsonl", time.monotonic() + 240
    while not events.exists() or f'"step":{step},' not in events.read_text():
        assert time.monotonic() < limit_s, "the run does not come so far"
        time.sleep(0.1)


def weights(out: Path) -> str:
    file = out / f"checkpoints/step-{STEPS:09d}/model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def rounds(text: str) -> list[str]:
    return [line.partition(";")[0] for line in text.splitlines() if line.startswith("ray: round")]


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = [line for line in (out / "events.jsonl").read_text().split("\n")[:-1] if f'"kind":"{kind}"' in line]
    return [json.loads(line) for line in lines]


def finish(driver: subprocess.Popen[bytes], out: Path, code: int = 0) -> str:
    found = driver.wait(LIMIT_S)
    text = log_of(out).read_text()
    assert found == code, text
    return text


def test_a_machine_that_loses_power_leaves_the_weights_of_an_undisturbed_run(
    recipe: Path, tmp_path: Path, ray_machines: RayMachines
) -> None:
    out = tmp_path / "run"
    ray_machines.add()
    ray_machines.add()
    driver = ray_machines.submit(recipe, out, "1:2")
    wait_for_step(out, 80)
    ray_machines.lose_last()
    text = finish(driver, out)
    assert rounds(text) == ["ray: round 1: 2 nodes, 2 ranks", "ray: round 2: 1 node, 1 rank"], text
    assert "step 240/240" in text  # what rank 0 prints reaches the driver
    assert events(out, "attempt")[1]["from_step"] == 60
    assert weights(out) == train_alone(recipe, tmp_path / "alone")


def test_a_machine_that_joins_is_taken_in_and_resumes(recipe: Path, tmp_path: Path, ray_machines: RayMachines) -> None:
    out = tmp_path / "run"
    ray_machines.add()
    driver = ray_machines.submit(recipe, out, "1:2")
    wait_for_step(out, 40)
    ray_machines.add()
    text = finish(driver, out)
    assert rounds(text) == ["ray: round 1: 1 node, 1 rank", "ray: round 2: 2 nodes, 2 ranks"], text
    first, second = events(out, "attempt")
    assert second["from_step"] >= 40 > first["from_step"], (first, second)
    assert weights(out) == train_alone(recipe, tmp_path / "alone")


def test_ranks_end_with_an_actor_that_is_killed(recipe: Path, tmp_path: Path, ray_machines: RayMachines) -> None:
    out = tmp_path / "run"
    ray_machines.add()
    ray_machines.add()
    driver = ray_machines.submit(recipe, out, "2")
    wait_for_step(out, 80)
    machine = ray_machines.machines[2]
    before = {pid for pid in machine.pids() if "reconv.cluster.ray" in command_line(pid)}
    (actor,) = (pid for pid in machine.pids() if command_line(pid).startswith("ray::NodeActor"))
    assert before
    os.kill(actor, signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while before & set(machine.pids()):
        assert time.monotonic() < deadline_s, "the ranks of the actor live on"
        time.sleep(0.1)
    text = finish(driver, out)
    assert rounds(text) == ["ray: round 1: 2 nodes, 2 ranks", "ray: round 2: 2 nodes, 2 ranks"], text
    assert weights(out) == train_alone(recipe, tmp_path / "alone")


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:  # it has ended
        return ""


def test_a_driver_that_is_asked_to_stop_saves_and_a_new_one_continues(
    recipe: Path, tmp_path: Path, ray_machines: RayMachines
) -> None:
    out = tmp_path / "run"
    ray_machines.add()
    ray_machines.add()
    driver = ray_machines.submit(recipe, out, "2")
    wait_for_step(out, 80)
    driver.send_signal(signal.SIGTERM)
    finish(driver, out, code=75)
    assert "already contains a run" in finish(ray_machines.submit(recipe, out, "2"), out, code=2)
    finish(ray_machines.submit(recipe, out, "2", "--resume"), out)
    assert weights(out) == train_alone(recipe, tmp_path / "alone")


def test_an_error_that_would_repeat_ends_the_run_with_its_exit_code(
    recipe: Path, tmp_path: Path, ray_machines: RayMachines
) -> None:
    ray_machines.add()
    driver = ray_machines.submit(recipe, tmp_path / "run", "1", "--set", "schedule.lr=1e18")
    text = finish(driver, tmp_path / "run", code=5)
    assert text.count("error:") == 1, text
