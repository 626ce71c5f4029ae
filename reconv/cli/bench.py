"""The verb `bench`: speed of training, of answers and of the loader.

Owns the words about a result. Refuses to know how anything is measured. Invariant: `--json` holds every number that is
printed; a number that is not known is printed as unknown, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from reconv.cli.options import (
    DEVICE_HELP,
    Command,
    CommandGroup,
    batch_override,
    complete_recipes,
    emit_json,
    json_option,
    parse_settings,
    percent,
    print_table,
    start_kernel_compiler,
)
from reconv.distributed.environment import read_launch_env
from reconv.errors import UsageError

LEAST_WINDOWS = 5


@click.group(cls=CommandGroup)
def bench() -> None:
    """Measure training, inference or the loader.

    \b
    Examples:
      reconv bench train resnet50 --compare
      reconv bench infer resnet50
      reconv bench data --data /imagenet --compare
    """


@bench.command("train", cls=Command)
@click.argument("recipe", shell_complete=complete_recipes)
@click.option(
    "--input",
    "where",
    type=click.Choice(["device", "host", "real"]),
    help="Made-up images lying on the device (default), made on the host, or the recipe's own data.",
)
@click.option("--data", metavar="DIR", type=click.Path(), help="Real data; means --input real.")
@click.option("--compare", is_flag=True, help="Also the peers that are installed, on the same data.")
@click.option("--peers", metavar="TEXT", help="Only the peer of this name, or those that hold it; means --compare.")
@click.option("--batch-size", metavar="N", type=click.IntRange(min=1), help="Global batch.")
@click.option("--batch-per-device", metavar="N", type=click.IntRange(min=1), help="The same, counted on one device.")
@click.option("--workers", metavar="N", type=click.IntRange(min=0), help="Decoding workers.")
@click.option("--device", metavar="NAME", default="auto", show_default=True, help=DEVICE_HELP)
@click.option("--devices", metavar="N", type=click.IntRange(min=1), help="Processes on this machine, one a device.")
@click.option("--nic", metavar="NAME|CIDR", help="The network between machines, as in eth1 or 10.0.0.0/16.")
@click.option("--windows", metavar="N", type=click.IntRange(min=LEAST_WINDOWS), default=7, show_default=True)
@click.option(
    "--steps", metavar="N", type=click.IntRange(min=1), help="Of a window; else as many as last half a second."
)
@click.option("--warmup", metavar="N", type=click.IntRange(min=0), default=5, show_default=True, help="Steps left out.")
@click.option("--set", "settings", metavar="A.B=V", multiple=True, help="Set any recipe field; may be repeated.")
@click.option("--quiet", is_flag=True, help="Print the result only.")
@json_option
def train(
    recipe: str,
    where: str | None,
    data: str | None,
    compare: bool,
    peers: str | None,
    batch_size: int | None,
    batch_per_device: int | None,
    workers: int | None,
    device: str,
    devices: int | None,
    nic: str | None,
    windows: int,
    steps: int | None,
    warmup: int,
    settings: tuple[str, ...],
    quiet: bool,
    json_file: str | None,
) -> None:
    """Measure real training steps of RECIPE: forward, loss, backward, optimizer, average.

    A window is some steps in a row; the median and the 95th percentile are over windows. The first step and the
    warm-up count only in the time from the start of the process to the first step. With --devices, or started by
    torchrun, mpirun or srun, also what one device reaches alone with the same samples, and what the reduction of
    gradients takes.

    \b
    Examples:
      reconv bench train quickstart
      reconv bench train resnet50 --devices 8 --batch-per-device 256
      reconv bench train resnet50 --batch-size 256 --set precision.mode=bf16 --compare
      reconv bench train resnet50 --data /imagenet --json result.json
    """
    if data is not None and where not in (None, "real"):
        raise UsageError(f"--data is real data, --input {where} is made up", then="leave one of them out")
    given = [
        batch_override(batch_size, batch_per_device, devices or read_launch_env().world_size),
        ("data.num_workers", workers, "--workers"),
    ]
    overrides = [override for override in given if override[1] is not None] + parse_settings(settings)
    start_kernel_compiler(device, devices)

    from reconv.bench.baselines import find_peers
    from reconv.bench.bench_train import bench_train
    from reconv.bench.timing import Wish
    from reconv.recipe.loader import load

    compare = compare or peers is not None
    found, missing = find_peers(load(recipe, overrides).recipe.model.name, peers or "") if compare else (None, [])
    result = bench_train(
        recipe,
        input="real" if data is not None or where == "real" else "host" if where == "host" else "device",
        data=data,
        overrides=overrides,
        device=device,
        devices=devices,
        nic=nic,
        wish=Wish(windows, steps, warmup),
        peers=found,
        tell=_teller(quiet, json_file),
    )
    if read_launch_env().rank > 0:
        return
    result["notes"] += missing
    if json_file is not None:
        emit_json(result, json_file)
    else:
        click.echo("\n".join(train_lines(result, compare)))


@bench.command("infer", cls=Command)
@click.argument("target", metavar="RECIPE|RUN", shell_complete=complete_recipes)
@click.option("--batches", metavar="N,N", help="Batch sizes; else 1, 2, 4 and so on to 256.")
@click.option("--answers", metavar="N", type=click.IntRange(min=1), help="For each size; else about three seconds.")
@click.option(
    "--compare", is_flag=True, help="Also the peers that are installed, eager and compiled, on the same images."
)
@click.option("--peers", metavar="TEXT", help="Only the peer of this name, or those that hold it; means --compare.")
@click.option("--device", metavar="NAME", default="auto", show_default=True, help=DEVICE_HELP)
@click.option("--set", "settings", metavar="A.B=V", multiple=True, help="Set any recipe field; may be repeated.")
@click.option("--quiet", is_flag=True, help="Print the result only.")
@json_option
def infer(
    target: str,
    batches: str | None,
    answers: int | None,
    compare: bool,
    peers: str | None,
    device: str,
    settings: tuple[str, ...],
    quiet: bool,
    json_file: str | None,
) -> None:
    """Measure how fast the network of a recipe or a run answers, batch size by batch size.

    Batch norms are folded into convolutions. On CUDA a convolution takes in the bias, sum and activation that follow
    it, in the fastest of several forms, and all of an answer is launched as one graph; --set engine.compile=on has
    torch's compiler do it instead. Images lie normalised on the device: reading and decoding are not measured here.

    \b
    Examples:
      reconv bench infer resnet50
      reconv bench infer runs/quickstart/1 --batches 1,8,64
      reconv bench infer resnet50 --set precision.mode=bf16 --json result.json
      reconv bench infer resnet50 --batches 1,32 --peers "torchvision channels_last"
    """
    sizes = _batch_sizes(batches)

    from reconv.bench.bench_infer import BATCHES, bench_infer, find_others

    compare = compare or peers is not None
    found, missing = find_others(target, parse_settings(settings), peers or "") if compare else ([], [])
    result = bench_infer(
        target,
        batches=sizes or BATCHES,
        overrides=parse_settings(settings),
        device=device,
        answers=answers,
        peers=found,
        tell=_teller(quiet, json_file),
    )
    result["notes"] += missing
    if json_file is not None:
        emit_json(result, json_file)
        return
    _print_answers(result)
    if compare and not any(result["peers"].values()):
        click.echo("no peer was measured")
    click.echo("\n".join([*_roofline_lines(result), *result["notes"]]))


@bench.command("data", cls=Command)
@click.argument("recipe", default="resnet50", shell_complete=complete_recipes)
@click.option("--data", metavar="DIR", type=click.Path(), envvar="DATA_DIR", help="The data set; else $DATA_DIR.")
@click.option("--compare", is_flag=True, help="Also the ordinary pipeline: Pillow, RandomResizedCrop, flip.")
@click.option("--workers", metavar="N", type=click.IntRange(min=1), help="Decoding workers; else the recipe's.")
@click.option("--images", metavar="N", type=click.IntRange(min=1), default=256, show_default=True, help="Of a window.")
@click.option("--windows", metavar="N", type=click.IntRange(min=LEAST_WINDOWS), default=5, show_default=True)
@click.option("--set", "settings", metavar="A.B=V", multiple=True, help="Set any recipe field; may be repeated.")
@click.option("--quiet", is_flag=True, help="Print the result only.")
@json_option
def data(
    recipe: str,
    data: str | None,
    compare: bool,
    workers: int | None,
    images: int,
    windows: int,
    settings: tuple[str, ...],
    quiet: bool,
    json_file: str | None,
) -> None:
    """Measure the loader alone: files to batches of uint8 images, on one core and on all.

    RECIPE says what becomes of an image; without it, a random part resized to 224 px and a flip. With --compare the
    ordinary pipeline and ours make the same images in turn, on one core: from the data as they are, without
    antialiasing and, where they are files, from packed copies of a window's images in a temporary folder.

    \b
    Examples:
      reconv bench data --data /imagenet
      reconv bench data --data /imagenet --compare --json result.json
    """
    if data is None:
        raise UsageError(
            "bench data needs data", why="neither --data nor $DATA_DIR says where it is", then="--data DIR"
        )

    from reconv.bench.bench_data import bench_data

    result = bench_data(
        data,
        recipe=recipe,
        overrides=parse_settings(settings),
        workers=workers,
        images=images,
        windows=windows,
        compare=compare,
        tell=_teller(quiet, json_file),
    )
    if json_file is not None:
        emit_json(result, json_file)
    else:
        click.echo("\n".join(data_lines(result)))
        if compare:
            _print_ways(result)


def train_lines(result: dict[str, Any], compare: bool) -> list[str]:
    """The result of `bench train`, a line a matter."""
    from reconv.logging import formatting as fmt

    step_ms = result["step_ms"]
    split = ", ".join(
        f"{name} {'unknown' if step_ms[name] is None else f'{step_ms[name]:.2f} ms'}"
        for name in ("forward", "backward", "optimizer", "input")
    )
    startup_s = result["startup_s"]
    said = [
        f"{result['images_per_s']:,.1f} images/s at batch {result['batch']}, {result['image_size']} px, "
        f"{result['precision']}, input: {result['input']}",
        f"step {step_ms['median']:.2f} ms (median of {result['windows']} windows of {result['steps_per_window']} "
        f"steps), p95 {step_ms['p95']:.2f} ms",
        split,
        f"peak memory {fmt.size(result['peak_memory_bytes'])}; first step "
        + ("at an unknown time" if startup_s is None else f"{startup_s:.1f} s after the start of the process"),
        *_roofline_lines(result),
    ]
    if result["scaling"] is not None:
        said[1:1] = _scaling_lines(result)
    if compare and not result["peers"]:
        said.append("no peer was measured")
    for name, peer in result["peers"].items():
        said.append(
            f"{name} ({peer['precision']}): {peer['images_per_s']:,.1f} images/s; ours is {peer['ratio']:.2f} x that"
        )
    return [*said, *result["notes"]]


def _scaling_lines(result: dict[str, Any]) -> list[str]:
    """What several devices give, and what their gradients take."""
    from reconv.recipe.plan_text import count

    scaling, devices = result["scaling"], result["devices"]
    way = scaling["reduce"] if scaling["compress"] == "off" else f"{scaling['reduce']}, {scaling['compress']}"
    cut = count(scaling["buckets"], "bucket")
    return [
        f"{devices} devices x {result['images_per_s_per_device']:,.1f} images/s; one alone with as many samples "
        f"({result['batch_per_device']}): {scaling['alone_images_per_s']:,.1f}; weak scaling "
        f"{scaling['weak_scaling']:.3f}",
        f"{scaling['gradient_bytes'] / 1e6:,.3g} MB of gradients a step in {cut} ({way}): "
        f"{scaling['reduce_ms']:.2f} ms alone, {percent(scaling['reduce_share'])} of a step; not hidden "
        f"{scaling['exposed_ms']:.2f} ms, {percent(scaling['exposed_share'])} (a step without them takes "
        f"{scaling['apart_step_ms']:.2f} ms)",
    ]


def data_lines(result: dict[str, Any]) -> list[str]:
    """The result of `bench data`, a line a matter."""
    one, everyone = result["one_core"], result["all_cores"]
    return [
        f"{one['images_per_s']:,.1f} images/s on one core ({one['lowest']:,.1f} to {one['highest']:,.1f} in "
        f"{one['windows']} windows of {result['images_per_window']} images; {result['jpeg_decoder']})",
        f"{everyone['images_per_s']:,.1f} images/s with {result['workers']} workers ({everyone['lowest']:,.1f} to "
        f"{everyone['highest']:,.1f}): {result['scaling']:.2f} x one core ({result['scaling_cpu']:.2f} x by processor "
        "time)",
        "of an image on one core: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in result["stage_ms"].items()),
    ]


def _print_answers(result: dict[str, Any]) -> None:
    """How the network answers at each batch size, and others beside it."""
    how = ", compiled" if result["compiled"] else ", recorded" if result["recorded"] else ""
    click.echo(f"{result['image_size']} px, {result['precision']}, {result['norms_folded']} norms folded{how}")

    def row(name: str, row: dict[str, Any]) -> list[str]:
        latencies = [f"{row['latency_ms'][percentile]:.2f}" for percentile in ("p50", "p95", "p99")]
        ratio = f"{row['ratio']:.2f} x" if "ratio" in row else ""
        return [str(row["batch"]), name, f"{row['images_per_s']:,.1f}", *latencies, str(row["answers"]), ratio]

    by_batch = [row("ours", own) for own in result["batches"]]
    by_batch += [row(name, theirs) for name, found in result["peers"].items() for theirs in found]
    by_batch.sort(key=lambda cells: int(cells[0]))
    columns = ["batch", "network", "images/s", "p50 ms", "p95 ms", "p99 ms", "answers", "ours to it"]
    if not any(result["peers"].values()):
        by_batch = [[cells[0], *cells[2:-1]] for cells in by_batch]
        columns = [columns[0], *columns[2:-1]]
    print_table(columns, by_batch)


def _print_ways(result: dict[str, Any]) -> None:
    """The ordinary pipeline and every way of ours, on one core."""
    from reconv.bench.data_paths import WORDS

    columns = ["one core", "images/s", "ratio", "lowest to highest", "by processor time", "grey levels apart"]
    rows = [["the ordinary pipeline", f"{result['ordinary']['images_per_s']:,.1f}", "1.00 x", "", "1.00 x", ""]]
    for name, way in result["paths"].items():
        ratios = way["ratio_windows"]
        rows.append(
            [
                WORDS[name],
                f"{way['images_per_s']:,.1f}",
                f"{way['ratio']:.2f} x",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{way['ratio_cpu']:.2f} x",
                f"{way['mean_difference']:.3f}",
            ]
        )
    print_table(columns, rows)


def _roofline_lines(result: dict[str, Any]) -> list[str]:
    """Operations, and what of the device's peak was reached."""
    said = f"{result['flops_per_image'] / 1e9:,.3g} GFLOP an image ({result['flops_rule']})"
    if result["roofline_fraction"] is None:
        return [f"{said}; share of the roofline unknown: {result['roofline_note']}"]
    reached, share = result["flop_utilisation"], result["roofline_fraction"]
    return [f"{said}; {100 * reached:.1f} % of the peak, {100 * share:.1f} % of the roofline"]


def _teller(quiet: bool, json_file: str | None) -> Callable[[str], None]:
    """Prints what is going on, where a person reads along; a function that other processes can be handed."""
    return _say_nothing if quiet or json_file is not None else click.echo


def _say_nothing(text: str) -> None:
    """The result is all that is wanted."""


def _batch_sizes(text: str | None) -> list[int]:
    """`1,8,64` as numbers; none where nothing was given."""
    if text is None:
        return []
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"--batches takes batch sizes, not {text!r}", then="for example --batches 1,8,64")
    return [int(word) for word in words]
