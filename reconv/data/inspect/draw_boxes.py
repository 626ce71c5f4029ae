"""Boxes with names drawn on an image.

Owns colours, lines and letters. Refuses to know what the boxes mean. Invariant: the image keeps its size, the one
given is not changed, and a box or a name that reaches beyond an edge stays in sight.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]

GOOD: Colour = (0, 158, 115)  # to be told apart by people who confuse red and green too
BAD: Colour = (213, 94, 0)
INDIFFERENT: Colour = (120, 120, 120)
_GOLDEN = 0.618034  # of a turn of the colour wheel: neighbours in a list of classes differ most
_SIDE_PER_LINE_PX = 300
_SIDE_PER_LETTER_PX = 40


@dataclass(frozen=True, slots=True)
class DrawnBox:
    """A box in pixels of the image, and what is written beside it."""

    box_xyxy: tuple[float, float, float, float]
    text: str
    colour: Colour


def class_colour(label: int) -> Colour:
    """A colour for a class, the same in every image."""
    red, green, blue = colorsys.hsv_to_rgb(label * _GOLDEN % 1.0, 0.85, 0.85)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_boxes(picture: Image.Image, boxes: Sequence[DrawnBox]) -> Image.Image:
    """A copy of the image in colour, with boxes on it, the first on top."""
    drawn = picture.convert("RGB")
    pen = ImageDraw.Draw(drawn)
    side_px = max(drawn.size)
    line_px = max(2, round(side_px / _SIDE_PER_LINE_PX))
    font = ImageFont.load_default(max(12, side_px / _SIDE_PER_LETTER_PX))
    for box in reversed(boxes):
        pen.rectangle(_inside(box.box_xyxy, drawn.size), outline=box.colour, width=line_px)
    for box in reversed(boxes):
        if box.text:
            _write(pen, drawn.size, box, font)
    return drawn


def _inside(box_xyxy: tuple[float, float, float, float], size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The corners moved into the image, in order."""
    xs = sorted(min(max(x, 0.0), size[0] - 1.0) for x in box_xyxy[::2])
    ys = sorted(min(max(y, 0.0), size[1] - 1.0) for y in box_xyxy[1::2])
    return xs[0], ys[0], xs[1], ys[1]


def _write(
    pen: ImageDraw.ImageDraw,
    size: tuple[int, int],
    box: DrawnBox,
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
) -> None:
    """The text above the box, or inside it where there is no room above."""
    x, y, _, _ = _inside(box.box_xyxy, size)
    left, top, right, bottom = pen.textbbox((0, 0), box.text, font=font)
    width, height = right - left + 4, bottom - top + 4
    x = max(0.0, min(x, size[0] - width))
    y = y - height if y >= height else y
    pen.rectangle((x, y, x + width, y + height), fill=box.colour)
    pen.text((x + 2 - left, y + 2 - top), box.text, fill=_ink(box.colour), font=font)


def _ink(paper: Colour) -> Colour:
    """Black or white, whichever reads better on the colour."""
    light = 0.299 * paper[0] + 0.587 * paper[1] + 0.114 * paper[2]
    return (0, 0, 0) if light > 140 else (255, 255, 255)
