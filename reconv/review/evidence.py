"""Evidence about labels and boxes.

It comes from folds that are trained, from checkpoints of a run, from the features of a network, or from a file of
predictions.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from reconv.api.training import train
from reconv.checkpoint.locate import locate
from reconv.checkpoint.store import CheckpointStore
from reconv.core.errors import CheckpointError, DataError, PreemptedError, UsageError
from reconv.core.text import count
from reconv.data.corrections import fold_numbers
from reconv.data.dataset import F64, I64, Split
from reconv.data.readers.dataset_factory import select
from reconv.device import device_kind
from reconv.inference.prediction_rows import read_rows
from reconv.inference.predictor import Predictor
from reconv.logging.run_dir import RunDir
from reconv.metrics.detection_matches import ImageDetections
from reconv.recipe.loader import Override
from reconv.review.boxes import detect_boxes
from reconv.review.images import ReviewedImages
from reconv.review.network import F32, FeatureNetwork, head_probabilities

Log = Callable[[str], None]
NUM_FOLDS = 5
_TRAJECTORY = (20, 40, 60, 80)  # percent of a run at which its checkpoints are kept
_SMALL_NETWORK = "resnet8_cifar"  # from scratch on a CPU


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Probabilities and features of the n images of a review."""

    method: str  # for people
    probs: F64 | None = None  # [n, classes]; rows of zeros: not known
    features: F32 | None = None  # [n, d]
    detections: Sequence[tuple[int, ImageDetections]] = ()
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Training:
    """The recipe, the data and the device that folds are trained with."""

    recipe: str | None  # None: what fits the data
    overrides: Sequence[Override]
    data: str | None
    device: str
    out: Path


def from_predictions(images: ReviewedImages, files: Sequence[Path]) -> Evidence:
    """Probabilities from tables that `reconv eval --predictions` wrote.

    They have the probability of the label and of the predicted class; the others share what is left.
    """
    by_name: dict[tuple[str, str], int] = {}
    for row, name in enumerate(images.files):
        by_name[name, images.split(row)] = row
    classes = {name: number for number, name in enumerate(images.class_names)}
    probs = np.zeros((len(images), len(classes)))
    for file in files:
        table = read_rows(file)
        unknown = sorted({*table.target, *table.predicted} - classes.keys())
        if unknown:
            raise DataError(f"{unknown[0]!r} is no class of the data", where=str(file), hint="give the data of the run")
        for path, target, predicted, score, loss, split in zip(*table.columns().values(), strict=True):
            found = next((by_name[n, split] for n in (path, os.path.abspath(path)) if (n, split) in by_name), None)
            if found is not None:
                probs[found] = _spread(len(classes), classes[target], math.exp(-loss), classes[predicted], score)
    if not probs.any():
        raise DataError("none of the predictions is of an image of the data", where=", ".join(map(str, files)))
    num_known = int(probs.any(axis=1).sum())
    note = f"predictions of {num_known:,} of {len(images):,} images: eval --split train --predictions writes the others"
    return Evidence("a file of predictions", probs, notes=(note,) if num_known < len(images) else ())


def _spread(num_classes: int, target: int, target_score: float, predicted: int, score: float) -> F64:
    """A distribution with these two probabilities."""
    known = {target: min(target_score, 1.0), predicted: min(max(score, 0.0), 1.0)}
    left = max(0.0, 1 - sum(known.values()))
    row = np.full(num_classes, left / max(1, num_classes - len(known)))
    for label, value in known.items():
        row[label] = value
    normalized: F64 = row / row.sum()
    return normalized


def from_weights(images: ReviewedImages, network: FeatureNetwork, folds: int, seed: int, name: str) -> Evidence:
    """Probabilities by heads that are fitted in folds to the features of a trained network."""
    features = _features(images, network)
    method = f"features of {name}, with a head for each of {folds} folds"
    if images.has_boxes or len(images.class_names) < 2:
        return Evidence(method, None, features)
    return _judged(Evidence(method, _heads(images, features, folds, seed), features), images, folds, seed)


