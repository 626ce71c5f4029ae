"""Digits scattered over a canvas."""

from __future__ import annotations

from typing import Any

import numpy as np

from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.readers.dataset_factory import open_dataset
from reconv.recipe.parts.data import DataConfig


def test_scattered_digits_are_fixed_and_boxes_hold_their_digits() -> None:
    data: dict[str, Any] = {"num_samples": 40, "preprocess": {"size": 96, "resize": None}}
    train, val = (open_dataset("scattered-digits", None, s, DataConfig(**data), boxes=True) for s in ("train", "val"))
    assert isinstance(train, DetectionDataset) and isinstance(val, DetectionDataset)
    assert (len(train), len(val)) == (40, 8) and train.class_names == tuple("0123456789")
    counts = []
    for index in range(40):
        sample = train[index]
        annotation = sample.annotation
        assert annotation is not None and isinstance(sample.data, np.ndarray) and sample.data.shape == (96, 96, 3)
        assert np.array_equal(sample.data, train[index].data)
        boxes = annotation.boxes_xyxy.astype(int)
        assert (boxes >= 0).all() and (boxes <= 96).all() and len(boxes) == train.box_counts()[index]
        outside = np.ones((96, 96), bool)
        for left, top, right, bottom in boxes:
            assert sample.data[top:bottom, left:right].max() > 150
            outside[top:bottom, left:right] = False
        assert sample.data[outside].max() <= 96
        counts.append(len(boxes))
    assert min(counts) == 1 and 4 <= max(counts) <= 6
    assert not np.array_equal(train[0].data, val[0].data)
    assert train.fingerprint() != val.fingerprint()


def test_digits_of_validation_never_occur_in_training() -> None:
    from reconv.data.readers.digits import open_digits

    train, val = open_digits("train").images, open_digits("val").images
    assert len({t.tobytes() for t in train} & {v.tobytes() for v in val}) == 0
