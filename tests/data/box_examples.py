"""Small detection data the tests share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from data_examples import encode, noise

from reconv.data.annotation import NO_TARGET, Annotation, DetectionSource
from reconv.data.source import Sample


class Listed(DetectionSource):
    """Pictures and annotations from a list."""

    kind = "listed"
    origin = "listed"

    def __init__(self, samples: Sequence[tuple[bytes | npt.NDArray[np.uint8], Annotation]], num_classes: int = 3):
        self._samples = samples
        self.class_names = tuple("abcdefgh"[:num_classes])
        self.class_ids = tuple(range(1, num_classes + 1))

    def __len__(self) -> int:
        return len(self._samples)

    def sample(self, index: int) -> Sample:
        data, said = self._samples[index]
        return Sample(data, NO_TARGET, f"listed[{index}]", said)

    def annotation(self, index: int) -> Annotation:
        return self._samples[index][1]

    def box_counts(self) -> npt.NDArray[np.int64]:
        return np.array([len(said) for _, said in self._samples])

    def fingerprint(self) -> str:
        return "listed"


def write_coco(
    root: Path,
    splits: Mapping[str, Sequence[tuple[str, int, int, Sequence[Mapping[str, Any]]]]],
    categories: Mapping[int, str],
) -> Path:
    """COCO's layout: for each split, pictures as (file, height, width, annotations without ids)."""
    (root / "annotations").mkdir(parents=True)
    next_id = 1
    for split, pictures in splits.items():
        (root / f"{split}2017").mkdir()
        images, annotations = [], []
        for number, (file, height, width, boxes) in enumerate(pictures):
            image_id = 10 * number + (1 if split == "train" else 5)
            (root / f"{split}2017" / file).write_bytes(encode(noise(height, width, 3, image_id), "JPEG"))
            images.append({"id": image_id, "file_name": file, "height": height, "width": width})
            for box in boxes:
                annotations.append({"id": next_id, "image_id": image_id, "iscrowd": 0, **box})
                next_id += 1
        told = {
            "images": images,
            "annotations": annotations,
            "categories": [{"id": number, "name": name} for number, name in categories.items()],
        }
        (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(told))
    return root
