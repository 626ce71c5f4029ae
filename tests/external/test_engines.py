"""One recipe gives the same bits on every engine that runs here, also when a node is lost in the middle.

Needs Linux, root and: apt-get install --no-install-recommends openmpi-bin slurm-wlm munge iproute2; pip install
'reconv[ray]'. An engine whose program is missing is skipped. `PYTHONPATH=tests/support python
tests/external/test_engines.py --repeats 3 --json FILE` measures how long each pauses when a node is lost.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from node_namespaces import Machine, machines, missing_tools
from paced_run import LIMIT_S, PacedRun
from ray_machines import RayMachines
from slurm_nodes import SLURM, slurm

KILL_AT, NETWORK = 80, "10.80.0"
STORE_PORT, RANK_PORT = 29400, 29600
SECRET = {"RECONV_SECRET": "a secret of this test"}


def python(*words: str) -> list[str]:
    return [sys.executable, *words]


def start_here(words: list[str], run: PacedRun, **variables: str) -> subprocess.Popen[bytes]:
    with log_of(run).open("ab") as log:
        return subprocess.Popen(words, env={**os.environ, **variables}, stdout=log, stderr=subprocess.STDOUT)


def log_of(run: PacedRun) -> Path:
    return run.out.with_suffix(".txt")


def ends_with(code: int, process: subprocess.Popen[bytes], run: PacedRun) -> None:
    assert process.wait(LIMIT_S) == code, log_of(run).read_text()[-6000:]


def lose(machine: Machine) -> float:
    """Cut the power of a machine: no connection is closed, and its processes end without grace. Returns when."""
    began_s = time.time()
    machine.set_link("down")
    machine.kill()
    return began_s


# Undisturbed: an engine trains two ranks to the end.


def devices(run: PacedRun) -> None:
    ends_with(0, start_here(python(*run.train("--devices", "2")), run), run)


def torchrun(run: PacedRun) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ends_with(0, start_here(python(*words, *run.train()), run), run)


def mpirun(run: PacedRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    words += ["-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={port}"]
    ends_with(0, start_here([*words, *python(*run.train())], run), run)


def srun(run: PacedRun) -> None:
    with slurm(run.out.with_name("slurm")):
        words = ["srun", "--nodes=2", "--ntasks-per-node=1"]
        ends_with(0, start_here([*words, *python(*run.train())], run), run)


UNDISTURBED: dict[str, Callable[[PacedRun], None]] = {
    "--devices": devices,
    "torchrun": torchrun,
    "mpirun": mpirun,
    "srun": srun,
}


# A node is lost without grace after KILL_AT steps; returns when. Each run is finished then, by the engine or by hand.


def ray(run: PacedRun) -> float:
    (run.out.with_name("ray")).mkdir()
    with machines(3, "rcv-eng", NETWORK) as made:
        cluster = RayMachines(made, run.out.with_name("ray"))
        cluster.start()
        cluster.add()
        cluster.add()
        driver = cluster.submit(run, "1:2")
        run.wait_for_step(KILL_AT)
        began_s = lose(made[2])
        ends_with(0, driver, run)
    return began_s


def agent(run: PacedRun) -> float:
    with machines(3, "rcv-eng", NETWORK) as made:
        endpoint = start_rendezvous(made[0], run)
        words = python(*run.train("--elastic", "1:2", "--rendezvous", endpoint))
        nodes = [machine.start(words, log_of(run), **SECRET) for machine in made[1:]]
        return lose_one_of(nodes, made[1:], run)


def elastic_torchrun(run: PacedRun) -> float:
    """torchrun with the signed rendezvous, in a store that outlives the nodes."""
    metadata = run.out.with_name("reconv-0.dist-info")  # as an installation has it
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: reconv\nVersion: 0\n")
    entry = "reconv = reconv.cluster.torchrun_rendezvous:get_handler"
    (metadata / "entry_points.txt").write_text(f"[torchrun.handlers]\n{entry}\n")
    path = os.pathsep.join(filter(None, [str(metadata.parent), os.environ.get("PYTHONPATH", "")]))
    with machines(3, "rcv-eng", NETWORK) as made:
        endpoint = start_rendezvous(made[0], run)
        words = ["-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
        words += ["--rdzv-backend=reconv", f"--rdzv-endpoint={endpoint}", "--rdzv-id=1"]
        words += ["--rdzv-conf=is_host=0,join_timeout=60,last_call_timeout=3,keep_alive_interval=1"]
        variables = {**SECRET, "PYTHONPATH": path, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        nodes = [
            machine.start(
                python(*words, f"--local-addr={machine.address}", *run.train("--resume", "--nic", machine.address)),
                log_of(run),
                **variables,
            )
            for machine in made[1:]
        ]
        return lose_one_of(nodes, made[1:], run)


def start_rendezvous(machine: Machine, run: PacedRun) -> str:
    endpoint = f"{machine.address}:{STORE_PORT}"
    machine.start(python("-m", "reconv", "rendezvous", endpoint), log_of(run))
    deadline_s = time.monotonic() + LIMIT_S
    while f"listening on {endpoint}" not in (log_of(run).read_text() if log_of(run).exists() else ""):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return endpoint


def lose_one_of(nodes: list[subprocess.Popen[bytes]], made: list[Machine], run: PacedRun) -> float:
    """Lose the machine that has not rank 0; the other ends well."""
    run.wait_for_step(KILL_AT)
    has_rank_0 = run.events("attempt")[-1]["environment"]["host"]
    survivor = [machine.name for machine in made].index(has_rank_0)
    began_s = lose(made[1 - survivor])
    ends_with(0, nodes[survivor], run)
    return began_s


def restarted_mpirun(run: PacedRun) -> float:
    """mpirun ends with the node; the same command is typed again for the node that is left."""
    with machines(2, "rcv-eng", NETWORK) as made:
        rsh = run.out.with_name("rsh")
        cases = "".join(f"{machine.address}) name={machine.name} ;;\n" for machine in made)
        inner = 'exec ip netns exec $name unshare --uts sh -c "hostname $name && $*"'
        rsh.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}esac\nshift\n{inner}\n')
        rsh.chmod(0o755)

        def start(number: int) -> subprocess.Popen[bytes]:
            hosts = ",".join(f"{machine.address}:1" for machine in made[:number])
            words = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "--host", hosts]
            words += ["--mca", "plm_rsh_agent", str(rsh), "--mca", "oob_tcp_if_include", f"{NETWORK}.0/24"]
            variables = {"MASTER_ADDR": made[0].address, "MASTER_PORT": str(RANK_PORT), **SECRET}
            words += [word for name in (*variables, "PYTHONPATH", "OMP_NUM_THREADS") for word in ("-x", name)]
            words += python(*run.train("--resume", "--nic", f"{NETWORK}.0/24"))
            return made[0].start(words, log_of(run), **variables)

        first = start(2)
        run.wait_for_step(KILL_AT)
        began_s = lose(made[1])
        assert first.wait(LIMIT_S) != 0
        ends_with(0, start(1), run)
    return began_s


def requeued_srun(run: PacedRun) -> float:
    """Slurm starts the job of `submit --to slurm`, whose ranks srun starts, on other nodes."""
    with slurm(run.out.with_name("slurm")) as folder:
        place = ["--to", "slurm", "--nodes", "2", "--device", "cpu", "--out", str(run.out), "--time", "20"]
        words = ["-m", "reconv", "submit", str(run.recipe), *place, *run.settings, "--json"]
        job = json.loads(subprocess.run(python(*words), check=True, capture_output=True, timeout=LIMIT_S).stdout)
        run.wait_for_step(KILL_AT)
        shown = subprocess.run(
            ["scontrol", "show", "job", str(job["job_id"])], check=True, capture_output=True, text=True
        )
        hosts = shown.stdout.partition("\n   NodeList=")[2].partition("\n")[0]
        names = subprocess.run(["scontrol", "show", "hostnames", hosts], check=True, capture_output=True, text=True)
        began_s = time.time()
        subprocess.run([SLURM, "kill", folder, names.stdout.split()[-1].removeprefix("n")], check=True, timeout=60)
        deadline_s = time.monotonic() + LIMIT_S
        while not any(event["reason"] == "finished" for event in run.events("end")):
            assert time.monotonic() < deadline_s, shown.stdout
            time.sleep(0.5)
    return began_s


LOST: dict[str, Callable[[PacedRun], float]] = {
    "Ray": ray,
    "--elastic": agent,
    "torchrun --rdzv-backend reconv": elastic_torchrun,
    "Slurm, srun": requeued_srun,
    "mpirun, started again": restarted_mpirun,
}
NOTICED_BY = {
    "Ray": "health checks: every 1 s, timeout 3 s, 3 failures",
    "--elastic": "10 s without a record",
    "torchrun --rdzv-backend reconv": "the ranks: `parallel.heartbeat_timeout_s: 10`",
    "Slurm, srun": "the ranks: `parallel.heartbeat_timeout_s: 10`; Slurm: SlurmdTimeout=15",
    "mpirun, started again": "the ranks: `parallel.heartbeat_timeout_s: 10`",
}
PROGRAMS = {"mpirun": "mpirun", "mpirun, started again": "mpirun", "srun": "slurmctld", "Slurm, srun": "slurmctld"}


def missing(engine: str) -> str:
    """What an engine lacks here; empty if nothing."""
    if engine == "Ray" and find_spec("ray") is None:
        return "pip install 'reconv[ray]'"
    if shutil.which(PROGRAMS.get(engine, "sh")) is None:
        return "apt-get install --no-install-recommends openmpi-bin slurm-wlm munge"
    return missing_tools() if engine in LOST else ""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final weights of one process."""
    return PacedRun(tmp_path_factory.mktemp("alone") / "run").train_alone()


