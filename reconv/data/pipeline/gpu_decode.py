"""Rows that a device decodes: which they are, and files handed over in the place of their pixels.

Owns the choice by position and the form of a handed row. Refuses to know devices and who decodes. Invariant: which rows
are handed over is a function of position, share and the file's own bytes; never of time, workers or ranks. What is not
a plain JPEG file in colour, or is larger than the row it would lie in, is made here as ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reconv.data.dataset import I64, U8, Dataset
from reconv.data.decode.decode import MAX_PIXELS, eval_box
from reconv.data.decode.jpeg_header import head
from reconv.data.pipeline.sample_pipeline import Column, Decode, Draws, Rows, labelled
from reconv.data.transforms.random_params import resized_box
from reconv.kernels.crop.ops import CropBox
from reconv.recipe.data_fields import AugmentConfig, PreprocessConfig

HANDED = "handed"  # float64 [n, 5]: bytes of the file that lies in the row (0: its pixels do), and the box to resize


def is_of_device(positions: I64, share: float) -> npt.NDArray[np.bool_]:
    """Whether each position is the device's: evenly spread, so that all batches have the same number of them."""
    before = np.floor(positions * share)
    own: npt.NDArray[np.bool_] = np.floor((positions + 1) * share) > before
    return own


@dataclass(frozen=True, slots=True)
class HandoverLayout:
    """How boxes of handed images are resized: see `kernels/crop`."""

    antialias: bool
    is_cut: bool  # evaluation looks around its box, as if the whole image had been resized


class HandOver:
    """Samples decoded and cropped one by one, but for a share of them that is handed over encoded.

    `augment` is None for evaluation.
    """

    def __init__(
        self, source: Dataset, preprocess: PreprocessConfig, augment: AugmentConfig | None, share: float
    ) -> None:
        self._source = source
        self._preprocess = preprocess
        self._augment = augment
        self._share = share
        self._decode = Decode(source, preprocess, augment)
        self.form = HandoverLayout(True, False) if augment is None else HandoverLayout(augment.antialias, True)
        self.rows_per_task = self._decode.rows_per_task
        self.columns = (*self._decode.columns, Column(HANDED, (5,), np.float64))

    def draw(self, seed: int, positions: I64) -> Draws:
        """Crops, and in the last column whose they are."""
        drawn = self._decode.draw(seed, positions)
        return np.concatenate([drawn, is_of_device(positions, self._share)[:, None]], axis=1)

    def __call__(self, indices: I64, draws: Draws | None, rows: Rows) -> None:
        """Decode each row into its place, or lay its file there."""
        assert draws is not None  # the last column of them says whose a row is
        rows[HANDED][:] = 0
        for row, index in enumerate(indices):
            sample, image, drawn = labelled(self._source, int(index)), rows["images"][row], draws[row, :-1]
            rows["targets"][row] = sample.target
            box = self._box(sample.data, drawn, image.nbytes) if draws[row, -1] else None
            if box is None:
                self._decode.fill(sample, drawn, image)
            else:
                rows[HANDED][row] = (len(sample.data), *box)
                image.reshape(-1)[: len(sample.data)] = np.frombuffer(sample.data, np.uint8)

    def _box(self, data: bytes | U8, draws: Draws, room_bytes: int) -> CropBox | None:
        """The part of the image that the row is to show; None: the file is not for the device."""
        if not isinstance(data, bytes) or len(data) > room_bytes:
            return None
        found = head(data)
        if found is None or found.num_components != 3 or found.width * found.height > MAX_PIXELS:
            return None
        if self._augment is None:
            return eval_box(found.width, found.height, self._preprocess)
        return resized_box(found.width, found.height, draws, self._augment)


def keep_here(draws: Draws, row: int) -> None:
    """Have a row made by the host from now on, whoever was to make it."""
    draws[row, -1] = 0
