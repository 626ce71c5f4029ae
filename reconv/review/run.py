"""`review`: find what is likely wrong in a dataset, and write it as a list and a page."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reconv.build.saved_model import read_saved_recipe
from reconv.checkpoint.locate import locate
from reconv.core.errors import UsageError
from reconv.core.machine import Machine, cores_per_process
from reconv.core.text import count
from reconv.data.dataset import Split
from reconv.device import device_kind
from reconv.inference.predictor import Predictor
from reconv.logging.run_dir import RunDir
from reconv.recipe.loader import Override, load
from reconv.review import evidence as gather
from reconv.review.boxes import box_findings
from reconv.review.copies import find_copies, make_thumbnails
from reconv.review.evidence import Evidence, Training
from reconv.review.findings import (
    KINDS,
    ReviewFinding,
    accept_above,
    as_csv,
    copy_findings,
    label_findings,
    outlier_findings,
    unreadable_findings,
)
from reconv.review.images import ReviewedImages, open_images
from reconv.review.labels import LabelScores, judge_labels
from reconv.review.network import FeatureNetwork
from reconv.storage.files import disk_errors, write_atomic

LIST_FILE, PAGE_FILE = "review.csv", "review.html"
FEW_TRAIN, FEW_VAL, FEW_RATIO = 20, 10, 5  # images of a class; and this many times fewer than the median class has
LIKELY = 0.5  # score of a label that is more likely wrong than right

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ReviewOptions:
    """Options of a review: the data, and the evidence to judge it by."""

    source: str  # data, or a run for its own data
    out: Path
    run: str | None = None  # whose features are used
    init: str | None = None  # weights whose features are used
    predictions: Sequence[Path] = ()
    recipe: str | None = None  # of the folds
    folds: int | None = None  # 1: one network, by its checkpoints; None: what the evidence needs
    overrides: Sequence[Override] = ()
    device: str = "auto"
    accept_above: float | None = None
    trust_code: bool = False


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One class: its images, and how far its labels can be trusted."""

    name: str
    num_train: int
    num_val: int
    num_wrong: int | None  # labels that are likely wrong; None: not judged
    agreement: float | None  # share of the labels that the networks predict
    shortage: str  # empty: it has enough images


@dataclass(frozen=True, slots=True, eq=False)
class Review:
    """The findings of a review, and what they were found with."""

    images: ReviewedImages
    source: str
    evidence: Evidence
    scores: LabelScores | None
    findings: Sequence[ReviewFinding]
    accepted: Sequence[ReviewFinding]
    classes: Sequence[ClassRow]
    wall_s: float
    train: str  # the command that trains on the data

    def train_command(self, corrections: Path) -> str:
        """The command that trains with a list of corrections."""
        fields = ("data.exclude",) if self.images.has_boxes else ("data.relabel", "data.exclude")
        return " ".join([self.train, *(shlex.join(["--set", f"{field}={corrections}"]) for field in fields)])

    def counts(self) -> dict[str, int]:
        """The number of findings of each kind, of labels those that are more likely wrong than right."""
        counted = Counter(f.kind for f in self.findings if f.kind != "label" or f.score >= LIKELY)
        return {kind: counted[kind] for kind in KINDS}


def review(options: ReviewOptions, log: Log) -> Review:
    """Review a dataset and write the list, which recipes take; the data stays as it is."""
    start_s = time.perf_counter()
    _check(options)
    run = _run_of(options.source)
    images, training, seed = _open(options, run)
    log(f"{count(len(images), 'image')} of {count(len(images.class_names), 'class')}: {_origin(images)}")
    found = _gather(options, run, images, training, seed, log)
    for note in found.notes:
        log(note)
    threads = cores_per_process(Machine(), 1)
    thumbnails = make_thumbnails([images.at(row)[1:] for row in range(len(images))], threads)
    scores, findings = _label_findings(images, found)
    findings += copy_findings(images, find_copies(thumbnails, found.features, _torch_device(options.device)))
    findings += box_findings(images, found.detections)
    if found.features is not None:
        findings += outlier_findings(images, found.features, thumbnails.is_read)
    findings += unreadable_findings(thumbnails)
    accepted = [] if options.accept_above is None else accept_above(findings, options.accept_above)
    classes = class_rows(images, found, scores)
    result = Review(
        images,
        options.source,
        found,
        scores,
        findings,
        accepted,
        classes,
        time.perf_counter() - start_s,
        _train_command(options, run, images),
    )
    with disk_errors(options.out):
        options.out.mkdir(parents=True, exist_ok=True)
        write_atomic(options.out / LIST_FILE, as_csv(images, findings, accepted))
    return result


def _train_command(options: ReviewOptions, run: Path | None, images: ReviewedImages) -> str:
    """The command that trains on the reviewed data, before its list is named."""
    if run is not None:
        return shlex.join(["reconv", "train", str(RunDir(run).recipe)])
    is_digits = images.datasets[next(iter(images.datasets))].kind == "digits"
    recipe = "quickstart" if is_digits else "finetune-detection" if images.has_boxes else "finetune"
    data = [] if is_digits else ["--data", options.source]
    return shlex.join(["reconv", "train", options.recipe or recipe, *data])


def _check(options: ReviewOptions) -> None:
    """Raise if options contradict each other, before anything is computed."""
    given = {
        "--run": options.run is not None,
        "--init": options.init is not None,
        "--predictions": bool(options.predictions),
        "--recipe": options.recipe is not None,
    }
    named = [option for option, is_given in given.items() if is_given]
    if len(named) > 1:
        raise UsageError(f"{named[0]} and {named[1]} are two kinds of evidence", hint="give one of them")
    if options.folds == 1 and (given["--run"] or given["--init"]):
        raise UsageError("--folds 1 trains one network", hint="omit --folds, or give 2 or more")


