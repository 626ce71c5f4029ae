"""`reconv eval`: evaluate a trained model on the validation set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from reconv.cli.options import (
    Command,
    NumberRange,
    check_run,
    complete_runs,
    emit_json,
    journal_of,
    json_option,
    model_options,
    network_options,
    percent,
    print_line,
    print_note,
    print_table,
    trust_or_ask,
)
from reconv.distributed.environment import read_launch_env
from reconv.logging.formatting import few_images, rate

if TYPE_CHECKING:
    from reconv.api import EvalResult

_MAX_METRIC_COLUMNS = 6  # more metrics, as a detector has, are printed as rows
_MAX_PAIRS = 5
_CLASS_COLUMNS = {
    "num_images": "images",
    "num_predicted": "predicted",
    "num_objects": "objects",
    "num_detections": "detections",
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "ap": "AP",
    "ap50": "AP50",
    "voc10": "VOC AP",
}


@click.command("eval", cls=Command)
@click.argument("run", type=click.Path(), shell_complete=complete_runs)
@click.option("--data", metavar="DIR", type=click.Path(), help="The dataset [default: the run's own, or $DATA_DIR].")
@click.option(
    "--split",
    type=click.Choice(["train", "val", "test"]),
    help="Split of the dataset to evaluate [default: val; all images of data without splits, unless trained on].",
)
@click.option("--per-class", is_flag=True, help="Also print a table of the classes: precision, recall and F1, or AP.")
@click.option(
    "--predictions",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write path, target, prediction, score, loss and split of each image: FILE.csv or FILE.parquet.",
)
@click.option("--calibrate", is_flag=True, help="Fit temperature and prediction sets on the images; keep them in RUN.")
@click.option(
    "--coverage",
    metavar="P",
    type=NumberRange(0.5, 1, max_open=True),
    default=0.9,
    show_default=True,
    help="--calibrate: the share of images whose prediction set has the right class.",
)
@click.option("--all", "every", is_flag=True, help="Evaluate every checkpoint in order; skip those done before.")
@click.option("--batch-size", metavar="N", type=click.IntRange(min=1), help="Images per forward pass.")
@click.option(
    "--samples", metavar="N", type=click.IntRange(min=1), help="Evaluate on N images only; the result is partial."
)
@click.option(
    "--devices", metavar="N", type=click.IntRange(1, 256), help="Number of processes on this machine, one per device."
)
@model_options
@network_options
@json_option
def eval_command(
    run: str,
    every: bool,
    per_class: bool,
    weights: str | None,
    trust_code: bool,
    json_file: str | None,
    **options: Any,
) -> None:
    """Evaluate RUN on the validation set. Every image counts exactly once.

    RUN is a run directory, a checkpoint directory or a weights file. DIR is anything that train takes, or a validation
    set alone: val/CLASS/..., or CLASS/... Its classes are matched to those of the model by name, and may be fewer.
    With --json FILE or --all, run the same command again to continue after an interruption. Started by srun, mpirun or
    torchrun, the processes share the images; all of them must see FILE.

    \b
    Examples:
      reconv eval runs/quickstart/1
      reconv eval runs/quickstart/1 --per-class
      reconv eval runs/quickstart/1 --split train --predictions runs/quickstart/1/predictions-train.csv
      reconv eval runs/resnet50/1 --calibrate --coverage 0.95
      reconv eval runs/resnet50/1 --all
      reconv eval runs/resnet50/1 --devices 8
      reconv eval runs/resnet50/1 --data flowers/ --split test
      reconv eval runs/resnet50/1/checkpoints/step-000450000 --data /imagenet --json scores.json
    """
    check_run(run)
    from reconv.api import evaluate
    from reconv.storage.work_journal import remove_journal

    journal_dir = None if every else journal_of(json_file, "evaluating")
    results = evaluate(
        run,
        all=every,
        per_class=per_class,
        weights=weights or "auto",
        trust_code=trust_or_ask(trust_code),
        journal_dir=journal_dir,
        log=print_note,
        **options,
    )
    if read_launch_env().rank != 0:  # started by torchrun, mpirun or srun: rank 0 prints
        return
    if json_file is not None:
        emit_json([_to_json(result) for result in results], json_file)
        if journal_dir is not None:
            remove_journal(journal_dir)
        return
    _print_metrics(results)
    if results[-1].few_images:
        print_note(few_images(results[-1].few_images))
    for note in (result.confidence_note for result in results if result.confidence_note):
        print_line(note)
    for result in results if per_class else ():
        _print_classes(result)


def _print_metrics(results: Sequence[EvalResult]) -> None:
    names = list(dict.fromkeys(name for result in results for name in result.metrics))
    rows = [_row(result, names) for result in results]
    if len(names) <= _MAX_METRIC_COLUMNS:
        print_table(["step", "weights", *names, "images", "images/s"], rows)
        return
    print_table(
        ["", *(f"step {row[0]}" for row in rows)],
        list(zip(["weights", *names, "images", "images/s"], *(row[1:] for row in rows), strict=True)),
    )


def _print_classes(result: EvalResult) -> None:
    """The table of classes, and for a classifier their means and what is confused most."""
    analysis = result.analysis
    if analysis is None:
        print_note("there is no table of classes for this task")
        return
    columns = {name: title for name, title in _CLASS_COLUMNS.items() if name in analysis["classes"][0]}
    rows = [[row["name"], *(_cell(name, row[name]) for name in columns)] for row in analysis["classes"]]
    means = {name.removeprefix("macro_"): value for name, value in analysis["metrics"].items() if "macro_" in name}
    if means:
        rows.append(["mean over classes", *(percent(means[name]) if name in means else "" for name in columns)])
    print_line()
    print_table(["class", *columns.values()], rows)
    if "most_confused" not in analysis:
        return
    pairs = [f"{p['target']} as {p['predicted']} ({p['num_images']:,})" for p in analysis["most_confused"]]
    print_line()
    print_line("most confused: " + (", ".join(pairs[:_MAX_PAIRS]) or "none, every image is classified correctly"))
    print_line(f"expected calibration error: {percent(analysis['metrics']['calibration_error'])}")


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if name.startswith("num_") else percent(value)


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
        "images_per_s": result.images_per_s,
        **({} if result.analysis is None else {"analysis": dict(result.analysis)}),
        **({} if result.confidence is None else {"confidence": result.confidence.to_dict()}),
        "path": str(result.path),
    }


def _row(result: EvalResult, names: list[str]) -> list[str]:
    step = "-" if result.step is None else str(result.step)
    remarks = [f"{result.skipped} skipped"] * (result.skipped > 0) + ["partial"] * result.partial
    images = f"{result.num_samples} ({', '.join(remarks)})" if remarks else f"{result.num_samples}"
    speed = "-" if result.images_per_s is None else rate(result.images_per_s)
    return [step, result.weights, *(_metric(name, result.metrics.get(name)) for name in names), images, speed]


def _metric(name: str, value: float | None) -> str:
    """A loss as it is, any other metric in percent."""
    if value is None:
        return "-"
    return f"{value:.4f}" if name.endswith("loss") or not 0 <= value <= 1 else percent(value)
