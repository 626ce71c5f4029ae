"""What is settled before a run has parts: which recipe it is, which folder is its, and whether there is work to do.

Owns those decisions, which rank 0 makes for all processes. Refuses to know plans and parts. Invariant: nothing is
written before the recipe is whole, and the run folder is written to by the holder of its lock alone.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reconv.checkpoint.run_dir import RunDir
from reconv.device import count_devices, device_kind
from reconv.device.affinity import format_allowed_cpus
from reconv.distributed.environment import LaunchEnv
from reconv.distributed.process_group import ProcessGroup
from reconv.environment_checks import Machine, available_memory_bytes
from reconv.errors import DataError, ExitCode, ReconvError, RemoteRankError, UsageError
from reconv.io.atomic import write_atomic
from reconv.logging.exporters import require_packages
from reconv.recipe.batch_split import num_copies, split_batch
from reconv.recipe.loader import Override, load
from reconv.recipe.plan_text import count
from reconv.recipe.schema import Recipe
from reconv.report.summary import read_summary
from reconv.trainer.build.datasets import Datasets, refuse_unread_path, with_data_path
from reconv.trainer.build.init_weights import refuse_unusable_weights
from reconv.trainer.resume import ChosenRunDir, check_same_run, choose_folder, existing_run, known_data_path

# What would end a restarted process again: a recipe, data, weights or a divergence, or that the run was told to stop.
FOR_GOOD = (ExitCode.USAGE, ExitCode.DATA, ExitCode.CHECKPOINT, ExitCode.DIVERGED, ExitCode.PREEMPTED)
_PROCESS_BYTES = 256 << 20  # of its own: measured for a quickstart process on a CPU, which is the least there is


@dataclass(frozen=True, slots=True)
class RunArgs:
    """What a command says about a run."""

    recipe: str | Path
    data: str | Path | None
    overrides: Sequence[Override]
    resume: bool
    out: Path | None
    runs: Path

    def again(self, launch_env: LaunchEnv) -> RunArgs:
        """The same where an elastic agent has started the processes anew: the run of the first time goes on."""
        return replace(self, resume=True) if launch_env.restart_count else self


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """The folder of a run, held, and what should be said about it."""

    choice: ChosenRunDir
    said: tuple[str, ...] = ()
    is_finished: bool = False
    summary: dict[str, Any] = field(default_factory=dict)  # of a run that is finished


def resolve(start: RunArgs) -> Recipe:
    """The whole recipe of a command, with what it needs at hand."""
    given = [*start.overrides, *([("data.path", str(start.data), "--data")] if start.data is not None else [])]
    recipe = load(str(start.recipe), given).recipe
    refuse_unread_path(recipe, start.data)
    earlier = existing_run(recipe, out=start.out, runs=start.runs) if start.resume else None
    recipe = with_data_path(recipe, known_data_path(earlier) if earlier else None)
    require_packages(recipe.loggers)
    if not start.resume:  # a run that goes on no longer needs them
        refuse_unusable_weights(recipe)
    return recipe


def refuse_devices(devices: int, device: str, recipe: Recipe) -> None:
    """Refuse more processes than the batch or this machine allow, before any is started."""
    if ":" in device:
        raise UsageError(f"--device {device} names one device, and --devices {devices} takes several")
    split_batch(recipe, num_copies(recipe, devices))
    kind, room = device_kind(device), available_memory_bytes(Machine())
    there = count_devices(kind)
    if there is not None and devices > there:
        raise UsageError(f"--devices {devices}, and this machine has {count(there, kind + ' device')}")
    if room is not None and devices * _PROCESS_BYTES > room:
        raise UsageError(
            f"--devices {devices}: so many processes do not fit into memory",
            why=f"each takes {_PROCESS_BYTES >> 20} MB or more, and {room >> 20} MB are free",
            then=f"at most --devices {room // _PROCESS_BYTES}",
        )


def claim_folder(start: RunArgs, recipe: Recipe, stack: ExitStack, launch_env: LaunchEnv) -> ClaimedRun:
    """Choose the folder of a run and hold it until the stack is unwound."""
    choice = choose_folder(recipe, out=start.out, resume=start.resume, runs=start.runs)
    stack.enter_context(choice.folder.lock())
    stack.push(marking(choice.folder, launch_env))
    said = check_same_run(choice.folder, recipe) if choice.exists else ()
    if choice.exists and choice.folder.is_finished() and not any(line.startswith("length") for line in said):
        return ClaimedRun(choice, said, is_finished=True, summary=read_summary(choice.folder.path))
    return ClaimedRun(choice, said)


def marking(folder: RunDir, launch_env: LaunchEnv) -> Callable[[object, BaseException | None, object], None]:
    """Refuse to start what has ended for good already; the result leaves a mark when the run ends so.

    An elastic agent restarts processes whatever their code was, so those that would end the same way end at once.
    """
    mark = folder.path / f"ended-{os.environ.get('TORCHELASTIC_RUN_ID', 'alone')}.json"
    if launch_env.restart_count == 0:
        mark.unlink(missing_ok=True)
    elif mark.exists():
        raise RemoteRankError.from_dict(json.loads(mark.read_text()))

    def leave(kind: object, error: BaseException | None, trace: object) -> None:
        may_restart = "TORCHELASTIC_RUN_ID" in os.environ and not launch_env.failure_dir
        if isinstance(error, ReconvError) and error.code in FOR_GOOD and may_restart:
            write_atomic(mark, json.dumps(error.to_dict()))

    return leave


def topology(process_group: ProcessGroup, device: str) -> list[str]:
    """Who takes part, machine by machine: ranks, devices and the cores each may use; nothing for one process."""
    if process_group.world_size == 1:
        return []
    found = process_group.all_gather((platform.node(), process_group.rank, device, format_allowed_cpus()))
    machines: dict[str, list[str]] = {}
    for host, rank, of_rank, cpus in found:
        machines.setdefault(host, []).append(f"rank {rank} on {of_rank}, cores {cpus}")
    launcher = f", started by {process_group.launch_env.launcher}"
    lines = [
        f"{process_group.world_size} processes on {len(machines)} machine{'s' if len(machines) > 1 else ''}{launcher}"
    ]
    return lines + [f"  {host}: {'; '.join(ranks)}" for host, ranks in machines.items()]


def refuse_different_data(process_group: ProcessGroup, sources: Datasets) -> None:
    """Refuse to train together on data that is not the same everywhere."""
    if process_group.world_size == 1:
        return
    found = process_group.all_gather((platform.node(), sources.fingerprint()))
    others = [(rank, host) for rank, (host, fingerprint) in enumerate(found) if fingerprint != found[0][1]]
    if others:
        listed = ", ".join(f"rank {rank} on {host}" for rank, host in others[:4])
        raise DataError(
            "the processes do not have the same data",
            where=f"{listed}, unlike rank 0 on {found[0][0]}",
            why="files are missing, or --data names another folder there",
            then="compare `reconv data check PATH` on both machines",
        )
