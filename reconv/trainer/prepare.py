"""The arguments of a run, and all that training and benchmarks set up before there is a run directory: recipe, data,
plan, device and process group. Nothing is written.

Precision, initial weights and teacher are checked here too, so that a run that cannot be built leaves no directory
(tests/trainer/test_prepare.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Self, TypeVar

from reconv.build.addresses import check_addresses, remember_addresses
from reconv.build.checks import check_model, check_num_devices, check_same_data
from reconv.build.code import import_code
from reconv.build.data import (
    Datasets,
    cache_size,
    check_data_is_read,
    data_path,
    fills_from_files,
    open_datasets,
    with_cache,
    with_checked_images,
    with_data_path,
)
from reconv.build.derived_recipe import HeadMeasurement, load_derived
from reconv.build.init_weights import check_weights_readable
from reconv.checkpoint.mirror.download import NO_MIRROR, check_mirror_address, download_run, read_mirror_url
from reconv.checkpoint.mirror.upload import RunMirror
from reconv.core.custom_code import is_import_path, is_provided, provide, require_trust
from reconv.core.errors import RecipeError, ReconvError, ResourceError, UsageError
from reconv.core.machine import Machine, available_memory_bytes, cores_per_process, has_address_space
from reconv.core.text import printable
from reconv.data.decode.native import choose_decoder, native_support
from reconv.device import Device, configure_algorithms, device_kind, open_device
from reconv.device.affinity import cpu_affinity
from reconv.distributed.environment import SECRET_VARIABLE, num_local_ranks, read_launch_env, read_node_env
from reconv.distributed.failure import report_failures
from reconv.distributed.nic import choose_nic
from reconv.distributed.process_group import ProcessGroup, open_process_group
from reconv.kernels.jit.compile_ahead import import_triton
from reconv.logging.console import make_console
from reconv.logging.events import LogMessage
from reconv.logging.exporters import require_packages
from reconv.logging.phases import Phase, PhaseTimer, process_start_s
from reconv.logging.run_dir import RunDir
from reconv.models import option_names
from reconv.recipe.load.resolved import Resolved, fit_to_data, fit_to_model
from reconv.recipe.loader import load
from reconv.recipe.parts.code import code_references
from reconv.recipe.parts.data import Decoder
from reconv.recipe.plan import Facts, Plan, make_plan
from reconv.recipe.schema import Recipe
from reconv.recipe.workers import check_worker_memory
from reconv.storage.object_stores.store import as_url, is_url, local_folder, open_object_store
from reconv.trainer.imported_state import import_state
from reconv.trainer.opened_run import (
    ExistingRun,
    RestorePoint,
    ResumeLookup,
    check_out_is_free,
    find_restore_point,
    open_existing,
    with_durations_of_run,
)
from reconv.trainer.options import RunOptions

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
    datasets = with_cache(recipe, open_datasets(recipe), available_bytes, process_group.world_size)
    return with_checked_images(recipe, datasets)


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
    if args.nic is not None:
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
        lookup = ResumeLookup(args.out, args.runs, args.resume)
        resolved = process_group.on_rank0(lambda: resolve_recipe(args, lookup, measures_head=True))
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
            resolved = process_group.on_rank0(lambda: with_durations_of_run(fitted, lookup))
            check_code_of_rank0(process_group, resolved.recipe, args)
        recipe = resolved.recipe
        existing, restore_point, notes = _open_existing(args, recipe, lookup, datasets, process_group, stack)
        with phases.during(Phase.DEVICE):
            pci_address = open_device(args.device, local_rank=launch_env.local_rank).pci_address
        if recipe.engine.cpu_affinity != "any":
            binding = cpu_affinity(
                recipe.engine.cpu_affinity,
                pci_address,
                local_rank=launch_env.local_rank,
                local_world_size=launch_env.local_world_size,
            )
            notes = (*notes, stack.enter_context(binding))
        facts = _plan_facts(recipe, datasets, process_group, restore_point.state, args.device)
        plan = make_plan(recipe, facts, resolved.lines)
        check_worker_memory(plan, recipe, launch_env.local_world_size, available_memory_bytes(Machine()))
        source, is_new = recipe.model.resume_from, existing is None or not existing.is_finished
        if source is not None and is_new and not restore_point.is_resumed:
            imported = process_group.on_rank0(lambda: import_state(Path(source), recipe, plan))
            restore_point = replace(restore_point, imported=imported)
            notes = (*notes, *imported.notes)
        restore_point.check_step(plan.total_steps)
        process_group.on_rank0(lambda: check_model(recipe, plan.num_classes))
        with phases.during(Phase.DEVICE):
            device = open_device(args.device, plan.threads, launch_env.local_rank)
        if existing is None or not existing.is_finished:
            configure_algorithms(device, recipe.engine, plan.total_steps)
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
            hint="raise the limit: ulimit -v unlimited",
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
    args: RunOptions,
    recipe: Recipe,
    lookup: ResumeLookup,
    datasets: Datasets,
    process_group: ProcessGroup,
    stack: ExitStack,
) -> tuple[ExistingRun | None, RestorePoint, tuple[str, ...]]:
    """The run to resume, locked until the stack is closed, its checkpoint, and notes for the log."""
    process_group.set_phase("opening the run directory")
    if not args.resume:
        process_group.on_rank0(lambda: check_out_is_free(args.out, resume=False))
        return None, RestorePoint(), ()
    existing, notes = process_group.on_rank0(
        lambda: open_existing(
            recipe,
            lookup,
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
            hint="use --data with the data of the first command, or start a new run without --resume",
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


T = TypeVar("T")


def run_on_devices(devices: int | None, function: Callable[..., T], args: RunOptions, *more: Any) -> T:
    """Call `function(args, *more)` here or, with several devices, in one process per device; returns rank 0's result.

    For several processes the function must be importable, and its arguments and result must be picklable.
    """
    num_ranks = num_local_ranks(devices, read_launch_env())
    if num_ranks is None:
        return function(args, *more)
    from reconv.distributed.launcher import launch  # imports torch's launcher, which a single process does not need

    provide(args.objects)  # here too, for an evaluation of the run that comes after it
    check_picklable(args.objects)
    node = read_node_env()
    if node is None or node.node_rank == 0:
        take_run_back(args)
    check_num_devices(num_ranks, args.device, resolve_recipe(args).recipe, 1 if node is None else node.num_nodes)
    if node is None or node.node_rank == 0:  # the others may come when rank 0 has made it
        check_out_is_free(args.out, args.resume)
    return launch(num_ranks, function, args, *more)


def take_run_back(args: RunOptions) -> None:
    """Download the run to resume from its copy in an object store, if that is newer."""
    if args.mirror is not None and args.resume and args.out is not None:
        download_run(open_object_store(args.mirror), RunDir(args.out), lambda text: None)


def local_out(out: str | Path | None, runs: str | Path, mirror: str | None = None) -> tuple[Path | None, str | None]:
    """The run directory on this machine and the address of its copy, from --out or from the run directory itself.

    The user must have given that address; `mirror` is one that they give now, or `off`.
    """
    if out is None:
        return None, None
    if is_url(out):
        url = as_url(out)
        return local_folder(url, Path(runs)), url
    if mirror is not None:
        return Path(out), None if mirror == NO_MIRROR else as_url(mirror)
    noted = read_mirror_url(RunDir(Path(out)))
    if noted is not None and read_launch_env().rank == 0:  # which alone uses it
        check_mirror_address(noted, str(out))
    return Path(out), noted


def check_picklable(objects: Mapping[str, Any]) -> None:
    """Refuse objects from Python that cannot be sent to other processes."""
    for name, value in objects.items():
        try:
            ForkingPickler.dumps(value)
        except Exception as error:  # whatever the object's own methods raise
            raise UsageError(
                f"{name} cannot be sent to other processes",
                why=str(error),
                hint="define it at the top level of a module or a script, or train with one device",
            ) from error


def resolve_recipe(args: RunOptions, lookup: ResumeLookup | None = None, *, measures_head: bool = False) -> Resolved:
    """The recipe with its overrides and the path of its data; checks that the packages and weights it needs exist.

    Without `measures_head` a derived learning rate does not depend on the features of the initial weights, which takes
    seconds to know.
    """
    lookup = lookup or ResumeLookup(args.out, args.runs, args.resume)
    overrides = [*args.overrides, *([("data.path", str(args.data), "--data")] if args.data is not None else [])]
    resolved = load(args.recipe, overrides)
    if args.consent is not None:
        args.consent.require(code_references(resolved.recipe), resolved.recipe.code_path, args.recipe)
    _check_addresses(args, resolved.recipe, [field for field, *_ in overrides])
    if resolved.recipe.derive:
        resumed = lookup.find(resolved.recipe)
        values = None if resumed is None else resumed.recipe
        is_network_derived = resolved.is_open("model.name")
        check_network = partial(_require_trust_in_network, trust_code=args.trust_code)
        measurement = HeadMeasurement(True, check_network, partial(print_early, args.console))
        resolved = load_derived(args.recipe, overrides, values, measurement if measures_head else None).resolved
        if is_network_derived:
            check_network(resolved.recipe)
    resolved = fit_to_model(resolved, option_names(resolved.recipe.model.name))
    recipe = resolved.recipe
    check_data_is_read(recipe, args.data)
    resumed = lookup.find(recipe)
    is_path_saved = recipe.data.path is None and "DATA_DIR" not in os.environ
    recipe = with_data_path(
        recipe, resumed.recipe.data.path if resumed is not None and resumed.run_dir.recipe.is_file() else None
    )
    if is_path_saved:
        check_addresses(recipe, str(args.out), ["data.path"])
    else:
        remember_addresses(recipe, ["data.path"])
    require_packages(recipe.loggers)
    if recipe.model.init is not None and not args.resume:  # a resumed run no longer needs its initial weights
        check_weights_readable(recipe)
    return replace(resolved, recipe=recipe)


def _check_addresses(args: RunOptions, recipe: Recipe, overridden: Sequence[str]) -> None:
    """Note the addresses that the user gives, in options or a recipe; those of a saved recipe must be among them."""
    is_saved = args.consent is not None
    remember_addresses(recipe, overridden if is_saved else None)
    if is_saved:
        check_addresses(recipe, args.recipe)


def print_early(mode: str | None, text: str) -> None:
    """Print a message, such as the progress of a download, before the run has a logger."""
    if mode is not None:
        console = make_console(mode)
        console.on_event(LogMessage("info", text))
        console.close()


def check_code_of_rank0(process_group: ProcessGroup, recipe: Recipe, args: RunOptions) -> None:
    """Refuse code that a rank 0 without a proof of its identity names, unless this rank's own recipe names it too."""
    if process_group.is_authenticated or process_group.is_rank0:
        return
    named = _named_code(recipe, args)
    if not named:
        return
    try:
        own = _named_code(resolve_recipe(args).recipe, args)
    except ReconvError:  # a file that only rank 0 has
        own = set()
    if named - own:
        raise UsageError(
            f"rank 0 names code that the recipe of rank {process_group.rank} does not",
            where=", ".join(sorted(named - own)),
            why=f"the ranks are not authenticated: {SECRET_VARIABLE} is not set",
            hint=f"set {SECRET_VARIABLE} to the same text for all ranks, or give all of them the same recipe",
        )


def _named_code(recipe: Recipe, args: RunOptions) -> set[str]:
    """Code that a recipe would import, the folders it would be found in, and whose saved recipe may name more."""
    paths = [path for _, path in code_references(recipe) if not is_provided(path)]
    folders = recipe.code_path if paths else ()
    teacher = (recipe.distill.teacher, recipe.distill.teacher_recipe) if args.trust_code else ()
    return {name for name in (*paths, *folders, *teacher) if name}


def _require_trust_in_network(recipe: Recipe, trust_code: bool) -> None:
    """Refuse to import a network that initial weights or the resumed run name, not the user, unless it is trusted."""
    if is_import_path(recipe.model.name):
        where = f"the model of {recipe.model.init}"
        require_trust([("model.name", recipe.model.name)], recipe.code_path, trust_code, where)