def _features(images: ReviewedImages, network: FeatureNetwork) -> F32:
    return np.concatenate([network.outputs(dataset).features for dataset in images.datasets.values()])


def _heads(images: ReviewedImages, features: F32, folds: int, seed: int) -> F64:
    numbers = _folds_of(images, folds, seed)
    is_read = features.any(axis=1)
    probs = np.zeros((len(images), len(images.class_names)))
    probs[is_read] = head_probabilities(features[is_read], images.labels[is_read], numbers[is_read], probs.shape[1])
    return probs


def _folds_of(images: ReviewedImages, folds: int, seed: int) -> I64:
    """The fold of each training image, and -1 for those of validation [n]."""
    numbers = np.full(len(images), -1)
    numbers[images.rows("train")] = fold_numbers(images.datasets["train"], folds, seed)
    return numbers


def _judged(found: Evidence, images: ReviewedImages, folds: int, seed: int) -> Evidence:
    """The evidence without labels that the other folds do not have: their networks could only call them wrong."""
    assert found.probs is not None
    numbers, labels = _folds_of(images, folds, seed), images.labels
    counts = np.zeros((len(images.class_names), folds), np.int64)
    np.add.at(counts, (labels[numbers >= 0], numbers[numbers >= 0]), 1)
    in_others = counts.sum(axis=1)[labels] - np.where(numbers >= 0, counts[labels, numbers], 0)
    probs = np.where(in_others[:, None] > 0, found.probs, 0.0)
    num_unknown = int((in_others == 0).sum())
    note = f"{count(num_unknown, 'label')} not judged: no other fold has an image of the class"
    return replace(found, probs=probs, notes=(*found.notes, note) if num_unknown else found.notes)


def from_run(images: ReviewedImages, run: Path, device: str, trust_code: bool, log: Log) -> Evidence:
    """Probabilities by the checkpoints of a run, or the boxes that its newest one detects.

    While a network learns, images with wrong labels keep a high loss for longest: so the mean over checkpoints tells
    more about training images than the last one, which may have learned them by heart.
    """
    if images.has_boxes:
        predictor = Predictor.load(run, backend="eager", device=device, trust_code=trust_code, log=log)
        return Evidence(f"detections of {run}", detections=_detections(images, predictor))
    store = CheckpointStore(RunDir(run).checkpoints)
    probs, features, num_used = np.zeros((len(images), len(images.class_names))), None, 0
    for path in [store.path(step) for step in store.steps()] or [run]:
        try:
            locate(path, loads=True)
        except CheckpointError as error:
            log(f"skipped {path.name}, which cannot be used: {error.what}")
            continue
        predictor = Predictor.load(path, backend="eager", device=device, trust_code=trust_code, log=log)
        _check_classes(images, predictor)
        network = FeatureNetwork.of_predictor(predictor)
        outputs = [network.outputs(dataset) for dataset in images.datasets.values()]
        probs += np.concatenate([output.probs for output in outputs])
        features, num_used = np.concatenate([output.features for output in outputs]), num_used + 1
    if not num_used:
        raise CheckpointError("no checkpoint of this run can be used", where=str(run))
    note = "training images are judged by networks that learned them: --folds 5 trains networks that did not"
    return Evidence(f"{num_used} checkpoints of {run}", probs / num_used, features, notes=(note,))


def _detections(images: ReviewedImages, predictor: Predictor) -> list[tuple[int, ImageDetections]]:
    found: list[tuple[int, ImageDetections]] = []
    for split, dataset in images.datasets.items():
        rows = images.rows(split)
        found += [(int(rows[image.index]), image) for image in detect_boxes(predictor, dataset)]
    return found


def _check_classes(images: ReviewedImages, predictor: Predictor) -> None:
    if predictor.class_names != images.class_names:
        raise UsageError(
            "the run has other classes than the data",
            why=f"{len(predictor.class_names):,} and {len(images.class_names):,} classes, or in another order",
            hint="--run RUN takes the features of its network for any classes: reconv data review DATA --run RUN",
        )


