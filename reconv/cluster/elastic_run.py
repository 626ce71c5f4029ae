"""Facts about a run for the agents of `--elastic` and Ray that start its ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from reconv.build.checks import check_machine_has
from reconv.checkpoint.run_identity import read_identity
from reconv.cluster.elastic_config import ElasticConfig
from reconv.cluster.ray import Ray
from reconv.core.custom_code import provide
from reconv.core.errors import ExitCode, ReconvError, UsageError
from reconv.distributed.environment import read_launch_env
from reconv.logging.run_dir import RunDir, read_summary
from reconv.recipe.batch_split import num_copies, split_batch
from reconv.recipe.schema import Recipe
from reconv.recipe.units import BatchPerDevice
from reconv.trainer.opened_run import check_out_is_free
from reconv.trainer.options import RunOptions
from reconv.trainer.prepare import check_picklable, resolve_recipe
from reconv.trainer.run import RunOutcome


def train_elastic(config: ElasticConfig, train: Callable[..., RunOutcome], args: RunOptions) -> RunOutcome:
    """Call `train(args, None)` in the ranks of this node, with whatever other nodes there are, until the run ends."""
    from reconv.cluster.elastic import ElasticWork, run_elastic  # imports torch's launcher

    launch_env = read_launch_env()
    if launch_env.world_size > 1:
        raise UsageError(
            f"--elastic cannot be combined with {launch_env.launcher}, which has already started processes",
            hint="start one `reconv train --elastic` on each node",
        )
    if args.out is None:
        raise UsageError(
            "--elastic needs --out", why="all nodes and all rounds use one run directory", hint="name it with --out DIR"
        )
    if args.mirror is not None:
        raise UsageError(
            f"--elastic cannot use {args.mirror}", why="all nodes need one run directory", hint="--out a shared folder"
        )
    if any(isinstance(value, BatchPerDevice) for _, value, _ in args.overrides):
        raise UsageError(
            "--elastic and --batch-per-device cannot be combined",
            why="an elastic run has the same global batch on any number of devices",
            hint="use --batch-size",
        )
    out = args.out.absolute()
    args = replace(args, out=out)
    provide(args.objects)
    check_picklable(args.objects)
    recipe = resolve_recipe(args).recipe
    _check_saves(recipe, "--elastic")
    if config.num_ranks > 1:
        check_machine_has(config.num_ranks, args.device)
    if usable_ranks(recipe, config.max_nodes * config.num_ranks) == 0:
        split_batch(recipe, num_copies(recipe, config.max_nodes * config.num_ranks))  # raises an error that says why
    work = ElasticWork(
        function=train,
        args=(args, None),
        usable=partial(usable_ranks, recipe),
        job=str(out),
        run_id=partial(_run_id, RunDir(out)),
        progress=partial(_newest_checkpoint, RunDir(out)),
        finished=lambda: RunOutcome(out, read_summary(out), int(ExitCode.OK)),
    )
    return run_elastic(config, work, args.nic)


def train_on_ray(launch: Ray, args: RunOptions) -> RunOutcome:
    """Train on a Ray cluster until the run ends."""
    if args.out is None:
        raise UsageError(
            "launch=Ray(...) needs out", why="all nodes and all rounds use one run directory", hint="add out=DIR"
        )
    provide(args.objects)
    resolved = resolve_recipe(args)
    check_out_is_free(args.out if args.mirror is None else None, args.resume)
    _check_saves(resolved.recipe, "Ray")
    # Later rounds continue what an earlier one has saved.
    args = replace(args, out=args.out.absolute() if args.mirror is None else args.out, resume=True)
    kind = args.device.partition(":")[0]
    result = launch.run(args, partial(usable_ranks, resolved.recipe), None if kind == "auto" else kind == "cuda")
    assert args.out is not None
    return RunOutcome(args.out, result["summary"], result["exit_code"])


def _check_saves(recipe: Recipe, option: str) -> None:
    if recipe.save.every == "off":
        raise UsageError(
            f"{option} needs checkpoints, and save.every is off",
            why="after every change of the nodes the run would start anew",
            hint="for example --set save.every=1ep",
        )


def usable_ranks(recipe: Recipe, num_ranks: int) -> int:
    """The largest number of ranks, up to `num_ranks`, that can share the global batch; 0 if there is none."""
    for number in range(num_ranks, 0, -1):
        with suppress(ReconvError):
            split_batch(recipe, num_copies(recipe, number))
            return number
    return 0


def _run_id(run_dir: RunDir) -> str:
    if not run_dir.identity.is_file():
        return ""
    try:
        return read_identity(run_dir).run_id
    except ReconvError:  # the ranks say what is wrong with it
        return "unreadable"


def _newest_checkpoint(run_dir: RunDir) -> str:
    folders: list[Path] = []
    with suppress(OSError):
        folders = list(run_dir.checkpoints.glob("step-*"))
    return max((folder.name for folder in folders), default="")
