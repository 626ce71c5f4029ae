"""Writers of detection data: TFRecords of TensorFlow's object detection programs, and COCO's layout.

Classes keep the ids they had. The bytes written depend only on the samples, their order and their split.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from reconv.data.boxes.annotations import AnnotationError
from reconv.data.convert.staging import Facts, StagingDir
from reconv.data.convert.transcode import TranscodedSample, size_of
from reconv.data.convert.writers import (
    DatasetWriter,
    NumberedSamples,
    OutputShard,
    SplitInfo,
    encoded,
    folder_shard_name,
)
from reconv.data.dataset import Sample, Split
from reconv.data.pipeline.detection import require_annotation
from reconv.data.readers.detection import box_tfrecord as features
from reconv.data.readers.shards.tfrecord_format import Values, encode_example, write_record
from reconv.detection.annotation import Annotation


def scale_boxes(item: TranscodedSample) -> TranscodedSample:
    """The sample with its boxes scaled to the new size of the image."""
    annotation = require_annotation(item.sample)
    if not item.is_changed or not isinstance(item.sample.data, bytes):
        return item
    width, height = size_of(item.sample.data, item.sample.name)
    if (width > height) != (annotation.width > annotation.height) and width != height:
        raise AnnotationError(
            "the image is rotated by its EXIF orientation, but its boxes are for the stored orientation",
            where=item.sample.name,
            why="re-encoding applies the rotation to the pixels",
            hint="convert without --longest, --shortest and --quality",
        )
    scale_x, scale_y = width / annotation.width, height / annotation.height
    scaled = replace(
        annotation,
        boxes_xyxy=(annotation.boxes_xyxy * np.array([scale_x, scale_y] * 2)).astype(np.float32),
        area=(annotation.area * scale_x * scale_y).astype(np.float32),
        height=height,
        width=width,
    )
    return replace(item, sample=replace(item.sample, annotation=scaled))


def _write_records(staging: StagingDir, shard: OutputShard, info: SplitInfo, samples: NumberedSamples) -> None:
    with staging.new_file(shard.name) as file:
        for number, item in samples:
            annotation = require_annotation(item.sample)
            name = image_name(item, annotation, int(shard.indices[number]))
            write_record(file, encode_example(_features(item.sample, annotation, name, info)))


def _features(sample: Sample, annotation: Annotation, name: str, info: SplitInfo) -> Mapping[str, Values]:
    """The published features; empty lists are left out because their type would be lost."""
    data = encoded(sample)
    edges = annotation.boxes_xyxy / np.array([annotation.width, annotation.height] * 2)
    labels = annotation.labels.tolist()
    example: dict[str, Values] = {
        features.IMAGE: [data],
        "image/format": [b"jpeg"],
        "image/key/sha256": [hashlib.sha256(data).hexdigest().encode()],
        features.HEIGHT: [annotation.height],
        features.WIDTH: [annotation.width],
        features.FILE: [name.encode("utf-8", "surrogateescape")],
        features.ID: [str(annotation.image_id).encode("utf-8", "surrogateescape")],
        **{key: edges[:, column].tolist() for column, key in enumerate(features.EDGES)},
        features.LABEL: [info.class_ids[label] for label in labels],
        features.TEXT: [info.class_names[label].encode("utf-8", "surrogateescape") for label in labels],
        features.AREA: [float(area) for area in annotation.area.tolist()],
        features.CROWD: [int(flag) for flag in annotation.is_crowd.tolist()],
        features.DIFFICULT: [int(flag) for flag in annotation.difficult.tolist()],
    }
    return {key: values for key, values in example.items() if len(values)}


def _finish_records(staging: StagingDir, info: SplitInfo, records: Sequence[Facts]) -> None:
    """The names of all classes; records name only the classes they contain."""
    names = dict(zip(info.class_ids, info.class_names, strict=True))
    staging.write_text(features.LABEL_MAP, features.format_label_map(names))


def _write_images(staging: StagingDir, shard: OutputShard, info: SplitInfo, samples: NumberedSamples) -> Facts:
    """The images of a shard; their annotations are kept in its record until the split is finished."""
    staging.make_folder(staging.path / info.split)
    images = []
    for number, item in samples:
        annotation = require_annotation(item.sample)
        index = int(shard.indices[number])
        name = image_name(item, annotation, index)
        staging.write_unsynced(staging.path / info.split / name, encoded(item.sample))
        images.append(_image_entry(annotation, name, index))
    os.sync()
    return {"images": images}


def _image_entry(annotation: Annotation, name: str, index: int) -> dict[str, Any]:
    corners = annotation.boxes_xyxy.astype(np.float64)
    boxes_xywh = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
    return {
        # COCO's evaluation takes only integer ids; other ids are kept in the file name.
        "id": annotation.image_id if isinstance(annotation.image_id, int) else index + 1,
        "file_name": name,
        "height": annotation.height,
        "width": annotation.width,
        "boxes": [[round(value, 4) for value in row] for row in boxes_xywh.tolist()],
        "labels": annotation.labels.tolist(),
        "areas": [round(area, 4) for area in annotation.area.tolist()],
        "crowds": [int(flag) for flag in annotation.is_crowd.tolist()],
    }


def _finish_coco(staging: StagingDir, info: SplitInfo, records: Sequence[Facts]) -> None:
    """The split's annotations in COCO's JSON format."""
    images: list[Facts] = []
    annotations: list[Facts] = []
    for image in (image for record in records for image in record["images"]):
        images.append({key: image[key] for key in ("id", "file_name", "height", "width")})
        rows = zip(image["boxes"], image["labels"], image["areas"], image["crowds"], strict=True)
        for box, label, area, crowd in rows:
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image["id"],
                    "category_id": info.class_ids[label],
                    "bbox": box,
                    "area": area,
                    "iscrowd": crowd,
                }
            )
    categories = [{"id": i, "name": n} for i, n in zip(info.class_ids, info.class_names, strict=True)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    staging.write_text(f"annotations/instances_{info.split}.json", json.dumps(content) + "\n")


def image_name(item: TranscodedSample, annotation: Annotation, index: int) -> str:
    """The file name of an image: COCO's form for integer ids, else the last part of the id."""
    if isinstance(annotation.image_id, int):
        return f"{annotation.image_id:012}.{item.extension}"
    own = PurePosixPath(annotation.image_id.replace("\\", "/")).name
    stem = PurePosixPath(own).stem if own.lower().endswith((".jpg", ".jpeg", ".png")) else own
    return f"{stem if stem and not stem.startswith('.') else f'{index:08}'}.{item.extension}"


def _record_name(split: Split, number: int, num_shards: int) -> str:
    return f"{split}-{number:05}-of-{num_shards:05}"


BOX_WRITERS: Mapping[str, DatasetWriter] = {
    "tfrecord": DatasetWriter(
        "jpeg",
        _record_name,
        _write_records,
        is_shuffled=True,
        num_shards={"train": 256, "val": 32},
        finish=_finish_records,
    ),
    "coco": DatasetWriter("file", folder_shard_name, _write_images, is_one_file=False, finish=_finish_coco),
}
