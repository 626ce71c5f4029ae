"""`reconv bench`: speed of training, inference and data loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from reconv.cli.bench_output import (
    data_lines,
    loadgen_lines,
    print_data_paths,
    print_inference,
    print_published,
    roofline_lines,
    train_lines,
)
from reconv.cli.options import (
    DEVICE_HELP,
    Command,
    CommandGroup,
    NumberRange,
    Override,
    complete_recipes,
    emit_json,
    json_option,
    parse_settings,
    print_line,
    set_option,
    shortcut_options,
    trust_option,
    trust_or_ask,
)
from reconv.cli.start_up import import_torch, pause_gc, start_cuda
from reconv.core.errors import UsageError
from reconv.distributed.environment import read_launch_env
from reconv.recipe.shortcuts import shortcut_overrides

if TYPE_CHECKING:
    from reconv.core.custom_code import TrustCode

MIN_WINDOWS = 5


_published_option = click.option(
    "--published", is_flag=True, help="Also print what vendors have published for this model, with its hardware."
)


@click.group(cls=CommandGroup)
def bench() -> None:
    """Measure the speed of training, inference or data loading.

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
    help="Synthetic images on the device (default) or from the host, or the recipe's own data.",
)
@click.option("--data", metavar="DIR", type=click.Path(), help="Real data; implies --input real.")
@click.option("--compare", is_flag=True, help="Also measure torchvision and timm, if installed, on the same data.")
@click.option("--baselines", metavar="NAME", help="Only baselines whose name contains NAME; implies --compare.")
@_published_option
@shortcut_options("batch_size", "batch_per_device", "workers")
@click.option("--device", metavar="NAME", default="auto", show_default=True, help=DEVICE_HELP)
@click.option(
    "--devices", metavar="N", type=click.IntRange(1, 256), help="Number of processes on this machine, one per device."
)
@click.option("--nic", metavar="NAME|CIDR", help="Network interface between machines, for example eth1 or 10.0.0.0/16.")
@click.option(
    "--windows",
    metavar="N",
    type=click.IntRange(min=MIN_WINDOWS),
    default=7,
    show_default=True,
    help="Number of windows.",
)
@click.option(
    "--steps", metavar="N", type=click.IntRange(min=1), help="Steps per window; default: half a second of them."
)
@click.option(
    "--warmup",
    metavar="N",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="Steps before the first window.",
)
@set_option
@click.option("--quiet", is_flag=True, help="Print only the result.")
@json_option
def train(
    recipe: str,
    where: str | None,
    data: str | None,
    compare: bool,
    baselines: str | None,
    published: bool,
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
    """Measure training steps of RECIPE: forward, loss, backward, optimizer and EMA.

    Steps are timed in windows; median and 95th percentile are over windows. The warm-up is not part of a window. With
    --devices, or when started by torchrun, mpirun or srun, one device alone and the gradient reduction are measured
    too.

    \b
    Examples:
      reconv bench train quickstart
      reconv bench train resnet50 --devices 8 --batch-per-device 256
      reconv bench train resnet50 --batch-size 256 --set precision.mode=bf16 --compare
      reconv bench train resnet50 --data /imagenet --json result.json
      reconv bench train resnet50-nv-90ep-8gpu-mixed --batch-size 256 --published
    """
    if data is not None and where not in (None, "real"):
        raise UsageError(f"--data is real data, and --input {where} is synthetic", hint="leave one of them out")
    shortcuts = {"batch_size": batch_size, "batch_per_device": batch_per_device, "workers": workers}
    overrides = shortcut_overrides(shortcuts, devices or read_launch_env().world_size) + parse_settings(settings)
    start_cuda(device, devices)
    with pause_gc():
        import_torch()

    from reconv.bench.baselines import find_baselines
    from reconv.bench.timing import TimingConfig
    from reconv.bench.train import bench_train
    from reconv.recipe.loader import load

    compare = compare or baselines is not None
    model = load(recipe, overrides).recipe.model.name
    found, missing = find_baselines(model, baselines or "") if compare else (None, [])
    result = bench_train(
        recipe,
        input="real" if data is not None or where == "real" else "host" if where == "host" else "device",
        data=data,
        overrides=overrides,
        device=device,
        devices=devices,
        nic=nic,
        config=TimingConfig(windows, steps, warmup),
        baselines=found,
        log=_choose_log(quiet, json_file),
    )
    if read_launch_env().rank > 0:
        return
    result["notes"] += missing
    if published:
        from reconv.bench.published import add_published

        add_published(result)
    if json_file is not None:
        emit_json(result, json_file)
        return
    for line in train_lines(result, compare):
        print_line(line)
    if published:
        print_published(result)


@bench.command("infer", cls=Command)
@click.argument("target", metavar="RECIPE|RUN", shell_complete=complete_recipes)
@click.option(
    "--data", metavar="DIR", type=click.Path(), help="Real images, validation data or any folder: read and decode too."
)
@click.option("--batches", metavar="N,N", help="Batch sizes; default: 1, 2, 4, ... 256; with --data fewer of them.")
@click.option(
    "--concurrency",
    metavar="N,N",
    help="Also measure this many clients at once, each waiting for its answer; default batch size then: 1.",
)
@click.option(
    "--iterations",
    metavar="N",
    type=click.IntRange(min=1),
    help="Per batch size; default: about three seconds of them.",
)
@click.option("--compare", is_flag=True, help="Also measure torchvision and timm, if installed, eager and compiled.")
@click.option("--baselines", metavar="NAME", help="Only baselines whose name contains NAME; implies --compare.")
@_published_option
@click.option(
    "--loadgen",
    type=click.Choice(["offline", "server", "single", "multi"]),
    help="Let MLCommons' LoadGen ask for images by this scenario; needs reconv[loadgen].",
)
@click.option(
    "--duration", metavar="S", type=NumberRange(min=0.1), help="Least seconds of a LoadGen test; default: 60."
)
@click.option(
    "--target-qps",
    metavar="N",
    type=NumberRange(min=0.1),
    help="Images/s that --loadgen server asks for.",
)
@click.option(
    "--target-latency",
    metavar="MS",
    type=NumberRange(min=0.1),
    help="Limit of the 99th percentile of --loadgen server; default: 15 ms.",
)
@click.option("--out", metavar="DIR", type=click.Path(), help="Folder for LoadGen's logs; default: loadgen/SCENARIO.")
@click.option("--device", metavar="NAME", default="auto", show_default=True, help=DEVICE_HELP)
@set_option
@trust_option
@click.option("--quiet", is_flag=True, help="Print only the result.")
@json_option
def infer(
    target: str,
    data: str | None,
    batches: str | None,
    concurrency: str | None,
    iterations: int | None,
    compare: bool,
    baselines: str | None,
    published: bool,
    loadgen: str | None,
    duration: float | None,
    target_qps: float | None,
    target_latency: float | None,
    out: str | None,
    device: str,
    settings: tuple[str, ...],
    trust_code: bool,
    quiet: bool,
    json_file: str | None,
) -> None:
    """Measure inference of the network of a recipe or a run, by batch size.

    Batch norms are folded into convolutions. On CUDA, bias, addition and activation are fused into the convolutions
    and the network runs as one CUDA graph; with --set engine.compile=on it is compiled by torch.compile instead.
    Images are already normalized on the device: reading and decoding are not measured.

    With --data, images are read and decoded as by `predict`: the latency is from files to predictions, and for the
    throughput the next batches are read while the network computes.

    With --loadgen, MLCommons' LoadGen asks for images, measures and judges; they are decoded before.

    \b
    Examples:
      reconv bench infer resnet50
      reconv bench infer runs/quickstart/1 --batches 1,8,64
      reconv bench infer runs/resnet50/1 --data /imagenet --batches 1,256 --json result.json
      reconv bench infer resnet50 --set precision.mode=bf16 --json result.json
      reconv bench infer resnet50 --batches 1,32 --baselines "torchvision channels_last"
      reconv bench infer resnet50 --concurrency 1,4,16
      reconv bench infer resnet50 --set precision.mode=bf16 --published
      reconv bench infer runs/resnet50/1 --loadgen server --target-qps 500 --out loadgen/server
    """
    compare = compare or baselines is not None
    if data is not None and compare:
        raise UsageError("--compare measures models, and --data reading files", hint="leave one of them out")
    if loadgen is not None:
        measured = {"--batches": batches, "--concurrency": concurrency, "--iterations": iterations}
        _refuse("--loadgen measures by its own rules", measured | {"--compare": compare, "--published": published})
        log, trust = _choose_log(quiet, json_file), trust_or_ask(trust_code)
        test = (loadgen, duration, target_qps, target_latency, out)
        _infer_by_loadgen(target, test, data, parse_settings(settings), device, trust, log, json_file)
        return
    alone = {"--duration": duration, "--target-qps": target_qps, "--target-latency": target_latency, "--out": out}
    _refuse("these options are LoadGen's; add --loadgen SCENARIO", alone)
    options: dict[str, Any] = {
        "overrides": parse_settings(settings),
        "device": device,
        "concurrency": _numbers("--concurrency", "numbers of clients, for example 1,4,16", concurrency),
        "iterations": iterations,
        "trust_code": trust_or_ask(trust_code),
        "log": _choose_log(quiet, json_file),
    }
    sizes = _numbers("--batches", "batch sizes, for example 1,8,64", batches)
    sizes = sizes or ([1] if concurrency else [])
    if data is not None:
        from reconv.bench.predict import bench_predict

        result = bench_predict(target, data, batches=sizes, **options)
    else:
        from reconv.bench.infer import BATCHES, bench_infer, find_inference_baselines

        found, missing = (
            find_inference_baselines(target, options["overrides"], baselines or "") if compare else ([], [])
        )
        result = bench_infer(target, batches=sizes or BATCHES, baselines=found, **options)
        result["notes"] += missing
    if published:
        from reconv.bench.published import add_published

        add_published(result)
    if json_file is not None:
        emit_json(result, json_file)
        return
    print_inference(result)
    if compare and not any(result["baselines"].values()):
        print_line("no baseline was measured")
    for line in (*roofline_lines(result), *result["notes"]):
        print_line(line)
    if published:
        print_published(result)


def _infer_by_loadgen(
    target: str,
    test: tuple[str, float | None, float | None, float | None, str | None],
    data: str | None,
    overrides: list[Override],
    device: str,
    trust_code: TrustCode,
    log: Callable[[str], None],
    json_file: str | None,
) -> None:
    """Run one of LoadGen's tests and print its verdict."""
    from reconv.bench.loadgen import DURATION_S, TARGET_LATENCY_MS, LoadGenConfig, bench_loadgen

    scenario, duration, target_qps, target_latency, out = test
    config = LoadGenConfig(
        cast(Any, scenario),
        Path(out or f"loadgen/{scenario}"),
        duration or DURATION_S,
        target_qps,
        target_latency or TARGET_LATENCY_MS,
    )
    result = bench_loadgen(
        target, config, data=data, overrides=overrides, device=device, trust_code=trust_code, log=log
    )
    if json_file is not None:
        emit_json(result, json_file)
        return
    for line in (*loadgen_lines(result), *result["notes"]):
        print_line(line)


@bench.command("data", cls=Command)
@click.argument("recipe", default="resnet50", shell_complete=complete_recipes)
@click.option("--data", metavar="DIR", type=click.Path(), envvar="DATA_DIR", help="The dataset; default: $DATA_DIR.")
@click.option("--compare", is_flag=True, help="Also measure Pillow with torchvision's RandomResizedCrop and flip.")
@click.option(
    "--workers", metavar="N", type=click.IntRange(min=1), help="Number of data loading workers; default: the recipe's."
)
@click.option(
    "--images", metavar="N", type=click.IntRange(min=1), default=256, show_default=True, help="Images per window."
)
@click.option(
    "--windows",
    metavar="N",
    type=click.IntRange(min=MIN_WINDOWS),
    default=5,
    show_default=True,
    help="Number of windows.",
)
@set_option
@click.option("--quiet", is_flag=True, help="Print only the result.")
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
    """Measure data loading alone: from files to batches of uint8 images, on one core and on all.

    RECIPE defines the augmentation; the default is RandomResizedCrop to 224 px and a flip. With --compare, a baseline
    pipeline and ours make the same images alternately on one core: from the data as it is, without antialiasing, and
    from packed copies of the images in a temporary folder.

    \b
    Examples:
      reconv bench data --data /imagenet
      reconv bench data --data /imagenet --compare --json result.json
    """
    if data is None:
        raise UsageError("bench data needs a dataset", why="neither --data nor $DATA_DIR is set", hint="add --data DIR")

    from reconv.bench.data import bench_data

    result = bench_data(
        data,
        recipe=recipe,
        overrides=parse_settings(settings),
        workers=workers,
        images=images,
        windows=windows,
        compare=compare,
        log=_choose_log(quiet, json_file),
    )
    if json_file is not None:
        emit_json(result, json_file)
    else:
        for line in data_lines(result):
            print_line(line)
        if compare:
            print_data_paths(result)


def _choose_log(quiet: bool, json_file: str | None) -> Callable[[str], None]:
    """Prints progress unless only the result is wanted; importable, so that other processes can use it."""
    return _no_log if quiet or json_file is not None else print_line


def _refuse(why: str, options: dict[str, Any]) -> None:
    """Raise `UsageError` if one of these options was given."""
    given = [name for name, value in options.items() if value]
    if given:
        raise UsageError(f"{', '.join(given)} cannot be used here", why=why, hint=f"leave out {', '.join(given)}")


def _no_log(text: str) -> None:
    """Discards what is logged."""


def _numbers(option: str, what: str, text: str | None) -> list[int]:
    """`1,8,64` as numbers; empty for None."""
    if text is None:
        return []
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"{option} takes {what}, not {text!r}")
    return [int(word) for word in words]
