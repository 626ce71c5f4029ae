"""The verb `data`: get a data set onto this machine.

Owns the progress bar. Refuses to know addresses and checksums. Invariant: nothing is downloaded that was not named.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reconv.cli.options import NearestGroup, Verb

if TYPE_CHECKING:
    from rich.console import Console


@click.group(cls=NearestGroup)
def data() -> None:
    """Get data sets.

    \b
    Examples:
      reconv data get cifar10
      reconv data get cifar100 /data
    """


@data.command("get", cls=Verb)
@click.argument("name", type=click.Choice(["cifar10", "cifar100"]))
@click.argument("folder", type=click.Path(path_type=Path), envvar="DATA_DIR", default=Path("data"))
@click.option("--base-url", metavar="URL", help="A mirror's folder, instead of the data set's home page.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def get(name: str, folder: Path, base_url: str | None, quiet: bool) -> None:
    """Download NAME into FOLDER (else $DATA_DIR, else data/), check it and unpack it.

    A broken download goes on where it stopped; a wrong checksum is refused.

    \b
    Examples:
      reconv data get cifar10
      reconv data get cifar100 /data
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from reconv.data.get import get as fetch

    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=quiet or not sys.stderr.isatty(), console=_stderr()) as bar:
        task = bar.add_task(name, total=None)

        def advance(there: int, total: int | None) -> None:
            bar.update(task, completed=there, total=total)

        got = fetch(name, folder, progress=advance, base_url=base_url)
    said = "was there already" if got.already_there else "is complete"
    click.echo(f"{name} {said}: {got.path}")


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)
