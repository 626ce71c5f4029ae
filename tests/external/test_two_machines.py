"""Jobs on two simulated machines: network namespaces joined by a virtual cable, which is cut during a run.

Needs Linux, root, `ip` (iproute2), `unshare` and `hostname`; the first test also Open MPI's `mpirun`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

NETWORK = "10.77.0.0/24"
MACHINES = {"reconv-a": "10.77.0.1", "reconv-b": "10.77.0.2"}
CABLE = {"reconv-a": "veth-reconv-a", "reconv-b": "veth-reconv-b"}
PORT = "29777"
LIMIT_S = 60
SETTINGS = {
    "length": "12step",
    "schedule.warmup": "0ep",
    "batch.group": "16",
    "save.every": "12step",
    "evaluate.every": "12step",
    "engine.num_threads": "1",
    "parallel.reduce": "ordered",
}
ENDLESS = {**SETTINGS, "length": "1000000step", "save.every": "off", "evaluate.every": "off"}


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(autouse=True)
def _machines() -> Iterator[None]:
    """Both namespaces, and the cable between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2: apt-get install iproute2")
    try:
        for name in MACHINES:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", CABLE["reconv-a"], "type", "veth", "peer", "name", CABLE["reconv-b"])
        for name, address in MACHINES.items():
            run("ip", "link", "set", CABLE[name], "netns", name)
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", CABLE[name])
            for link in (CABLE[name], "lo"):
                run("ip", "-n", name, "link", "set", link, "up")
        yield
    finally:
        for name in MACHINES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def on_machine(name: str, command: list[str]) -> list[str]:
    """A command as it is started on one of the machines, which has a host name of its own."""
    inner = f'hostname {name} && exec "$@"'
    return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", inner, "sh", *command]


def train(settings: dict[str, str], out: Path, *more: str) -> list[str]:
    fields = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "reconv", "train", "quickstart", "--out", str(out), "--quiet", *fields, *more]


def weights(run_directory: Path) -> bytes:
    return (run_directory / "checkpoints/step-000000012/model.safetensors").read_bytes()


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="apt-get install openmpi-bin")
def test_two_by_two_ranks_under_mpirun_give_the_weights_of_one_process(tmp_path: Path) -> None:
    folder = tmp_path
    agent = folder / "agent"
    cases = "".join(f"{address}) name={name} ;;\n" for name, address in MACHINES.items())
    agent.write_text(
        f'#!/bin/sh\ncase "$1" in\n{cases}esac\nshift\n'
        'exec ip netns exec $name unshare --uts sh -c "hostname $name && $*"\n'
    )
    agent.chmod(0o755)
    mpirun = ["mpirun", "--allow-run-as-root", "--host", ",".join(f"{address}:2" for address in MACHINES.values())]
    mpirun += ["--mca", "plm_rsh_agent", str(agent), "--mca", "oob_tcp_if_include", NETWORK, "--bind-to", "none"]
    mpirun += ["-x", f"MASTER_ADDR={MACHINES['reconv-a']}", "-x", f"MASTER_PORT={PORT}"]
    mpirun += [word for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ for word in ("-x", name)]
    command = [*mpirun, *train(SETTINGS, folder / "two-by-two", "--nic", NETWORK)]
    subprocess.run(on_machine("reconv-a", command), check=True, timeout=600)
    subprocess.run(train(SETTINGS, folder / "one"), check=True, timeout=600)
    events = (folder / "two-by-two/events.jsonl").read_text()
    assert "4 processes on 2 machines, started by Open MPI" in events, events[:2000]
    assert weights(folder / "two-by-two") == weights(folder / "one"), "the weights differ"


def test_both_ranks_exit_with_code_7_within_a_minute_of_a_network_failure(tmp_path: Path) -> None:
    folder, started = tmp_path, {}
    for rank, (name, address) in enumerate(MACHINES.items()):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        variables |= {"MASTER_ADDR": MACHINES["reconv-a"], "MASTER_PORT": PORT}
        command = on_machine(name, train(ENDLESS, folder / "cut", "--nic", address))
        started[name] = subprocess.Popen(
            command, env={**os.environ, **variables}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
    try:
        log, deadline_s = folder / "cut/logs/rank-1.log", time.monotonic() + 300
        while not (log.exists() and "step 20/" in log.read_text()):
            assert time.monotonic() < deadline_s, "the run never reached step 20"
            time.sleep(0.1)
        run("ip", "-n", "reconv-b", "link", "set", CABLE["reconv-b"], "down")
        cut_s = time.monotonic()
        for name, process in started.items():
            _, stderr = process.communicate(timeout=LIMIT_S + 10)
            took_s = time.monotonic() - cut_s
            assert process.returncode == 7, (name, process.returncode, stderr)
            assert took_s < LIMIT_S, f"{name} took {took_s:.0f} s"
            assert any(line.startswith("error: ") for line in stderr.splitlines()), (name, stderr)
    finally:
        for process in started.values():
            process.kill()


SCAN = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
def is_open(port):
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((sys.argv[1], port)) == 0
with ThreadPoolExecutor(64) as pool:
    print([port for port, found in enumerate(pool.map(is_open, range(1, 65536)), 1) if found])
"""


def test_nothing_of_a_run_on_one_machine_can_be_reached_from_another(tmp_path: Path) -> None:
    command = on_machine("reconv-a", train(ENDLESS, tmp_path / "run", "--devices", "2"))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        log, deadline_s = tmp_path / "run/logs/rank-1.log", time.monotonic() + 300
        while not (log.exists() and "step 20/" in log.read_text()):
            assert time.monotonic() < deadline_s and process.poll() is None, "the run never reached step 20"
            time.sleep(0.1)
        scan = on_machine("reconv-b", [sys.executable, "-c", SCAN, MACHINES["reconv-a"]])
        found = subprocess.run(scan, check=True, capture_output=True, text=True)
        assert found.stdout.strip() == "[]"
        listening = subprocess.run(
            on_machine("reconv-a", ["cat", "/proc/net/tcp"]), check=True, capture_output=True, text=True
        )
        assert " 0A " in listening.stdout, "the ranks do not listen at all: the scan proves nothing"
    finally:
        process.terminate()
        process.wait(LIMIT_S)
