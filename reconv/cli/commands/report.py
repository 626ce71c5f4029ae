"""`reconv report`: write an HTML report of a run, or a comparison of several."""

from __future__ import annotations

from pathlib import Path

import click

from reconv.cli.options import Command, complete_runs, print_line, print_note, write_text
from reconv.core.errors import CheckpointError


@click.command(cls=Command)
@click.argument(
    "runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...", shell_complete=complete_runs
)
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The file to write [default: RUN/report.html, or comparison.html].",
)
def report(runs: tuple[Path, ...], out: Path | None) -> None:
    """Write an HTML report of a run, or a comparison of several runs.

    The report of one run is written to RUN/report.html, a comparison to comparison.html in the current folder. The
    page is self-contained and works offline.

    \b
    Examples:
      reconv report runs/quickstart/1
      reconv report runs/quickstart/1 runs/quickstart/2 --out compare.html
    """
    for run in runs:
        if not (run / "events.jsonl").is_file():
            raise CheckpointError(
                f"{run} is not a run directory",
                where=str(run / "events.jsonl"),
                why="it has no events.jsonl",
                hint="list the runs: ls -d runs/*/*",
            )
    from reconv.report.html import render
    from reconv.storage.files import disk_errors, write_atomic

    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("comparison.html"))
    page = render(list(runs), warn=lambda text: print_note(f"warning: {text}"))
    if out is None:
        with disk_errors(target, "choose another file with --out FILE"):
            write_atomic(target, page)
    else:
        write_text(out, page)
    print_line(f"wrote {target}")
