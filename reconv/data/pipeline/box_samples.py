"""Filling rows of a detection batch: a square image, and its boxes padded to one length.

Owns the columns and what becomes of an annotation in them. Refuses to know order, threads, files and what a network
makes of boxes. Invariant: a row depends on its index and its key alone; boxes are float32 fractions of the square,
inside it, with an area; labels count from 1, and all rows from `num_boxes` on are zeros.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import Image

from reconv.data.boxes.annotations import Annotation, AnnotationError
from reconv.data.boxes.box_transforms import WHOLE, View, draw_views, native_square, seen_through, square_of, train_view
from reconv.data.dataset import I64, U8, Dataset, Sample
from reconv.data.decode.decode import FILTERS, any_picture, decode_picture, pixels_of
from reconv.data.pipeline.sample_pipeline import Column, Draws, MakeSamplePipeline, Rows, SamplePipeline
from reconv.data.pipeline.stage_timing import spent
from reconv.data.transforms.random_params import F64, effective
from reconv.recipe.data_fields import AugmentConfig, PreprocessConfig
from reconv.recipe.schema import Recipe

_ROWS_PER_TASK = 4
_GREY = 128


def detection_sample_pipeline(recipe: Recipe) -> MakeSamplePipeline:
    """How a detection recipe's batches are filled."""
    return partial(_make, max_boxes=recipe.detection.max_gt_boxes, use_difficult=recipe.data.difficult_boxes == "use")


def _make(
    source: Dataset, preprocess: PreprocessConfig, augment: AugmentConfig | None, *, max_boxes: int, use_difficult: bool
) -> SamplePipeline:
    return BoxSamplePipeline(
        source, preprocess, None if augment is None else effective(augment), max_boxes, use_difficult
    )


@dataclass(frozen=True, slots=True)
class BoxSamplePipeline:
    """Images decoded, cropped and resized one by one, their boxes with them; no augmentation: the whole image."""

    source: Dataset
    preprocess: PreprocessConfig
    augment: AugmentConfig | None
    max_boxes: int
    use_difficult: bool = True

    @property
    def rows_per_task(self) -> int | None:
        return _ROWS_PER_TASK

    @property
    def columns(self) -> tuple[Column, ...]:
        """Image, boxes, classes and how many there are."""
        side = self.preprocess.size
        return (
            Column("images", (self.preprocess.channels, side, side), np.uint8),
            Column("boxes", (self.max_boxes, 4), np.float32),
            Column("labels", (self.max_boxes,), np.int64),
            Column("num_boxes", (), np.int64),
        )

    def draw(self, seed: int, positions: I64) -> Draws:
        """The key of each row's view."""
        return draw_views(seed, positions)

    def __call__(self, indices: I64, draws: Draws | None, rows: Rows) -> None:
        """Fill each row."""
        for row, index in enumerate(indices.tolist()):
            began_s = time.perf_counter()
            sample = self.source[index]
            spent("disk", began_s)
            said = annotation_of(sample)
            boxes, labels = self._trained_on(said)
            view = WHOLE
            if self.augment is not None and draws is not None:
                view = train_view(boxes, self.augment, int(draws[row]))
            self._put_picture(rows["images"][row], sample, said, view)
            seen, kept = seen_through(view, boxes)
            self._put(rows, row, seen, labels[kept])

    def _put_picture(self, out: U8, sample: Sample, said: Annotation, view: View) -> None:
        """What the view shows of the image, by the compiled decoder where the plan has chosen it and it can."""
        spec, fill = self.preprocess, mean_colour(self.preprocess)
        if self.augment is not None and self.augment.decoder == "native" and isinstance(sample.data, bytes):
            began_s, size = time.perf_counter(), (said.width, said.height)
            is_done = native_square(sample.data, view, size, out, spec.interpolation, fill)
            spent("decode", began_s)
            if is_done:
                return
        image = picture_as_annotated(sample, said, spec.channels)
        out[:] = pixels_of(square_of(image, view, spec.size, FILTERS[spec.interpolation], fill)).transpose(2, 0, 1)

    def _trained_on(self, said: Annotation) -> tuple[F64, I64]:
        """Boxes as fractions of the image, with classes from 1: no crowds, and of each what is in the image."""
        used = ~said.is_crowd if self.use_difficult else ~(said.is_crowd | said.difficult)
        size = np.array([said.width, said.height] * 2, np.float64)
        boxes = np.clip(said.boxes_xyxy[used] / size, 0, 1)
        has_area = (boxes[:, 2:] > boxes[:, :2]).all(1)
        return boxes[has_area], said.labels[used][has_area] + 1

    def _put(self, rows: Rows, row: int, boxes_xyxy: F64, labels: I64) -> None:
        num_boxes = min(len(labels), self.max_boxes)
        rows["boxes"][row] = 0
        rows["labels"][row] = 0
        rows["boxes"][row, :num_boxes] = boxes_xyxy[:num_boxes]
        rows["labels"][row, :num_boxes] = labels[:num_boxes]
        rows["num_boxes"][row] = num_boxes


def annotation_of(sample: Sample) -> Annotation:
    """The boxes of an image that must have some said about it."""
    if sample.annotation is None:
        raise AnnotationError(
            "an image without boxes",
            where=sample.name,
            why="these are data for classification, and the recipe's task is detection",
            then="reconv recipes lists recipes for classification",
        )
    return sample.annotation


def picture_as_annotated(sample: Sample, said: Annotation, channels: int) -> Image.Image:
    """The image, lying as it did for who drew the boxes; an error where it is of another size.

    Some programs turn an image as its EXIF data say before boxes are drawn, others do not: the annotated size decides.
    """
    image = any_picture(sample.data, channels, sample.name)
    if isinstance(sample.data, bytes) and image.size == (said.height, said.width) != (said.width, said.height):
        image = decode_picture(sample.data, channels, sample.name, is_turned=False)
    if image.size != (said.width, said.height):
        raise AnnotationError(
            f"the image is {image.width} x {image.height}, its boxes are of one of {said.width} x {said.height}",
            where=sample.name,
            why="the image was resized or replaced after its boxes were drawn",
            then="put the annotated image back, or scale its boxes and the size in its annotation",
        )
    return image


def mean_colour(preprocess: PreprocessConfig) -> tuple[int, ...]:
    """What is beyond an image: the colour that becomes 0 for the network; grey where each image has its own mean."""
    if preprocess.per_image_standardization:
        return (_GREY,) * preprocess.channels
    return tuple(round(mean * preprocess.divide_by) for mean in preprocess.mean)
