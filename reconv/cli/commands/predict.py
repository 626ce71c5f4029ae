"""`reconv predict`: classify images, or detect objects in them, with a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reconv.cli.options import (
    Command,
    NumberRange,
    backend_options,
    check_run,
    complete_runs,
    emit_json,
    journal_of,
    json_option,
    model_options,
    percent,
    print_note,
    print_table,
    trust_or_ask,
)
from reconv.core.errors import DataError

if TYPE_CHECKING:
    from reconv.api import Prediction
    from reconv.inference.backends.base import BackendName, Precision
    from reconv.inference.image_reader import DecoderName
    from reconv.inference.predict import SharedPredictions
    from reconv.inference.predictor import LoadOptions

_MAX_BAD_LISTED = 5


@click.command(cls=Command)
@click.argument("run", type=click.Path(), shell_complete=complete_runs)
@click.argument("images", nargs=-1, required=True, type=click.Path(), metavar="IMAGE_OR_FOLDER...")
@click.option(
    "--top",
    metavar="N",
    type=click.IntRange(min=1),
    help="Print the N best classes [default: 5], labels or boxes [default: all] of each image.",
)
@click.option(
    "--min-score",
    metavar="X",
    type=NumberRange(0, 1),
    help="Omit boxes [default: 0.3] or, of several labels per image, labels [default: 0.5] with a lower score.",
)
@click.option(
    "--save-images", metavar="DIR", type=click.Path(), help="Detectors: write a copy of each image with its boxes."
)
@click.option(
    "--devices", metavar="N", type=click.IntRange(1, 256), help="Number of processes on this machine, one per device."
)
@model_options
@backend_options
@json_option
def predict(
    run: str,
    images: tuple[str, ...],
    top: int | None,
    min_score: float | None,
    save_images: str | None,
    devices: int | None,
    device: str,
    weights: str | None,
    best: bool,
    recipe: str | None,
    trust_code: bool,
    backend: BackendName,
    precision: Precision,
    calibration: str | None,
    decoder: DecoderName,
    json_file: str | None,
) -> None:
    """Predict the classes or boxes of images, or of every image in a folder.

    RUN is a run directory, a checkpoint directory or a weights file. Boxes are left, top, right and bottom in pixels.
    The images are preprocessed as in evaluation; the model's preprocessing is saved with it. With --json FILE, run the
    same command again to continue after an interruption. Started by srun, mpirun or torchrun, the processes share the
    images; all of them must see FILE.

    \b
    Examples:
      reconv predict runs/quickstart/1 digit.png
      reconv predict runs/resnet50/1 photos/ cat.jpg --top 3
      reconv predict runs/resnet50/1 photos/ --json predictions.json
      srun -N 10 reconv predict runs/resnet50/1 /photos --json /shared/predictions.json
      reconv predict runs/ssd-resnet34/1 street.jpg --save-images boxes/
    """
    check_run(run)
    from reconv.inference.predict import PredictArgs, predict_in_ranks
    from reconv.storage.work_journal import remove_journal

    journal_dir = journal_of(json_file, "predicting")
    options: LoadOptions = {
        "device": device,
        "weights": weights or "auto",
        "best": best,
        "recipe": recipe,
        "backend": backend,
        "precision": precision,
        "calibration": calibration,
        "decoder": decoder,
        "trust_code": trust_or_ask(trust_code),
    }
    folder = None if save_images is None else Path(save_images)
    args = PredictArgs(run, images, top, min_score, folder, journal_dir, options)
    result = predict_in_ranks(args, devices, print_note)
    if result.predictions is not None:
        _print_predictions(result.predictions, json_file)
        if journal_dir is not None:
            remove_journal(journal_dir)
    if result.num_bad:
        raise _unreadable_images(result)


def _print_predictions(predictions: Sequence[Prediction], json_file: str | None) -> None:
    good = [prediction for prediction in predictions if not prediction.error]
    if json_file is not None:
        emit_json([prediction.to_dict() for prediction in predictions], json_file)
    elif good and good[0].boxes is not None:
        _print_boxes(good)
    elif good:
        rows = [
            [prediction.shown_path if rank == 0 else "", *cells]
            for prediction in good
            for rank, cells in enumerate(_class_cells(prediction))
        ]
        with_sets = any(prediction.prediction_set is not None for prediction in good)
        print_table(["image", "class", "score", *(["prediction set"] if with_sets else [])], rows)


def _unreadable_images(result: SharedPredictions) -> DataError:
    """The error about images that could not be read, which rank 0 prints."""
    bad = [prediction for prediction in result.predictions or () if prediction.error]
    error = DataError(
        f"{result.num_bad} of {result.num_images} images could not be read"
        + ("; the others were predicted" if result.num_bad < result.num_images else ""),
        where="; ".join(f"{prediction.shown_path}: {prediction.error}" for prediction in bad[:_MAX_BAD_LISTED]),
    )
    error.is_reported = result.predictions is None
    return error


def _class_cells(prediction: Prediction) -> list[list[str]]:
    """Name and score of each class, and the prediction set in the first row; one row for an image without a label."""
    rows = [[found.name, percent(found.score)] for found in prediction.classes] or [["none", ""]]
    if prediction.prediction_set is not None:
        names = ", ".join(prediction.prediction_set) or "no class is probable enough"
        rows = [[*row, f"unsure: {names}" if prediction.unsure and n == 0 else ""] for n, row in enumerate(rows)]
    return rows


def _print_boxes(predictions: Sequence[Prediction]) -> None:
    """Print a row for each box, and one for an image without a box."""
    rows = []
    for prediction in predictions:
        boxes = [
            [box.name, percent(box.score), *(f"{edge:.0f}" for edge in box.box_xyxy)] for box in prediction.boxes or ()
        ]
        for number, cells in enumerate(boxes or [["none", "", "", "", "", ""]]):
            rows.append([prediction.shown_path if number == 0 else "", *cells])
    print_table(["image", "class", "score", "left", "top", "right", "bottom"], rows)
    saved = [prediction.saved_image for prediction in predictions if prediction.saved_image is not None]
    if saved:
        print_note(f"saved: {saved[0]}" + (f" and {len(saved) - 1} more" if len(saved) > 1 else ""))
