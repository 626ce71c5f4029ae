"""The findings of a review for other programs: Label Studio, FiftyOne and COCO, each with the listed images."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from reconv.core.errors import DataError, UsageError
from reconv.data.dataset import FileBacked
from reconv.review.copies import sample_image
from reconv.review.findings import ReviewFinding
from reconv.review.images import ReviewedImages
from reconv.storage.files import write_atomic

MODEL = "reconv data review"
_CLASS, _BOXES = "label", "boxes"  # names of Label Studio's controls


@dataclass(frozen=True, slots=True)
class ExportedImage:
    """One image with its findings, the most suspicious first."""

    row: int
    file: str
    width: int
    height: int
    findings: tuple[ReviewFinding, ...]


@dataclass(frozen=True, slots=True)
class ExportedBox:
    """A box as the review proposes it, in pixels, and what was wrong with it (empty: nothing)."""

    xyxy: tuple[float, float, float, float]
    label: str
    problem: str = ""
    score: float = 1.0


def export(images: ReviewedImages, findings: list[ReviewFinding], kind: str, out: Path) -> list[Path]:
    """Write the images that have findings in the format of another program; returns the files."""
    if not isinstance(next(iter(images.datasets.values())), FileBacked) and not images.has_boxes:
        raise UsageError(
            "these images are no files that another program could open",
            where="--export",
            hint="reconv data convert SOURCE DIR --to folder, and review that",
        )
    contents = _FORMATS[kind](images, list(_exported(images, findings)))
    written = []
    for name, content in contents.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, indent=1)
        write_atomic(path, text.encode("utf-8", "backslashreplace"))
        written.append(path)
    return written


def _exported(images: ReviewedImages, findings: list[ReviewFinding]) -> Iterator[ExportedImage]:
    by_row: dict[int, list[ReviewFinding]] = {}
    for finding in findings:
        if finding.kind != "unreadable":
            by_row.setdefault(finding.row, []).append(finding)
    for row, found in by_row.items():
        try:
            width, height = sample_image(images.sample(row)).size
        except DataError:
            continue
        yield ExportedImage(row, images.files[row], width, height, tuple(found))


def _boxes(images: ReviewedImages, image: ExportedImage) -> list[ExportedBox]:
    """All boxes of an image, with the corrections that its findings propose."""
    _, dataset, index = images.at(image.row)
    truth = dataset[index].annotation
    assert truth is not None
    boxes = {
        tuple(corners): ExportedBox(tuple(corners), images.class_names[label])
        for corners, label in zip(truth.boxes_xyxy.tolist(), truth.labels.tolist(), strict=True)
    }
    for finding in image.findings:
        box = finding.box
        if box is None:
            continue
        corners = box.detected_xyxy if box.problem == "shifted" and box.detected_xyxy is not None else box.box_xyxy
        label = finding.given if box.problem == "extra" else finding.label
        boxes[box.box_xyxy] = ExportedBox(corners, label, box.problem, finding.score)
    return list(boxes.values())


def _proposed(images: ReviewedImages, image: ExportedImage) -> tuple[str, str, ReviewFinding]:
    """The class in the data, the proposed one and the finding of an image with one class."""
    finding = next((found for found in image.findings if found.kind == "label"), image.findings[0])
    given = images.class_names[images.labels[image.row]]
    return given, finding.label or given, finding


def _label_studio(images: ReviewedImages, exported: list[ExportedImage]) -> Mapping[str, Any]:
    """Tasks with predictions, and the labeling configuration; files are served by Label Studio's local storage."""
    control = "RectangleLabels" if images.has_boxes else "Choices"
    option = "Label" if images.has_boxes else "Choice"
    name = _BOXES if images.has_boxes else _CLASS
    options = "".join(f'<{option} value="{escape(label)}"/>' for label in images.class_names)
    controls = f'<{control} name="{name}" toName="image">{options}</{control}>'
    config = f'<View><Image name="image" value="$image"/>{controls}</View>'
    tasks: list[dict[str, Any]] = []
    for image in exported:
        boxes = _boxes(images, image) if images.has_boxes else []
        result: list[dict[str, Any]] = [_rectangle(box, image) for box in boxes]
        if not images.has_boxes:
            choices = {"choices": [_proposed(images, image)[1]]}
            result = [{"from_name": _CLASS, "to_name": "image", "type": "choices", "value": choices}]
        score = max(finding.score for finding in image.findings)
        url = f"/data/local-files/?d={quote(image.file.lstrip('/'), errors='surrogateescape')}"
        predictions = [{"model_version": MODEL, "score": round(score, 4), "result": result}]
        tasks.append({"data": {"image": url, **_about(images, image)}, "predictions": predictions})
    return {"label-studio.json": tasks, "label-studio.xml": config}


