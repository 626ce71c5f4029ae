"""Copies are found after re-encoding, resizing and cropping, and different pictures are not copies."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from review_examples import picture

from reconv.data.dataset import Dataset, Sample
from reconv.data.readers.arrays import ArrayDataset
from reconv.review.copies import find_copies, make_thumbnails
from reconv.review.neighbors import nearest_neighbors

NUM_PICTURES = 12


class Encoded:
    """A dataset of encoded images."""

    kind, class_names, origin = "encoded", ("a",), "test"

    def __init__(self, files: list[bytes]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.files[index], 0, str(index))

    def fingerprint(self) -> str:
        return ""


def encoded(image: Image.Image, kind: str = "PNG", **options: int) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def changed(image: Image.Image, how: str) -> Image.Image:
    width = image.width
    crop = {"crop": (0.1, 0.15, 0.9, 0.95), "squeezed": (0.2, 0.15, 0.95, 0.9)}.get(how)
    if crop is not None:
        image = image.crop(tuple(round(part * width) for part in crop))  # type: ignore[arg-type]
    return image.resize((130, 88)) if how == "squeezed" else image.resize((120, 120)) if how == "resize" else image


def copies_of(files: list[bytes], features: np.ndarray | None = None) -> dict[tuple[int, int], float]:
    dataset: Dataset = Encoded(files)
    thumbnails = make_thumbnails([(dataset, index) for index in range(len(files))], 2)
    return {(copy.first, copy.second): copy.score for copy in find_copies(thumbnails, features)}


@pytest.mark.parametrize("how", ["reencode", "resize", "crop", "squeezed"])
def test_a_changed_copy_is_found_and_nothing_else(how: str) -> None:
    pictures = [picture(seed, side=240) for seed in range(NUM_PICTURES)]
    copy = encoded(changed(pictures[3], how), "JPEG", quality=60)
    found = copies_of([*(encoded(image) for image in pictures), copy])
    assert list(found) == [(3, NUM_PICTURES)]  # the larger one first
    assert 0.9 <= found[3, NUM_PICTURES] < 1


def test_identical_pixels_score_one_and_flat_or_unreadable_images_are_no_copies() -> None:
    flat = [encoded(Image.new("RGB", (60, 60), color)) for color in ((10, 10, 10), (12, 12, 12))]
    picture_file = encoded(picture(1))
    found = copies_of([picture_file, b"no image", *flat, picture_file, b"no image"])
    assert found == {(0, 4): 1.0}


def test_tiny_images_are_copies_only_if_their_pixels_are_equal() -> None:
    images = np.zeros((3, 1, 8, 8), np.uint8)
    images[:, 0] = np.arange(64).reshape(8, 8) * 3
    images[2, 0, 0, 0] = 9
    dataset = ArrayDataset("digits", images, np.zeros(3, np.int64), ("0",), "test")
    thumbnails = make_thumbnails([(dataset, index) for index in range(3)], 1)
    assert [(copy.first, copy.second) for copy in find_copies(thumbnails, None)] == [(0, 1)]


def test_neighbors_equal_brute_force_in_blocks() -> None:
    features = np.random.default_rng(0).normal(size=(2500, 8)).astype(np.float32)  # more than a block
    indices, similarities = nearest_neighbors(features, 4)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    for row in (0, 2047, 2048, 2499):
        expected = unit @ unit[row]
        expected[row] = -2
        assert indices[row].tolist() == np.argsort(-expected)[:4].tolist()
        assert similarities[row] == pytest.approx(np.sort(expected)[::-1][:4], abs=1e-5)
    assert nearest_neighbors(features[:3], 10)[0].shape == (3, 2)
    assert nearest_neighbors(features[:1], 10)[0].shape == (1, 0)
