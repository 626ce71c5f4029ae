"""`reconv average`: average the weights of several checkpoints of a run."""

from __future__ import annotations

from pathlib import Path

import click

from reconv.cli.options import Command, NumberRange, complete_runs, emit_json, json_option, print_line, print_note


@click.command(cls=Command)
@click.argument("run", type=click.Path(path_type=Path), shell_complete=complete_runs)
@click.option(
    "--last",
    metavar="LENGTH",
    default="100%",
    show_default=True,
    help="Average the checkpoints of the last 5ep, 1000step or 10%.",
)
@click.option(
    "--discard-last",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    help="Leave out the newest N checkpoints; --last counts back from the newest of the others.",
)
@click.option(
    "--mode", type=click.Choice(["mean", "exponential"]), default="mean", show_default=True, help="The kind of average."
)
@click.option(
    "--decay",
    type=NumberRange(0, 1, min_open=True),
    default=0.99,
    show_default=True,
    help="Decay per checkpoint of the exponential average.",
)
@click.option("--ema", is_flag=True, help="Average the EMA weights instead of the weights as trained.")
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The file to write [default: RUN/averaged.safetensors].",
)
@json_option
def average(
    run: Path,
    last: str,
    discard_last: int,
    mode: str,
    decay: float,
    ema: bool,
    out: Path | None,
    json_file: str | None,
) -> None:
    """Average the weights of RUN's checkpoints in float64, including batch norm statistics.

    Averages the checkpoints that save.every wrote within the last LENGTH and that have not been deleted, and warns if
    some have. To keep more of them, set save.keep_last; to average at the end of every run, checkpoint_average.last.
    Started by srun, mpirun or torchrun, the processes share the work.

    \b
    Examples:
      reconv average runs/resnet50/1 --last 5ep
      reconv average runs/resnet50/1 --last 20ep --mode exponential --decay 0.97 --out mean.safetensors
      reconv average runs/resnet50/1 --last 5ep --discard-last 1
      reconv eval runs/resnet50/1 --averaged
    """
    from reconv.api import average as run_average
    from reconv.distributed.shared_work import joined_ranks

    with joined_ranks() as ranks:
        weights = "ema" if ema else "raw"
        result = run_average(
            run,
            last=last,
            discard_last=discard_last,
            kind=mode,
            decay=decay,
            weights=weights,
            out=out,
            process_group=ranks,
        )
    if not ranks.is_rank0:
        return
    if result.warning:
        print_note(f"warning: {result.warning}")
    if json_file is not None:
        found = {"path": str(result.path), "steps": list(result.steps), "mode": result.kind}
        emit_json({**found, "num_deleted": result.num_deleted}, json_file)
        return
    print_line(str(result))
    command = (
        f"reconv eval {run} --averaged" if out is None else f"reconv eval {result.path} --recipe {run}/recipe.yaml"
    )
    print_line(f"to evaluate it: {command}")
