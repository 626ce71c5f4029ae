"""`reconv plan`: predict the speed, time and cost of a recipe on many devices."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reconv.cli.options import (
    Command,
    NumberRange,
    Override,
    complete_recipes,
    emit_json,
    json_option,
    parse_settings,
    print_line,
    print_note,
    print_table,
    set_option,
    shortcut_options,
    write_text,
)
from reconv.core.errors import UsageError
from reconv.recipe.shortcuts import shortcut_overrides

if TYPE_CHECKING:
    from reconv.planner.cluster import ClusterPrediction, ImpossiblePlan
    from reconv.planner.failures import Failures
    from reconv.recipe.schema import Recipe

_MAX_DEVICES = 65536
_UNITS = {"mb/s": 1e6, "gb/s": 1e9, "tb/s": 1e12}


def _device_counts(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, ...]:
    """Numbers of devices, as 8,64,512."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 0 < int(word) <= _MAX_DEVICES for word in words):
        raise click.BadParameter(f"expected numbers from 1 to {_MAX_DEVICES}: 8,64,512", ctx, param)
    return tuple(sorted(set(map(int, words))))


def _bytes_per_s(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """A bandwidth, as 20GB/s."""
    if text is None:
        return None
    number, unit = text[:-4].strip(), _UNITS.get(text[-4:].lower())
    try:
        value = float(number.replace("_", "")) * (unit or 0)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        raise click.BadParameter("expected a bandwidth: 500MB/s, 20GB/s or 1TB/s", ctx, param)
    return value


@click.command(cls=Command)
@click.argument("recipe", shell_complete=complete_recipes)
@click.option(
    "--devices",
    metavar="N,N,...",
    default="1,8,16,64",
    show_default=True,
    callback=_device_counts,
    help="Numbers of devices.",
)
@click.option(
    "--device-kind", metavar="NAME", default="h100", show_default=True, help="The kind of device, such as a100 or h200."
)
@click.option(
    "--network",
    metavar="RATE",
    help="Network of each device between machines: 400gbps, 100gbps-ethernet [default: the device's usual one].",
)
@shortcut_options(
    "batch_size",
    "batch_per_device",
    batch_size="Global batch size [default: the recipe's].",
    batch_per_device="Batch size of one device instead.",
)
@click.option(
    "--measured",
    metavar="FILE",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Step time from `reconv bench train --json FILE`; repeatable, for two batch sizes.",
)
@click.option(
    "--images",
    metavar="N",
    type=click.IntRange(min=1),
    help="Training images [default: ImageNet's, COCO's or CIFAR's].",
)
@click.option(
    "--parameters", metavar="N", type=click.IntRange(min=1), help="Parameters of a model that is not Reconv's."
)
@click.option(
    "--storage",
    metavar="RATE",
    callback=_bytes_per_s,
    help="Bandwidth of the shared storage: 20GB/s [default: enough].",
)
@click.option("--image-kb", metavar="X", type=NumberRange(0.1, 1e6), help="Mean size of an image file [default: 110].")
@click.option(
    "--cores", metavar="N", type=click.IntRange(1, 4096), help="CPU cores of a machine [default: the usual ones]."
)
@click.option("--price", metavar="X", type=NumberRange(0, 1e6), help="US dollars per hour and device.")
@click.option(
    "--failure-rate",
    metavar="X",
    type=NumberRange(1e-6, 1e6),
    help="Devices of 1,000 that fail in a day [default: 0.474, Llama 3's on 16,384 GPUs].",
)
@click.option(
    "--save-s",
    metavar="X",
    type=NumberRange(1e-6, 1e6),
    help="Seconds that a save stops training [default: 0.027].",
)
@click.option("--out", metavar="FILE.html", type=click.Path(path_type=Path), help="Write a page with charts.")
@set_option
@json_option
def plan(
    recipe: str,
    devices: tuple[int, ...],
    device_kind: str,
    network: str | None,
    batch_size: int | None,
    batch_per_device: int | None,
    measured: tuple[Path, ...],
    images: int | None,
    parameters: int | None,
    storage: float | None,
    image_kb: float | None,
    cores: int | None,
    price: float | None,
    failure_rate: float | None,
    save_s: float | None,
    out: Path | None,
    settings: tuple[str, ...],
    json_file: str | None,
) -> None:
    """Predict the speed, time and cost of training RECIPE on devices that are not here.

    The step time of one device is measured (--measured, or our own on an H200) or published; the rest is a model of
    all-reduce, stragglers and input that was checked against published results: the range holds for 80 % of those.
    The recipe's batch is global, so that more devices have smaller parts of it; --batch-per-device keeps those instead.

    \b
    Examples:
      reconv plan resnet50 --devices 8,64,512 --device-kind h100 --network 400gbps
      reconv plan resnet50 --devices 8,64 --batch-per-device 256 --out plan.html
      reconv plan resnet50 --measured step.json --device-kind a100 --price 2.10
    """
    from reconv.planner.cluster import IMAGE_BYTES, Cluster, ClusterPrediction, dataset_size, predict_cluster
    from reconv.planner.device_kinds import find_device_kind, with_network
    from reconv.planner.failures import FAILURES_PER_1000_DEVICES_AND_DAY, SAVE_S, Failures, engine_pauses, lost_time
    from reconv.planner.page import assumptions, render_plan
    from reconv.planner.step_time import find_network, known_step_time, measured_step_time

    overrides = parse_settings(settings)
    recipe_for = _recipe_loader(recipe, overrides, batch_size, batch_per_device)
    loaded = recipe_for(devices[0])
    if loaded.parallel.pipeline_stages > 1:
        raise UsageError(
            f"{loaded.name} splits its model over {loaded.parallel.pipeline_stages} devices, which is not predicted",
            hint="--set parallel.pipeline_stages=1 --set 'parallel.pipeline_splits=[]'",
        )
    kind = with_network(find_device_kind(device_kind), network)
    step_time = measured_step_time(measured, loaded) if measured else known_step_time(loaded, kind)
    if step_time.gradient_bytes is None:
        find_network(loaded.model.name, parameters)
    num_bytes = IMAGE_BYTES if image_kb is None else round(1000 * image_kb)
    cluster = Cluster(kind, kind.price_per_hour if price is None else price, storage, cores, num_bytes)
    num_train, num_val = dataset_size(loaded)
    rows = predict_cluster(recipe_for, devices, cluster, step_time, (images or num_train, num_val), parameters)
    failures = Failures(failure_rate or FAILURES_PER_1000_DEVICES_AND_DAY, save_s or SAVE_S)
    if out is not None:
        write_text(out, render_plan(loaded, cluster, step_time, rows, f"reconv {shlex.join(sys.argv[1:])}", failures))
    if json_file is not None:
        found = [row.as_json() for row in rows if isinstance(row, ClusterPrediction)]
        impossible = {row.devices: row.why for row in rows if not isinstance(row, ClusterPrediction)}
        basis = dict(assumptions(cluster, step_time, failures))
        for row in found:
            row["failures"] = asdict(lost_time(row["devices"], row["save_interval_s"], failures, engine_pauses()))
        emit_json({"recipe": loaded.name, "basis": basis, "predictions": found, "impossible": impossible}, json_file)
        return
    _print(rows, assumptions(cluster, step_time, failures), failures)
    if out is not None:
        print_note(f"page: {out}")


def _recipe_loader(
    recipe: str, overrides: Sequence[Override], batch_size: int | None, batch_per_device: int | None
) -> Callable[[int], Recipe]:
    """A function from a number of devices to the recipe."""
    from reconv.recipe.loader import load

    def recipe_for(count: int) -> Recipe:
        batch = shortcut_overrides({"batch_size": batch_size, "batch_per_device": batch_per_device}, count)
        return load(recipe, [*overrides, *batch]).recipe

    return recipe_for


def _print(
    rows: Sequence[ClusterPrediction | ImpossiblePlan], basis: Sequence[tuple[str, str]], failures: Failures
) -> None:
    from reconv.planner.cluster import ClusterPrediction
    from reconv.planner.page import HEAD, LOST_HEAD, lost_cells, plan_cells

    found = [row for row in rows if isinstance(row, ClusterPrediction)]
    if found:
        print_table(HEAD, [plan_cells(row) for row in found])
        print_line()
        print_table(["devices", "step, ms", *found[0].step.parts_s], [_part_cells(row) for row in found])
        print_line()
        print_line("lost in a day to failures, with the recipe's saves (with the best interval), predicted:")
        print_table(LOST_HEAD, [lost_cells(row, failures) for row in found])
        print_line()
    for name, text in basis:
        print_line(f"{name + ':':<12}{text}")
    for row in rows:
        if not isinstance(row, ClusterPrediction):
            print_line(f"{row.devices:,} devices: not possible: {row.why}", fg="yellow")
            continue
        for note in row.notes:
            print_line(f"note: {row.devices:,} devices: {note}", fg="yellow")


def _part_cells(row: ClusterPrediction) -> list[str]:
    step_s = row.step.step_s
    return [
        f"{row.devices:,}",
        f"{1000 * step_s:.4g}",
        *(f"{100 * s / step_s:.1f} %" for s in row.step.parts_s.values()),
    ]
