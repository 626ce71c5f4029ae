"""Writes the TFRecords that the tests of the reader compare with. Run by hand, not by the tests.

    python -m venv tf && tf/bin/pip install tensorflow-cpu pillow      # written with 2.21.0
    tf/bin/python tools/make_tfrecord_fixture.py tests/data/fixtures/tfrecord

Both published layouts, with the published features: `folders/` has train/ and validation/, labels 1 to 5, synsets,
texts and box lists, and among its images a PNG under the name of a JPEG and a CMYK JPEG; `flat/` has all shards in
one folder, the label and the image alone. `expected.json` has for every record, in the order of the shards, its
label, its text and the sha256 of its image as TensorFlow's own reader gives them back.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
from PIL import Image

SYNSETS = ("n01440764", "n01443537", "n01484850", "n01491361", "n01494475")
TEXTS = ("tench, Tinca tinca", "goldfish", "great white shark", "tiger shark", "hammerhead")


def picture(number: int, form: str, mode: str = "RGB") -> bytes:
    """A small image of smooth colours."""
    down, across = np.mgrid[0 : 20 + number, 0 : 26 - number % 5]
    planes = [(down * (3 + band) + across * (7 - band) + 40 * number) % 256 for band in range(len(mode))]
    file = io.BytesIO()
    Image.fromarray(np.stack(planes, -1).astype(np.uint8), mode).save(file, form)
    return file.getvalue()


def bytes_feature(*values: bytes) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def ints(*values: int) -> tf.train.Feature:
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def floats(*values: float) -> tf.train.Feature:
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


def example(number: int, is_full: bool) -> bytes:
    """One record: every seventh image is a PNG, every fifth CMYK."""
    label = number % len(SYNSETS) + 1
    form = "PNG" if number % 7 == 3 else "JPEG"
    encoded = picture(number, form, "CMYK" if number % 5 == 4 and form == "JPEG" else "RGB")
    features = {"image/encoded": bytes_feature(encoded), "image/class/label": ints(label)}
    if is_full:
        num_boxes = number % 3
        features |= {
            "image/height": ints(20 + number),
            "image/width": ints(26 - number % 5),
            "image/colorspace": bytes_feature(b"RGB"),
            "image/channels": ints(3),
            "image/class/synset": bytes_feature(SYNSETS[label - 1].encode()),
            "image/class/text": bytes_feature(TEXTS[label - 1].encode()),
            "image/object/bbox/label": ints(*[label] * num_boxes),
            "image/format": bytes_feature(b"JPEG"),
            "image/filename": bytes_feature(f"{SYNSETS[label - 1]}_{number}.JPEG".encode()),
        }
        for offset, side in enumerate(("xmin", "xmax", "ymin", "ymax")):
            features[f"image/object/bbox/{side}"] = floats(*[0.125 * (offset + box) for box in range(num_boxes)])
    return bytes(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def write(folder: Path, split: str, numbers: list[int], num_shards: int, is_full: bool) -> list[dict[str, object]]:
    """Shards of a split, and what TensorFlow reads back from them."""
    folder.mkdir(parents=True, exist_ok=True)
    seen = []
    for shard in range(num_shards):
        path = str(folder / f"{split}-{shard:05}-of-{num_shards:05}")
        with tf.io.TFRecordWriter(path) as writer:
            for number in numbers[shard::num_shards]:
                writer.write(example(number, is_full))
        for record in tf.data.TFRecordDataset(path):
            feature = tf.train.Example.FromString(record.numpy()).features.feature
            text = feature["image/class/text"].bytes_list.value
            digest = hashlib.sha256(feature["image/encoded"].bytes_list.value[0]).hexdigest()
            boxes = list(feature["image/object/bbox/ymax"].float_list.value)
            label = feature["image/class/label"].int64_list.value[0]
            seen.append({"label": label, "text": text[0].decode() if text else "", "sha256": digest, "ymax": boxes})
    return seen


def main(root: Path) -> None:
    expected = {
        "tensorflow": tf.__version__,
        "folders": {
            "train": write(root / "folders" / "train", "train", list(range(13)), 3, True),
            "val": write(root / "folders" / "validation", "validation", list(range(13, 19)), 2, True),
        },
        "flat": {
            "train": write(root / "flat", "train", list(range(10)), 2, False),
            "val": write(root / "flat", "validation", list(range(10, 15)), 1, False),
        },
    }
    (root / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
