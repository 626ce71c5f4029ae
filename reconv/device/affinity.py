"""CPU affinity: binds this process, its threads and the processes it starts to a list of cores or those near a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from reconv.core.errors import UsageError

_SYSTEM = Path("/sys")


def parse_cpu_list(text: str) -> set[int]:
    """The numbers of a list such as `0-3,8`."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def numa_cpus(pci_address: str | None, system: Path = _SYSTEM) -> set[int] | None:
    """The cores of the NUMA node of a PCI device; None if unknown, or if there is only one node."""
    if pci_address is None:
        return None
    try:
        node = int((system / "bus/pci/devices" / pci_address / "numa_node").read_text())
        if node < 0:
            return None
        return parse_cpu_list((system / f"devices/system/node/node{node}/cpulist").read_text().strip())
    except OSError:  # virtual machines may not have these files
        return None


def rank_cpus(local_rank: int, local_world_size: int) -> set[int]:
    """The cores of one of several processes on this machine: adjacent, and as many for each."""
    allowed = sorted(os.sched_getaffinity(0))
    each = max(1, len(allowed) // local_world_size)
    first = local_rank * each % len(allowed)
    return set(allowed[first : first + each])


@contextmanager
def cpu_affinity(
    requested: str,
    pci_address: Callable[[], str | None],
    system: Path = _SYSTEM,
    local_rank: int = 0,
    local_world_size: int = 1,
) -> Iterator[str]:
    """Bind this process to the cores of `engine.cpu_affinity` until the block ends; yield a note for the log."""
    if not sys.platform.startswith("linux"):
        raise UsageError(
            "processes cannot be bound to cores on this system",
            where="engine.cpu_affinity",
            hint="--set engine.cpu_affinity=any",
        )
    before = os.sched_getaffinity(0)
    try:
        if requested == "share":
            requested = _format_cpus(rank_cpus(local_rank, local_world_size))
        yield _bind(requested, pci_address() if requested == "near" else None, system)
    finally:
        os.sched_setaffinity(0, before)


def _bind(requested: str, pci_address: str | None, system: Path) -> str:
    """Bind the calling thread, and so whatever it starts; returns a note for the log."""
    wanted = numa_cpus(pci_address, system) if requested == "near" else parse_cpu_list(requested)
    if wanted is None:
        return "engine.cpu_affinity: near has no effect: the NUMA node of the device is unknown"
    allowed = os.sched_getaffinity(0)
    if not wanted & allowed:
        raise UsageError(
            f"none of the cores {_format_cpus(wanted)} are available to this process",
            where="engine.cpu_affinity",
            why=f"it may use {_format_cpus(allowed)}",
            hint="--set engine.cpu_affinity=any",
        )
    os.sched_setaffinity(0, wanted & allowed)
    missing = f"; {_format_cpus(wanted - allowed)} are not available" if wanted - allowed else ""
    return f"engine.cpu_affinity: bound to cores {_format_cpus(wanted & allowed)}{missing}"


def format_allowed_cpus() -> str:
    """The cores this process may use, such as `0-3,8`."""
    return _format_cpus(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else "any"


def _format_cpus(cpus: set[int]) -> str:
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
