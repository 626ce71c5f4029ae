"""Generated images with boxes."""

from __future__ import annotations

import numpy as np
import pytest

from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.dataset import Split
from reconv.data.readers.dataset_factory import open_dataset, select, subsample
from reconv.data.readers.detection.synthetic_boxes import MAX_BOXES
from reconv.data.readers.synthetic import class_pattern
from reconv.recipe.parts.data import DataConfig, PreprocessConfig

DATA = DataConfig(num_samples=40, num_classes=3, preprocess=PreprocessConfig(size=64, resize=None))


def opened(kind: str = "synthetic", split: Split = "train") -> DetectionDataset:
    source = open_dataset(kind, None, split, DATA, boxes=True)
    assert isinstance(source, DetectionDataset)
    return source


def test_an_image_and_its_boxes_depend_on_their_index() -> None:
    one, other = opened(), opened()
    assert len(one) == 40 and len(opened(split="val")) == 8
    for index in (7, 0, 39):
        assert np.array_equal(one[index].data, other[index].data)
        assert np.array_equal(one.annotation(index).boxes_xyxy, other.annotation(index).boxes_xyxy)
    assert not np.array_equal(one[0].data, opened(split="val")[0].data)
    assert one.fingerprint() != opened(split="val").fingerprint()


def test_boxes_lie_within_the_image_and_are_counted() -> None:
    source = opened()
    counts = source.box_counts()
    labels = set()
    for index in range(len(source)):
        annotation = source.annotation(index)
        assert len(annotation) == counts[index]
        assert (annotation.boxes_xyxy >= 0).all() and (annotation.boxes_xyxy <= 64).all()
        assert (annotation.boxes_xyxy[:, 2:] - annotation.boxes_xyxy[:, :2] >= 2).all()
        labels |= set(annotation.labels.tolist())
    assert labels == {0, 1, 2}
    assert counts.min() >= 1 and counts.max() <= MAX_BOXES


def test_the_last_box_shows_the_pattern_of_its_class() -> None:
    sample = opened()[3]
    assert sample.annotation is not None and isinstance(sample.data, np.ndarray)
    left, top, right, bottom = sample.annotation.boxes_xyxy[-1].astype(int)
    pattern = class_pattern(int(sample.annotation.labels[-1]), bottom - top, right - left, 3) >> 1
    noise = sample.data[top:bottom, left:right].astype(int) - pattern
    assert noise.min() >= 0 and noise.max() <= 127


@pytest.mark.parametrize("kind", ["synthetic", "synthetic-device"])
def test_subsets_keep_the_kind_of_their_dataset(kind: str) -> None:
    source = subsample(opened(kind), 50)
    assert isinstance(source, DetectionDataset)
    assert (source.kind, len(source)) == (kind, 20)
    some = select(source, np.array([4, 1]))
    assert isinstance(some, DetectionDataset)
    assert some.annotation(1).image_id == source.annotation(1).image_id
