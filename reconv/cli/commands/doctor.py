"""`reconv doctor` checks this machine; `reconv completion` prints a shell completion script."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from reconv.cli.options import Command, emit_json, json_option
from reconv.cli.start_up import pause_gc
from reconv.core.errors import ExitCode
from reconv.core.text import printable

_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "missing": ("MISSING", "red"), "wrong": ("WRONG", "red")}


@click.command(cls=Command)
@click.option(
    "--hosts",
    metavar="A,B",
    help="Also check these machines: ssh, versions, clocks, munge, a port here, and the bandwidth of an all-reduce.",
)
@click.option(
    "--data",
    metavar="DIR|URL",
    type=click.Path(),
    help="With --hosts: a dataset that must be the same on all machines.",
)
@click.option(
    "--runs", metavar="DIR", type=click.Path(), help="With --hosts: a folder for runs that all machines must share."
)
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=29500,
    show_default=True,
    help="With --hosts: the port to check.",
)
@click.option("--store", metavar="URL", help="Also check access to an object store, as in s3://bucket/imagenet.")
@click.option(
    "--gpu", is_flag=True, help="Also train on each GPU twice, and compare the bits: about a minute for each GPU."
)
@json_option
def doctor(
    hosts: str | None,
    data: str | None,
    runs: str | None,
    port: int,
    store: str | None,
    gpu: bool,
    json_file: str | None,
) -> int:
    """Check this machine: versions, devices, cores, memory, disk, and what is missing.

    \b
    Examples:
      reconv doctor
      reconv doctor --json machine.json
      reconv doctor --hosts node1,node2 --data /imagenet --runs /shared/runs
      reconv doctor --store s3://bucket/imagenet
      reconv doctor --gpu
    """
    from reconv.cluster.environment_checks import as_json, check_machine, has_requirements

    with pause_gc():  # it imports torch
        results = check_machine()
    if hosts is not None:
        from reconv.cluster.host_check import check_hosts

        results = [*results, *check_hosts([host for host in hosts.split(",") if host], data, port, shared=runs)]
    if store is not None:
        from reconv.cluster.store_check import check_store

        results = [*results, *check_store(store)]
    if gpu:
        from reconv.cluster.reference_steps import check_gpus

        results = [*results, *check_gpus()]
    if json_file is not None:
        emit_json(as_json(results), json_file)
    else:
        width = max(len(result.name) for result in results)
        topic = ""
        for result in results:
            if result.topic != topic:
                topic = result.topic
                click.secho(f"\n{topic}", bold=True)
            mark, color = _MARKS[result.level]
            click.echo(
                f"  {printable(result.name):<{width}}  {click.style(f'{mark:<7}', fg=color)}  {printable(result.text)}"
            )
            if result.advice:
                click.echo(f"  {'':<{width}}           -> {printable(result.advice)}")
    if any(result.level == "wrong" for result in results):
        return ExitCode.FAULTY_DEVICE
    return ExitCode.OK if has_requirements(results) else ExitCode.USAGE


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands, options and recipe names in SHELL.

    \b
    Examples:
      reconv completion bash >> ~/.bashrc
      reconv completion zsh >> ~/.zshrc
      reconv completion fish > ~/.config/fish/completions/reconv.fish
    """
    completer = get_completion_class(shell)
    if completer is None:
        raise click.UsageError(f"this version of click does not support completion in {shell}")
    click.echo(completer(ctx.find_root().command, {}, "reconv", "_RECONV_COMPLETE").source())
