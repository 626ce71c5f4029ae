"""Runs on a Ray cluster of simulated machines end with the weights of an undisturbed run, whatever happens to nodes.

Each machine is a network namespace with an address and a raylet of its own. Needs Linux, root, iproute2, util-linux and
pip install 'reconv[ray]'; TorchTrainer also pip install 'ray[train]'.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_namespaces import machines, missing_tools
from paced_run import LIMIT_S, PacedRun
from ray_machines import RayMachines

pytest.importorskip("ray")
pytestmark = [pytest.mark.external, pytest.mark.skipif(bool(missing_tools()), reason=missing_tools() or "-")]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final weights of one process."""
    return PacedRun(tmp_path_factory.mktemp("alone") / "run").train_alone()


@pytest.fixture
def ray_machines(tmp_path: Path) -> Iterator[RayMachines]:
    (tmp_path / "ray").mkdir()
    with machines(3, "rcv-ray", "10.79.0") as made:
        cluster = RayMachines(made, tmp_path / "ray")
        cluster.start()
        yield cluster


def rounds(text: str) -> list[str]:
    return [line.partition(";")[0] for line in text.splitlines() if line.startswith("ray: round")]


def finish(driver: subprocess.Popen[bytes], run: PacedRun, code: int = 0) -> str:
    """What the driver has printed, all drivers of the run included."""
    found = driver.wait(LIMIT_S)
    text = run.out.with_suffix(".txt").read_text()
    assert found == code, text
    return text


def test_a_machine_that_loses_power_leaves_the_weights_of_an_undisturbed_run(
    tmp_path: Path, ray_machines: RayMachines, reference: str
) -> None:
    run = PacedRun(tmp_path / "run")
    ray_machines.add()
    ray_machines.add()
    driver = ray_machines.submit(run, "1:2")
    run.wait_for_step(80)
    ray_machines.lose_last()
    text = finish(driver, run)
    assert rounds(text) == ["ray: round 1: 2 nodes, 2 ranks", "ray: round 2: 1 node, 1 rank"], text
    assert "step 240/240" in text  # what rank 0 prints reaches the driver
    assert run.events("attempt")[1]["from_step"] == 60
    assert run.weights() == reference


def test_a_machine_that_joins_is_taken_in_and_resumes(
    tmp_path: Path, ray_machines: RayMachines, reference: str
) -> None:
    run = PacedRun(tmp_path / "run")
    ray_machines.add()
    driver = ray_machines.submit(run, "1:2")
    run.wait_for_step(40)
    ray_machines.add()
    text = finish(driver, run)
    assert rounds(text) == ["ray: round 1: 1 node, 1 rank", "ray: round 2: 2 nodes, 2 ranks"], text
    first, second = run.events("attempt")
    assert second["from_step"] >= 40 > first["from_step"], (first, second)
    assert run.weights() == reference


def test_ranks_end_with_an_actor_that_is_killed(tmp_path: Path, ray_machines: RayMachines, reference: str) -> None:
    run = PacedRun(tmp_path / "run")
    ray_machines.add()
    ray_machines.add()
    driver = ray_machines.submit(run, "2")
    run.wait_for_step(80)
    machine = ray_machines.machines[2]
    before = {pid for pid in machine.pids() if "reconv.cluster.ray" in command_line(pid)}
    (actor,) = (pid for pid in machine.pids() if command_line(pid).startswith("ray::NodeActor"))
    assert before
    os.kill(actor, signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while before & set(machine.pids()):
        assert time.monotonic() < deadline_s, "the ranks of the actor live on"
        time.sleep(0.1)
    text = finish(driver, run)
    assert rounds(text) == ["ray: round 1: 2 nodes, 2 ranks", "ray: round 2: 2 nodes, 2 ranks"], text
    assert run.weights() == reference


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:  # it has ended
        return ""


def test_a_driver_that_is_asked_to_stop_saves_and_a_new_one_continues(
    tmp_path: Path, ray_machines: RayMachines, reference: str
) -> None:
    run = PacedRun(tmp_path / "run")
    ray_machines.add()
    ray_machines.add()
    driver = ray_machines.submit(run, "2")
    run.wait_for_step(80)
    driver.send_signal(signal.SIGTERM)
    finish(driver, run, code=75)
    assert "already contains a run" in finish(ray_machines.submit(run, "2"), run, code=2)
    finish(ray_machines.submit(run, "2", "--resume"), run)
    assert run.weights() == reference


def test_an_error_that_would_repeat_ends_the_run_with_its_exit_code(tmp_path: Path, ray_machines: RayMachines) -> None:
    run = PacedRun(tmp_path / "run")
    ray_machines.add()
    driver = ray_machines.submit(run, "1", "--set", "schedule.lr=1e18")
    text = finish(driver, run, code=5)
    assert text.count("error:") == 1, text


def test_the_documented_torch_trainer_gives_the_same_weights(
    tmp_path: Path, ray_machines: RayMachines, reference: str
) -> None:
    """The example of docs/how-to/clusters.md, over two nodes."""
    pytest.importorskip("ray.train.torch", reason="pip install 'ray[train]'")
    run = PacedRun(tmp_path / "run")
    ray_machines.variables["GLOO_SOCKET_IFNAME"] = "eth0"  # Ray's own process group: host names resolve to nothing here
    ray_machines.add()
    ray_machines.add()
    page = (Path(__file__).parents[2] / "docs/how-to/clusters.md").read_text()
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "TorchTrainer" in block)
    pairs = (word.split("=", 1) for word in run.settings[1::2])
    overrides = {name: int(value) if value.isdecimal() else value for name, value in pairs}
    changes = {
        "/shared": str(tmp_path),
        "resnet50": "quickstart",
        "use_gpu=True": "use_gpu=False",
        '"overrides": {}': f'"overrides": {overrides}',
    }
    for old, new in changes.items():
        assert old in example
        example = example.replace(old, new)
    script = tmp_path / "torch_trainer.py"
    script.write_text(example)
    variables = {"RAY_ADDRESS": ray_machines.address, "RAY_USAGE_STATS_ENABLED": "0", "RECONV_SECRET": "a test"}
    log = tmp_path / "torch_trainer.txt"
    process = ray_machines.machines[0].start([sys.executable, str(script)], log, **variables)
    assert process.wait(LIMIT_S) == 0, log.read_text()
    assert any("2 devices" in line for line in run.events("plan")[0]["lines"])
    assert run.weights() == reference
