"""Rows of detection batches: a square image, and its boxes padded to `max_boxes`.

Boxes are float32 fractions of the square (left, top, right, bottom), inside it and with an area; labels count from 1;
all entries from `num_boxes` on are zeros.

A batch has `images` [n, 3, S, S], `boxes` [n, M, 4], `labels` [n, M] (0 is background), `num_boxes` [n] and `indices`
[n]. Metrics use the dataset's annotations, never the padded batch (tests/data/pipeline/test_detection_pipeline.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import Image

from reconv.core.errors import DataError
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
from reconv.data.pipeline.row_reader import RowReader, Source
from reconv.data.pipeline.samples import Column, MakeSamplePipeline, SamplePipeline
from reconv.data.stage_timing import record_stage
from reconv.data.transforms.host import ImageData, ImageView, Size
from reconv.detection.annotation import Annotation
from reconv.recipe.parts.data import AugmentConfig, PreprocessConfig, effective_augment
from reconv.recipe.schema import Recipe

_MIN_ROWS_PER_TASK = 4
_GRAY = 128
_VIEW, _SIZE = "view", "image_size"  # parameters: float64 [n, 4], and the annotated width and height, int64 [n, 2]


def make_detection_pipeline(recipe: Recipe) -> MakeSamplePipeline:
    """Factory of the pipelines of a detection recipe."""
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
class _OneSample:
    """The image of one row, which was read for its boxes."""

    sample: Sample

    def paths(self) -> None:
        return None

    def read(self, row: int) -> Source:
        return Source(self.sample.data, self.sample.name)


class DetectionView(ImageView):
    """The view of an image that its boxes were fitted to, in the parameters `_VIEW` and `_SIZE`."""

    def __init__(self, preprocess: PreprocessConfig) -> None:
        super().__init__(preprocess.interpolation)
        self._channels, self._size, self._color = preprocess.channels, preprocess.size, mean_color(preprocess)

    def fill_natively(self, data: bytes, params: NamedArrays, out: U8) -> Size | None:
        view, size = _view_and_size(params)
        began_s = time.perf_counter()
        is_filled = resize_view_natively(data, view, size, out, self.interpolation, self._color)
        record_stage("decode", began_s)
        return size if is_filled else None

    def fill(self, data: ImageData, params: NamedArrays, out: U8, name: str) -> Size:
        assert not isinstance(data, Image.Image)
        view, size = _view_and_size(params)
        image = decode_with_size(data, size, self._channels, name)
        resized = resize_view(image, view, self._size, RESAMPLING[self.interpolation], self._color)
        out[:] = to_array(resized).transpose(2, 0, 1)
        return size


def _view_and_size(params: NamedArrays) -> tuple[View, Size]:
    left, top, right, bottom = params[_VIEW].tolist()
    width, height = params[_SIZE].tolist()
    return (left, top, right, bottom), (width, height)


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
        is_native = self.augment is not None and self.augment.decoder == "native"
        reader = RowReader(DetectionView(self.preprocess), is_native)
        for row, index in enumerate(indices.tolist()):
            began_s = time.perf_counter()
            sample = self.dataset[index]
            record_stage("disk", began_s)
            annotation = require_annotation(sample)
            boxes, labels = self._train_boxes(annotation)
            view = WHOLE_IMAGE
            if self.augment is not None:
                view = train_view(boxes, self.augment, int(params[VIEW_KEY][row]))
            frame = {_VIEW: np.array([view]), _SIZE: np.array([(annotation.width, annotation.height)])}
            [outcome] = reader.fill(_OneSample(sample), frame, rows["images"][row, None])
            if isinstance(outcome, DataError):
                raise outcome
            clipped, is_kept = clip_boxes(view, boxes)
            self._fill_boxes(rows, row, clipped, labels[is_kept])

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
            hint="reconv recipes lists recipes for classification",
        )
    return sample.annotation


def decode_annotated(sample: Sample, annotation: Annotation, channels: int) -> Image.Image:
    """The image in the orientation of its annotation; an error if their sizes differ."""
    return decode_with_size(sample.data, (annotation.width, annotation.height), channels, sample.name)


def decode_with_size(data: bytes | U8, size: Size, channels: int, name: str) -> Image.Image:
    """The image in the orientation in which it has the annotated `size`; an error if it has it in none.

    Some annotation programs apply an image's EXIF orientation, others do not: the annotated size decides.
    """
    image = to_image(data, channels, name)
    if isinstance(data, bytes) and image.size == size[::-1] != size:
        image = decode_image(data, channels, name, apply_exif=False)
    if image.size != size:
        raise AnnotationError(
            f"the image is {image.width} x {image.height}, its annotation is for {size[0]} x {size[1]}",
            where=name,
            why="the image was resized or replaced after its boxes were drawn",
            hint="put the annotated image back, or scale its boxes and the size in its annotation",
        )
    return image


def mean_color(preprocess: PreprocessConfig) -> tuple[int, ...]:
    """The fill outside an image: the color that becomes 0 for the network; gray if each image has its own mean."""
    if preprocess.per_image_standardization:
        return (_GRAY,) * preprocess.channels
    return tuple(round(mean * preprocess.divide_by) for mean in preprocess.mean)
