"""Checks that training and inference make before they start."""

from __future__ import annotations

import platform

from reconv.build.datasets import Datasets
from reconv.core.errors import DataError, UsageError
from reconv.core.machine import Machine, available_memory_bytes
from reconv.data.dataset import Dataset
from reconv.device import count_devices, device_kind
from reconv.device.affinity import format_allowed_cpus
from reconv.distributed.environment import requested_backend
from reconv.distributed.process_group import ProcessGroup
from reconv.recipe.batch_split import num_copies, split_batch
from reconv.recipe.plan_text import count
from reconv.recipe.schema import Recipe


def check_num_devices(devices: int, device: str, recipe: Recipe, num_nodes: int = 1) -> None:
    """Refuse more processes than the batch or this machine allow, before any is started."""
    split_batch(recipe, num_copies(recipe, devices * num_nodes))
    check_machine_has(devices, device)


def check_machine_has(devices: int, device: str) -> None:
    """Refuse more processes than this machine has devices or memory for."""
    if ":" in device:
        raise UsageError(f"--device {device} is a single device, and --devices {devices} needs several")
    kind, available = device_kind(device), available_memory_bytes(Machine())
    num_devices = count_devices(kind)
    if num_devices is not None and devices > num_devices and requested_backend() != "gloo":
        raise UsageError(f"--devices {devices}: this machine has {count(num_devices, kind + ' device')}")
    if available is not None and devices * _MIN_PROCESS_BYTES > available:
        raise UsageError(
            f"--devices {devices}: there is not enough memory for so many processes",
            why=f"each needs at least {_MIN_PROCESS_BYTES >> 20} MB, and {available >> 20} MB are available",
            then=f"use at most --devices {available // _MIN_PROCESS_BYTES}",
        )


def check_same_data(process_group: ProcessGroup, datasets: Datasets | Dataset) -> None:
    """Refuse ranks whose datasets differ."""
    if process_group.world_size == 1:
        return
    found = process_group.all_gather((platform.node(), datasets.fingerprint()))
    others = [(rank, host) for rank, (host, fingerprint) in enumerate(found) if fingerprint != found[0][1]]
    if others:
        listed = ", ".join(f"rank {rank} on {host}" for rank, host in others[:4])
        raise DataError(
            "the ranks do not have the same data",
            where=f"{listed}, unlike rank 0 on {found[0][0]}",
            why="files are missing there, or --data is another folder",
            then="compare `reconv data check PATH` on both machines",
        )


def describe_ranks(process_group: ProcessGroup, device: str) -> list[str]:
    """The ranks of each machine with their devices and cores; empty for a single process."""
    if process_group.world_size == 1:
        return []
    found = process_group.all_gather((platform.node(), process_group.rank, device, format_allowed_cpus()))
    machines: dict[str, list[str]] = {}
    for host, rank, of_rank, cpus in found:
        machines.setdefault(host, []).append(f"rank {rank} on {of_rank}, cores {cpus}")
    launcher = f", started by {process_group.launch_env.launcher}"
    lines = [f"{process_group.world_size} processes on {count(len(machines), 'machine')}{launcher}"]
    return lines + [f"  {host}: {'; '.join(ranks)}" for host, ranks in machines.items()]


_MIN_PROCESS_BYTES = 256 << 20  # measured: a quickstart process on a CPU
