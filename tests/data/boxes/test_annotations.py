"""Annotations and subsets of detection datasets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from reconv.data.boxes.annotations import NO_TARGET, DetectionDataset, DetectionSubset
from reconv.data.dataset import Sample
from reconv.detection.annotation import Annotation, make_annotation


class Three(DetectionDataset):
    """Three images: image i has i boxes."""

    kind = "three"
    class_names = ("a", "b")
    class_ids = (7, 9)
    origin = "three"

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Sample:
        return Sample(np.full((2, 2, 3), index, np.uint8), NO_TARGET, f"three[{index}]")

    def annotation(self, index: int) -> Annotation:
        return make_annotation([[0, 0, 1, 1 + box] for box in range(index)], [1] * index, index, 2, 2)

    def box_counts(self) -> npt.NDArray[np.int64]:
        return np.arange(3)

    def fingerprint(self) -> str:
        return "three"


def test_plain_lists_become_arrays_with_the_areas_of_the_boxes() -> None:
    made = make_annotation([[1, 2, 4, 6], [0, 0, 2, 1]], [1, 0], "x", 10, 20, is_crowd=[0, 1])
    assert (made.boxes_xyxy.dtype, made.labels.dtype, made.area.dtype) == (np.float32, np.int64, np.float32)
    assert made.area.tolist() == [12, 2] and made.is_crowd.tolist() == [False, True]
    assert not made.difficult.any()
    none = make_annotation([], [], 3, 10, 20)
    assert none.boxes_xyxy.shape == (0, 4) and none.area.shape == none.labels.shape == (0,) and len(none) == 0


def test_selected_boxes_keep_their_attributes() -> None:
    made = make_annotation(
        [[0, 0, 1, 1], [0, 0, 2, 2]], [3, 5], 1, 8, 9, is_crowd=[0, 1], difficult=[1, 0], area=[0.5, 3]
    )
    kept = made.select(np.array([False, True]))
    assert (kept.labels.tolist(), kept.area.tolist(), kept.boxes_xyxy.tolist()) == ([5], [3.0], [[0, 0, 2, 2]])
    assert kept.is_crowd.tolist() == [True] and kept.difficult.tolist() == [False]
    assert (kept.image_id, kept.height, kept.width) == (1, 8, 9)


def test_a_subset_keeps_boxes_and_has_its_own_fingerprint() -> None:
    subset = DetectionSubset(Three(), np.array([2, 1]))
    assert len(subset) == 2 and subset.class_ids == (7, 9)
    assert [len(subset.annotation(i)) for i in range(2)] == [2, 1]
    assert [int(np.asarray(subset[i].data).max()) for i in range(2)] == [2, 1]
    assert subset.fingerprint() != DetectionSubset(Three(), np.array([2, 0])).fingerprint()
    assert subset.box_counts().tolist() == [2, 1]
    assert "2 of 3 images" in subset.origin
