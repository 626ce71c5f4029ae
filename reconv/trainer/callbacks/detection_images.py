"""Images of a detector's validation set for the report: the ground truth beside the predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.dataset import at_most
from reconv.data.inspect.draw_boxes import BAD, GOOD, NEUTRAL, DrawnBox, draw_boxes
from reconv.data.pipeline.detection import decode_annotated
from reconv.logging.events import ImageLogged
from reconv.logging.run_dir import RunDir
from reconv.logging.run_logger import RunLogger
from reconv.metrics.detection import DetectionMetrics
from reconv.metrics.detection_matches import ImageDetections, MatchOutcomes, match_detections
from reconv.metrics.voc_eval import IOU_THRESHOLD
from reconv.storage.files import atomic_writer

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
    metrics: DetectionMetrics, dataset: DetectionDataset, run_dir: RunDir, step: int, logger: RunLogger
) -> None:
    """Write images of ground truth beside predictions."""
    chosen = _choose([_check(image) for image in metrics.images()])
    if not chosen:
        return
    tiles = [_draw_pair(checked, dataset) for checked in chosen]
    run_dir.images.mkdir(parents=True, exist_ok=True)
    with atomic_writer(run_dir.images / "detections.png") as file:
        _sheet(tiles).save(file, "PNG", compress_level=3)  # optimize=True would take most of a second
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
    others = at_most(len(rest), NUM_DETECTION_IMAGES - len(chosen))
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
