"""TensorFlow reads the TFRecords that Reconv writes, and its SSD backbone computes the features that ours does.

    python -m venv tf && tf/bin/pip install tensorflow-cpu
    TENSORFLOW_PYTHON=tf/bin/python make external

TENSORFLOW_PYTHON defaults to the interpreter of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from reconv.checkpoint.interop.tensorflow import read_tensorflow
from reconv.checkpoint.interop.tensorflow_names import to_resnet
from reconv.checkpoint.load_weights import load_weights
from reconv.data.readers.shards.tfrecord_format import encode_example, write_records
from reconv.models import build_model
from reconv.models.ssd import SSD

READER = Path(__file__).with_name("tensorflow_reader.py")
BACKBONE = Path(__file__).with_name("tensorflow_backbone.py")
PYTHON = Path(os.environ.get("TENSORFLOW_PYTHON", sys.executable)).absolute()


@pytest.fixture(autouse=True, scope="module")
def _tensorflow() -> None:
    if subprocess.run([PYTHON, "-c", "import tensorflow"], capture_output=True).returncode:
        pytest.skip(f"{PYTHON} has no tensorflow: pip install tensorflow-cpu, or set TENSORFLOW_PYTHON")


def read_by_tensorflow(*files: Path) -> list[dict[str, Any]]:
    done = subprocess.run([PYTHON, READER, *files], stdout=subprocess.PIPE, check=True)
    records: list[dict[str, Any]] = json.loads(done.stdout)
    return records


def features(number: int) -> dict[str, list[Any]]:
    """Features of every kind and awkward size: both signs of int64, empty lists, images of up to 270 kB."""
    return {
        "image/encoded": [bytes((number * 7 + i) % 256 for i in range(number * number * 3))],
        "image/class/label": [number % 1000 + 1],
        "image/class/text": [f"class {number} é".encode()],
        "ints": [-1, 0, 127, 128, 2**63 - 1, -(2**63), number],
        "floats": [0.5 * box for box in range(number % 4)] or [-1.0],
        "empty": [],
    }


def test_tensorflow_reads_every_feature_as_written(tmp_path: Path) -> None:
    file = tmp_path / "train-00000-of-00001"
    assert write_records(file, (encode_example(features(n)) for n in range(300))) == 300
    records = read_by_tensorflow(file)
    assert len(records) == 300
    for number, record in enumerate(records):
        for name, expected in features(number).items():
            assert record[name] == [v.hex() if isinstance(v, bytes) else v for v in expected], f"record {number}"


def write_coco(root: Path, num_images: int) -> dict[str, list[tuple[int, list[float]]]]:
    """A small COCO folder; its boxes by image id as (category, xyxy)."""
    random = np.random.default_rng(0)
    for folder in ("annotations", "train2017", "val2017"):
        (root / folder).mkdir(parents=True)
    images, annotations, boxes = [], [], {}
    for number in range(num_images):
        width, height = (int(side) for side in random.integers(60, 200, 2))
        name, image_id = f"{number:012}.jpg", 3 * number + 1
        Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).save(root / "train2017" / name)
        images.append({"id": image_id, "file_name": name, "width": width, "height": height})
        own = boxes[str(image_id)] = []
        for category in random.integers(1, 4, random.integers(1, 6)).tolist():
            x, y = random.uniform(0, 0.5, 2) * (width, height)
            w, h = random.uniform(0.1, 0.5, 2) * (width, height)
            bbox, more = [x, y, w, h], {"id": len(annotations) + 1, "area": w * h, "iscrowd": 0}
            annotations.append({"image_id": image_id, "category_id": category, "bbox": bbox, **more})
            own.append((category, [x, y, x + w, y + h]))
    categories = [{"id": number, "name": f"class {number}"} for number in (1, 2, 3)]
    for split in ("train", "val"):
        (root / f"annotations/instances_{split}2017.json").write_text(
            json.dumps({"images": images, "annotations": annotations, "categories": categories})
        )
    for file in (root / "train2017").iterdir():
        (root / "val2017" / file.name).hardlink_to(file)
    return boxes


def test_tensorflow_reads_converted_boxes(tmp_path: Path) -> None:
    expected = write_coco(tmp_path / "coco", 40)
    command = ["data", "convert", tmp_path / "coco", tmp_path / "records", "--to", "tfrecord", "--shards", "4,2"]
    subprocess.run([sys.executable, "-m", "reconv", *command], check=True)
    files = sorted((tmp_path / "records").glob("train-*"))
    records = read_by_tensorflow(*files)
    assert len(files) == 4
    assert len(records) == len(expected)
    for record in records:
        height, width = record["decoded size"]
        edges = [record[f"image/object/bbox/{edge}"] for edge in ("xmin", "ymin", "xmax", "ymax")]
        found = np.array(edges).T * [width, height, width, height]
        own = expected[bytes.fromhex(record["image/source_id"][0]).decode()]
        assert record["image/object/class/label"] == [category for category, _ in own]
        np.testing.assert_allclose(found, [box for _, box in own], atol=1e-3)


@pytest.mark.parametrize(
    ("theirs", "ours", "is_equal"),
    [("fixed", "torch", True), ("same", "torch", False), ("same", "same", True)],
)
def test_an_ssd_that_pads_explicitly_needs_no_option(theirs: str, ours: str, is_equal: bool, tmp_path: Path) -> None:
    subprocess.run([PYTHON, BACKBONE, tmp_path, theirs], check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    model = build_model("ssd_resnet34", num_classes=81, padding=ours).eval()
    assert isinstance(model, SSD)
    report = load_weights(model, to_resnet(read_tensorflow(tmp_path / "resnet34.ckpt")), strict=False)
    assert not report.unexpected and not report.reshaped
    assert not any(name.startswith(("conv1", "bn1", "layer")) for name in report.missing)
    stored = np.load(tmp_path / "features.npz")
    with torch.no_grad():
        features = model.features(torch.from_numpy(stored["image"]).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    difference = np.abs(features.numpy() - stored["features"]).max() / np.abs(stored["features"]).max()
    assert (difference < 1e-5) if is_equal else (difference > 0.05)
