"""Rows of detection batches: a square image, and its boxes padded to `max_boxes`.

Boxes are float32 fractions of the square (left, top, right, bottom), inside it and with an area; labels count from 1;
all entries from `num_boxes` on are zeros.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import Image

from reconv.data.boxes.annotations import AnnotationError
from reconv.data.boxes.transforms import (
    VIEW_KEY,
    WHOLE_IMAGE,
    View,
    clip_boxes,
    resize_view,
    resize_view_natively,
    train_view,
    view_params,
)
from reconv.data.dataset import F64, I64, U8, Dataset, NamedArrays, Sample
from reconv.data.decode.pillow import RESAMPLING, decode_image, to_array, to_image
from reconv.data.pipeline.samples import Column, MakeSamplePipeline, SamplePipeline
from reconv.data.stage_timing import record_stage
from reconv.data.transforms.params import effective_augment
from reconv.detection.annotation import Annotation
from reconv.recipe.parts.data import AugmentConfig, PreprocessConfig
from reconv.recipe.schema import Recipe

_MIN_ROWS_PER_TASK = 4
_GRAY = 128


def make_detection_pipeline(recipe: Recipe) -> MakeSamplePipeline:
    """What makes the pipelines of a detection recipe."""
    return partial(_make, max_boxes=recipe.detection.max_gt_boxes, use_difficult=recipe.data.difficult_boxes == "use")


def _make(
    dataset: Dataset,
    preprocess: PreprocessConfig,
    augment: AugmentConfig | None,
    decode_threads: int = 1,  # images are decoded one by one
    *,
    max_boxes: int,
    use_difficult: bool,
) -> SamplePipeline:
    augment = None if augment is None else effective_augment(augment)
    return DetectionPipeline(dataset, preprocess, augment, max_boxes, use_difficult)


@dataclass(frozen=True, slots=True)
class DetectionPipeline:
    """Decodes, crops and resizes images with their boxes; `augment` is None for evaluation, on the whole image."""

    dataset: Dataset
    preprocess: PreprocessConfig
    augment: AugmentConfig | None
    max_boxes: int
    use_difficult: bool = True

    @property
    def min_rows_per_task(self) -> int | None:
        return _MIN_ROWS_PER_TASK

    @property
    def columns(self) -> tuple[Column, ...]:
        size = self.preprocess.size
        return (
            Column("images", (self.preprocess.channels, size, size), np.uint8),
            Column("boxes", (self.max_boxes, 4), np.float32),
            Column("labels", (self.max_boxes,), np.int64),
            Column("num_boxes", (), np.int64),
        )

    def params(self, seed: int, positions: I64) -> NamedArrays:
        return {} if self.augment is None else view_params(seed, positions)

    def __call__(self, indices: I64, params: NamedArrays, rows: NamedArrays) -> None:
        for row, index in enumerate(indices.tolist()):
            began_s = time.perf_counter()
            sample = self.dataset[index]
            record_stage("disk", began_s)
            annotation = require_annotation(sample)
            boxes, labels = self._train_boxes(annotation)
            view = WHOLE_IMAGE
            if self.augment is not None:
                view = train_view(boxes, self.augment, int(params[VIEW_KEY][row]))
            self._fill_image(rows["images"][row], sample, annotation, view)
            clipped, is_kept = clip_boxes(view, boxes)
            self._fill_boxes(rows, row, clipped, labels[is_kept])

    def _fill_image(self, out: U8, sample: Sample, annotation: Annotation, view: View) -> None:
        """The view resized, by the compiled decoder where the plan has chosen it and it supports the file."""
        preprocess, fill = self.preprocess, mean_color(self.preprocess)
        if self.augment is not None and self.augment.decoder == "native" and isinstance(sample.data, bytes):
            began_s, size = time.perf_counter(), (annotation.width, annotation.height)
            is_done = resize_view_natively(sample.data, view, size, out, preprocess.interpolation, fill)
            record_stage("decode", began_s)
            if is_done:
                return
        image = decode_annotated(sample, annotation, preprocess.channels)
        resized = resize_view(image, view, preprocess.size, RESAMPLING[preprocess.interpolation], fill)
        out[:] = to_array(resized).transpose(2, 0, 1)

    def _train_boxes(self, annotation: Annotation) -> tuple[F64, I64]:
        """Boxes as fractions of the image and clipped to it, without crowds, and their classes from 1."""
        used = ~annotation.is_crowd if self.use_difficult else ~(annotation.is_crowd | annotation.difficult)
        size = np.array([annotation.width, annotation.height] * 2, np.float64)
        boxes = np.clip(annotation.boxes_xyxy[used] / size, 0, 1)
        has_area = (boxes[:, 2:] > boxes[:, :2]).all(1)
        return boxes[has_area], annotation.labels[used][has_area] + 1

    def _fill_boxes(self, rows: NamedArrays, row: int, boxes_xyxy: F64, labels: I64) -> None:
        num_boxes = min(len(labels), self.max_boxes)
        rows["boxes"][row] = 0
        rows["labels"][row] = 0
        rows["boxes"][row, :num_boxes] = boxes_xyxy[:num_boxes]
        rows["labels"][row, :num_boxes] = labels[:num_boxes]
        rows["num_boxes"][row] = num_boxes


def require_annotation(sample: Sample) -> Annotation:
    """The annotation of a sample; an error if it has none."""
    if sample.annotation is None:
        raise AnnotationError(
            "an image without boxes",
            where=sample.name,
            why="the data is for classification, and the recipe's task is detection",
            then="reconv recipes lists recipes for classification",
        )
    return sample.annotation


def decode_annotated(sample: Sample, annotation: Annotation, channels: int) -> Image.Image:
    """The image in the orientation of its annotation; an error if their sizes differ.

    Some annotation programs apply an image's EXIF orientation, others do not: the annotated size decides.
    """
    image = to_image(sample.data, channels, sample.name)
    size = (annotation.width, annotation.height)
    if isinstance(sample.data, bytes) and image.size == size[::-1] != size:
        image = decode_image(sample.data, channels, sample.name, apply_exif=False)
    if image.size != size:
        raise AnnotationError(
            f"the image is {image.width} x {image.height}, its annotation is for {size[0]} x {size[1]}",
            where=sample.name,
            why="the image was resized or replaced after its boxes were drawn",
            then="put the annotated image back, or scale its boxes and the size in its annotation",
        )
    return image


def mean_color(preprocess: PreprocessConfig) -> tuple[int, ...]:
    """The fill outside an image: the color that becomes 0 for the network; gray if each image has its own mean."""
    if preprocess.per_image_standardization:
        return (_GRAY,) * preprocess.channels
    return tuple(round(mean * preprocess.divide_by) for mean in preprocess.mean)
