"""TensorFlow reads what Reconv writes. Two halves, since the two packages need not share an environment.

    python tools/prove_tfrecord.py write DIR          # where reconv is installed
    tf/bin/python tools/prove_tfrecord.py read DIR     # where tensorflow is

The second half ends with an error at the first feature that is not as it was written. What it printed, and when, is in
docs/data.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NUM_RECORDS = 300


def features(number: int) -> dict[str, list[Any]]:
    """Features of every kind and awkward size: both signs of int64, empty lists, records around the CRC's row size."""
    return {
        "image/encoded": [bytes((number * 7 + i) % 256 for i in range(number * number * 3))],
        "image/class/label": [number % 1000 + 1],
        "image/class/text": [f"class {number} é".encode()],
        "ints": [-1, 0, 127, 128, 2**63 - 1, -(2**63), number],
        "floats": [0.5 * box for box in range(number % 4)] or [-1.0],
        "empty": [],
    }


def write(folder: Path) -> None:
    from reconv.data.readers.tfrecord_format import encode_example, write_records

    folder.mkdir(parents=True, exist_ok=True)
    count = write_records(folder / "train-00000-of-00001", (encode_example(features(n)) for n in range(NUM_RECORDS)))
    print(f"wrote {count} records, {(folder / 'train-00000-of-00001').stat().st_size} bytes")


def read(folder: Path) -> None:
    import tensorflow as tf

    count = 0
    for count, record in enumerate(tf.data.TFRecordDataset(str(folder / "train-00000-of-00001")), 1):
        found = tf.train.Example.FromString(record.numpy()).features.feature
        for name, expected in features(count - 1).items():
            feature = found[name]
            kind = feature.WhichOneof("kind")
            values = list(getattr(feature, kind).value)
            if values != expected:
                raise SystemExit(f"record {count - 1}: {name} is {values!r:.200}, written as {expected!r:.200}")
    if count != NUM_RECORDS:
        raise SystemExit(f"{count} of {NUM_RECORDS} records")
    print(json.dumps({"tensorflow": tf.__version__, "records": count, "equal": True}))


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
