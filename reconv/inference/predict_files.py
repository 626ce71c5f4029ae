"""`predict`: predictions for image files and folders, and copies of the images with their boxes drawn."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from reconv.checkpoint.run_dir import RunDir
from reconv.data.decode.pillow import decode_image
from reconv.data.readers.folder import walk_images
from reconv.data.storage.local import read
from reconv.errors import DataError, UsageError
from reconv.inference.image_input import ImageFile
from reconv.inference.model_evaluation import LogFunction
from reconv.inference.output_predictions import MIN_SCORE
from reconv.inference.predictions import Prediction, PredictionList, image_with_boxes
from reconv.inference.predictor import LoadOptions, Predictor, find_model, no_log
from reconv.io.atomic import disk_errors
from reconv.report.evaluation_files import read_detection_analysis


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
    named = (file for path in dict.fromkeys(map(Path, paths)) for file in image_files(path, log))
    files = list({file.path: file for file in named}.values())
    predictor = Predictor.load(run, log=log, **options)
    if min_score is None and predictor.is_detector:
        _log_threshold(find_model(run, options.get("best", False), no_log).run, log)
    if save_images is None:
        return predictor.predict(files, top=top, min_score=min_score, skip_bad=skip_bad)
    if not predictor.is_detector:
        raise UsageError("--save-images is for detectors, and this model is a classifier", then="omit --save-images")
    targets = _target_files([file.path for file in files], Path(save_images))
    predictions = predictor.predict(files, top=top, min_score=min_score, skip_bad=skip_bad)
    return PredictionList(_save_images(predictions, targets))


def _log_threshold(run_dir: RunDir | None, log: LogFunction) -> None:
    """Log which threshold the last evaluation of the run recommends, if there is one."""
    analysis = None if run_dir is None else read_detection_analysis(run_dir.path)
    if analysis is not None and analysis["best_threshold"]["f1"] > 0:
        best = analysis["best_threshold"]
        log(
            f"boxes with a score of at least {MIN_SCORE:g} are shown; F1 on the validation set is highest, "
            f"{best['f1']:.1%}, with --min-score {best['score']:.2f}"
        )


def image_files(path: Path, log: LogFunction = no_log) -> list[ImageFile]:
    """The image at a path, or those in a folder and its subfolders."""
    if os.path.isdir(path):
        # A file with an image's name that cannot be read is reported when it is opened, so it is not filtered here.
        files = walk_images(path)
        if not files:
            raise DataError("there is no image in this folder", where=str(path))
        log(f"{len(files):,} image{'s' * (len(files) > 1)} in {path} and its subfolders; links are not followed")
        return [ImageFile(Path(file), is_named=False) for file in files]
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        raise DataError("no such image", where=str(path))
    return [ImageFile(path)]


def _target_files(files: Sequence[Path], folder: Path) -> list[Path]:
    """A file in the folder for each image; images with the same name get numbers."""
    targets: list[Path] = []
    taken: set[str] = set()
    for file in files:
        name, number = file.stem, 1
        while name in taken:
            number += 1
            name = f"{file.stem}-{number}"
        taken.add(name)
        targets.append(folder / f"{name}.png")
    originals = {file.resolve() for file in files}
    overwritten = next((target for target in targets if target.resolve() in originals), None)
    if overwritten is not None:
        raise UsageError("--save-images would overwrite an image", where=str(overwritten), then="use another folder")
    return targets


def _save_images(predictions: Sequence[Prediction], targets: Sequence[Path]) -> Iterator[Prediction]:
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
