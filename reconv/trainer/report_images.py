"""Images of a run for its report: the first batch, the worst mistakes, and detections beside the ground truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from reconv.batch import Batch
from reconv.checkpoint.run_dir import RunDir
from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.dataset import evenly_spaced
from reconv.data.inspect.contact_sheet import grid
from reconv.data.inspect.draw_boxes import BAD, GOOD, NEUTRAL, DrawnBox, draw_boxes
from reconv.data.pipeline.detection_pipeline import decode_annotated
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.readers.dataset_factory import select
from reconv.data.transforms.device_transforms import denormalize
from reconv.logging.events import ImageLogged
from reconv.logging.run_logger import RunLogger
from reconv.metrics.detection_matches import ImageDetections, MatchOutcomes, match_detections
from reconv.metrics.detection_metrics import DetectionMetrics
from reconv.metrics.topk import ClassificationMetrics
from reconv.metrics.voc_eval import IOU_THRESHOLD
from reconv.report.evaluation_files import write_detection_analysis
from reconv.trainer.build.datasets import as_detection_dataset
from reconv.trainer.callbacks import Callback
from reconv.trainer.step import StepResult

if TYPE_CHECKING:
    from reconv.trainer.trainer import Trainer
    from reconv.trainer.training_run import TrainingRun

NUM_TRAIN_IMAGES = 32
GRID_COLUMNS = 8
NUM_DETECTION_IMAGES = 12
MIN_SCORE = 0.3  # of a detection that is drawn and counted as a mistake, as the note says
TILE_PX = 320  # side of each of the two images of a pair
DETECTION_COLUMNS = 2
DETECTION_TITLE = "Ground truth beside prediction"
DETECTION_NOTE = (
    "Left the ground truth, right the predictions with a score of 30 % or more. Green: matched; orange: missed "
    "or wrong; gray: crowds and difficult objects, which do not count. Half of the images "
    "are those with the most mistakes."
)


@dataclass(frozen=True, slots=True)
class ReportImages(Callback):
    """Saves the first batch as the network got it and, after training, the worst mistakes or some detections."""

    run: TrainingRun

    def on_step_end(self, trainer: Trainer, step: int, result: StepResult, micro_batches: Sequence[Batch]) -> None:
        if step == 0 and self.run.process_group.is_rank0:
            first = next(trainer.step.forward_batches(micro_batches))
            with torch.no_grad():
                self._log_first_batch(trainer.step.preprocess(first, step))

    def on_fit_end(self, trainer: Trainer) -> None:
        run, evaluator, step = self.run, trainer.evaluator, trainer.counters.step
        if run.plan.evaluate is None or not run.process_group.is_rank0:
            return
        if isinstance(evaluator.last_metrics, DetectionMetrics):
            dataset, weights = as_detection_dataset(run.datasets.val), evaluator.last_weights
            is_partial = evaluator.is_partial
            log_detection_images(evaluator.last_metrics, dataset, run.run_dir, step, weights, is_partial, run.logger)
        elif evaluator.last_metrics is not None:
            self._log_mistakes(evaluator.last_metrics, step)

    def _log_first_batch(self, batch: Batch) -> None:
        images = denormalize(batch["images"][:NUM_TRAIN_IMAGES], self.run.recipe.data.preprocess)
        class_names = tuple(self.run.datasets.train.class_names)
        captions = tuple(_caption(class_names, batch, row) for row in range(len(images)))
        self._log_grid("first-batch.png", images, "First training batch", captions, 0)

    def _log_mistakes(self, metrics: ClassificationMetrics, step: int) -> None:
        """Save the validation images with the most confident wrong predictions."""
        mistakes = metrics.mistakes()
        if not mistakes:
            return
        dataset, names = self.run.datasets.val, self.run.datasets.train.class_names
        wrong = select(dataset, np.array([m.index for m in mistakes], dtype=np.int64))
        [batch] = EvalLoader(wrong, self.run.recipe.data.preprocess, len(mistakes), DataContext.on_host())
        captions = tuple(
            f"predicted {names[m.predicted]} ({m.confidence:.0%}), target {names[m.target]} · {dataset[m.index].name}"
            for m in mistakes
        )
        self._log_grid("mistakes.png", batch["images"], "Worst mistakes", captions, step)

    def _log_grid(self, name: str, images: Tensor, title: str, captions: tuple[str, ...], step: int) -> None:
        """Write a grid of images to the run directory and log it for the report."""
        folder = self.run.run_dir.images
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(grid(images, GRID_COLUMNS))
        self.run.logger.log(ImageLogged(title, f"{folder.name}/{name}", captions, step, GRID_COLUMNS))


def _caption(class_names: tuple[str, ...], batch: Batch, row: int) -> str:
    """The class of an image, or the classes of its boxes."""
    if "targets" in batch.tensors:
        return class_names[int(batch["targets"][row])]
    labels = batch["labels"][row, : int(batch["num_boxes"][row])].tolist()
    return ", ".join(class_names[label - 1] for label in labels)


@dataclass(frozen=True, slots=True, eq=False)
class _CheckedImage:
    """The detections of an image that are drawn, and which of them and of its objects are matched."""

    image: ImageDetections
    outcomes: MatchOutcomes
    found: Sequence[bool]  # for each ground-truth box

    @property
    def num_wrong(self) -> int:
        return int((~self.outcomes.true_positive & ~self.outcomes.ignored).sum())

    @property
    def num_objects(self) -> int:
        truth = self.image.truth
        return int((~truth.is_crowd & ~truth.difficult).sum())

    @property
    def num_found(self) -> int:
        return int(self.outcomes.true_positive.sum())


def log_detection_images(
    metrics: DetectionMetrics,
    dataset: DetectionDataset,
    run_dir: RunDir,
    step: int,
    weights: str,
    is_partial: bool,
    logger: RunLogger,
) -> None:
    """Write `detection.json` for the report, and images of ground truth beside predictions."""
    analysis = metrics.result().analysis()
    about = {"step": step, "weights": weights, "partial": is_partial}
    write_detection_analysis(run_dir.path, {**about, **analysis})
    chosen = _choose([_check(image) for image in metrics.images()])
    if not chosen:
        return
    tiles = [_draw_pair(checked, dataset) for checked in chosen]
    run_dir.images.mkdir(parents=True, exist_ok=True)
    _sheet(tiles).save(run_dir.images / "detections.png", optimize=True)
    captions = tuple(_detection_caption(checked, dataset) for checked in chosen)
    path = f"{run_dir.images.name}/detections.png"
    logger.log(ImageLogged(DETECTION_TITLE, path, captions, step, DETECTION_COLUMNS, note=DETECTION_NOTE))


def _check(image: ImageDetections) -> _CheckedImage:
    keep = image.scores >= MIN_SCORE
    likely = ImageDetections(image.index, image.truth, image.boxes_xyxy[keep], image.scores[keep], image.labels[keep])
    matches = match_detections([likely])
    outcomes = matches.outcomes(IOU_THRESHOLD)
    objects = np.flatnonzero(~image.truth.is_crowd)
    found = np.zeros(len(image.truth), bool)
    found[objects[matches.match[outcomes.true_positive]]] = True
    return _CheckedImage(likely, outcomes, found.tolist())


def _choose(images: Sequence[_CheckedImage]) -> list[_CheckedImage]:
    """Half of the images are those with the most mistakes, the others are evenly spaced over the validation set."""
    if len(images) <= NUM_DETECTION_IMAGES:
        return list(images)
    worst = sorted(images, key=lambda checked: checked.num_found - checked.num_objects - checked.num_wrong)
    chosen = {checked.image.index: checked for checked in worst[: NUM_DETECTION_IMAGES // 2]}
    rest = [checked for checked in images if checked.image.index not in chosen]
    others = evenly_spaced(len(rest), 100 * (NUM_DETECTION_IMAGES - len(chosen)) / len(rest))
    chosen |= {rest[place].image.index: rest[place] for place in others.tolist()}
    return [chosen[index] for index in sorted(chosen)]


def _draw_pair(checked: _CheckedImage, dataset: DetectionDataset) -> Image.Image:
    """The image twice in one tile: with its ground truth, and with its predictions."""
    scored, truth = checked.image, checked.image.truth
    image = decode_annotated(dataset[scored.index], truth, 3)
    scale = TILE_PX / max(image.size)
    resampling = Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.BILINEAR
    image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), resampling)
    truth_boxes = [
        DrawnBox(_scaled(box, scale), dataset.class_names[label], _truth_color(checked, number))
        for number, (box, label) in enumerate(zip(truth.boxes_xyxy.tolist(), truth.labels.tolist(), strict=True))
    ]
    colors = [
        GOOD if right else NEUTRAL if ignored else BAD
        for right, ignored in zip(checked.outcomes.true_positive, checked.outcomes.ignored, strict=True)
    ]
    predicted_boxes = [
        DrawnBox(_scaled(box, scale), f"{dataset.class_names[label]} {score:.0%}", color)
        for box, label, score, color in zip(
            scored.boxes_xyxy.tolist(), scored.labels.tolist(), scored.scores.tolist(), colors, strict=True
        )
    ]
    tile = Image.new("RGB", (2 * TILE_PX + 4, TILE_PX), (225, 225, 225))
    for left, boxes in ((0, truth_boxes), (TILE_PX + 4, predicted_boxes)):
        half = draw_boxes(image, boxes)
        tile.paste(half, (left + (TILE_PX - half.width) // 2, (TILE_PX - half.height) // 2))
    return tile


def _truth_color(checked: _CheckedImage, number: int) -> tuple[int, int, int]:
    truth = checked.image.truth
    if truth.is_crowd[number] or truth.difficult[number]:
        return NEUTRAL
    return GOOD if checked.found[number] else BAD


def _scaled(box_xyxy: Sequence[float], scale: float) -> tuple[float, float, float, float]:
    left, top, right, bottom = (edge * scale for edge in box_xyxy)
    return left, top, right, bottom


def _sheet(tiles: Sequence[Image.Image], gap_px: int = 2) -> Image.Image:
    width, height = tiles[0].size
    rows = -(-len(tiles) // DETECTION_COLUMNS)
    sheet = Image.new(
        "RGB", (DETECTION_COLUMNS * (width + gap_px) - gap_px, rows * (height + gap_px) - gap_px), (255, 255, 255)
    )
    for number, tile in enumerate(tiles):
        sheet.paste(
            tile, (number % DETECTION_COLUMNS * (width + gap_px), number // DETECTION_COLUMNS * (height + gap_px))
        )
    return sheet


def _detection_caption(checked: _CheckedImage, dataset: DetectionDataset) -> str:
    name = dataset[checked.image.index].name
    wrong = f", {checked.num_wrong} wrong" if checked.num_wrong else ""
    return f"{name}: {checked.num_found} of {checked.num_objects} found{wrong}"
