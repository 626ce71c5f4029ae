"""Trained models, images for them, and one server that the tests share."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from detector_example import write_recipe
from interpreted_kernels import use_torch_instead
from PIL import Image
from server_process import ServerProcess

import reconv

SETTINGS = {"length": "3ep", "ema.decay": "0.9", "save.keep_last": "3", "save.keep_best": "false"}
MULTILABEL = """\
name: tiny-multilabel
task: multilabel
length: 4step
model: {name: resnet8_cifar}
data: {source: csv, num_workers: 0, preprocess: {size: 8, resize: null}}
augment: {crop: none}
batch: {size: 4}
schedule: {lr: 0.01}
engine: {num_threads: 1}
"""


@pytest.fixture(autouse=True)
def kernels_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch_instead(monkeypatch)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a classifier with EMA weights and checkpoints at the steps 22, 44 and 66."""
    overrides = [(field, value, "--set") for field, value in SETTINGS.items()]
    folder = tmp_path_factory.mktemp("runs") / "quickstart" / "1"
    return reconv.train("quickstart", out=folder, overrides=overrides).folder


@pytest.fixture(scope="session")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a small detector."""
    folder = tmp_path_factory.mktemp("detector")
    return reconv.train(write_recipe(folder), out=folder / "run").folder


@pytest.fixture(scope="session")
def multilabel(tmp_path_factory: pytest.TempPathFactory, images: list[bytes]) -> Path:
    """A finished run of a small model with several labels per image."""
    folder = tmp_path_factory.mktemp("multilabel")
    (folder / "data").mkdir()
    lines = ["file,cat,dog,emu,split"]
    for number, image in enumerate(images):
        (folder / "data" / f"{number}.png").write_bytes(image)
        labels = ",".join(str(number >> bit & 1) for bit in range(3))
        lines.append(f"{number}.png,{labels},{'val' if number % 4 == 3 else 'train'}")
    (folder / "data" / "labels.csv").write_text("\n".join(lines) + "\n")
    (folder / "recipe.yaml").write_text(MULTILABEL)
    return reconv.train(folder / "recipe.yaml", data=folder / "data", out=folder / "run").folder


@pytest.fixture(scope="session")
def images() -> list[bytes]:
    """Encoded images of different sizes."""
    return [encode(seed) for seed in range(8)]


@pytest.fixture(scope="session")
def server(
    classifier: Path, detector: Path, multilabel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of three models; the first is the classifier."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with ServerProcess(log, classifier, f"boxes={detector}", f"labels={multilabel}", "--backend", "eager") as process:
        yield process


def encode(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (20 + seed, 30, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
