"""What training and benchmarks set up before there is a run directory: recipe, data, plan, device, process group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from reconv.build.checks import check_model, check_same_data
from reconv.build.code import import_code
from reconv.build.data import Datasets, cache_size, data_path, fills_from_files, open_datasets, with_cache
from reconv.checkpoint.mirror.upload import RunMirror
from reconv.core.custom_code import provide
from reconv.core.errors import RecipeError, ResourceError
from reconv.core.machine import Machine, available_memory_bytes, cores_per_process, has_address_space
from reconv.core.text import printable
from reconv.data.decode.native import choose_decoder, native_support
from reconv.device import Device, configure_algorithms, device_kind, open_device
from reconv.device.affinity import cpu_affinity
from reconv.distributed.environment import read_launch_env
from reconv.distributed.failure import report_failures
from reconv.distributed.nic import choose_nic
from reconv.distributed.process_group import ProcessGroup, open_process_group
from reconv.kernels.jit.compile_ahead import import_triton
from reconv.logging.phases import Phase, PhaseTimer, process_start_s
from reconv.logging.run_dir import RunDir
from reconv.recipe.load.resolved import fit_to_data
from reconv.recipe.parts.data import Decoder
from reconv.recipe.plan import Facts, Plan, make_plan
from reconv.recipe.schema import Recipe
from reconv.recipe.workers import check_worker_memory
from reconv.trainer.imported_state import import_state
from reconv.trainer.options import RunOptions
from reconv.trainer.resume import (
    ExistingRun,
    RestorePoint,
    check_out_is_free,
    find_restore_point,
    open_existing,
    with_durations_of_run,
)
from reconv.trainer.run_setup import check_code_of_rank0, resolve_recipe

_MIN_ADDRESS_SPACE = 8 << 20  # bytes: the stack of one thread


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """Everything a run needs before it has a run directory; shared by training and benchmarks."""

    recipe: Recipe
    plan: Plan
    datasets: Datasets
    device: Device
    process_group: ProcessGroup
    restore_point: RestorePoint = field(default_factory=RestorePoint)
    existing: ExistingRun | None = None  # the run that is resumed
    notes: tuple[str, ...] = ()  # for the log
    trust_code: bool = False  # of a teacher's recipe
    mirror: RunMirror | None = None  # the run's copy in an object store; on rank 0
    phases: PhaseTimer = field(default_factory=PhaseTimer)

    def on_one_device(self) -> Self:
        """This run on a single device, with the device's share of the global batch."""
        return replace(self, plan=self.plan.one_device(), process_group=ProcessGroup.single())


def open_cached_datasets(recipe: Recipe, process_group: ProcessGroup) -> Datasets:
    """The datasets of a run, cached in memory if the recipe asks for it."""
    available_bytes = available_memory_bytes(Machine())
    return with_cache(recipe, open_datasets(recipe), available_bytes, process_group.world_size)


@contextmanager
def prepare_run(
    args: RunOptions, open_data: Callable[[Recipe, ProcessGroup], Datasets] = open_cached_datasets
) -> Iterator[PreparedRun]:
    """Join the process group, open data and device and make the plan; nothing is written."""
    launch_env = read_launch_env()
    if launch_env.restart_count:  # an elastic agent has restarted the processes
        args = replace(args, resume=True)
    phases = PhaseTimer(process_start_s() if args.command else None)  # in Python the process is not ours
    phases.enter(Phase.DEVICE)
    _check_address_space()
    choose_nic(args.nic)
    kind = device_kind(args.device)
    if kind == "cuda":
        import_triton()
    process_group = open_process_group(launch_env, kind)
    phases.enter(Phase.PLAN)
    with ExitStack() as stack:
        stack.enter_context(report_failures(process_group))
        provide(args.objects)
        mirror = _open_mirror(args, process_group, stack)
        resolved = process_group.on_rank0(lambda: resolve_recipe(args, measures_head=True))
        check_code_of_rank0(process_group, resolved.recipe, args)
        import_code(resolved.recipe)
        process_group.set_phase("opening the data")
        with phases.during(Phase.DATA_INDEX):
            datasets = open_data(resolved.recipe, process_group)
            datasets.hash_ahead()
            check_same_data(process_group, datasets)
        resolved = fit_to_data(resolved, len(datasets.train), len(datasets.train.class_names))
        if args.resume:
            fitted = resolved
            resolved = process_group.on_rank0(lambda: with_durations_of_run(fitted, args.out, args.runs))
            check_code_of_rank0(process_group, resolved.recipe, args)
        recipe = resolved.recipe
        existing, restore_point, notes = _open_existing(args, recipe, datasets, process_group, stack)
        with phases.during(Phase.DEVICE):
            pci_address = open_device(args.device, local_rank=launch_env.local_rank).pci_address
        affinity_note = stack.enter_context(
            cpu_affinity(
                recipe.engine.cpu_affinity,
                pci_address,
                local_rank=launch_env.local_rank,
                local_world_size=launch_env.local_world_size,
            )
        )
        facts = _plan_facts(recipe, datasets, process_group, restore_point.state, args.device)
        plan = make_plan(recipe, facts, resolved.lines)
        check_worker_memory(plan, recipe, launch_env.local_world_size, available_memory_bytes(Machine()))
        if not restore_point.is_resumed and (existing is None or not existing.is_finished):
            imported = process_group.on_rank0(lambda: import_state(recipe, plan))
            restore_point = replace(restore_point, imported=imported)
            notes = (*notes, *(imported.notes if imported is not None else ()))
        restore_point.check_step(plan.total_steps)
        process_group.on_rank0(lambda: check_model(recipe, plan.num_classes))
        with phases.during(Phase.DEVICE):
            device = open_device(args.device, plan.threads, launch_env.local_rank)
        if existing is None or not existing.is_finished:
            configure_algorithms(device, recipe.engine, plan.total_steps)
        notes = (*notes, affinity_note) if affinity_note else notes
        yield PreparedRun(
            recipe=recipe,
            plan=plan,
            datasets=datasets,
            device=device,
            process_group=process_group,
            restore_point=restore_point,
            existing=existing,
            notes=notes,
            trust_code=args.trust_code,
            mirror=mirror,
            phases=phases,
        )


