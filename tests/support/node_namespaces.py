"""Simulated machines: network namespaces on one bridge, each with a host name that no other one can resolve."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def missing_tools() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        return "network namespaces need root, iproute2 and util-linux: apt-get install iproute2 util-linux"
    return ""


@dataclass(slots=True)
class Machine:
    """One namespace, with the processes that were started in it."""

    name: str
    address: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: Sequence[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command on this machine; its output goes to a file."""
        inner = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"']
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*inner, "sh", *command], env={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT
            )
        self.processes.append(process)
        return process

    def pids(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        return [int(word) for word in found.stdout.split()]

    def kill(self) -> None:
        """End every process at once, as when the machine loses power; connections are closed by the kernel."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)

    def set_link(self, state: str) -> None:
        """`down` cuts the cable, `up` mends it."""
        ip("-n", self.name, "link", "set", "eth0", state)


@contextmanager
def machines(count: int, prefix: str = "rcv", network: str = "10.78.0") -> Iterator[list[Machine]]:
    """So many machines in one network; everything on them ends with the block."""
    hub = f"{prefix}-hub"
    ip("netns", "add", hub)  # fails if another test has such machines: they are not this one's to remove
    made = [Machine(f"{prefix}-{number}", f"{network}.{number + 1}") for number in range(count)]
    try:
        ip("-n", hub, "link", "add", "br0", "type", "bridge")
        ip("-n", hub, "link", "set", "br0", "up")
        for machine in made:
            ip("netns", "add", machine.name)
            ip("-n", hub, "link", "add", machine.name, "type", "veth", "peer", "name", "eth0", "netns", machine.name)
            ip("-n", hub, "link", "set", machine.name, "master", "br0", "up")
            ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                ip("-n", machine.name, "link", "set", link, "up")
        yield made
    finally:
        for machine in made:
            machine.kill()
            for process in machine.processes:
                process.wait()
        for name in (*(machine.name for machine in made), hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
