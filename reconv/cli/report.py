"""The verb `report`: a run, or several compared, as one HTML page.

Owns where the page goes. Refuses to know what is in it. Invariant: a report never changes the run it shows.
"""

from __future__ import annotations

from pathlib import Path

import click

from reconv.cli.options import Command, write_text
from reconv.errors import CheckpointError


@click.command(cls=Command)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help="Where the page goes.")
def report(runs: tuple[Path, ...], out: Path | None) -> None:
    """Write one HTML page about RUN, or one that compares several runs.

    One run: RUN/report.html unless --out says otherwise. Several: comparison.html in this folder. The page needs
    no network.

    \b
    Examples:
      reconv report runs/quickstart/1
      reconv report runs/quickstart/1 runs/quickstart/2 --out compare.html
    """
    for run in runs:
        if not (run / "events.jsonl").is_file():
            raise CheckpointError(
                f"{run} is not a run folder",
                where=str(run / "events.jsonl"),
                why="every run folder holds events.jsonl, and this one does not",
                then="ls runs/*/*/events.jsonl shows the runs there are",
            )
    from reconv.report.html import render

    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("comparison.html"))
    write_text(target, render(list(runs)))
    click.echo(f"wrote {target}")
