"""`reconv predict` on the ranks of a launcher: they share the images, and predictions outlive a kill.

An image is in the same batch whatever the number of ranks, so that its prediction has the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reconv.build.checks import check_machine_has
from reconv.build.saved_model import model_digest, read_saved_model
from reconv.core.custom_code import CodeConsent
from reconv.device import device_kind
from reconv.distributed.environment import must_launch, read_launch_env
from reconv.distributed.process_group import ProcessGroup
from reconv.distributed.shared_work import joined_ranks, open_journal, part_size, run_parts
from reconv.inference.backends.base import LogFunction, no_log
from reconv.inference.files import list_files, log_threshold, save_box_images, target_files
from reconv.inference.image_input import ImageFile
from reconv.inference.predictions import Prediction, PredictionList
from reconv.inference.predictor import LoadOptions, Predictor, find_model


@dataclass(frozen=True, slots=True)
class PredictArgs:
    """What is predicted and how; other processes get it pickled."""

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
    if not must_launch(devices, read_launch_env()):
        return _predict(args, log)
    assert devices is not None
    from reconv.distributed.launcher import launch  # imports torch's launcher, which a single process does not need

    check_machine_has(devices, args.options["device"])
    options, consent = args.options, CodeConsent.of(args.options["trust_code"])
    located = find_model(args.run, options["best"], log)
    read_saved_model(  # asks for trust where it must
        located, weights=options["weights"], recipe=options["recipe"], trust_code=consent
    )
    return launch(devices, _predict, replace(args, options={**options, "trust_code": consent}), log)


def _predict(args: PredictArgs, log: LogFunction) -> SharedPredictions:
    """Predict in this process, one of those that share the images."""
    options = args.options
    with joined_ranks(device_kind(options["device"])) as ranks:
        if ranks.world_size > 1:
            log = log if ranks.is_rank0 else no_log
            consent = CodeConsent.of(options["trust_code"]).without_question()  # cannot be asked in every process
            options = {**options, "trust_code": consent}
            ranks.on_rank0(lambda: bool(find_model(args.run, options["best"], no_log)))  # where it must be downloaded
        files = list_files(args.paths, log)
        located = find_model(args.run, options["best"], log)
        named = {name: value for name, value in options.items() if name != "best"}
        predictor = Predictor.from_located(located, launch_env=ranks.launch_env, log=log, **named)  # type: ignore[arg-type]
        if args.min_score is None and predictor.is_detector:
            log_threshold(located.run, log)
        targets = None if args.save_images is None else target_files(predictor, files, args.save_images)
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
