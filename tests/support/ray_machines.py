"""A Ray cluster of simulated machines, each with an address and a raylet of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from node_namespaces import Machine
from paced_run import LIMIT_S, PacedRun

# A lost node is noticed in seconds; Ray's own defaults are slow.
FAST_CHECKS = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}


@dataclass(slots=True)
class RayMachines:
    """A head without CPUs on the first machine, and a raylet with one CPU on each of the others."""

    machines: list[Machine]
    folder: Path
    number: int = 0  # of the nodes that have been started
    variables: dict[str, str] = field(default_factory=dict)  # of nodes that are started from now on

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

    def submit(self, run: PacedRun, number: str, *more: str) -> subprocess.Popen[bytes]:
        """Start a driver on the first machine; it prints to a file beside the run."""
        place = ["--nodes", number, "--address", self.address, "--device", "cpu", "--out", str(run.out)]
        words = ["submit", str(run.recipe), "--to", "ray", *place, *run.settings, *more]
        return self.machines[0].start([sys.executable, "-m", "reconv", *words], run.out.with_suffix(".txt"))

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
        variables = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", **self.variables}
        self.machines[number].start(command, self.folder / f"ray-{number}.txt", **variables)
