"""The cores a process runs on: a list typed by a person, or those near a GPU.

Owns reading such lists and binding this process, which its threads and the processes it starts inherit. Refuses to know
what runs. Invariant: only cores that the process had before are used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from reconv.errors import UsageError

_SYSTEM = Path("/sys")


def parse_cpu_list(text: str) -> set[int]:
    """`0-3,8` as numbers."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def numa_cpus(pci_address: str | None, system: Path = _SYSTEM) -> set[int] | None:
    """The cores of the memory node a PCI device hangs on; None where that is not known or there is one node alone."""
    if pci_address is None:
        return None
    try:
        node = int((system / "bus/pci/devices" / pci_address / "numa_node").read_text())
        if node < 0:
            return None
        return parse_cpu_list((system / f"devices/system/node/node{node}/cpulist").read_text().strip())
    except OSError:  # a virtual machine may not show them
        return None


def rank_cpus(local_rank: int, local_world_size: int) -> set[int]:
    """The cores of one of several processes on this machine: neighbours, as many as every other process has."""
    allowed = sorted(os.sched_getaffinity(0))
    each = max(1, len(allowed) // local_world_size)
    first = local_rank * each % len(allowed)
    return set(allowed[first : first + each])


@contextmanager
def cpu_affinity(
    wish: str,
    pci_address: Callable[[], str | None],
    system: Path = _SYSTEM,
    local_rank: int = 0,
    local_world_size: int = 1,
) -> Iterator[str]:
    """Bind this process to the cores of `engine.cpu_affinity` until the block ends; yield a note for the log."""
    if wish == "any":
        yield ""
        return
    if not sys.platform.startswith("linux"):
        raise UsageError(
            "processes cannot be bound to cores here", where="engine.cpu_affinity", then="--set engine.cpu_affinity=any"
        )
    before = os.sched_getaffinity(0)
    try:
        if wish == "share":
            wish = _format_cpus(rank_cpus(local_rank, local_world_size))
        yield bind(wish, pci_address() if wish == "near" else None, system)
    finally:
        os.sched_setaffinity(0, before)


def bind(wish: str, pci_address: str | None, system: Path = _SYSTEM) -> str:
    """Bind the calling thread, and so what it starts; what a person should know of that."""
    wanted = numa_cpus(pci_address, system) if wish == "near" else parse_cpu_list(wish)
    if wanted is None:
        return "engine.cpu_affinity: near has no effect: which cores are near the device is not known here"
    allowed = os.sched_getaffinity(0)
    if not wanted & allowed:
        raise UsageError(
            f"none of the cores {_format_cpus(wanted)} may be used",
            where="engine.cpu_affinity",
            why=f"this process is allowed {_format_cpus(allowed)}",
            then="--set engine.cpu_affinity=any",
        )
    os.sched_setaffinity(0, wanted & allowed)
    left_out = f"; {_format_cpus(wanted - allowed)} may not be used" if wanted - allowed else ""
    return f"engine.cpu_affinity: bound to {_format_cpus(wanted & allowed)}{left_out}"


def format_allowed_cpus() -> str:
    """The cores this process may use, as a list with ranges."""
    return _format_cpus(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else "any"


def _format_cpus(cpus: set[int]) -> str:
    """Numbers as a list with ranges, `0-3,8`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
