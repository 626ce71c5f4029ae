"""The grid of images for the report."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from reconv.data.inspect.contact_sheet import grid


def test_a_grid_shows_every_image_enlarged_in_row_order() -> None:
    images = torch.arange(5 * 3 * 8 * 8).reshape(5, 3, 8, 8).to(torch.uint8)
    sheet = np.asarray(Image.open(io.BytesIO(grid(images, columns=3))))
    assert sheet.shape == (64 + 2 + 64, 3 * 64 + 2 * 2, 3)
    for number in range(5):
        top, left = number // 3 * 66, number % 3 * 66
        tile = sheet[top : top + 64 : 8, left : left + 64 : 8]
        assert np.array_equal(tile.transpose(2, 0, 1), images[number].numpy())
    assert (sheet[66:, 132:] == 255).all()


def test_large_and_gray_images_keep_their_size() -> None:
    assert Image.open(io.BytesIO(grid(torch.zeros(1, 1, 100, 80, dtype=torch.uint8)))).size == (80, 100)
    with pytest.raises(ValueError, match="at least one"):
        grid(torch.zeros(0, 3, 8, 8, dtype=torch.uint8))
