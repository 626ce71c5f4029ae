"""`reconv.predict` and `reconv predict`: predictions for image files and folders, and their boxes drawn.

The command runs on the ranks of a launcher, too: they share the images, and predictions outlive a kill.

An image is in the same batch whatever the number of ranks, so that its prediction has the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from reconv.build.checks import check_machine_has
from reconv.build.saved_model import model_digest, read_saved_model
from reconv.core.custom_code import CodeConsent
from reconv.core.errors import UsageError
from reconv.data.decode.pillow import decode_image
from reconv.device import device_kind
from reconv.distributed.environment import SINGLE_PROCESS, LaunchEnv, must_launch, read_launch_env
from reconv.distributed.process_group import ProcessGroup
from reconv.distributed.shared_work import joined_ranks, open_journal, part_size, run_parts
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


@dataclass(frozen=True, slots=True)
class PredictArgs:
    """Arguments of a prediction; other processes get them pickled."""

    run: str | Path
    paths: tuple[str | Path, ...]
    top: int | None
    min_score: float | None
    save_images: Path | None
    journal_dir: Path | None  # where finished parts are kept; None: nowhere
    options: LoadOptions


@dataclass(frozen=True, slots=True)
class SharedPredictions:
    """The predictions of all ranks; `predictions` is None on ranks other than 0."""

    predictions: PredictionList | None
    num_bad: int
    num_images: int


def predict_in_ranks(args: PredictArgs, devices: int | None, log: LogFunction) -> SharedPredictions:
    """Predict the images on the ranks of a launcher, or on `devices` of this machine.

    An image that cannot be read has its error as its prediction.
    """
    launch_env = read_launch_env()
    if not must_launch(devices, launch_env):
        is_shared = launch_env.world_size > 1 or args.journal_dir is not None
        return _predict_in_parts(args, log) if is_shared else _predict_at_once(args, log)
    assert devices is not None
    from reconv.distributed.launcher import launch  # imports torch's launcher, which a single process does not need

    check_machine_has(devices, args.options["device"])
    options, consent = args.options, CodeConsent.of(args.options["trust_code"])
    located = find_model(args.run, options["best"], log)
    read_saved_model(  # asks for trust where it must
        located, weights=options["weights"], recipe=options["recipe"], trust_code=consent
    )
    return launch(devices, _predict_in_parts, replace(args, options={**options, "trust_code": consent}), log)


def _predict_at_once(args: PredictArgs, log: LogFunction) -> SharedPredictions:
    """Predict in this process alone, which keeps nothing for another try."""
    predictions = predict(
        args.run,
        args.paths,
        top=args.top,
        min_score=args.min_score,
        save_images=args.save_images,
        skip_bad=True,
        log=log,
        **args.options,
    )
    return SharedPredictions(predictions, sum(bool(found.error) for found in predictions), len(predictions))


def _predict_in_parts(args: PredictArgs, log: LogFunction) -> SharedPredictions:
    """Predict in this process, one of those that share the images, or whose finished parts outlive a kill."""
    options = args.options
    with joined_ranks(device_kind(options["device"])) as ranks:
        if ranks.world_size > 1:
            log = log if ranks.is_rank0 else no_log
            consent = CodeConsent.of(options["trust_code"]).without_question()  # cannot be asked in every process
            options = {**options, "trust_code": consent}
            ranks.on_rank0(
                lambda: bool(find_model(args.run, options["best"], no_log, loads=False))
            )  # where it must be downloaded
        files, predictor, targets = _open(
            args.run, args.paths, args.min_score, args.save_images, options, log, ranks.launch_env
        )
        predictions = _share(ranks, predictor, files, targets, args)
        num_bad = ranks.on_rank0(lambda: sum(bool(prediction.error) for prediction in predictions))
        return SharedPredictions(PredictionList(predictions) if ranks.is_rank0 else None, num_bad, len(files))


def _share(
    ranks: ProcessGroup,
    predictor: Predictor,
    files: Sequence[ImageFile],
    targets: Sequence[Path] | None,
    args: PredictArgs,
) -> list[Prediction]:
    """All predictions in order on rank 0, none on the others."""
    size = part_size(len(files), predictor.batch_size)
    starts = {f"{start:010}": start for start in range(0, len(files), size)}

    def predict_part(part: str) -> bytes:
        own = slice(starts[part], starts[part] + size)
        found: Sequence[Prediction] = predictor.predict(
            files[own], top=args.top, min_score=args.min_score, skip_bad=True
        )
        if targets is not None:
            found = list(save_box_images(found, targets[own]))
        return json.dumps([prediction.to_dict() for prediction in found]).encode()

    plan = {"files": _files_digest(files), "size": size}
    if args.journal_dir is not None:
        plan |= {
            "model": model_digest(predictor.module, predictor.recipe, predictor.classes),
            "options": repr(_kept_options(args)),
        }
    with open_journal(ranks, args.journal_dir, plan) as journal:
        payloads = run_parts(ranks, list(starts), predict_part, journal)
        return [Prediction.from_dict(item) for payload in payloads for item in json.loads(payload)]


def _kept_options(args: PredictArgs) -> list[object]:
    """The options that decide the predictions."""
    names = ("device", "backend", "precision", "calibration", "decoder")
    return [args.top, args.min_score, args.save_images, *(args.options[name] for name in names)]  # type: ignore[literal-required]


def _files_digest(files: Sequence[ImageFile]) -> str:
    """A digest of the names and sizes of files."""
    digest = hashlib.sha256()
    for file in files:
        size = os.path.getsize(file.path) if os.path.exists(file.path) else -1
        digest.update(f"{file.path}\0{size}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


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
    files, predictor, targets = _open(run, paths, min_score, save_images, options, log)
    predictions = predictor.predict(files, top=top, min_score=min_score, skip_bad=skip_bad)
    return predictions if targets is None else PredictionList(save_box_images(predictions, targets))


def _open(
    run: str | Path,
    paths: Sequence[str | Path],
    min_score: float | None,
    save_images: str | Path | None,
    options: LoadOptions,
    log: LogFunction,
    launch_env: LaunchEnv = SINGLE_PROCESS,
) -> tuple[list[ImageFile], Predictor, list[Path] | None]:
    """The image files, the loaded model, and the files for its drawn boxes where they are asked for."""
    files = list_files(paths, log)
    located = find_model(run, options.get("best", False), log)
    named: Any = {"weights": "auto", "recipe": None, "device": "auto", **options}
    named.pop("best", None)
    predictor = Predictor.from_located(located, launch_env=launch_env, log=log, **named)
    if min_score is None and predictor.is_detector:
        log_threshold(located.run, log)
    targets = None if save_images is None else target_files(predictor, files, Path(save_images))
    return files, predictor, targets


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
        raise UsageError("--save-images is for detectors, and this model is a classifier", hint="omit --save-images")
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
        raise UsageError("--save-images would overwrite an image", where=str(overwritten), hint="use another folder")
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
