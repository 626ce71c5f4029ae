"""Print what TensorFlow reads from TFRecord files, as JSON: the features of each record, and the size of its image.

    TENSORFLOW_PYTHON tensorflow_reader.py FILE...

Needs tensorflow and nothing of Reconv: the two need not share an environment.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tensorflow as tf


def read(file: str) -> list[dict[str, Any]]:
    records = []
    for record in tf.data.TFRecordDataset(file):
        found = {}
        for name, feature in tf.train.Example.FromString(record.numpy()).features.feature.items():
            values = list(getattr(feature, feature.WhichOneof("kind")).value)
            found[name] = [value.hex() if isinstance(value, bytes) else value for value in values]
        if "image/format" in found:
            image = tf.io.decode_jpeg(bytes.fromhex(found["image/encoded"][0]))
            found["decoded size"] = [int(side) for side in image.shape[:2]]
        records.append(found)
    return records


print(json.dumps([record for file in sys.argv[1:] for record in read(file)]))
