"""A small COCO dataset, and functions to open and change it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from box_examples import write_coco

from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.readers.dataset_factory import open_dataset
from reconv.recipe.parts.data import DataConfig

CATEGORIES = {1: "person", 18: "dog", 90: "toothbrush"}


def box(category: int, *corners: float, **more: Any) -> dict[str, Any]:
    left, top, width, height = corners
    return {"category_id": category, "bbox": [left, top, width, height], **more}


def opened(path: Path, split: Any = "train", kind: str = "auto", **data: Any) -> DetectionDataset:
    source = open_dataset(kind, path, split, DataConfig(**data), boxes=True)
    assert isinstance(source, DetectionDataset)
    return source


def rewrite(root: Path, change: Any, split: str = "train") -> None:
    """Change COCO's file in place."""
    file = root / "annotations" / f"instances_{split}2017.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def write_small_coco(folder: Path) -> Path:
    """Three training images, one without a box, and two validation images."""
    train = [
        ("b.jpg", 30, 40, [box(90, 0, 0, 10, 10), box(1, 5.5, 6.25, 20, 10, area=77.5)]),
        ("a.jpg", 20, 20, [box(18, 1, 1, 19, 19, iscrowd=1)]),
        ("empty.jpg", 25, 25, []),
    ]
    val = [("v.jpg", 30, 40, [box(1, 2, 3, 4, 5)]), ("none.jpg", 10, 10, [])]
    return write_coco(folder, {"train": train, "val": val}, CATEGORIES)
