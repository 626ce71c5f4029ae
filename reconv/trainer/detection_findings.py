"""What a detector's last evaluation found, for the report: `detection.json`, and images of truth beside prediction.

Owns the choice of images and what is drawn on them. Refuses to know scoring. Invariant: half of the images are those
with the most mistakes, the others lie evenly over the validation set, so that neither luck nor failure is all one sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from reconv.checkpoint.run_dir import RunDir
from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.dataset import evenly_spaced
from reconv.data.inspect.draw_boxes import BAD, GOOD, NEUTRAL, DrawnBox, draw_boxes
from reconv.data.pipeline.detection_pipeline import decode_annotated
from reconv.logging.events import ImageLogged
from reconv.logging.run_logger import RunLogger
from reconv.metrics.detection_matches import ImageDetections, MatchOutcomes, match_detections
from reconv.metrics.detection_metrics import DetectionMetrics
from reconv.metrics.voc_eval import IOU_THRESHOLD
from reconv.report.evaluation_files import write_detection_analysis

NUM_IMAGES = 12
LEAST_SCORE = 0.3  # of a detection that is drawn and counted as a mistake, as the note says
TILE_PX = 320  # side of each of the two halves
COLUMNS = 2
TITLE = "Ground truth beside prediction"
NOTE = (
    "Left what is there, right what was found with a score of 30 % or more. Green: found, and right; orange: missed, "
    "and wrong; grey: crowds and difficult objects, which do not count. Half of the images are those with the most "
    "mistakes."
)


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """An image with the detections worth drawing, and which of them and of its objects are right and found."""

    image: ImageDetections
    outcomes: MatchOutcomes
    found: Sequence[bool]  # for each true box

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


def tell_findings(
    evaluator: DetectionMetrics,
    source: DetectionDataset,
    folder: RunDir,
    step: int,
    weights: str,
    is_partial: bool,
    logger: RunLogger,
) -> None:
    """Write what the report says beyond numbers."""
    analysis = evaluator.result().analysis()
    about = {"step": step, "weights": weights, "partial": is_partial}
    write_detection_analysis(folder.path, {**about, **analysis})
    chosen = _chosen([_judged(image) for image in evaluator.images()])
    if not chosen:
        return
    tiles = [_beside(judged, source) for judged in chosen]
    folder.images.mkdir(parents=True, exist_ok=True)
    _sheet(tiles).save(folder.images / "detections.png", optimize=True)
    captions = tuple(_caption(judged, source) for judged in chosen)
    logger.log(ImageLogged(TITLE, f"{folder.images.name}/detections.png", captions, step, COLUMNS, note=NOTE))


def _judged(image: ImageDetections) -> Judged:
    keep = image.scores >= LEAST_SCORE
    likely = ImageDetections(image.index, image.truth, image.boxes_xyxy[keep], image.scores[keep], image.labels[keep])
    matches = match_detections([likely])
    outcomes = matches.outcomes(IOU_THRESHOLD)
    objects = np.flatnonzero(~image.truth.is_crowd)
    found = np.zeros(len(image.truth), bool)
    found[objects[matches.match[outcomes.true_positive]]] = True
    return Judged(likely, outcomes, found.tolist())


def _chosen(images: Sequence[Judged]) -> list[Judged]:
    """The worst images and some others, in the order of the validation set."""
    if len(images) <= NUM_IMAGES:
        return list(images)
    worst = sorted(images, key=lambda judged: judged.num_found - judged.num_objects - judged.num_wrong)
    chosen = {judged.image.index: judged for judged in worst[: NUM_IMAGES // 2]}
    rest = [judged for judged in images if judged.image.index not in chosen]
    others = evenly_spaced(len(rest), 100 * (NUM_IMAGES - len(chosen)) / len(rest))
    chosen |= {rest[place].image.index: rest[place] for place in others.tolist()}
    return [chosen[index] for index in sorted(chosen)]


def _beside(judged: Judged, source: DetectionDataset) -> Image.Image:
    """The image twice in one tile: with its true boxes, and with those that were found."""
    image, truth = judged.image, judged.image.truth
    picture = decode_annotated(source[image.index], truth, 3)
    scale = TILE_PX / max(picture.size)
    how = Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.BILINEAR
    picture = picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))), how)
    true = [
        DrawnBox(_scaled(box, scale), source.class_names[label], _truth_colour(judged, number))
        for number, (box, label) in enumerate(zip(truth.boxes_xyxy.tolist(), truth.labels.tolist(), strict=True))
    ]
    colours = [
        GOOD if right else NEUTRAL if ignored else BAD
        for right, ignored in zip(judged.outcomes.true_positive, judged.outcomes.ignored, strict=True)
    ]
    found = [
        DrawnBox(_scaled(box, scale), f"{source.class_names[label]} {score:.0%}", colour)
        for box, label, score, colour in zip(
            image.boxes_xyxy.tolist(), image.labels.tolist(), image.scores.tolist(), colours, strict=True
        )
    ]
    tile = Image.new("RGB", (2 * TILE_PX + 4, TILE_PX), (225, 225, 225))
    for left, boxes in ((0, true), (TILE_PX + 4, found)):
        half = draw_boxes(picture, boxes)
        tile.paste(half, (left + (TILE_PX - half.width) // 2, (TILE_PX - half.height) // 2))
    return tile


def _truth_colour(judged: Judged, number: int) -> tuple[int, int, int]:
    truth = judged.image.truth
    if truth.is_crowd[number] or truth.difficult[number]:
        return NEUTRAL
    return GOOD if judged.found[number] else BAD


def _scaled(box_xyxy: Sequence[float], scale: float) -> tuple[float, float, float, float]:
    left, top, right, bottom = (edge * scale for edge in box_xyxy)
    return left, top, right, bottom


def _sheet(tiles: Sequence[Image.Image], gap_px: int = 2) -> Image.Image:
    width, height = tiles[0].size
    rows = -(-len(tiles) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (width + gap_px) - gap_px, rows * (height + gap_px) - gap_px), (255, 255, 255))
    for number, tile in enumerate(tiles):
        sheet.paste(tile, (number % COLUMNS * (width + gap_px), number // COLUMNS * (height + gap_px)))
    return sheet


def _caption(judged: Judged, source: DetectionDataset) -> str:
    name = source[judged.image.index].name
    wrong = f", {judged.num_wrong} wrong" if judged.num_wrong else ""
    return f"{name}: {judged.num_found} of {judged.num_objects} found{wrong}"
