"""`reconv eval`: evaluate a trained model on the validation set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reconv.cli.options import (
    Command,
    emit_json,
    json_option,
    model_options,
    percent,
    print_note,
    print_table,
    trust_or_ask,
)

if TYPE_CHECKING:
    from reconv.api import EvalResult
    from reconv.data.dataset import Split

_MAX_METRIC_COLUMNS = 6  # more metrics, as a detector has, are printed as rows


@click.command("eval", cls=Command)
@click.argument("run", type=click.Path())
@click.option("--data", metavar="DIR", type=click.Path(), help="The dataset [default: the run's own, or $DATA_DIR].")
@click.option(
    "--split",
    type=click.Choice(["train", "val", "test"]),
    help="Split of the dataset to evaluate [default: val; all images of data without splits, unless trained on].",
)
@click.option("--all", "every", is_flag=True, help="Evaluate every checkpoint in order; skip those done before.")
@click.option("--batch-size", metavar="N", type=click.IntRange(min=1), help="Images per forward pass.")
@click.option(
    "--samples", metavar="N", type=click.IntRange(min=1), help="Evaluate on N images only; the result is partial."
)
@model_options
@json_option
def eval_command(
    run: str,
    data: str | None,
    split: Split | None,
    every: bool,
    batch_size: int | None,
    samples: int | None,
    device: str,
    weights: str | None,
    best: bool,
    recipe: str | None,
    trust_code: bool,
    json_file: str | None,
) -> None:
    """Evaluate RUN on the validation set. Every image counts exactly once.

    RUN is a run directory, a checkpoint directory or a weights file. DIR is anything that train takes, or a validation
    set alone: val/CLASS/..., or CLASS/... Its classes are matched to those of the model by name, and may be fewer.

    \b
    Examples:
      reconv eval runs/quickstart/1
      reconv eval runs/resnet50/1 --all
      reconv eval runs/resnet50/1 --data flowers/ --split test
      reconv eval runs/resnet50/1/checkpoints/step-000450000 --data /imagenet --json scores.json
    """
    from reconv.api import evaluate

    results = evaluate(
        run,
        data=data,
        split=split,
        device=device,
        all=every,
        weights=weights or "auto",
        best=best,
        batch_size=batch_size,
        samples=samples,
        recipe=recipe,
        trust_code=trust_or_ask(trust_code),
        log=print_note,
    )
    if json_file is not None:
        emit_json([_to_json(result) for result in results], json_file)
        return
    names = list(dict.fromkeys(name for result in results for name in result.metrics))
    rows = [_row(result, names) for result in results]
    if len(names) <= _MAX_METRIC_COLUMNS:
        print_table(["step", "weights", *names, "images"], rows)
        return
    print_table(
        ["", *(f"step {row[0]}" for row in rows)],
        list(zip(["weights", *names, "images"], *(row[1:] for row in rows), strict=True)),
    )


def _to_json(result: EvalResult) -> dict[str, Any]:
    return {
        "step": result.step,
        "weights": result.weights,
        "metrics": dict(result.metrics),
        "num_samples": result.num_samples,
        "skipped": result.skipped,
        "partial": result.partial,
        "split": result.split,
        "data": result.data,
        "path": str(result.path),
    }


def _row(result: EvalResult, names: list[str]) -> list[str]:
    step = "-" if result.step is None else str(result.step)
    remarks = [f"{result.skipped} skipped"] * (result.skipped > 0) + ["partial"] * result.partial
    images = f"{result.num_samples} ({', '.join(remarks)})" if remarks else f"{result.num_samples}"
    return [step, result.weights, *(_metric(name, result.metrics.get(name)) for name in names), images]


def _metric(name: str, value: float | None) -> str:
    """A loss as it is, any other metric in percent."""
    if value is None:
        return "-"
    return f"{value:.4f}" if name.endswith("loss") or not 0 <= value <= 1 else percent(value)
