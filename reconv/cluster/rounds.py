"""Rounds of a run, each with the nodes that are there: what `--elastic` and Ray share. Imports no torch."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from reconv.core.custom_code import provide
from reconv.core.errors import ExitCode, ReconvError, TerminatedError, UsageError
from reconv.core.text import printable
from reconv.distributed.environment import read_launch_env
from reconv.logging.run_dir import RunDir, read_summary
from reconv.recipe.batch_split import num_copies, split_batch
from reconv.recipe.schema import Recipe
from reconv.recipe.units import BatchPerDevice

if TYPE_CHECKING:
    from reconv.cluster.launch import ElasticConfig
    from reconv.cluster.ray import Ray
    from reconv.trainer.options import RunOptions
    from reconv.trainer.run import RunOutcome

STOP_LIMIT_S = 300.0  # for ranks that were asked to save and stop, or whose peers are lost
MAX_RESTARTS = 3  # in a row, with the same nodes and without a new checkpoint
_LOCKED_LIMIT_S = 120.0  # for ranks of an earlier round, on a node that is cut off, to release the run directory
# A restart would end with the same error.
FINAL = (ExitCode.USAGE, ExitCode.DATA, ExitCode.CHECKPOINT, ExitCode.DIVERGED)


class RestartPolicy:
    """Decides if another round may help after one that has failed."""

    def __init__(self) -> None:
        self._num_restarts = 0
        self._last: tuple[object, str] | None = None  # the nodes and the progress at the last failure
        self._locked_s: float | None = None  # since when another process has the run directory

    def after(self, error: ReconvError, nodes: object, progress: str) -> str:
        """Describe why another round follows, or raise the error of ranks that fail again and again.

        `progress` changes with every checkpoint.
        """
        now_s = time.monotonic()
        if error.code == ExitCode.RUN_LOCKED:
            self._locked_s = self._locked_s or now_s
            if now_s - self._locked_s > _LOCKED_LIMIT_S:
                raise error
            time.sleep(2.0)
            return f"{printable(error.what)}; trying again"
        self._locked_s = None
        self._num_restarts = self._num_restarts + 1 if (nodes, progress) == self._last else 1
        self._last = (nodes, progress)
        if self._num_restarts > MAX_RESTARTS:
            raise error
        restarts = f"{self._num_restarts} of {MAX_RESTARTS} without a new checkpoint"
        return f"{printable(error.what)}; starting again ({restarts})"


def stopped_without_saving(signals: Sequence[int]) -> BaseException:
    """The end of an agent or a driver that was asked to stop while no rank had anything to save."""
    if signals[0] == signal.SIGINT:
        return KeyboardInterrupt()
    return TerminatedError("stopped without saving", why="no rank of this node was training")


def check_saves(recipe: Recipe, option: str) -> None:
    """Raise if the recipe saves nothing to continue from."""
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


def assign_ranks(offered: Sequence[int], usable: Callable[[int], int]) -> tuple[int, ...]:
    """The ranks of each node, of those that it offers: as many in total as can share the global batch."""
    left = usable(sum(offered))
    assigned = []
    for number in offered:
        assigned.append(min(number, left))
        left -= assigned[-1]
    return tuple(assigned)


def find_run_id(run_dir: RunDir) -> str:
    """The id of the run in a run directory; empty if there is none."""
    from reconv.checkpoint.run_identity import read_identity

    if not run_dir.identity.is_file():
        return ""
    try:
        return read_identity(run_dir).run_id
    except ReconvError:  # the ranks say what is wrong with it
        return "unreadable"


def newest_checkpoint(folder: Path) -> str:
    """The name of the newest checkpoint in the folder `checkpoints` of a run; empty if there is none."""
    found: list[str] = []
    with suppress(OSError):
        found = [checkpoint.name for checkpoint in folder.glob("step-*")]
    return max(found, default="")


def train_elastic(config: ElasticConfig, train: Callable[..., RunOutcome], args: RunOptions) -> RunOutcome:
    """Call `train(args, None)` in the ranks of this node, with whatever other nodes there are, until the run ends."""
    from reconv.build.checks import check_machine_has
    from reconv.cluster.elastic import ElasticWork, run_elastic  # imports torch's launcher
    from reconv.trainer.prepare import check_picklable, resolve_recipe
    from reconv.trainer.run import RunOutcome

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
    check_saves(recipe, "--elastic")
    if config.num_ranks > 1:
        check_machine_has(config.num_ranks, args.device)
    if usable_ranks(recipe, config.max_nodes * config.num_ranks) == 0:
        split_batch(recipe, num_copies(recipe, config.max_nodes * config.num_ranks))  # raises an error that says why
    work = ElasticWork(
        function=train,
        args=(args, None),
        usable=partial(usable_ranks, recipe),
        job=str(out),
        run_id=partial(find_run_id, RunDir(out)),
        progress=partial(newest_checkpoint, RunDir(out).checkpoints),
        finished=lambda: RunOutcome(out, read_summary(out), int(ExitCode.OK)),
    )
    return run_elastic(config, work, args.nic)


def train_on_ray(launch: Ray, args: RunOptions) -> RunOutcome:
    """Train on a Ray cluster until the run ends."""
    from reconv.trainer.opened_run import check_out_is_free
    from reconv.trainer.prepare import resolve_recipe
    from reconv.trainer.run import RunOutcome

    if args.out is None:
        raise UsageError(
            "launch=Ray(...) needs out", why="all nodes and all rounds use one run directory", hint="add out=DIR"
        )
    provide(args.objects)
    resolved = resolve_recipe(args)
    check_out_is_free(args.out if args.mirror is None else None, args.resume)
    check_saves(resolved.recipe, "Ray")
    # Later rounds continue what an earlier one has saved.
    args = replace(args, out=args.out.absolute() if args.mirror is None else args.out, resume=True)
    kind = args.device.partition(":")[0]
    result = launch.run(args, partial(usable_ranks, resolved.recipe), None if kind == "auto" else kind == "cuda")
    assert args.out is not None
    return RunOutcome(args.out, result["summary"], result["exit_code"])