def _run_of(source: str) -> Path | None:
    """The run directory that a source is; None for data."""
    path = Path(source)
    return path if RunDir(path).recipe.is_file() and RunDir(path).checkpoints.is_dir() else None


def _open(options: ReviewOptions, run: Path | None) -> tuple[ReviewedImages, Training, int]:
    """The images, how folds of them are trained, and the seed of the folds."""
    folder = options.out / "folds"
    if run is None:
        section = load("finetune", _of_data(options.overrides)).recipe.data
        images = open_images(section, options.source)
        path = None if images.datasets[next(iter(images.datasets))].kind in ("digits",) else options.source
        return images, Training(options.recipe, options.overrides, path, options.device, folder), section.split_seed
    recipe = read_saved_recipe(locate(run, loads=True))
    section = load(str(RunDir(run).recipe), options.overrides).recipe.data
    images = open_images(section, section.path, boxes=recipe.task == "detection")
    chosen = options.recipe or str(RunDir(run).recipe)
    return images, Training(chosen, options.overrides, section.path, options.device, folder), section.split_seed


def _of_data(overrides: Sequence[Override]) -> list[Override]:
    """The overrides of how data is read."""
    return [override for override in overrides if override[0].startswith("data.")]


def _origin(images: ReviewedImages) -> str:
    return next(iter(images.datasets.values())).origin


def _gather(
    options: ReviewOptions, run: Path | None, images: ReviewedImages, training: Training, seed: int, log: Log
) -> Evidence:
    """The best evidence that the options allow."""
    folds = options.folds or gather.NUM_FOLDS
    if options.predictions:
        return gather.from_predictions(images, options.predictions)
    if options.run is not None:
        return _from_other_run(options, images, folds, seed, log)
    if options.init is not None:
        overrides = [*_of_data(options.overrides), ("data.path", options.source, "SOURCE")]
        network = FeatureNetwork.of_weights(options.init, overrides, options.device, len(images.class_names))
        return gather.from_weights(images, network, folds, seed, options.init)
    if run is not None and options.folds is None:
        return gather.from_run(images, run, options.device, options.trust_code, log)
    if images.has_boxes:
        return Evidence("no detector", notes=("boxes are judged by a detector: --run RUN",))
    if len(images.class_names) < 2:
        return Evidence("one class", notes=("there is one class: labels are not judged",))
    if options.recipe is None and run is None and images.datasets["train"].kind not in ("digits", "cifar10"):
        log("networks are trained from scratch; --init WEIGHTS takes trained ones, which is faster and finds more")
    return gather.from_folds(images, training, folds, seed, log)


def _from_other_run(options: ReviewOptions, images: ReviewedImages, folds: int, seed: int, log: Log) -> Evidence:
    """Evidence from the network of a run on any data."""
    assert options.run is not None
    if images.has_boxes:
        return gather.from_run(images, Path(options.run), options.device, options.trust_code, log)
    predictor = Predictor.load(
        options.run, backend="eager", device=options.device, trust_code=options.trust_code, log=log
    )
    return gather.from_weights(images, FeatureNetwork.of_predictor(predictor), folds, seed, options.run)


def _label_findings(images: ReviewedImages, found: Evidence) -> tuple[LabelScores | None, list[ReviewFinding]]:
    if found.probs is None:
        return None, []
    rows = gather.judged_rows(images, found.probs)
    if not len(rows):
        return None, []
    scores = judge_labels(images.labels[rows], found.probs[rows])
    return scores, label_findings(images, rows, scores, found.features)


def class_rows(images: ReviewedImages, found: Evidence, scores: LabelScores | None) -> list[ClassRow]:
    """The classes of a dataset: the number of images, or of boxes, and what is short."""
    counts = {split: _counts(images, split) for split in ("train", "val")}
    median = float(np.median(counts["train"])) if len(images.class_names) else 0.0
    rows = []
    judged = None if found.probs is None else gather.judged_rows(images, found.probs)
    for number, name in enumerate(images.class_names):
        num_train, num_val = int(counts["train"][number]), int(counts["val"][number])
        wrong = agreement = None
        if scores is not None and judged is not None and found.probs is not None:
            mine = images.labels[judged] == number
            wrong = int((scores.wrong[mine] >= LIKELY).sum())
            agreement = float((found.probs[judged[mine]].argmax(axis=1) == number).mean()) if mine.any() else None
        shortages = []
        if num_train < FEW_TRAIN or num_train * FEW_RATIO < median:
            shortages.append(f"{num_train:,} for training (the median class has {median:,.0f})")
        if num_val < FEW_VAL:
            shortages.append(f"{num_val:,} for validation, of {FEW_VAL} or more")
        rows.append(ClassRow(name, num_train, num_val, wrong, agreement, "; ".join(shortages)))
    return rows


def _counts(images: ReviewedImages, split: Split) -> np.ndarray:
    """The number of images, or of boxes, of each class in a split."""
    num_classes, dataset = len(images.class_names), images.datasets.get(split)
    if dataset is None:
        return np.zeros(num_classes, np.int64)
    if not images.has_boxes:
        return np.bincount(images.labels[images.rows(split)], minlength=num_classes)
    from reconv.build.data import as_detection_dataset

    boxed = as_detection_dataset(dataset)
    labels = [boxed.annotation(index).labels for index in range(len(boxed))]
    return np.bincount(np.concatenate([np.zeros(0, np.int64), *labels]), minlength=num_classes)


def _torch_device(name: str) -> str:
    return "cuda" if device_kind(name) == "cuda" else "cpu"
