"""The real Hugging Face package saves a data set, and Reconv reads it. Run by hand, not by the tests.

    pip install 'reconv[hf]' && python tools/prove_hf.py

Ends with an error at the first sample that is not as it was saved. What it printed, and when, is in docs/data.md.
"""

from __future__ import annotations

import io
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
from PIL import Image

from reconv.data.dataset import Dataset
from reconv.data.readers.detect import detect
from reconv.data.readers.hf import HFDataset

COUNTS = {"train": 3000, "validation": 100}
NAMES = ["ant", "bee", "cat"]


def picture(number: int) -> bytes:
    """A small image that depends on its number."""
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG" if number % 2 else "JPEG")
    return file.getvalue()


def save(root: Path) -> None:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    splits = {
        name: datasets.Dataset.from_dict(
            {
                "image": [{"bytes": picture(number), "path": None} for number in range(count)],
                "label": [number % len(NAMES) for number in range(count)],
            },
            features=features,
        )
        for name, count in COUNTS.items()
    }
    datasets.DatasetDict(splits).save_to_disk(str(root), num_shards={"train": 3, "validation": 1})


def check(source: Dataset, count: int) -> None:
    if len(source) != count or list(source.class_names) != NAMES:
        raise SystemExit(f"{len(source)} samples of {source.class_names}")
    with ThreadPoolExecutor(8) as pool:  # read by many threads at once, as the loader does
        for number, sample in enumerate(pool.map(source.sample, range(count))):
            if sample.data != picture(number) or sample.target != number % len(NAMES):
                raise SystemExit(f"sample {number} is not as it was saved")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save(root)
        found = detect(root)
        for split, name in (("train", "train"), ("val", "validation")):
            source = HFDataset(found.path, split, found.why)  # type: ignore[arg-type]
            check(source, COUNTS[name])
            if HFDataset(found.path, split).fingerprint() != source.fingerprint():  # type: ignore[arg-type]
                raise SystemExit("the fingerprint changed")
            print(f"datasets {datasets.__version__}: {len(source)} samples of {name} equal; {found.kind}: {found.why}")


if __name__ == "__main__":
    main()
