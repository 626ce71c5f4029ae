"""The files that images with boxes are written as: TFRecords of TensorFlow's detection programs, or COCO's layout.

Owns names and layout. Refuses to know where samples come from and how writing survives a crash. Invariant: classes keep
the numbers they had; what is written is a function of the samples, their positions and the set they belong to.
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

from reconv.data.boxes.annotations import Annotation, AnnotationError
from reconv.data.convert.staging import Facts, StagingDir
from reconv.data.convert.transcode import Formed, size_of
from reconv.data.convert.writers import Kind, Numbered, Piece, Whole, encoded
from reconv.data.dataset import Sample, Split
from reconv.data.pipeline.box_samples import annotation_of
from reconv.data.readers.detection import box_tfrecord as features
from reconv.data.readers.shards.tfrecord_format import Values, encode_example, write_record


def following(made: Formed) -> Formed:
    """The sample with boxes that follow an image that was made smaller."""
    said = annotation_of(made.sample)
    if not made.is_changed or not isinstance(made.sample.data, bytes):
        return made
    width, height = size_of(made.sample.data, made.sample.name)
    if (width > height) != (said.width > said.height) and width != height:
        raise AnnotationError(
            "an image that is turned by its EXIF data has boxes of the unturned one",
            where=made.sample.name,
            why="encoding it anew turns it for good",
            then="convert without --longest, --shortest and --quality",
        )
    across, down = width / said.width, height / said.height
    scaled = replace(
        said,
        boxes_xyxy=(said.boxes_xyxy * np.array([across, down] * 2)).astype(np.float32),
        area=(said.area * across * down).astype(np.float32),
        height=height,
        width=width,
    )
    return replace(made, sample=replace(made.sample, annotation=scaled))


def _write_records(room: StagingDir, piece: Piece, whole: Whole, samples: Numbered) -> None:
    with room.new_file(piece.name) as file:
        for number, formed in samples:
            said = annotation_of(formed.sample)
            name = picture_name(formed, said, int(piece.indices[number]))
            write_record(file, encode_example(_features(formed.sample, said, name, whole)))


def _features(sample: Sample, said: Annotation, name: str, whole: Whole) -> Mapping[str, Values]:
    """The published features; a list without values is left out, since its type could not be told."""
    data = encoded(sample)
    edges = said.boxes_xyxy / np.array([said.width, said.height] * 2)
    labels = said.labels.tolist()
    made: dict[str, Values] = {
        features.IMAGE: [data],
        "image/format": [b"jpeg"],
        "image/key/sha256": [hashlib.sha256(data).hexdigest().encode()],
        features.HEIGHT: [said.height],
        features.WIDTH: [said.width],
        features.FILE: [name.encode("utf-8", "surrogateescape")],
        features.ID: [str(said.image_id).encode("utf-8", "surrogateescape")],
        **{key: edges[:, column].tolist() for column, key in enumerate(features.EDGES)},
        features.LABEL: [whole.class_ids[label] for label in labels],
        features.TEXT: [whole.class_names[label].encode("utf-8", "surrogateescape") for label in labels],
        features.AREA: [float(area) for area in said.area.tolist()],
        features.CROWD: [int(flag) for flag in said.is_crowd.tolist()],
        features.DIFFICULT: [int(flag) for flag in said.difficult.tolist()],
    }
    return {key: values for key, values in made.items() if len(values)}


def _finish_records(room: StagingDir, whole: Whole, records: Sequence[Facts]) -> None:
    """The names of all classes: records tell those that they have alone."""
    names = dict(zip(whole.class_ids, whole.class_names, strict=True))
    room.put_text(features.LABEL_MAP, features.label_map(names))


def _write_pictures(room: StagingDir, piece: Piece, whole: Whole, samples: Numbered) -> Facts:
    """Images of a split side by side; what is said about them is kept with the piece until all are written."""
    room.make_folder(room.path / whole.split)
    pictures = []
    for number, formed in samples:
        said = annotation_of(formed.sample)
        index = int(piece.indices[number])
        name = picture_name(formed, said, index)
        room.put_unsynced(room.path / whole.split / name, encoded(formed.sample))
        pictures.append(_picture_entry(said, name, index))
    os.sync()
    return {"images": pictures}


def _picture_entry(said: Annotation, name: str, index: int) -> dict[str, Any]:
    corners = said.boxes_xyxy.astype(np.float64)
    sides = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
    return {
        # Scorers of COCO take numbers alone; other ids are in the file's name.
        "id": said.image_id if isinstance(said.image_id, int) else index + 1,
        "file_name": name,
        "height": said.height,
        "width": said.width,
        "boxes": [[round(value, 4) for value in row] for row in sides.tolist()],
        "labels": said.labels.tolist(),
        "areas": [round(area, 4) for area in said.area.tolist()],
        "crowds": [int(flag) for flag in said.is_crowd.tolist()],
    }


def _finish_coco(room: StagingDir, whole: Whole, records: Sequence[Facts]) -> None:
    """One JSON file a split, in COCO's form."""
    images: list[Facts] = []
    annotations: list[Facts] = []
    for picture in (picture for record in records for picture in record["images"]):
        images.append({key: picture[key] for key in ("id", "file_name", "height", "width")})
        rows = zip(picture["boxes"], picture["labels"], picture["areas"], picture["crowds"], strict=True)
        for box, label, area, crowd in rows:
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": picture["id"],
                    "category_id": whole.class_ids[label],
                    "bbox": box,
                    "area": area,
                    "iscrowd": crowd,
                }
            )
    categories = [{"id": i, "name": n} for i, n in zip(whole.class_ids, whole.class_names, strict=True)]
    told = {"images": images, "annotations": annotations, "categories": categories}
    room.put_text(f"annotations/instances_{whole.split}.json", json.dumps(told) + "\n")


def picture_name(formed: Formed, said: Annotation, index: int) -> str:
    """COCO's own form for images with numbers, else the last part of their id."""
    if isinstance(said.image_id, int):
        return f"{said.image_id:012}.{formed.ending}"
    own = PurePosixPath(said.image_id.replace("\\", "/")).name
    stem = PurePosixPath(own).stem if own.lower().endswith((".jpg", ".jpeg", ".png")) else own
    return f"{stem if stem and not stem.startswith('.') else f'{index:08}'}.{formed.ending}"


def _record_name(split: Split, number: int, num_shards: int) -> str:
    return f"{split}-{number:05}-of-{num_shards:05}"


BOX_KINDS: Mapping[str, Kind] = {
    "tfrecord": Kind(
        "jpeg", True, True, False, _record_name, _write_records, {"train": 256, "val": 32}, _finish_records
    ),
    "coco": Kind(
        "file",
        False,
        False,
        False,
        lambda split, number, _: f"{split}-{number:06}",
        _write_pictures,
        None,
        _finish_coco,
    ),
}
