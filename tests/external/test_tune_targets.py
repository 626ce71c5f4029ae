"""`reconv tune` with trials that are jobs of a real Slurm, or runs on a Ray cluster: the study of this machine.

Needs Linux, root and: apt-get install --no-install-recommends slurm-wlm munge iproute2; pip install 'reconv[ray,tune]'
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")
pytestmark = pytest.mark.external

CLUSTER = Path(__file__).with_name("slurm_cluster")
STUDY = [
    *("quickstart", "--set", "data.subset_percent=20", "--set", "data.num_workers=0", "--epochs", "4"),
    *("--trials", "3", "--rungs", "2", "--reduction", "2", "--confirm", "0", "--device", "cpu"),
    *("--space", "schedule.lr=0.01:1:log", "--quiet"),
]
LIMIT_S = 400


def command(out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "reconv", "tune", *STUDY, "--out", str(out), *more]


def tune(out: Path, *more: str) -> dict[str, Any]:
    done = subprocess.run(command(out, *more), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return result(out)


def result(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "study.json").read_text())
    return {name: content[name] for name in ("trials", "best", "verdict", "epochs")}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tune(tmp_path_factory.mktemp("here") / "study")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    programs = ("slurmctld", "slurmd", "munged", "ip", "nsenter", "unshare")
    if os.geteuid() != 0 or any(shutil.which(program) is None for program in programs):
        pytest.skip("needs root, and: apt-get install --no-install-recommends slurm-wlm munge iproute2")
    folder = tmp_path_factory.mktemp("cluster")
    log = folder.with_name("tune-cluster.out")  # not a pipe: the daemons would keep it open
    with log.open("w") as out:
        started = subprocess.run([CLUSTER, "start", folder], stdout=out, stderr=out, timeout=120, check=False)
    try:
        assert started.returncode == 0, log.read_text()
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        yield
    finally:
        os.environ.pop("SLURM_CONF", None)
        subprocess.run([CLUSTER, "stop", folder], check=True, timeout=120)


def test_jobs_of_slurm_give_the_study_of_this_machine_also_after_a_kill(
    slurm: None, here: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "study"
    words = ["--to", "slurm", "--time", "20", "--stop-before", "60", "--parallel", "2"]
    first = subprocess.Popen(command(out, *words))
    limit_s = time.monotonic() + LIMIT_S
    while not (out / "1" / "job.json").exists():
        assert first.poll() is None and time.monotonic() < limit_s
        time.sleep(0.2)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert tune(out, *words) == here
    assert "start 1 of job" in "".join(log.read_text() for log in (out / "0" / "logs").glob("slurm-*.log"))


def test_runs_on_ray_give_the_study_of_this_machine(here: dict[str, Any], tmp_path: Path) -> None:
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        assert tune(tmp_path / "study", "--to", "ray", "--address", cluster.address) == here
    finally:
        cluster.shutdown()
