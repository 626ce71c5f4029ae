"""What `train --dry-run N` and `train --compile-only` print.

Owns the words about a rehearsal. Refuses to know how it is done. Invariant: a number that was not measured is not
printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from reconv.cli.options import Override, emit_json
from reconv.distributed.environment import read_launch_env

if TYPE_CHECKING:
    from reconv.logging.events import Event
    from reconv.trainer.dry_run import DryRunResult


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run and its rehearsal are asked alike."""

    recipe: str
    data: str | None
    overrides: Sequence[Override]
    device: str
    devices: int | None
    nic: str | None
    quiet: bool
    json_file: str | None


def rehearse(asked: Asked, steps: int | None) -> int:
    """Rehearse a run (without `steps`: only what compiles) and say what it showed."""
    from reconv.api import dry_run as run_rehearsal

    result = run_rehearsal(
        asked.recipe,
        steps=steps,
        data=asked.data,
        overrides=asked.overrides,
        device=asked.device,
        devices=asked.devices,
        nic=asked.nic,
        on_event=None if asked.quiet or asked.json_file is not None else _say,
    )
    if read_launch_env().rank > 0:
        return 0
    if asked.json_file is not None:
        emit_json(asdict(result), asked.json_file)
    else:
        click.echo("\n".join(lines(result, is_compiling_only=steps is None)))
    return 0


def _say(event: Event) -> None:
    """Print what a person should know before the first step; other processes can be handed this function."""
    from reconv.logging.events import LogMessage, RunPlanned

    if isinstance(event, RunPlanned):
        click.echo("\n".join([f"{event.recipe}: {event.model}, {event.total_steps:,} steps of it", *event.lines]))
    elif isinstance(event, LogMessage):
        click.echo(event.text)


def lines(result: DryRunResult, *, is_compiling_only: bool) -> list[str]:
    """The result of a rehearsal, a line a matter."""
    from reconv.logging import formatting as fmt

    said = [
        f"made ready in {result.setup_s:.1f} s; first step {result.first_step_s:.2f} s"
        + ("" if result.step_s is None else f", later ones {1000 * result.step_s:.0f} ms"),
        f"peak memory {fmt.size(result.peak_memory_bytes)}",
    ]
    if is_compiling_only:
        return [*said, "nothing was trained, nothing was kept"]
    if result.images_per_s is not None:
        wait = fmt.percent(result.data_wait_fraction, 0)
        said.append(
            f"{fmt.rate(result.images_per_s)} images/s, {fmt.rate(result.compute_images_per_s)} without waiting "
            f"for data ({wait} of the time)"
        )
    if result.estimated_s is not None:
        said.append(f"the run of {result.total_steps:,} steps will take about {fmt.clock_time(result.estimated_s)}")
    if result.checkpoint_bytes is not None and result.estimated_disk_bytes is not None:
        each = fmt.size(result.checkpoint_bytes)
        said.append(f"and at most {fmt.size(result.estimated_disk_bytes)} of disk: checkpoints of {each}")
    return [*said, *result.notes, f"{result.steps} steps were rehearsed, nothing was kept"]
