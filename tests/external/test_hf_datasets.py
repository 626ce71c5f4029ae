"""Reconv reads what the real Hugging Face package saved. Needs: pip install 'reconv[hf]'"""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from reconv.data.readers.detect import detect
from reconv.data.readers.hf import HFDataset

COUNTS = {"train": 3000, "validation": 100}
NAMES = ["ant", "bee", "cat"]


def image_bytes(number: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG" if number % 2 else "JPEG")
    return file.getvalue()


def save(root: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install 'reconv[hf]'")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    splits = {
        name: datasets.Dataset.from_dict(
            {
                "image": [{"bytes": image_bytes(number), "path": None} for number in range(count)],
                "label": [number % len(NAMES) for number in range(count)],
            },
            features=features,
        )
        for name, count in COUNTS.items()
    }
    datasets.DatasetDict(splits).save_to_disk(str(root), num_shards={"train": 3, "validation": 1})


def test_a_saved_dataset_is_read_as_it_was_saved(tmp_path: Path) -> None:
    save(tmp_path / "saved")
    found = detect(tmp_path / "saved")
    for split, name in (("train", "train"), ("val", "validation")):
        dataset = HFDataset(found.path, split, found.why)  # type: ignore[arg-type]
        assert len(dataset) == COUNTS[name]
        assert list(dataset.class_names) == NAMES
        with ThreadPoolExecutor(8) as pool:  # the loader reads by many threads at once
            for number, sample in enumerate(pool.map(dataset.__getitem__, range(len(dataset)))):
                assert sample.data == image_bytes(number), number
                assert sample.target == number % len(NAMES)
        assert HFDataset(found.path, split).fingerprint() == dataset.fingerprint()  # type: ignore[arg-type]