@pytest.mark.parametrize("engine", UNDISTURBED)
def test_an_engine_trains_the_weights_of_one_process(engine: str, reference: str, tmp_path: Path) -> None:
    if why := missing(engine):
        pytest.skip(why)
    run = PacedRun(tmp_path / "run")
    UNDISTURBED[engine](run)
    assert run.weights() == reference


@pytest.mark.parametrize("words", [[], ["--devices", "2"]], ids=["one process", "--devices"])
def test_a_run_that_was_stopped_is_resumed_with_the_same_bits(words: list[str], reference: str, tmp_path: Path) -> None:
    run = PacedRun(tmp_path / "run")
    ends_with(0, start_here(python(*run.train(*words, "--stop-after", "90step")), run), run)
    assert run.events("end")[-1]["step"] == 90
    ends_with(0, start_here(python("-m", "reconv", "resume", str(run.out), "--trust-code", *words), run), run)
    assert run.weights() == reference


@pytest.mark.parametrize("engine", LOST)
def test_a_lost_node_leaves_the_weights_of_one_process(engine: str, reference: str, tmp_path: Path) -> None:
    if why := missing(engine):
        pytest.skip(why)
    run = PacedRun(tmp_path / "run")
    began_s = LOST[engine](run)
    assert run.weights() == reference
    assert run.events("attempt")[-1]["from_step"] == run.save_every
    assert run.pause_s(began_s) < LIMIT_S


def measure(repeats: int, engines: list[str]) -> Iterator[dict[str, object]]:
    """The pauses of each engine, and how many runs have ended with the weights of one process."""
    with tempfile.TemporaryDirectory() as name:
        expected = PacedRun(Path(name) / "alone/run").train_alone()
        for engine in engines:
            pauses: list[float] = []
            num_equal = 0
            for number in range(repeats):
                folder = Path(name) / f"{engine}-{number}".replace(" ", "-").replace(",", "")
                folder.mkdir()
                run = PacedRun(folder / "run")
                pauses.append(run.pause_s(LOST[engine](run)))
                num_equal += run.weights() == expected
                print(engine, f"{pauses[-1]:.1f} s", num_equal, os.getloadavg(), file=sys.stderr, flush=True)
            yield {"engine": engine, "noticed_by": NOTICED_BY[engine], "pauses_s": pauses, "equal": num_equal}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", nargs="*", default=list(LOST))
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    found = list(measure(arguments.repeats, [engine for engine in arguments.engines if not missing(engine)]))
    arguments.json.write_text(json.dumps(found, indent=1))
