"""PNG images for reports: a grid of images, or contact sheets with titles and captions."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

_GAP_PX = 2
_BACKGROUND = 255
_MARGIN_PX = 8
_LINE_PX = 14
_LETTER_PX = 6  # about the width of a letter of the default font
_TITLE = (0, 0, 0)
_CAPTION = (90, 90, 90)


@dataclass(frozen=True, slots=True)
class ContactSheet:
    """Images under one title, with a caption each if there are captions."""

    title: str
    tiles: Sequence[Image.Image]
    captions: Sequence[str] = ()


def grid(images: Tensor, columns: int | None = None, min_tile_px: int = 64) -> bytes:
    """PNG grid of uint8 images [n, 1 or 3, height, width]; small images are upscaled by an integer."""
    num_images, channels, height, width = images.shape
    if num_images == 0:
        raise ValueError("a grid needs at least one image")
    columns = columns or min(8, math.ceil(math.sqrt(num_images)))
    num_rows = -(-num_images // columns)
    scale = max(1, -(-min_tile_px // max(height, width)))
    pixels = images.detach().cpu().numpy().transpose(0, 2, 3, 1).repeat(scale, axis=1).repeat(scale, axis=2)
    tile_height, tile_width = height * scale, width * scale
    sheet = np.full(
        (num_rows * (tile_height + _GAP_PX) - _GAP_PX, columns * (tile_width + _GAP_PX) - _GAP_PX, channels),
        _BACKGROUND,
        np.uint8,
    )
    for number, tile in enumerate(pixels):
        top, left = (number // columns) * (tile_height + _GAP_PX), (number % columns) * (tile_width + _GAP_PX)
        sheet[top : top + tile_height, left : left + tile_width] = tile
    file = io.BytesIO()
    # Not optimize=True: of photographs it would take a second, while training waits.
    Image.fromarray(sheet[:, :, 0] if channels == 1 else sheet).save(file, "PNG", compress_level=3)
    return file.getvalue()


def contact_sheets(sheets: Sequence[ContactSheet], tile_px: int = 96, columns: int = 8) -> bytes:
    """PNG of sheets one below the other; images are fitted into squares, small ones upscaled by an integer."""
    caption_px = _LINE_PX if any(sheet.captions for sheet in sheets) else 0
    pitch_x, pitch_y = tile_px + _MARGIN_PX, tile_px + caption_px + _MARGIN_PX
    heights = [_LINE_PX + _MARGIN_PX + -(-len(sheet.tiles) // columns) * pitch_y for sheet in sheets]
    page = Image.new("RGB", (columns * pitch_x + _MARGIN_PX, sum(heights) + _MARGIN_PX), (_BACKGROUND,) * 3)
    pen, font = ImageDraw.Draw(page), ImageFont.load_default()
    top = _MARGIN_PX
    for sheet, height in zip(sheets, heights, strict=True):
        pen.text((_MARGIN_PX, top), _fit_text(sheet.title, columns * pitch_x), _TITLE, font)
        for number, tile in enumerate(sheet.tiles):
            left = _MARGIN_PX + number % columns * pitch_x
            down = top + _LINE_PX + _MARGIN_PX // 2 + number // columns * pitch_y
            page.paste(_fit(tile, tile_px), (left, down))
            if number < len(sheet.captions):
                pen.text((left, down + tile_px), _fit_text(sheet.captions[number], tile_px), _CAPTION, font)
        top += height
    file = io.BytesIO()
    page.save(file, "PNG", optimize=True)
    return file.getvalue()


def _fit(image: Image.Image, side_px: int) -> Image.Image:
    """The image centered in a gray square."""
    scale = side_px / max(image.size)
    if scale >= 1:
        size, how = (image.width * int(scale), image.height * int(scale)), Image.Resampling.NEAREST
    else:
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        how = Image.Resampling.BILINEAR
    square = Image.new("RGB", (side_px, side_px), (225, 225, 225))
    square.paste(image.convert("RGB").resize(size, how), ((side_px - size[0]) // 2, (side_px - size[1]) // 2))
    return square


def _fit_text(text: str, width_px: int) -> str:
    """The text cut to the width, in characters of the built-in font."""
    num_letters = max(1, width_px // _LETTER_PX)
    short = text if len(text) <= num_letters else text[: num_letters - 2] + ".."
    return short.encode("latin-1", "replace").decode("latin-1")
