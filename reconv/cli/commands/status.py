"""`reconv status`: how far runs are, on this machine and on a cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reconv.cli.options import Command, complete_runs, emit_json, json_option, print_table
from reconv.core.errors import UsageError

if TYPE_CHECKING:
    from reconv.cluster.status import RunStatus

_INTERVAL_S = 5.0


@click.command(cls=Command)
@click.argument("runs", metavar="[RUN|DIR]...", nargs=-1, type=click.Path(), shell_complete=complete_runs)
@click.option("--watch", is_flag=True, help="Repeat every 5 seconds until no run is active, or Ctrl-C.")
@json_option
def status(runs: tuple[str, ...], watch: bool, json_file: str | None) -> int:
    """Show state, step, rate, remaining time and last save of runs, of those in DIR [default: runs].

    Jobs that were submitted with `reconv submit` are looked up in Slurm's queue.

    \b
    Examples:
      reconv status
      reconv status runs/resnet50/1 --watch
      reconv status --json
    """
    if watch and json_file is not None:
        raise UsageError("--watch and --json cannot be combined", hint="use one of them")
    from reconv.cluster.status import find_runs, read_statuses

    folders = [Path(run) for run in runs] or [Path("runs")]
    while True:
        found = [run_dir for folder in folders for run_dir in find_runs(folder)]
        statuses = read_statuses(found)
        if json_file is not None:
            emit_json([asdict(run_status) for run_status in statuses], json_file)
            return 0
        if watch and os.isatty(1):
            click.clear()
        _print(statuses, folders)
        if not watch or not any(run_status.is_active for run_status in statuses):
            return 0
        time.sleep(_INTERVAL_S)


def _print(statuses: Sequence[RunStatus], folders: Sequence[Path]) -> None:
    if not statuses:
        click.echo(f"no runs in {', '.join(map(str, folders))}")
        return
    columns = ("run", "state", "step", "images/s", "ETA", "last save", "job", "")
    print_table(columns, [_row(run_status) for run_status in statuses])


def _row(run_status: RunStatus) -> list[str]:
    from reconv.logging import formatting as fmt

    step = "-" if run_status.step is None else fmt.count(run_status.step)
    if run_status.total_steps is not None:
        step += f"/{fmt.count(run_status.total_steps)}"
    save = "-"
    if run_status.saved_step is not None:
        save = f"step {fmt.count(run_status.saved_step)}, {fmt.duration(run_status.saved_age_s)} ago"
    return [
        run_status.run,
        run_status.state,
        step,
        "-" if run_status.images_per_s is None else fmt.rate(run_status.images_per_s),
        "-" if run_status.eta_s is None else fmt.clock_time(run_status.eta_s),
        save,
        run_status.job_id or "-",
        run_status.detail,
    ]