def from_folds(images: ReviewedImages, training: Training, folds: int, seed: int, log: Log) -> Evidence:
    """Probabilities by networks that are trained on the other folds; with one fold, by the checkpoints of one network.

    A fold that was trained before, with the same settings and data, is used again.
    """
    recipe, overrides = _recipe(images, training)
    key = repr((recipe, sorted(map(repr, overrides)), folds, training.data, images.fingerprint()))
    out = training.out / hashlib.blake2b(key.encode(), digest_size=6).hexdigest()
    if folds == 1:
        keep = ("save.keep_at", [f"{percent}%" for percent in _TRAJECTORY], "--folds 1")
        run = _train(recipe, [*overrides, keep], training, out / "all", "one network", log)
        return from_run(images, run, training.device, True, lambda text: None)
    numbers = fold_numbers(images.datasets["train"], folds, seed)
    probs, features = np.zeros((len(images), len(images.class_names))), None
    for fold in range(folds):
        held: Override = ("data.fold", f"{fold + 1}/{folds}", "--folds")
        name = f"fold {fold + 1} of {folds}"
        run = _train(recipe, [*overrides, held], training, out / f"{fold + 1}", name, log)
        predictor = Predictor.load(run, backend="eager", device=training.device, trust_code=True, log=lambda text: None)
        network = FeatureNetwork.of_predictor(predictor)
        held_out = np.flatnonzero(numbers == fold)
        probs[images.rows("train")[held_out]] = network.outputs(select(images.datasets["train"], held_out)).probs
        if "val" in images.datasets:
            probs[images.rows("val")] += network.outputs(images.datasets["val"]).probs / folds
        features = _features(images, network) if features is None else features
    method = f"{folds} folds of {Path(recipe).stem}, each by a network trained on the others"
    return _judged(Evidence(method, probs, features), images, folds, seed)


def _train(recipe: str, overrides: Sequence[Override], training: Training, out: Path, name: str, log: Log) -> Path:
    """Train, or take what was trained before; returns the run directory."""
    start_s = time.perf_counter()
    is_done = (out / "summary.json").exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        result = train(
            recipe, data=training.data, overrides=list(overrides), out=out, resume=True, device=training.device
        )
    except PreemptedError as error:
        raise PreemptedError(f"{name}: {error.what}", hint="run the same command to continue") from error
    seconds = "trained before" if is_done else f"{time.perf_counter() - start_s:.0f} s"
    log(f"{name}: {result.metric} {result.value:.4f} on what it did not see, {seconds}")
    return result.folder


def _recipe(images: ReviewedImages, training: Training) -> tuple[str, list[Override]]:
    """The recipe that folds are trained with, and what is set: it evaluates and saves at the end alone."""
    always: list[Override] = [
        (name, value, "data review")
        for name, value in (("evaluate.every", "100%"), ("save.every", "100%"), ("expect", None))
    ]
    chosen = training.recipe
    fitting: list[Override] = []
    if chosen is None:
        kind, is_cpu = images.datasets["train"].kind, device_kind(training.device) == "cpu"
        chosen = (
            "quickstart" if kind == "digits" else "cifar10-fast" if kind == "cifar10" and not is_cpu else "finetune"
        )
        if chosen == "finetune" and is_cpu:
            fitting = [("model.name", _SMALL_NETWORK, "on a CPU")]
    return chosen, [*always, *fitting, *training.overrides]


def splits_without_probs(images: ReviewedImages, probs: F64) -> list[Split]:
    """The splits about which nothing is known."""
    return [split for split in images.datasets if not probs[images.rows(split)].any()]


def judged_rows(images: ReviewedImages, probs: F64) -> I64:
    """The images whose probabilities are known."""
    return np.flatnonzero(probs.any(axis=1) & (images.labels >= 0))
