"""The verbs `eval` and `predict`: a trained run answers for itself.

Owns how scores and predictions are printed. Refuses to know how they are computed. Invariant: what `--json` writes
is what the library call returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from reconv.cli.options import (
    DEVICE_HELP,
    Command,
    CommandFunction,
    complete_recipes,
    emit_json,
    json_option,
    percent,
    print_table,
)
from reconv.errors import DataError

if TYPE_CHECKING:
    from reconv.api import EvalResult, Prediction
    from reconv.inference.predict_files import FoundBox

NUM_BAD_NAMED = 5
MOST_COLUMNS = 6  # of metrics; more, as a detector's, are told one a line


def model_options(verb: CommandFunction) -> CommandFunction:
    """The options that say which weights of a RUN are meant, and where they run."""
    for option in (
        click.option(
            "--recipe", metavar="NAME", shell_complete=complete_recipes, help="Needed by a bare weights file."
        ),
        click.option("--best", is_flag=True, help="The best checkpoint instead of the newest."),
        click.option("--raw", "weights", flag_value="raw", help="The weights as trained."),
        click.option(
            "--ema", "weights", flag_value="ema", help="The averaged weights; the default where there are some."
        ),
        click.option("--averaged", "weights", flag_value="averaged", help="The average of the run's checkpoints."),
        click.option("--device", metavar="NAME", default="auto", show_default=True, help=DEVICE_HELP),
    ):
        verb = option(verb)
    return verb


@click.command("eval", cls=Command)
@click.argument("run", type=click.Path())
@click.option("--data", metavar="DIR", type=click.Path(), help="The data set; else the run's own, else $DATA_DIR.")
@click.option("--all", "every", is_flag=True, help="Score every checkpoint once, in order; those done are skipped.")
@click.option("--batch-size", metavar="N", type=click.IntRange(min=1), help="Images in one forward pass.")
@click.option(
    "--samples", metavar="N", type=click.IntRange(min=1), help="So many of the images only; the score is partial."
)
@model_options
@json_option
def evaluate(
    run: str,
    data: str | None,
    every: bool,
    batch_size: int | None,
    samples: int | None,
    device: str,
    weights: str | None,
    best: bool,
    recipe: str | None,
    json_file: str | None,
) -> None:
    """Score RUN in one exact pass over the validation set.

    RUN is a run folder, a checkpoint folder or a weights file. Each sample counts exactly once.

    \b
    Examples:
      reconv eval runs/quickstart/1
      reconv eval runs/resnet50/1 --all
      reconv eval runs/resnet50/1/checkpoints/step-000450000 --data /imagenet --json scores.json
    """
    from reconv.api import evaluate as run_evaluate

    results = run_evaluate(
        run,
        data=data,
        device=device,
        all=every,
        weights=weights or "auto",
        best=best,
        batch=batch_size,
        samples=samples,
        recipe=recipe,
        tell=_tell,
    )
    if json_file is not None:
        emit_json([_score(result) for result in results], json_file)
        return
    names = list(dict.fromkeys(name for result in results for name in result.metrics))
    if len(names) <= MOST_COLUMNS:
        print_table(["step", "weights", *names, "images"], [_row(result, names) for result in results])
        return
    rows = [_row(result, names) for result in results]
    print_table(
        ["", *(f"step {row[0]}" for row in rows)],
        list(zip(["weights", *names, "images"], *(row[1:] for row in rows), strict=True)),
    )


def _score(result: EvalResult) -> dict[str, Any]:
    """One evaluation as plain data."""
    return {
        "step": result.step,
        "weights": result.weights,
        "metrics": dict(result.metrics),
        "num_samples": result.num_samples,
        "skipped": result.skipped,
        "partial": result.partial,
        "path": str(result.path),
    }


def _row(result: EvalResult, names: list[str]) -> list[str]:
    step = "-" if result.step is None else str(result.step)
    marks = [f"{result.skipped} left out"] * (result.skipped > 0) + ["partial"] * result.partial
    images = f"{result.num_samples} ({', '.join(marks)})" if marks else f"{result.num_samples}"
    return [step, result.weights, *(_metric(name, result.metrics.get(name)) for name in names), images]


def _metric(name: str, value: float | None) -> str:
    """A fraction in percent; a loss as it is."""
    if value is None:
        return "-"
    return f"{value:.4f}" if name.endswith("loss") else percent(value)


@click.command(cls=Command)
@click.argument("run", type=click.Path())
@click.argument("images", nargs=-1, required=True, type=click.Path(), metavar="IMAGE_OR_FOLDER...")
@click.option("--top", metavar="N", type=click.IntRange(min=1), help="Names per image, else 5; or boxes, else all.")
@click.option(
    "--score", metavar="X", type=click.FloatRange(0, 1), help="Detectors: the least score of a box, else 0.3."
)
@click.option("--images", metavar="DIR", type=click.Path(), help="Detectors: draw the boxes into images there.")
@model_options
@json_option
def predict(
    run: str,
    images: tuple[str, ...],
    top: int | None,
    score: float | None,
    pictures: str | None,
    device: str,
    weights: str | None,
    best: bool,
    recipe: str | None,
    json_file: str | None,
) -> None:
    """Tell what RUN sees in images, or in every image of a folder.

    A detector tells boxes: left, top, right and bottom in pixels. Images pass through the very preprocessing that
    evaluation used; it is saved with the model.

    \b
    Examples:
      reconv predict runs/quickstart/1 digit.png
      reconv predict runs/resnet50/1 photos/ cat.jpg --top 3
      reconv predict runs/resnet50/1 photos/ --json predictions.json
      reconv predict runs/ssd-resnet34/1 street.jpg --images drawn/
    """
    from reconv.api import predict as run_predict

    predictions = run_predict(
        run,
        images,
        top=top,
        min_score=score,
        pictures=pictures,
        device=device,
        weights=weights or "auto",
        best=best,
        recipe=recipe,
        skip_bad=True,
        tell=_tell,
    )
    bad = [prediction for prediction in predictions if prediction.error]
    if json_file is not None:
        emit_json([_answer(prediction) for prediction in predictions], json_file)
    elif any(prediction.labels for prediction in predictions):
        rows = [
            [str(prediction.path) if rank == 0 else "", name, percent(value)]
            for prediction in predictions
            for rank, (name, value) in enumerate(prediction.labels)
        ]
        print_table(["image", "name", "score"], rows)
    elif len(bad) < len(predictions):
        _print_boxes([prediction for prediction in predictions if not prediction.error])
    if bad:
        raise DataError(
            f"{len(bad)} of {len(predictions)} images could not be read"
            + ("; the others are answered" if len(bad) < len(predictions) else ""),
            where="; ".join(f"{prediction.path}: {prediction.error}" for prediction in bad[:NUM_BAD_NAMED]),
        )


def _print_boxes(predictions: Sequence[Prediction]) -> None:
    """A row for each box; an image without one is told too."""
    rows = []
    for prediction in predictions:
        found = [
            [box.name, percent(box.score), *(f"{edge:.0f}" for edge in box.box_xyxy)] for box in prediction.boxes or ()
        ]
        for number, cells in enumerate(found or [["nothing", "", "", "", "", ""]]):
            rows.append([str(prediction.path) if number == 0 else "", *cells])
    print_table(["image", "name", "score", "left", "top", "right", "bottom"], rows)
    drawn = [prediction.drawn for prediction in predictions if prediction.drawn is not None]
    if drawn:
        _tell(f"drawn: {drawn[0]}" + (f" and {len(drawn) - 1} more" if len(drawn) > 1 else ""))


def _tell(text: str) -> None:
    """What a person should know besides the result, apart from it."""
    click.echo(text, err=True)


def _answer(prediction: Prediction) -> dict[str, Any]:
    """One prediction as plain data."""
    if prediction.boxes is None:
        told: dict[str, Any] = {"labels": [{"name": name, "score": score} for name, score in prediction.labels]}
    else:
        told = {"boxes": [_told_box(box) for box in prediction.boxes]}
    return {
        "path": str(prediction.path),
        **told,
        **({"drawn": str(prediction.drawn)} if prediction.drawn is not None else {}),
        **({"error": prediction.error} if prediction.error else {}),
    }


def _told_box(box: FoundBox) -> dict[str, Any]:
    """One box as plain data; the class's number where the run's data had one."""
    number = {} if box.class_id is None else {"class_id": box.class_id}
    return {"name": box.name, **number, "score": box.score, "box_xyxy": list(box.box_xyxy)}