def _rectangle(box: ExportedBox, image: ExportedImage) -> dict[str, Any]:
    """A box as Label Studio has it, in percent of the image."""
    left, top, right, bottom = box.xyxy
    value = {
        "x": 100 * left / image.width,
        "y": 100 * top / image.height,
        "width": 100 * (right - left) / image.width,
        "height": 100 * (bottom - top) / image.height,
        "rotation": 0,
        "rectanglelabels": [box.label],
    }
    return {
        "from_name": _BOXES,
        "to_name": "image",
        "type": "rectanglelabels",
        "original_width": image.width,
        "original_height": image.height,
        "image_rotation": 0,
        "value": value,
    }


def _about(images: ReviewedImages, image: ExportedImage) -> dict[str, str]:
    first = image.findings[0]
    about = {
        "path": images.paths[image.row],
        "split": images.split(image.row),
        "finding": first.kind,
        "note": first.note,
    }
    return about if images.has_boxes else {**about, "given": images.class_names[images.labels[image.row]]}


def _fiftyone(images: ReviewedImages, exported: list[ExportedImage]) -> Mapping[str, Any]:
    """FiftyOneImageClassificationDataset or FiftyOneImageDetectionDataset; data.json says where the images lie."""
    labels: dict[str, Any] = {}
    for image in exported:
        key = f"{image.row:08d}"
        if images.has_boxes:
            labels[key] = [
                {
                    "label": box.label,
                    "bounding_box": _relative(box, image),
                    "confidence": round(box.score, 4),
                    "attributes": {"finding": box.problem},
                }
                for box in _boxes(images, image)
            ]
            continue
        given, proposed, finding = _proposed(images, image)
        attributes = {"finding": finding.kind, "proposed": proposed, "score": round(finding.score, 4)}
        labels[key] = {"label": given, "attributes": attributes}
    content = {"classes": list(images.class_names), "labels": labels}
    return {
        "fiftyone/labels.json": content,
        "fiftyone/data.json": {f"{image.row:08d}": image.file for image in exported},
    }


def _relative(box: ExportedBox, image: ExportedImage) -> list[float]:
    """Left, top, width and height as fractions of the image."""
    left, top, right, bottom = box.xyxy
    sides = (image.width, image.height, image.width, image.height)
    return [value / side for value, side in zip((left, top, right - left, bottom - top), sides, strict=True)]


def _coco(images: ReviewedImages, exported: list[ExportedImage]) -> Mapping[str, Any]:
    """COCO's instances; an image with one class has a box of its whole size."""
    numbers = {name: number for number, name in enumerate(images.class_names, 1)}
    annotations: list[dict[str, Any]] = []
    for image in exported:
        if images.has_boxes:
            boxes = _boxes(images, image)
        else:
            _, proposed, finding = _proposed(images, image)
            whole = (0.0, 0.0, float(image.width), float(image.height))
            boxes = [ExportedBox(whole, proposed, finding.kind, finding.score)]
        for box in boxes:
            left, top, right, bottom = box.xyxy
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image.row,
                    "category_id": numbers[box.label],
                    "bbox": [left, top, right - left, bottom - top],
                    "area": (right - left) * (bottom - top),
                    "iscrowd": 0,
                    "score": round(box.score, 4),
                    "finding": box.problem,
                }
            )
    listed = [
        {"id": image.row, "file_name": image.file, "width": image.width, "height": image.height} for image in exported
    ]
    categories = [{"id": number, "name": name, "supercategory": ""} for name, number in numbers.items()]
    info = {"description": "images that reconv data review lists, with the labels that it proposes"}
    return {
        "coco.json": {
            "info": info,
            "licenses": [],
            "images": listed,
            "annotations": annotations,
            "categories": categories,
        }
    }


_FORMATS: Mapping[str, Callable[[ReviewedImages, list[ExportedImage]], Mapping[str, Any]]] = {
    "label-studio": _label_studio,
    "fiftyone": _fiftyone,
    "coco": _coco,
}
