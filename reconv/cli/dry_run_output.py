"""Output of `reconv train --dry-run N` and `--compile-only`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from reconv.cli.options import emit_json, print_line
from reconv.cli.start_up import import_torch, pause_gc
from reconv.distributed.environment import read_launch_env

if TYPE_CHECKING:
    from reconv.cluster.launch import Launch
    from reconv.logging.events import Event
    from reconv.trainer.dry_run import DryRunResult
    from reconv.trainer.options import RunOptions


def print_dry_run(options: RunOptions, launch: Launch, steps: int | None, json_file: str | None) -> int:
    """Make a dry run, without `steps` only compile, and print its result; returns the exit code."""
    with pause_gc():
        import_torch()
        from reconv.api import dry_run

    result = dry_run(
        options.recipe,
        steps=steps,
        data=options.data,
        overrides=options.overrides,
        device=options.device,
        devices=launch.devices,
        nic=launch.nic,
        trust_code=options.trust_code,
        on_event=_print_event if options.console == "auto" and json_file is None else None,
    )
    if read_launch_env().rank > 0:
        return 0
    if json_file is not None:
        emit_json(asdict(result), json_file)
    else:
        for line in dry_run_lines(result, compile_only=steps is None):
            print_line(line)
    return 0


def _print_event(event: Event) -> None:
    """Print the plan and messages; importable, so that other processes can use it."""
    from reconv.logging.events import LogMessage, RunPlanned

    if isinstance(event, RunPlanned):
        from reconv.core.text import count

        for line in (f"{event.recipe}: {event.model}, {count(event.total_steps, 'step')}", *event.lines):
            print_line(line)
    elif isinstance(event, LogMessage):
        print_line(event.text)


def dry_run_lines(result: DryRunResult, *, compile_only: bool) -> list[str]:
    """The result of a dry run as text; what was not measured is left out."""
    from reconv.core.text import count
    from reconv.logging import formatting as fmt

    lines = [
        f"setup {result.setup_s:.1f} s; first step {result.first_step_s:.2f} s"
        + ("" if result.step_s is None else f", later steps {1000 * result.step_s:.0f} ms"),
        f"peak memory {fmt.size(result.peak_memory_bytes)}",
    ]
    if compile_only:
        return [*lines, "compiled only: nothing was kept"]
    if result.images_per_s is not None:
        wait = fmt.percent(result.data_wait_fraction, 0)
        lines.append(
            f"{fmt.rate(result.images_per_s)} images/s, {fmt.rate(result.compute_images_per_s)} without waiting "
            f"for data ({wait} of the time)"
        )
    if result.estimated_s is not None:
        lines.append(f"all {count(result.total_steps, 'step')} will take about {fmt.clock_time(result.estimated_s)}")
    if result.checkpoint_bytes is not None and result.estimated_disk_bytes is not None:
        each = fmt.size(result.checkpoint_bytes)
        lines.append(f"checkpoints of {each}, at most {fmt.size(result.estimated_disk_bytes)} on disk")
    return [*lines, *result.notes, f"dry run of {count(result.steps, 'step')}: nothing was kept"]
