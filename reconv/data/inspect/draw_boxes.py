"""Boxes with labels, drawn on a copy of an image."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

Color = tuple[int, int, int]

GOOD: Color = (0, 158, 115)  # distinguishable with red-green color blindness
BAD: Color = (213, 94, 0)
NEUTRAL: Color = (120, 120, 120)
_GOLDEN = 0.618034  # of the color wheel: classes next to each other get very different hues
_SIDE_PER_LINE_PX = 300
_SIDE_PER_LETTER_PX = 40
_MAX_BOXES = 500
_MAX_LETTERS = 60  # of a label


@dataclass(frozen=True, slots=True)
class DrawnBox:
    """A box in pixels, its label and its color."""

    box_xyxy: tuple[float, float, float, float]
    text: str
    color: Color


def class_color(label: int) -> Color:
    """The color of a class."""
    red, green, blue = colorsys.hsv_to_rgb(label * _GOLDEN % 1.0, 0.85, 0.85)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_boxes(image: Image.Image, boxes: Sequence[DrawnBox]) -> Image.Image:
    """An RGB copy of the image with the boxes drawn on it, the first one on top.

    Left out are boxes with a corner that is not a number, and those after the first few hundred.
    """
    boxes = [box for box in boxes[:_MAX_BOXES] if not any(map(math.isnan, box.box_xyxy))]
    image_copy = image.convert("RGB")
    pen = ImageDraw.Draw(image_copy)
    side_px = max(image_copy.size)
    line_px = max(2, round(side_px / _SIDE_PER_LINE_PX))
    font = ImageFont.load_default(max(12, side_px / _SIDE_PER_LETTER_PX))
    for box in reversed(boxes):
        pen.rectangle(_clip(box.box_xyxy, image_copy.size), outline=box.color, width=line_px)
    for box in reversed(boxes):
        if box.text:
            _draw_label(pen, image_copy.size, box, font)
    return image_copy


def draw_batch_boxes(image: Image.Image, boxes: Tensor, labels: Tensor, class_names: Sequence[str]) -> Image.Image:
    """An RGB copy of a batch's image with its boxes [M, 4] (xyxy, fractions); labels [M] are from 1, 0 is no box."""
    is_box = labels > 0
    scaled = (boxes[is_box].double() * torch.tensor([image.width, image.height] * 2)).tolist()
    drawn = [
        DrawnBox((left, top, right, bottom), class_names[label - 1], class_color(label - 1))
        for (left, top, right, bottom), label in zip(scaled, labels[is_box].tolist(), strict=True)
    ]
    return draw_boxes(image, drawn)


def _clip(box_xyxy: tuple[float, float, float, float], size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The corners in order, clipped to the image."""
    xs = sorted(min(max(x, 0.0), size[0] - 1.0) for x in box_xyxy[::2])
    ys = sorted(min(max(y, 0.0), size[1] - 1.0) for y in box_xyxy[1::2])
    return xs[0], ys[0], xs[1], ys[1]


def _draw_label(
    pen: ImageDraw.ImageDraw,
    size: tuple[int, int],
    box: DrawnBox,
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
) -> None:
    """Draw the label above the box, or inside it if there is no space above."""
    x, y, _, _ = _clip(box.box_xyxy, size)
    text = box.text[:_MAX_LETTERS]
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    width, height = right - left + 4, bottom - top + 4
    x = max(0.0, min(x, size[0] - width))
    y = y - height if y >= height else y
    pen.rectangle((x, y, x + width, y + height), fill=box.color)
    pen.text((x + 2 - left, y + 2 - top), text, fill=_text_color(box.color), font=font)


def _text_color(background: Color) -> Color:
    """Black or white, whichever has more contrast."""
    luminance = 0.299 * background[0] + 0.587 * background[1] + 0.114 * background[2]
    return (0, 0, 0) if luminance > 140 else (255, 255, 255)
