"""Bandwidth of an all-reduce between this machine and another one, beside the rate of the link, for `doctor --hosts`.

Both run gloo over TCP, as ranks on CPUs do; NCCL over InfiniBand is faster.
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile

from reconv.cluster.environment_checks import CheckResult
from reconv.core.python_child import python_command
from reconv.distributed.nic import address_towards, free_port

LIMIT_S = 60
# One TCP connection of gloo does not fill a faster link.
_EXPECTED_GBIT_PER_S = 10.0
_LOW = 0.5  # of the link's rate, or of that

_SCRIPT = """
import datetime, json, os, pathlib, sys, time
rank, own, other, port = int(sys.argv[1]), *sys.argv[2:5]
from reconv.distributed.nic import interface_addresses, nic_variables
os.environ.update(nic_variables(own))
name = next(name for name, address in interface_addresses().items() if address == own)
import torch, torch.distributed as dist
limit = datetime.timedelta(seconds=30)
store = dist.TCPStore(own if rank == 0 else other, int(port), 2, rank == 0, timeout=limit)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
def seconds(mib):
    x = torch.zeros(mib << 18)
    dist.barrier()
    began_s = time.perf_counter()
    dist.all_reduce(x)
    dist.barrier()
    return time.perf_counter() - began_s
seconds(1)
mib = torch.tensor(min(64, max(1, int(2.0 / seconds(4) * 4 / 3))))  # about two seconds for three of them
dist.broadcast(mib, 0)
best_s = min(seconds(int(mib)) for _ in range(3))
try:
    link = int(pathlib.Path(f"/sys/class/net/{name}/speed").read_text())
except (OSError, ValueError):
    link = -1
found = {"gbit_per_s": int(mib) * 2**20 * 8 / best_s / 1e9, "link_mbit_per_s": link, "interface": name}
print(json.dumps(found), flush=True)
os._exit(0)  # threads of gloo may abort an orderly end
"""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """A measured rate, and that of the slower of both links; None: not known."""

    gbit_per_s: float
    link_gbit_per_s: float | None
    interfaces: tuple[str, str]  # here and there


def check_bandwidth(host: str, ssh: Sequence[str], address: str) -> CheckResult:
    """Measure an all-reduce with a machine that this one reaches at an address."""
    found = measure(host, ssh, address)
    if isinstance(found, str):
        advice = "ranks connect at ports that the system chooses: let these machines reach each other at all of them"
        return CheckResult(host, "all-reduce", None, f"no all-reduce with this machine: {found}", "missing", advice)
    text = f"{found.gbit_per_s:.3g} Gbit/s with this machine ({' to '.join(found.interfaces)}, gloo)"
    link = found.link_gbit_per_s
    text += ", link of unknown rate" if link is None else f", link of {link:g} Gbit/s"
    if found.gbit_per_s >= _LOW * min(_EXPECTED_GBIT_PER_S, link or found.gbit_per_s):
        return CheckResult(host, "all-reduce", found.gbit_per_s, text)
    advice = "look for other traffic, limits and cables, or choose another interface with --nic"
    return CheckResult(host, "all-reduce", found.gbit_per_s, text, "note", advice)


def measure(host: str, ssh: Sequence[str], address: str) -> Bandwidth | str:
    """The bandwidth of an all-reduce of two ranks, or why there is none."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    own = address_towards(family, address, 1)
    port = str(free_port(own))
    here = python_command(_SCRIPT, "0", own, address, port)
    there = [*ssh, host, shlex.join([sys.executable, "-", "1", address, own, port])]
    with TemporaryFile("w+") as script, TemporaryFile("w+", errors="replace") as errors:
        script.write(_SCRIPT)
        script.seek(0)
        pipes = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        processes = [subprocess.Popen(here, **pipes), subprocess.Popen(there, stdin=script, **pipes)]  # type: ignore[call-overload]
        try:
            outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
        except subprocess.TimeoutExpired:
            return f"nothing within {LIMIT_S} s"
        finally:
            for process in processes:
                process.kill()
                process.wait()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if any(process.returncode for process in processes):
        return (lines or ["a rank failed"])[-1]
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    rates = [rank["link_mbit_per_s"] / 1000 for rank in found if rank["link_mbit_per_s"] > 0]
    interfaces = (found[0]["interface"], found[1]["interface"])
    return Bandwidth(min(rank["gbit_per_s"] for rank in found), min(rates, default=None), interfaces)
