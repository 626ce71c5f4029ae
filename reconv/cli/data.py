"""The verb `data`: get a data set onto this machine.

Owns the progress bar. Refuses to know addresses and checksums. Invariant: nothing is downloaded that was not named.
"""

from __future__ import annotations

from pathlib import Path

import click

from reconv.cli.options import NearestGroup, Verb


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
@click.option("--url", metavar="URL", help="A mirror's folder, instead of the data set's home page.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def get(name: str, folder: Path, url: str | None, quiet: bool) -> None:
    """Download NAME into FOLDER (else $DATA_DIR, else data/), check it and unpack it.

    A broken download goes on where it stopped; a wrong checksum is refused.

    \b
    Examples:
      reconv data get cifar10
      reconv data get cifar100 /data
    """
    raise NotImplementedError
