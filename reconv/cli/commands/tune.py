"""`reconv tune`: search recipe fields with trials that are ordinary runs, or find a range of learning rates."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reconv.cli.commands.submit import submit
from reconv.cli.commands.train import recipe_and_data, recipe_overrides, silence_torch
from reconv.cli.options import (
    DEVICE_HELP,
    STDOUT,
    Command,
    complete_recipes,
    emit_json,
    json_option,
    print_line,
    print_note,
    print_table,
    set_option,
    shortcut_options,
    write_text,
)
from reconv.cli.start_up import import_torch, pause_gc, start_cuda
from reconv.core.errors import UsageError

if TYPE_CHECKING:
    from reconv.trainer.lr_range import LrRange
    from reconv.tuner.result import TuneResult

_TARGETS = ("slurm", "ray")
# Options of `submit` that jobs of trials have, too.
_SUBMIT_OPTIONS = (
    *("nodes", "devices_per_node", "partition", "account", "time", "cpus_per_device", "memory_per_node"),
    *("stop_before", "sbatch_options", "setup", "program", "address"),
)
_SEARCH_OPTIONS = ("space", "trials", "seed", "search", "rungs", "reduction", "parallel", "confirm", "out", "target")


def _with_submit_options(command: click.Command) -> click.Command:
    command.params += [param for param in submit.params if param.name in _SUBMIT_OPTIONS]
    return command


@_with_submit_options
@click.command(cls=Command)
@click.argument("recipe", required=False, shell_complete=complete_recipes)
@click.option("--data", metavar="DIR|URL", type=click.Path(), help="The dataset, as for `reconv train`.")
@click.option(
    "--space",
    metavar="A.B=LOW:HIGH[:log]",
    multiple=True,
    help="A recipe field to search: a range, with :log in the logarithm, or choices A|B|C; repeatable. Default: rate "
    "and weight decay.",
)
@click.option("--trials", metavar="N", type=click.IntRange(min=2), default=20, show_default=True, help="Trials.")
@click.option("--seed", metavar="N", type=click.IntRange(min=0), default=0, show_default=True, help="Of the search.")
@click.option(
    "--search",
    type=click.Choice(["tpe", "random"]),
    default="tpe",
    show_default=True,
    help="What proposes trials: Optuna's TPE from the results, or chance.",
)
@click.option(
    "--rungs",
    metavar="N",
    type=click.IntRange(1, 8),
    default=3,
    show_default=True,
    help="Points at which trials are compared; 1: only at the end.",
)
@click.option(
    "--reduction",
    metavar="N",
    type=click.IntRange(2, 16),
    default=3,
    show_default=True,
    help="One of N trials goes on after a rung, to N times the length.",
)
@click.option(
    "--parallel",
    metavar="N",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Trials at once, on the same device or in the queue.",
)
@click.option(
    "--confirm",
    metavar="N",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Fresh seeds with which the best trial and the recipe as it is are compared; 0: none.",
)
@click.option("--out", metavar="DIR", type=click.Path(), help="The study [default: runs/RECIPE-tune].")
@shortcut_options("epochs", "batch_size", "lr", "workers")
@click.option("--device", metavar="NAME", default="auto", show_default=True, help=DEVICE_HELP)
@shortcut_options("model", "init", "freeze")
@set_option
@click.option("--to", "target", type=click.Choice(_TARGETS), help="Train the trials there, not on this machine.")
@click.option(
    "--lr-range",
    is_flag=True,
    help="No search: raise the rate exponentially within a few steps, and suggest one; leaves no run.",
)
@click.option(
    "--steps", metavar="N", type=click.IntRange(20, 10_000), help="With --lr-range: number of steps [default: 100]."
)
@click.option("--chart", metavar="FILE.html", type=click.Path(), help="With --lr-range: draw the loss over the rate.")
@click.option("--trust-code", is_flag=True, help="Import the code that a teacher's run or the weights of --init name.")
@click.option("--quiet", is_flag=True, help="Print only the result.")
@json_option
@click.pass_context
def tune(
    ctx: click.Context,
    /,
    recipe: str | None,
    data: str | None,
    lr_range: bool,
    steps: int | None,
    chart: str | None,
    quiet: bool,
    json_file: str | None,
    **options: Any,
) -> int:
    """Search fields of RECIPE for better values; trials are runs that are stopped and continued at rungs.

    Trial 0 is the recipe as it is. After each rung the best third goes on; the best trial at the end is trained again
    with fresh seeds beside the recipe as it is, and unless it is better by more than two standard errors, the default
    stands. The folder has a report, the recipe to keep (best.yaml) and every run. After Ctrl-C or a crash the same
    command goes on.

    \b
    Examples:
      reconv tune quickstart --trials 9
      reconv tune finetune --data photos/ --init mobilenet_v2.pth --trials 18
      reconv tune resnet50 --data /imagenet --space schedule.lr=0.1:4:log --space 'optimizer.name=sgd|lars'
      reconv tune quickstart --space batch.size=32:128:32 --space schedule.warmup=0ep:3ep --parallel 2
      reconv tune resnet50 --data /imagenet --to slurm --devices-per-node 8 --parallel 4 --time 8:00:00
      reconv tune quickstart --lr-range
    """
    recipe, data = recipe_and_data(recipe, data)
    options["settings"] = options.pop("settings", ())
    if lr_range:
        return _lr_range(ctx, recipe, data, steps or 100, chart, quiet, json_file, options)
    for name, value in (("--steps", steps), ("--chart", chart)):
        if value is not None:
            raise UsageError(f"{name} is for --lr-range", hint="add --lr-range, or leave it out")
    return _search(ctx, recipe, data, quiet, json_file, options)


def _search(
    ctx: click.Context, recipe: str, data: str | None, quiet: bool, json_file: str | None, options: dict[str, Any]
) -> int:
    target = options["target"]
    if target is None:
        _refuse(ctx, _SUBMIT_OPTIONS, "is for --to slurm or --to ray", "add --to, or leave it out")
    from reconv.tuner.tune import TuneOptions, run_study

    study = TuneOptions(
        recipe=recipe,
        overrides=recipe_overrides({**options, "seed": None}, 1),
        data=data,
        out=None if options["out"] is None else Path(options["out"]),
        submit={**{name: options.get(name) for name in _SUBMIT_OPTIONS}, "name": None, "nic": None},
        command=["reconv", *sys.argv[1:]],
        **{
            name: options[name]
            for name in ("space", "trials", "seed", "search", "rungs", "reduction", "parallel", "confirm", "device")
        },
        trust_code=options["trust_code"],
        target=target,
    )
    result = run_study(study, (lambda text: None) if quiet or json_file == STDOUT else print_note)
    if json_file is not None:
        emit_json(result.to_dict(), json_file)
    if json_file != STDOUT:
        _print_study(result, quiet)
    return 0


def _print_study(result: TuneResult, quiet: bool) -> None:
    if not quiet:
        print_table(*result.rows)
        print_line()
    print_line(result.verdict)
    print_line(f"  train it: {shlex.join(result.train_words)}")
    print_line(f"  report:   {result.report}")


def _lr_range(
    ctx: click.Context,
    recipe: str,
    data: str | None,
    steps: int,
    chart: str | None,
    quiet: bool,
    json_file: str | None,
    options: dict[str, Any],
) -> int:
    _refuse(ctx, (*_SUBMIT_OPTIONS, *_SEARCH_OPTIONS), "cannot be combined with --lr-range", "leave it out")
    overrides = recipe_overrides(options, 1)
    silence_torch()
    start_cuda(options["device"], None)
    with pause_gc():
        import_torch()
        from reconv.trainer.lr_range import find_lr_range
        from reconv.trainer.options import RunOptions

    run = RunOptions(recipe, overrides, data, device=options["device"], trust_code=options["trust_code"])
    found = find_lr_range(run, steps)
    if chart is not None:
        from reconv.tuner.page import render_lr_range

        write_text(Path(chart), render_lr_range(found, shlex.join(["reconv", *sys.argv[1:]])))
    if json_file is not None:
        emit_json(found.to_dict(), json_file)
    if json_file != STDOUT:
        _print_lr_range(found, quiet, chart)
    return 0


def _print_lr_range(found: LrRange, quiet: bool, chart: str | None) -> None:
    if not quiet:
        print_table(*found.rows)
        print_line()
    for line in found.lines:
        print_line(line)
    if chart is not None:
        print_line(f"chart: {chart}")


def _refuse(ctx: click.Context, names: tuple[str, ...], why: str, hint: str) -> None:
    for param in ctx.command.params:
        is_given = ctx.get_parameter_source(param.name or "") is click.core.ParameterSource.COMMANDLINE
        if param.name in names and is_given:
            raise UsageError(f"{param.opts[0]} {why}", hint=hint)
