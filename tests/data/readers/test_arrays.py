"""Datasets in memory: their fingerprint."""

from __future__ import annotations

import numpy as np
import pytest

from reconv.data.readers import arrays
from reconv.data.readers.arrays import ArrayDataset


def fingerprint(images: np.ndarray, target: int = 0) -> str:
    targets = np.array([0, 1, target], np.int64)
    return ArrayDataset("digits", images, targets, ("a", "b", "c"), "made by a test").fingerprint()


@pytest.mark.parametrize("chunk_bytes", [arrays._CHUNK_BYTES, 32, 7])  # all at once; two per image; no divisor
def test_a_fingerprint_changes_with_any_pixel_their_order_and_a_target(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "_CHUNK_BYTES", chunk_bytes)
    images = np.arange(3 * 64, dtype=np.uint8).reshape(3, 1, 8, 8)
    seen = {fingerprint(images), fingerprint(images[::-1]), fingerprint(images, target=2)}
    for at in range(0, images.size, 5):
        changed = images.copy()
        changed.flat[at] += 1
        seen.add(fingerprint(changed))
    assert len(seen) == 3 + len(range(0, images.size, 5))
    assert fingerprint(images.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2)) == fingerprint(images)
