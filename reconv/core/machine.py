"""The machine as this process sees it: cores and memory within the limits of its container."""

from __future__ import annotations

import mmap
import os
import platform
import re
import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """The directories and environment from which facts about the machine are read; tests use their own."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    shm: Path = Path("/dev/shm")
    libraries: Path = Path("/usr/lib")
    folder: Path = field(default_factory=Path.cwd)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


def process_age_s(machine: Machine) -> float | None:
    """Seconds since this process was started, to a hundredth; None where the system does not say."""
    stat = read_system_file(machine.proc / "self" / "stat")
    if stat is None or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    start_ticks = int(stat.rpartition(")")[2].split()[19])
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK"))


def usable_cores(machine: Machine) -> int:
    """The cores this process may use: the smaller of its affinity and the container's quota."""
    affinity = len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count() or 1
    quotas = [quota / period for quota, period in _cpu_quotas(machine) if quota > 0 and period > 0]
    return max(1, min([affinity, *(int(quota) for quota in quotas)]))


def cores_per_process(machine: Machine, num_processes: int) -> int:
    """The cores of one of several processes, whether or not the launcher has bound each to its own."""
    return max(1, min(usable_cores(machine), (os.cpu_count() or 1) // num_processes))


def usable_memory_bytes(machine: Machine) -> int | None:
    """The memory this process may use: the smaller of the machine's and the container's limit."""
    total = re.search(r"^MemTotal:\s+(\d+) kB", read_system_file(machine.proc / "meminfo") or "", re.MULTILINE)
    limits = [int(total[1]) * 1024] if total else []
    limits += [
        limit for limit in map(parse_number, _cgroup_files(machine, "memory.max", "memory.limit_in_bytes")) if limit
    ]
    return min(limits) if limits else None


def available_memory_bytes(machine: Machine) -> int | None:
    """The memory available now: the smaller of the machine's and what the container's limit leaves."""
    free = re.search(r"^MemAvailable:\s+(\d+) kB", read_system_file(machine.proc / "meminfo") or "", re.MULTILINE)
    available = [int(free[1]) * 1024] if free else []
    limits = _cgroup_files(machine, "memory.max", "memory.limit_in_bytes")
    used = _cgroup_files(machine, "memory.current", "memory.usage_in_bytes")
    facts = _cgroup_files(machine, "memory.stat", "memory.stat")
    for limit, taken, fact in zip(map(parse_number, limits), map(parse_number, used), facts, strict=False):
        # The page cache counts as used, but is released when memory is short.
        files = re.search(r"^(?:total_)?inactive_file (\d+)$", fact, re.MULTILINE)
        if limit is not None and taken is not None:
            available.append(max(0, limit - taken + (int(files[1]) if files else 0)))
    return min(available) if available else None


def has_address_space(num_bytes: int) -> bool:
    """True if this process may still map so much memory (ulimit -v)."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return True
    try:
        mmap.mmap(-1, num_bytes).close()
    except (OSError, MemoryError):
        return False
    return True


def _cpu_quotas(machine: Machine) -> Iterator[tuple[int, int]]:
    """Quota and period in microseconds of this process's control group and its parents."""
    for text in _cgroup_files(machine, "cpu.max", ""):
        quota, _, period = text.partition(" ")
        yield parse_number(quota) or 0, parse_number(period) or 0
    quotas = _cgroup_files(machine, "", "cpu.cfs_quota_us")
    periods = _cgroup_files(machine, "", "cpu.cfs_period_us")
    for quota, period in zip(quotas, periods, strict=False):
        yield parse_number(quota) or 0, parse_number(period) or 0


def _cgroup_files(machine: Machine, unified: str, legacy: str) -> list[str]:
    """The contents of a control file of this process's group and its parents, of cgroup v2 and v1."""
    root = machine.sys / "fs" / "cgroup"
    texts: list[str] = []
    for line in (read_system_file(machine.proc / "self" / "cgroup") or "").splitlines():
        _, controllers, group = line.split(":", 2)
        controller = legacy.partition(".")[0]
        if not controllers and unified:
            base, name = root, unified
        elif legacy and controller in controllers.split(","):
            base, name = root / controller, legacy
        else:
            continue
        parts = Path(group.lstrip("/")).parts
        folders = [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
        texts += [text for text in (read_system_file(folder / name) for folder in folders) if text is not None]
    return texts


def read_system_file(path: Path) -> str | None:
    """The content of a small system file, or None if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def parse_number(text: str) -> int | None:
    """An integer, or None if the text is not one."""
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def process_exists(pid: int) -> bool:
    """True if there is a process with this id on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True


def process_state(pid: int) -> str:
    """Description of a process's state on this machine."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "the process no longer exists"
    state = next((line.partition(":")[2].strip() for line in status.splitlines() if line.startswith("State")), "")
    return f"the process exists, in state {state}"
