"""The 1,797 handwritten digits of UCI, shipped with the package (see digits.LICENSE.txt).

The file holds ink counts 0 to 16 on an 8 x 8 grid; pixels are those counts times 255/16, rounded. Every fifth sample
(index % 5 == 0) is for validation: 360 samples; the other 1,437 are for training.
"""

from __future__ import annotations

import io
from importlib import resources

import numpy as np

from reconv.data.dataset import Split
from reconv.data.readers.arrays import ArrayDataset

_INK_MAX = 16


def open_digits(split: Split) -> ArrayDataset:
    """The digits of one split, as gray images of 8 x 8 pixels."""
    packed = resources.files("reconv.data.readers").joinpath("digits.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as file:
        ink, targets = file["ink"], file["targets"]
    pixels = ((ink.astype(np.uint16) * 255 + _INK_MAX // 2) // _INK_MAX).astype(np.uint8)
    is_val = np.arange(len(targets)) % 5 == 0
    chosen = is_val if split == "val" else ~is_val
    return ArrayDataset(
        "digits",
        pixels[chosen][:, None],
        targets[chosen].astype(np.int64),
        tuple(str(digit) for digit in range(10)),
        f"digits: handwritten digits of UCI, shipped with reconv ({split}: {int(chosen.sum())} samples)",
    )
