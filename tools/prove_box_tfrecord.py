"""TensorFlow reads the boxes that Reconv writes. Two halves, since the two packages need not share an environment.

    reconv data convert SOURCE DIR --to tfrecord --shards 4,2
    python tools/prove_box_tfrecord.py tell DIR           # where reconv is installed: what it reads from the records
    tf/bin/python tools/prove_box_tfrecord.py read DIR    # where tensorflow is: compares, and decodes every image

The last ends with an error at the first record that TensorFlow reads otherwise. What it printed is in docs/data.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOLD = "told.json"
EDGES = ("xmin", "ymin", "xmax", "ymax")
MOST_PX = 1e-3


def tell(folder: Path) -> None:
    from reconv.data.boxes.annotations import DetectionDataset
    from reconv.data.readers.factory import open_dataset
    from reconv.recipe.data_fields import DataConfig

    source = open_dataset("tfrecord", folder, "train", DataConfig(empty_images="keep"), boxes=True)
    if not isinstance(source, DetectionDataset):
        raise SystemExit("these records have no boxes")
    told = []
    for said in (source.annotation(index) for index in range(len(source))):
        labels = [source.class_ids[label] for label in said.labels.tolist()]
        told.append([str(said.image_id), said.height, said.width, labels, said.boxes_xyxy.tolist()])
    (folder / TOLD).write_text(json.dumps(told))
    print(f"told of {len(told)} records")


def read(folder: Path) -> None:
    import tensorflow as tf

    fixed, many = tf.io.FixedLenFeature, tf.io.VarLenFeature
    spec: dict[str, Any] = {
        "image/encoded": fixed([], tf.string),
        "image/source_id": fixed([], tf.string),
        "image/object/class/label": many(tf.int64),
        **{f"image/object/bbox/{edge}": many(tf.float32) for edge in EDGES},
    }
    expected = json.loads((folder / TOLD).read_text())
    files = sorted(str(file) for file in folder.glob("train-*"))
    num_boxes, worst_px = 0, 0.0
    records = list(tf.data.TFRecordDataset(files))
    for record, (image_id, height, width, labels, boxes) in zip(records, expected, strict=True):
        found = tf.io.parse_single_example(record, spec)
        image = tf.io.decode_jpeg(found["image/encoded"])
        lists = [tf.sparse.to_dense(found[f"image/object/bbox/{edge}"]).numpy().tolist() for edge in EDGES]
        theirs = [[x0 * width, y0 * height, x1 * width, y1 * height] for x0, y0, x1, y1 in zip(*lists, strict=True)]
        pairs = [(a, b) for ours, own in zip(boxes, theirs, strict=True) for a, b in zip(ours, own, strict=True)]
        worst_px = max([worst_px, *(abs(a - b) for a, b in pairs)])
        same = found["image/source_id"].numpy().decode() == image_id
        same = same and tf.sparse.to_dense(found["image/object/class/label"]).numpy().tolist() == labels
        if not same or tuple(image.shape[:2]) != (height, width) or worst_px > MOST_PX:
            raise SystemExit(f"record of {image_id} is read otherwise")
        num_boxes += len(boxes)
    print(json.dumps({"tensorflow": tf.__version__, "records": len(records), "boxes": num_boxes, "worst_px": worst_px}))


if __name__ == "__main__":
    {"tell": tell, "read": read}[sys.argv[1]](Path(sys.argv[2]))