def _check_address_space() -> None:
    """Refuse to start threads where there is no room: one that fails to begin would be waited for without end."""
    if not has_address_space(_MIN_ADDRESS_SPACE):
        raise ResourceError(
            "out of memory",
            why=f"less than {_MIN_ADDRESS_SPACE >> 20} MiB of address space are left to this process (ulimit -v)",
            then="raise the limit: ulimit -v unlimited",
        )


def _open_mirror(args: RunOptions, process_group: ProcessGroup, stack: ExitStack) -> RunMirror | None:
    """The copy of the run in an object store, on rank 0; what it has of the run is there afterwards."""
    opened: list[RunMirror] = []

    def open_on_rank0(url: str, out: Path) -> None:
        process_group.set_phase(f"opening {url}")
        log = lambda text: print(printable(text), file=sys.stderr, flush=True)  # noqa: E731
        opened.append(stack.enter_context(RunMirror.open(url, RunDir(out), args.resume, log)))

    url, out = args.mirror, args.out
    if url is not None and out is not None:
        process_group.on_rank0(lambda: open_on_rank0(url, out))
    return opened[0] if opened else None


def _open_existing(
    args: RunOptions, recipe: Recipe, datasets: Datasets, process_group: ProcessGroup, stack: ExitStack
) -> tuple[ExistingRun | None, RestorePoint, tuple[str, ...]]:
    """The run to resume, locked until the stack is closed, its checkpoint, and notes for the log."""
    process_group.set_phase("opening the run directory")
    if not args.resume:
        process_group.on_rank0(lambda: check_out_is_free(args.out, resume=False))
        return None, RestorePoint(), ()
    existing, notes = process_group.on_rank0(
        lambda: open_existing(
            recipe,
            out=args.out,
            runs=args.runs,
            stack=stack,
            launch_env=process_group.launch_env,
            command=args.command,
        )
    )
    if existing is None or existing.is_finished:
        return existing, RestorePoint(), notes
    restore_point = process_group.on_rank0(lambda: find_restore_point(existing.run_dir))
    if restore_point.is_resumed and restore_point.state["data_fingerprint"] != datasets.fingerprint():
        raise RecipeError(
            "the data has changed since the run was started",
            where=str(data_path(recipe) or recipe.data.source),
            why="files were added, removed or relabeled",
            then="use --data with the data of the first command, or start a new run without --resume",
        )
    return existing, restore_point, (*restore_point.notes, *existing.notes)


def _plan_facts(
    recipe: Recipe, datasets: Datasets, process_group: ProcessGroup, state: Mapping[str, Any], device: str
) -> Facts:
    """The inputs of the plan besides the recipe; a resumed run keeps its threads and its JPEG decoder."""
    # Checkpoints from before the native decoder do not record one: they used Pillow.
    saved_decoder: Decoder | None = state.get("decoder", "pillow") if state else None
    return Facts(
        num_train=len(datasets.train),
        num_val=len(datasets.val),
        num_val_left_out=datasets.num_val_left_out,
        num_classes=len(datasets.train.class_names),
        world_size=process_group.world_size,
        source=datasets.train.kind,
        data_origins=datasets.origins,
        cores=state.get("threads") or cores_per_process(Machine(), process_group.launch_env.local_world_size),
        cache=cache_size(datasets),
        fills_from_files=fills_from_files(recipe, datasets.train),
        decoder=choose_decoder(recipe.augment.decoder, saved_decoder, process_group.all_gather(native_support())),
        device=device_kind(device),
    )
