"""`reconv resume`: continue a run exactly, with the options it was started with, or fork it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reconv.cli.commands.train import console_of, run_training, silence_torch, train
from reconv.cli.options import (
    DEVICE_HELP,
    Command,
    Override,
    can_ask,
    complete_runs,
    json_option,
    parse_settings,
    print_note,
    set_option,
    shortcut_options,
    stop_after_option,
    stop_at_option,
    trust_option,
    trust_or_ask,
)
from reconv.cli.start_up import start_cuda
from reconv.cluster.launch import Launch
from reconv.core.errors import UsageError
from reconv.distributed.environment import read_launch_env
from reconv.recipe.shortcuts import shortcut_overrides
from reconv.trainer.options import RunOptions

if TYPE_CHECKING:
    from reconv.core.custom_code import CodeConsent
    from reconv.logging.run_dir import RunDir


@click.command(cls=Command)
@click.argument("run", type=click.Path(), shell_complete=complete_runs)
@click.option("--data", metavar="DIR", type=click.Path(), help="Path of the dataset, if it has moved.")
@shortcut_options("epochs", epochs="Extend the run to N epochs.")
@click.option("--fork", is_flag=True, help="Start a new run from the checkpoint, with other settings.")
@click.option("--best", is_flag=True, help="With --fork: from the best checkpoint, not the newest.")
@shortcut_options(
    "lr",
    "batch_size",
    lr="With --fork: another learning rate (schedule.lr).",
    batch_size="With --fork: another global batch size.",
)
@click.option("--out", metavar="DIR|URL", type=click.Path(), help="With --fork: the new run [default: runs/RECIPE/N].")
@shortcut_options("workers")
@click.option("--device", metavar="NAME", help=f"{DEVICE_HELP} [default: as before]")
@click.option(
    "--devices", metavar="N", type=click.IntRange(1, 256), help="Processes on this machine [default: as before]."
)
@click.option("--nic", metavar="NAME|CIDR", help="Network interface between machines [default: as before].")
@set_option
@shortcut_options("profile")
@stop_after_option
@stop_at_option
@shortcut_options("on_divergence")
@trust_option
@click.option("--mirror", metavar="URL|off", help="Where the copy of RUN is, if you have not given it on this machine.")
@click.option("--plan", is_flag=True, help="Print every line of the plan, not a screenful.")
@click.option("--quiet", is_flag=True, help="Print only the result.")
@json_option
def resume(
    run: str,
    data: str | None,
    epochs: float | None,
    fork: bool,
    best: bool,
    lr: str | None,
    batch_size: int | None,
    out: str | None,
    workers: int | None,
    device: str | None,
    devices: int | None,
    nic: str | None,
    settings: tuple[str, ...],
    profile: str | None,
    stop_after: str | None,
    stop_at: str | None,
    on_divergence: str | None,
    trust_code: bool,
    mirror: str | None,
    plan: bool,
    quiet: bool,
    json_file: str | None,
) -> int:
    """Resume RUN from its newest checkpoint, bitwise where it stopped; a finished run has nothing to do.

    Recipe, data and devices are those the run was started with. RUN is a run directory, or a directory of runs for
    the newest one. Options given here apply to this command, also another number of devices.

    With --fork a new run starts from the checkpoint, with its weights, optimizer state and step. RUN stays as it is,
    and may also be one of its checkpoints; model.resume_from of the new run says where it came from.

    \b
    Examples:
      reconv resume runs/quickstart/1
      reconv resume runs/resnet50/1 --devices 4
      reconv resume runs/quickstart/1 --epochs 50
      reconv resume runs/quickstart/1 --fork --lr 0.01
      reconv resume runs/quickstart/1 --fork --best --batch-size 32
    """
    from reconv.checkpoint.locate import find_run

    _check_fork_options(run, fork, {"--lr": lr, "--batch-size": batch_size, "--best": best or None, "--out": out})
    run_dir = find_run(run)
    mirror = _take_run_back(run_dir, mirror)
    stored = stored_options(run_dir.events)
    shortcuts = {
        "epochs": epochs,
        "workers": workers,
        "lr": lr,
        "batch_size": batch_size,
        "on_divergence": on_divergence,
    }
    overrides = shortcut_overrides({**shortcuts, "profile": profile})
    if profile is None:
        overrides.append(("profile", "off", "--profile"))
    overrides += parse_settings(settings)
    overrides += _fork_overrides(run, best) if fork else []
    device = device or stored.get("device") or "auto"
    if devices is None and read_launch_env().world_size == 1:
        devices = _available(stored.get("devices"), device)
    consent = _ask_for_code(run_dir.recipe, overrides, trust_code)
    silence_torch()
    start_cuda(device, devices)
    options = RunOptions(
        str(run_dir.recipe),
        overrides,
        data,
        resume=not fork,
        device=device,
        console=console_of(quiet, json_file, plan),
        stop_after=stop_after,
        stop_at=stop_at,
        trust_code=trust_code,
        consent=consent,
    )
    launch = Launch(devices, nic=nic or stored.get("nic"))
    if fork:
        return run_training(options, launch, out, json_file)
    return run_training(options, launch, str(run_dir.path), json_file, mirror)


def _check_fork_options(run: str, fork: bool, options: dict[str, Any]) -> None:
    """Refuse options of a fork for a run that is continued."""
    given = {name: value for name, value in options.items() if value is not None}
    if fork or not given:
        return
    words = [word for name, value in given.items() for word in ((name,) if value is True else (name, str(value)))]
    raise UsageError(
        f"{', '.join(given)} would change the run",
        why="a resumed run keeps the settings that determine its result",
        hint=f"start a new run from its checkpoint: {shlex.join(['reconv', 'resume', run, '--fork', *words])}",
    )


def _fork_overrides(run: str, best: bool) -> list[Override]:
    """The recipe fields that make a run continue the newest or best checkpoint of another one."""
    from reconv.checkpoint.locate import locate

    located = locate(run, which="best" if best else "newest")
    if located.checkpoint is None:
        raise UsageError(f"{run} has weights only", hint=f"start from them: reconv train RECIPE --init {run}")
    return [
        ("model.init", None, "--fork"),
        ("model.resume_from", str(located.checkpoint.absolute()), "--fork"),
    ]


def _take_run_back(run_dir: RunDir, mirror: str | None) -> str | None:
    """Bring RUN up to date with its copy, before its recipe is read; returns the address that the user gives now."""
    from reconv.checkpoint.mirror.download import NO_MIRROR, check_mirror_address, download_run, read_mirror_url
    from reconv.storage.given_addresses import is_given
    from reconv.storage.object_stores.store import as_url, open_object_store

    if mirror == NO_MIRROR or read_launch_env().rank > 0:
        return mirror
    url = read_mirror_url(run_dir) if mirror is None else as_url(mirror)
    if url is None:
        return None
    if mirror is None and not is_given(url) and can_ask():
        print_note(f"This run says that its copy is at {url}, an address that you have not given.")
        mirror = url if click.confirm("Read the run from there and write it there?", default=False, err=True) else None
    if mirror is None:
        check_mirror_address(url, str(run_dir.path))
    download_run(open_object_store(url), run_dir, print_note)
    return mirror


def _ask_for_code(recipe: Path, overrides: Sequence[Override], trust_code: bool) -> CodeConsent | None:
    """Ask before the code that the recipe of a run names is imported, once for all processes."""
    from reconv.core.custom_code import CodeConsent
    from reconv.recipe.loader import load
    from reconv.recipe.parts.code import code_references

    if read_launch_env().rank > 0:  # rank 0 reads the recipe for all of them
        return None
    saved, consent = load(str(recipe), overrides).recipe, CodeConsent.of(trust_or_ask(trust_code))
    consent.require(code_references(saved), saved.code_path, str(recipe))
    return consent


def stored_options(events: Path) -> dict[str, Any]:
    """The values of --device, --devices and --nic in the last command of a run; empty if it was started in Python."""
    from reconv.logging.event_log import read_events
    from reconv.logging.events import AttemptStarted

    commands = [event.command for event in read_events(events) if isinstance(event, AttemptStarted)]
    options: dict[str, Any] = {}
    for _, verb, *words in (command for command in commands if len(command) > 1):
        parser = {"train": train, "resume": resume}.get(verb)
        found = {} if parser is None else parser.make_context(verb, words, resilient_parsing=True).params
        # `resume` takes what it does not name from the command before.
        given = {name: found.get(name) for name in ("device", "devices", "nic")}
        options |= given if verb == "train" else {name: value for name, value in given.items() if value is not None}
    return options


def _available(devices: int | None, device: str) -> int | None:
    """The number of devices of the stored command, or as many as this machine has."""
    from reconv.device import count_devices, device_kind

    here = count_devices(device_kind(device)) if devices is not None else None
    if devices is None or here is None or devices <= here:
        return devices
    print_note(f"the run used {devices} devices, and this machine has {here}: using {here}")
    return here
