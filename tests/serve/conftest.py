"""A trained classifier, images for it, and one server that the tests of a module share."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from server_process import ServerProcess

import reconv

SETTINGS = {"length": "3ep", "ema.decay": "0.9", "save.keep_last": "3", "save.keep_best": "false"}


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a classifier with EMA weights and checkpoints at the steps 22, 44 and 66."""
    overrides = [(field, value, "--set") for field, value in SETTINGS.items()]
    return reconv.train(
        "quickstart", out=tmp_path_factory.mktemp("runs") / "quickstart" / "1", overrides=overrides
    ).folder


@pytest.fixture(scope="session")
def images() -> list[bytes]:
    """Encoded images of different sizes."""
    return [_encode(seed) for seed in range(8)]


@pytest.fixture(scope="module")
def server(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the classifier."""
    with ServerProcess(tmp_path_factory.mktemp("server") / "log.txt", classifier) as process:
        yield process


def _encode(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (20 + seed, 30, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
