"""Runs on a Ray cluster: weights equal to an undisturbed run, with nodes that are lost and nodes that join.

Needs: pip install 'reconv[ray]'
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

cluster_utils = pytest.importorskip("ray.cluster_utils")
pytestmark = pytest.mark.external

# A lost node is noticed in seconds; Ray's own defaults take most of a minute.
FAST_CHECKS = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}
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


class RayNodes:
    """A cluster on this machine, with a node for each rank."""

    def __init__(self, number: int) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20}
        self.cluster: Any = cluster_utils.Cluster(
            initialize_head=True, head_node_args={**head, "_system_config": FAST_CHECKS}
        )
        self.nodes = [self.add() for _ in range(number)]

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=80 << 20)

    def kill_last(self) -> None:
        self.nodes.pop().kill_all_processes(check_alive=False, allow_graceful=False)


@pytest.fixture
def start_nodes() -> Iterator[Any]:
    started: list[RayNodes] = []

    def start(number: int) -> RayNodes:
        started.append(RayNodes(number))
        return started[-1]

    yield start
    for nodes in started:
        nodes.cluster.shutdown()


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


def submit(recipe: Path, out: Path, nodes: RayNodes, number: str) -> subprocess.Popen[str]:
    place = ["--nodes", number, "--address", nodes.cluster.address, "--device", "cpu", "--out", str(out)]
    command = [sys.executable, "-m", "reconv", "submit", str(recipe), "--to", "ray", *place, *WORDS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


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


def test_a_node_that_is_lost_leaves_the_weights_of_an_undisturbed_run(
    recipe: Path, tmp_path: Path, start_nodes: Any
) -> None:
    out, nodes = tmp_path / "run", start_nodes(2)
    driver = submit(recipe, out, nodes, "1:2")
    wait_for_step(out, 80)
    nodes.kill_last()
    text, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, text
    assert rounds(text) == ["ray: round 1: 2 nodes, 2 ranks", "ray: round 2: 1 node, 1 rank"], text
    assert weights(out) == train_alone(recipe, tmp_path / "alone")


def test_a_node_that_joins_is_taken_in(recipe: Path, tmp_path: Path, start_nodes: Any) -> None:
    out, nodes = tmp_path / "run", start_nodes(1)
    driver = submit(recipe, out, nodes, "1:2")
    wait_for_step(out, 40)
    nodes.add()
    text, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, text
    assert rounds(text) == ["ray: round 1: 1 node, 1 rank", "ray: round 2: 2 nodes, 2 ranks"], text
    assert weights(out) == train_alone(recipe, tmp_path / "alone")


def test_a_driver_that_is_asked_to_stop_saves_and_a_new_one_continues(
    recipe: Path, tmp_path: Path, start_nodes: Any
) -> None:
    out, nodes = tmp_path / "run", start_nodes(2)
    driver = submit(recipe, out, nodes, "2")
    wait_for_step(out, 80)
    driver.send_signal(signal.SIGTERM)
    text, _ = driver.communicate(timeout=120)
    assert driver.returncode == 75, text
    again = submit(recipe, out, nodes, "2")
    text, _ = again.communicate(timeout=300)
    assert (again.returncode, "already contains a run" in text) == (2, True)
    place = ["--nodes", "2", "--address", nodes.cluster.address, "--device", "cpu", "--out", str(out), "--resume"]
    command = [sys.executable, "-m", "reconv", "submit", str(recipe), "--to", "ray", *place, *WORDS]
    subprocess.run(command, check=True, timeout=300)
    assert weights(out) == train_alone(recipe, tmp_path / "alone")


def test_an_error_that_would_repeat_ends_the_run_with_its_exit_code(
    recipe: Path, tmp_path: Path, start_nodes: Any
) -> None:
    nodes = start_nodes(1)
    place = ["--nodes", "1", "--address", nodes.cluster.address, "--device", "cpu", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "reconv", "submit", str(recipe), "--to", "ray", *place]
    outcome = subprocess.run(
        [*command, "--set", "schedule.lr=1e18", "--set", "schedule.warmup=0ep"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert outcome.returncode == 5, outcome.stdout + outcome.stderr
    assert outcome.stderr.count("error:") == 1, outcome.stderr
