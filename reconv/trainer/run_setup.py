"""What a run is started with, and the checks before anything is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

from reconv.build.addresses import check_addresses, remember_addresses
from reconv.build.checks import check_num_devices
from reconv.build.data import check_data_is_read, with_data_path
from reconv.build.derived_recipe import HeadMeasurement, load_derived
from reconv.build.init_weights import check_weights_readable
from reconv.checkpoint.mirror.download import NO_MIRROR, check_mirror_address, download_run, read_mirror_url
from reconv.core.custom_code import is_import_path, is_provided, provide, require_trust
from reconv.core.errors import ReconvError, UsageError
from reconv.distributed.environment import SECRET_VARIABLE, num_local_ranks, read_launch_env, read_node_env
from reconv.distributed.process_group import ProcessGroup
from reconv.logging.console import make_console
from reconv.logging.events import LogMessage
from reconv.logging.exporters import require_packages
from reconv.logging.run_dir import RunDir
from reconv.models import option_names
from reconv.recipe.load.resolved import Resolved, fit_to_model
from reconv.recipe.loader import load
from reconv.recipe.parts.code import code_references
from reconv.recipe.schema import Recipe
from reconv.storage.object_stores.store import as_url, is_url, local_folder, open_object_store
from reconv.trainer.options import RunOptions
from reconv.trainer.resume import check_out_is_free, find_run, read_data_path

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
                then="define it at the top level of a module or a script, or train with one device",
            ) from error


def resolve_recipe(args: RunOptions, *, measures_head: bool = False) -> Resolved:
    """The recipe with its overrides and the path of its data; checks that the packages and weights it needs exist.

    Without `measures_head` a derived learning rate does not depend on the features of the initial weights, which takes
    seconds to know.
    """
    overrides = [*args.overrides, *([("data.path", str(args.data), "--data")] if args.data is not None else [])]
    resolved = load(args.recipe, overrides)
    if args.consent is not None:
        args.consent.require(code_references(resolved.recipe), resolved.recipe.code_path, args.recipe)
    _check_addresses(args, resolved.recipe, [field for field, *_ in overrides])
    if resolved.recipe.derive:
        resumed = find_run(resolved.recipe, out=args.out, runs=args.runs) if args.resume else None
        values = None if resumed is None else load(str(resumed.recipe)).recipe
        is_network_derived = resolved.is_open("model.name")
        check_network = partial(_require_trust_in_network, trust_code=args.trust_code)
        measurement = HeadMeasurement(True, check_network, partial(print_early, args.console))
        resolved = load_derived(args.recipe, overrides, values, measurement if measures_head else None).resolved
        if is_network_derived:
            check_network(resolved.recipe)
    resolved = fit_to_model(resolved, option_names(resolved.recipe.model.name))
    recipe = resolved.recipe
    check_data_is_read(recipe, args.data)
    resumed = find_run(recipe, out=args.out, runs=args.runs) if args.resume else None
    is_path_saved = recipe.data.path is None and "DATA_DIR" not in os.environ
    recipe = with_data_path(recipe, read_data_path(resumed) if resumed else None)
    if is_path_saved:
        check_addresses(recipe, str(args.out), ["data.path"])
    else:
        remember_addresses(recipe, ["data.path"])
    require_packages(recipe.loggers)
    if not args.resume:  # a resumed run no longer needs its initial weights
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
            then=f"set {SECRET_VARIABLE} to the same text for all ranks, or give all of them the same recipe",
        )


def _named_code(recipe: Recipe, args: RunOptions) -> set[str]:
    """What a recipe would import, the folders it would be found in, and whose saved recipe may name more."""
    paths = [path for _, path in code_references(recipe) if not is_provided(path)]
    folders = recipe.code_path if paths else ()
    teacher = (recipe.distill.teacher, recipe.distill.teacher_recipe) if args.trust_code else ()
    return {name for name in (*paths, *folders, *teacher) if name}


def _require_trust_in_network(recipe: Recipe, trust_code: bool) -> None:
    """Refuse to import a network that initial weights or the resumed run name, not the user, unless it is trusted."""
    if is_import_path(recipe.model.name):
        where = f"the network of {recipe.model.init}"
        require_trust([("model.name", recipe.model.name)], recipe.code_path, trust_code, where)
