"""`predict`: predictions for image files and folders, and copies of the images with their boxes drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from reconv.core.errors import UsageError
from reconv.data.decode.pillow import decode_image
from reconv.inference.backends.base import LogFunction, no_log
from reconv.inference.image_input import ImageFile, image_files
from reconv.inference.outputs import MIN_SCORE
from reconv.inference.predictions import Prediction, PredictionList, image_with_boxes
from reconv.inference.predictor import LoadOptions, Predictor, find_model
from reconv.logging.run_dir import RunDir
from reconv.report.evaluation_files import read_detection_analysis
from reconv.storage.bounded import real_path
from reconv.storage.files import disk_errors
from reconv.storage.local import read


def predict(
    run: str | Path,
    paths: Sequence[str | Path],
    *,
    top: int | None = None,
    min_score: float | None = None,
    save_images: str | Path | None = None,
    skip_bad: bool = False,
    log: LogFunction = no_log,
    **options: Unpack[LoadOptions],
) -> PredictionList:
    """Load `run` and predict each image file, and every image in each folder, of `paths`.

    See `Predictor.load` and `Predictor.predict` for the options. A detector can also write a copy of each image with
    its boxes to the folder `save_images`.
    """
    files = list_files(paths, log)
    predictor = Predictor.load(run, log=log, **options)
    if min_score is None and predictor.is_detector:
        log_threshold(find_model(run, options.get("best", False), no_log).run, log)
    targets = None if save_images is None else target_files(predictor, files, Path(save_images))
    predictions = predictor.predict(files, top=top, min_score=min_score, skip_bad=skip_bad)
    return predictions if targets is None else PredictionList(save_box_images(predictions, targets))


def list_files(paths: Sequence[str | Path], log: LogFunction = no_log) -> list[ImageFile]:
    """The image files that paths name, each once."""
    named = (file for path in dict.fromkeys(map(Path, paths)) for file in image_files(path, log))
    return list({file.path: file for file in named}.values())


def log_threshold(run_dir: RunDir | None, log: LogFunction) -> None:
    """Log which threshold the last evaluation of the run recommends, if there is one."""
    analysis = None if run_dir is None else read_detection_analysis(run_dir.path)
    if analysis is not None and analysis["best_threshold"]["f1"] > 0:
        best = analysis["best_threshold"]
        log(
            f"boxes with a score of at least {MIN_SCORE:g} are shown; F1 on the validation set is highest, "
            f"{best['f1']:.1%}, with --min-score {best['score']:.2f}"
        )


def target_files(predictor: Predictor, files: Sequence[ImageFile], folder: Path) -> list[Path]:
    """A file in the folder for each image; images with the same name get numbers. Raises an error for a classifier."""
    if not predictor.is_detector:
        raise UsageError("--save-images is for detectors, and this model is a classifier", then="omit --save-images")
    paths = [file.path for file in files]
    targets: list[Path] = []
    taken: set[str] = set()
    for file in paths:
        name, number = file.stem, 1
        while name in taken:
            number += 1
            name = f"{file.stem}-{number}"
        taken.add(name)
        targets.append(folder / f"{name}.png")
    originals = {real_path(file) for file in paths}
    overwritten = next((target for target in targets if real_path(target) in originals), None)
    if overwritten is not None:
        raise UsageError("--save-images would overwrite an image", where=str(overwritten), then="use another folder")
    return targets


def save_box_images(predictions: Sequence[Prediction], targets: Sequence[Path]) -> Iterator[Prediction]:
    """Write the image of each prediction with its boxes, in color and at full size."""
    for prediction, target in zip(predictions, targets, strict=True):
        if prediction.boxes is None or prediction.path is None:
            yield prediction
            continue
        image = image_with_boxes(decode_image(read(prediction.path), 3, str(prediction.path)), prediction.boxes)
        with disk_errors(target.parent, "choose another folder with --save-images DIR"):
            target.parent.mkdir(parents=True, exist_ok=True)
            image.save(target)
        yield replace(prediction, saved_image=target)
