"""Small datasets on disk for the data tests."""

from __future__ import annotations

import pickle
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from data_examples import cifar_layout, write_image_tree
from detection_data import write_small_coco

from reconv.data.decode import native


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An image tree: 3 classes, 11 training and 5 validation images."""
    return write_image_tree(tmp_path / "tree")


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    """Three training images, one without a box, and two validation images."""
    return write_small_coco(tmp_path / "coco")


@pytest.fixture
def write_cifar() -> Callable[..., Path]:
    """Writes a small CIFAR of 7 samples a file, the same pixels in both forms."""

    def write(parent: Path, kind: str, form: str, per_file: int = 7) -> Path:
        layout = cifar_layout(kind, form)
        folder = parent / layout.folder
        folder.mkdir(parents=True)
        names = [f"class_{number}" for number in range(layout.num_classes)]
        for number, name in enumerate((*layout.train, *layout.val)):
            rng = np.random.default_rng(number)
            pixels = rng.integers(0, 256, (per_file, 3072), dtype=np.uint8)
            labels = rng.integers(0, layout.num_classes, per_file)
            if form == "binary":
                coarse = [labels[:, None] // 5] if kind == "cifar100" else []
                rows = np.concatenate([*coarse, labels[:, None], pixels], axis=1).astype(np.uint8)
                (folder / name).write_bytes(rows.tobytes())
            else:
                content = {b"data": pixels, layout.labels_key: labels.tolist(), b"batch_label": b"x"}
                (folder / name).write_bytes(pickle.dumps(content, protocol=2))
        if form == "binary":
            (folder / layout.names).write_text("\n".join(names) + "\n\n")
        else:
            key = b"label_names" if kind == "cifar10" else b"fine_label_names"
            (folder / layout.names).write_bytes(pickle.dumps({key: [name.encode() for name in names]}, protocol=2))
        return folder

    return write


@pytest.fixture(scope="session")
def decoder_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JPEG decoder, compiled from this source tree whatever is installed."""
    library = tmp_path_factory.mktemp("native") / "_jpeg.so"
    build = runpy.run_path(str(Path(__file__).resolve().parents[2] / "hatch_build.py"))
    problem = build["compile_library"](build["JPEG"], library)
    assert not problem, problem
    return library


@pytest.fixture(scope="module")
def compiled_decoder(decoder_library: Path) -> Iterator[None]:
    """Reconv with the decoder of `decoder_library`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "LIBRARY", decoder_library)
        native.problem.cache_clear()
        assert native.available(), native.problem()
        yield
    native.problem.cache_clear()
