"""The files that an export is checked with are the original ones, whatever the data is stored in."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from export_examples import example_recipe, write_photographs, write_weights
from PIL import Image

from reconv.core.errors import DataError
from reconv.exporters.gate.images import GateImages, collect_images
from reconv.inference.predictor import Predictor

CLASSES = ("ant", "bee")


@pytest.fixture
def predictor(tmp_path: Path) -> Predictor:
    weights = write_weights(tmp_path / "weights.safetensors", example_recipe("resnet8_cifar"), CLASSES)
    return Predictor.load(weights, device="cpu")


def write_tree(root: Path) -> dict[str, bytes]:
    """Image files of two classes; the name of each and its content."""
    contents = {}
    for number, class_name in enumerate(CLASSES):
        (root / "val").mkdir(parents=True, exist_ok=True)
        for file in write_photographs(root / "val" / class_name, 2 + number).iterdir():
            contents[str(file)] = file.read_bytes()
    return contents


def write_tar(tree: dict[str, bytes], root: Path) -> Path:
    root.mkdir()
    (root / "classes.txt").write_text("\n".join(CLASSES))
    (root / "val").mkdir()
    with tarfile.open(root / "val" / "0000.tar", "w") as tar:
        for number, (name, content) in enumerate(sorted(tree.items())):
            label = str(CLASSES.index(Path(name).parent.name)).encode()
            for ending, data in (("jpg", content), ("cls", label)):
                info = tarfile.TarInfo(f"{number:06}.{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return root


def collect(predictor: Predictor, folder: Path, **options: object) -> GateImages:
    folder.mkdir()
    given = {"images": None, "data": None, "samples": None, **options}
    return collect_images(predictor, **given, folder=folder)  # type: ignore[arg-type]


def test_the_files_of_folders_are_linked_and_those_of_shards_are_written(predictor: Predictor, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree")
    sources = {"tree": tmp_path / "tree", "tar": write_tar(tree, tmp_path / "tar")}
    for name, data in sources.items():
        found = collect(predictor, tmp_path / f"files-{name}", data=data)
        images = found.images[: -found.num_probes]
        assert [image.path.is_symlink() for image in images] == [name == "tree"] * 5
        assert [image.path.read_bytes() for image in images] == [tree[file] for file in sorted(tree)]
        assert [image.target for image in images] == [0, 0, 1, 1, 1]
        assert found.dataset is not None and found.num_probes == 11


def test_pixels_become_a_lossless_file(classifier: Path, tmp_path: Path) -> None:
    found = collect(Predictor.load(classifier, device="cpu"), tmp_path / "files", samples=7)
    assert found.dataset is not None and len(found.dataset) == 7
    for index, image in enumerate(found.images[:7]):
        sample = found.dataset[index]
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(image.path.read_bytes()))), sample.data[:, :, 0])
        assert image.target == sample.target


def test_images_of_a_folder_have_no_target_and_are_limited(predictor: Predictor, tmp_path: Path) -> None:
    photos = write_photographs(tmp_path / "photos", 4)
    found = collect(predictor, tmp_path / "files", images=photos, samples=3)
    assert [image.target for image in found.images[:-11]] == [None] * 3
    assert [image.path.resolve() for image in found.images[:-11]] == sorted(photos.iterdir())[:3]
    with pytest.raises(DataError, match="no image in this folder"):
        (tmp_path / "empty").mkdir()
        collect(predictor, tmp_path / "files-2", images=tmp_path / "empty")


def test_test_images_have_all_color_modes_and_an_orientation(predictor: Predictor, tmp_path: Path) -> None:
    found = collect(predictor, tmp_path / "files", images=write_photographs(tmp_path / "photos", 1))
    opened = [Image.open(io.BytesIO(image.path.read_bytes())) for image in found.images[1:]]
    assert {image.mode for image in opened} == {"RGB", "L", "I;16", "RGBA", "P", "1", "CMYK"}
    assert [image.getexif().get(0x0112) for image in opened].count(6) == 1
    sides = [side for image in opened for side in image.size]
    assert min(sides) == 1 and max(sides) > 64
