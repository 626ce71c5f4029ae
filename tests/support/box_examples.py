"""Small detection data the tests share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from data_examples import encode, noise

from reconv.data.boxes.annotations import NO_TARGET, DetectionDataset
from reconv.data.dataset import Sample
from reconv.detection.annotation import Annotation


class Listed(DetectionDataset):
    """Images and annotations from a list."""

    kind = "listed"
    origin = "listed"

    def __init__(self, samples: Sequence[tuple[bytes | npt.NDArray[np.uint8], Annotation]], num_classes: int = 3):
        self._samples = samples
        self.class_names = tuple("abcdefgh"[:num_classes])
        self.class_ids = tuple(range(1, num_classes + 1))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        data, annotation = self._samples[index]
        return Sample(data, NO_TARGET, f"listed[{index}]", annotation)

    def annotation(self, index: int) -> Annotation:
        return self._samples[index][1]

    def box_counts(self) -> npt.NDArray[np.int64]:
        return np.array([len(annotation) for _, annotation in self._samples])

    def fingerprint(self) -> str:
        return "listed"


def write_coco(
    root: Path,
    splits: Mapping[str, Sequence[tuple[str, int, int, Sequence[Mapping[str, Any]]]]],
    categories: Mapping[int, str],
) -> Path:
    """COCO's layout: for each split, images as (file, height, width, annotations without ids)."""
    (root / "annotations").mkdir(parents=True)
    next_id = 1
    for split, split_images in splits.items():
        (root / f"{split}2017").mkdir()
        images, annotations = [], []
        for number, (file, height, width, boxes) in enumerate(split_images):
            image_id = 10 * number + (1 if split == "train" else 5)
            (root / f"{split}2017" / file).write_bytes(encode(noise(height, width, 3, image_id), "JPEG"))
            images.append({"id": image_id, "file_name": file, "height": height, "width": width})
            for box in boxes:
                annotations.append({"id": next_id, "image_id": image_id, "iscrowd": 0, **box})
                next_id += 1
        content = {
            "images": images,
            "annotations": annotations,
            "categories": [{"id": number, "name": name} for number, name in categories.items()],
        }
        (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))
    return root


def write_voc(
    root: Path,
    lists: Mapping[str, Sequence[str]],
    images: Mapping[str, tuple[int, int, Sequence[tuple[str, tuple[float, ...], int]]]],
) -> Path:
    """VOC's layout: images as (height, width, objects), objects as (class, corners, difficult)."""
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    for name, stems in lists.items():
        (root / "ImageSets" / "Main" / f"{name}.txt").write_text("".join(f"{stem}\n" for stem in stems))
    for number, (stem, (height, width, objects)) in enumerate(images.items()):
        (root / "JPEGImages" / f"{stem}.jpg").write_bytes(encode(noise(height, width, 3, number), "JPEG"))
        edges = ("xmin", "ymin", "xmax", "ymax")
        elements = "".join(
            f"<object><name>{name}</name><difficult>{difficult}</difficult><part><name>head</name></part><bndbox>"
            + "".join(f"<{edge}>{value}</{edge}>" for edge, value in zip(edges, corners, strict=True))
            + "</bndbox></object>"
            for name, corners, difficult in objects
        )
        size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        (root / "Annotations" / f"{stem}.xml").write_text(f"<annotation>{size}{elements}</annotation>")
    return root


def write_yolo(
    root: Path,
    layout: str,
    lines: Mapping[str, Sequence[str] | None],
    names: Sequence[str],
    size: tuple[int, int] = (20, 20),
) -> Path:
    """YOLO's layout, the same images in both splits; None: no text file."""
    for split in ("train", "val"):
        images = root / layout.replace("train", split)
        labels = Path(str(images).replace("images", "labels"))
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for number, (stem, label_lines) in enumerate(lines.items()):
            (images / f"{stem}.jpg").write_bytes(encode(noise(*size, 3, number), "JPEG"))
            if label_lines is not None:
                (labels / f"{stem}.txt").write_text("\n".join(label_lines) + "\n")
    (root / "data.yaml").write_text(json.dumps({"names": list(names)}))
    return root
