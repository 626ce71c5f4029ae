"""Datasets in memory: their fingerprint."""

from __future__ import annotations

import numpy as np

from reconv.data.readers.arrays import ArrayDataset


def fingerprint(images: np.ndarray, target: int = 0) -> str:
    targets = np.array([0, 1, target], np.int64)
    return ArrayDataset("digits", images, targets, ("a", "b", "c"), "made by a test").fingerprint()


def test_a_fingerprint_changes_with_any_pixel_their_order_and_a_target() -> None:
    images = np.arange(3 * 64, dtype=np.uint8).reshape(3, 1, 8, 8)
    seen = {fingerprint(images), fingerprint(images[::-1]), fingerprint(images, target=2)}
    for at in range(0, images.size, 5):
        changed = images.copy()
        changed.flat[at] += 1
        seen.add(fingerprint(changed))
    assert len(seen) == 3 + len(range(0, images.size, 5))
    assert fingerprint(images.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2)) == fingerprint(images)


def test_a_fingerprint_is_that_of_earlier_versions() -> None:
    """A run whose data has another fingerprint cannot be resumed."""
    images = np.arange(3 * 64, dtype=np.uint8).reshape(3, 1, 8, 8)
    assert fingerprint(images) == "6b788f183b984afc0ca84ce5fc7f1a3d"
