"""Boxes drawn on images."""

from __future__ import annotations

import numpy as np
from PIL import Image

from reconv.data.inspect.draw_boxes import BAD, GOOD, DrawnBox, class_color, draw_boxes


def _pixels(*boxes: DrawnBox, size: tuple[int, int] = (100, 80), mode: str = "RGB") -> np.ndarray:
    before = Image.new(mode, size)
    drawn = draw_boxes(before, boxes)
    assert before.getextrema() in ((0, 0), ((0, 0),) * 3)  # the image given is not changed
    assert (drawn.mode, drawn.size) == ("RGB", size)
    return np.asarray(drawn)


def test_a_box_is_drawn_where_it_is_and_nowhere_else() -> None:
    pixels = _pixels(DrawnBox((20, 30, 60, 70), "", GOOD))
    assert tuple(pixels[30, 40]) == tuple(pixels[70, 40]) == tuple(pixels[50, 20]) == tuple(pixels[50, 60]) == GOOD
    assert not pixels[32:69, 22:59].any()
    assert not pixels[:30].any() and not pixels[71:].any() and not pixels[:, :20].any() and not pixels[:, 61:].any()


def test_boxes_and_labels_are_clipped_to_the_image() -> None:
    pixels = _pixels(DrawnBox((-50, -20, 300, 200), "a", BAD))
    assert tuple(pixels[40, 0]) == tuple(pixels[40, 99]) == BAD
    named = _pixels(DrawnBox((95, 0, 99, 10), "a rather long name", BAD), size=(200, 80))
    assert (named.sum(axis=2) > 600).any()  # letters in white


def test_the_first_of_overlapping_boxes_is_on_top_and_gray_images_become_rgb() -> None:
    pixels = _pixels(DrawnBox((20, 30, 60, 70), "", GOOD), DrawnBox((20, 30, 60, 70), "", BAD), mode="L")
    assert tuple(pixels[30, 40]) == GOOD


def test_neighboring_classes_have_distinct_colors() -> None:
    colors = np.array([class_color(label) for label in range(81)])
    assert (np.abs(colors[1:] - colors[:-1]).sum(axis=1) > 60).all()
