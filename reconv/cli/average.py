"""The verb `average`: one weights file from several checkpoints of a run.

Owns how the result is told. Refuses to know which checkpoints are taken. Invariant: the run's checkpoints are not
changed.
"""

from __future__ import annotations

from pathlib import Path

import click

from reconv.cli.options import Command, emit_json, json_option


@click.command(cls=Command)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--last", metavar="LENGTH", default="100%", show_default=True, help="Up to the newest: 5ep, 1000step, 10%."
)
@click.option("--kind", type=click.Choice(["mean", "exponential"]), default="mean", show_default=True)
@click.option(
    "--decay",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.99,
    show_default=True,
    help="exponential: the share of the average so far that is kept at each next checkpoint.",
)
@click.option("--ema", is_flag=True, help="Average the checkpoints' moving averages instead of the weights as trained.")
@click.option(
    "--out", metavar="FILE", type=click.Path(path_type=Path), help="Where it goes; else averaged.safetensors in RUN."
)
@json_option
def average(run: Path, last: str, kind: str, decay: float, ema: bool, out: Path | None, json_file: str | None) -> None:
    """Average the checkpoints of RUN into one weights file, in float64, batch norm statistics included.

    Of the checkpoints still there, those that save.every wrote within the last LENGTH are taken: keep more of them
    with save.keep_last, or let the recipe do it all with checkpoint_average.last.

    \b
    Examples:
      reconv average runs/resnet50/1 --last 5ep
      reconv average runs/resnet50/1 --last 20ep --kind exponential --decay 0.97 --out mean.safetensors
      reconv eval runs/resnet50/1 --averaged
    """
    from reconv.api import average as run_average

    result = run_average(run, last=last, kind=kind, decay=decay, weights="ema" if ema else "raw", out=out)
    if json_file is not None:
        emit_json({"path": str(result.path), "steps": list(result.steps), "kind": result.kind}, json_file)
        return
    click.echo(str(result))
    score = f"reconv eval {run} --averaged" if out is None else f"reconv eval {result.path} --recipe {run}/recipe.yaml"
    click.echo(f"to score it: {score}")
