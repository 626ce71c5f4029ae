"""Triton kernel that crops boxes of images of different sizes and resizes them into one batch.

A program computes a tile of pixels of one image in all three channels; weights are computed on the fly, so that only
pixels are read.

Shapes: table [images, 7] of int64: address, height, width, left, top, right, bottom; boxes [images, 4]; out [images, 3,
size, size] uint8.

Hazards: images are addressed by raw pointers: the caller keeps them alive until the kernel has run.
"""

import triton
import triton.language as tl


@triton.jit
def _weight(at, length, center, narrowing):
    """Weights of the pixels at `at` along a side of a box; zero outside it."""
    far = tl.abs(at.to(tl.float32) + 0.5 - center) * narrowing
    return tl.where((at >= 0) & (at < length), tl.maximum(1.0 - far, 0.0), 0.0)


@triton.jit(do_not_specialize=["size", "tiles_across"])
def crop(table, boxes, out, size, tiles_across, ANTIALIAS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):
    """A tile of `TALL` x `WIDE` pixels of an image.

    The table has each image's address and sides and its visible part; boxes are relative to that part's corner.
    """
    row = tl.program_id(1)
    entry = table + row * 7
    image = tl.load(entry).to(tl.pointer_type(tl.uint8))
    height, width = tl.load(entry + 1).to(tl.int32), tl.load(entry + 2).to(tl.int32)
    left, top = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
    wide, tall = tl.load(entry + 5).to(tl.int32) - left, tl.load(entry + 6).to(tl.int32) - top
    box_left, box_top = tl.load(boxes + row * 4), tl.load(boxes + row * 4 + 1)
    across = (tl.load(boxes + row * 4 + 2) - box_left) / size
    down = (tl.load(boxes + row * 4 + 3) - box_top) / size
    stretch_x, stretch_y = across * 0 + 1.0, down * 0 + 1.0
    if ANTIALIAS:
        stretch_x, stretch_y = tl.maximum(across, 1.0), tl.maximum(down, 1.0)
    narrowing_x, narrowing_y = 1.0 / stretch_x, 1.0 / stretch_y
    tile = tl.program_id(0)
    pixel = tl.arange(0, TALL * WIDE)
    y, x = tile // tiles_across * TALL + pixel // WIDE, tile % tiles_across * WIDE + pixel % WIDE
    center_x, center_y = box_left + (x.to(tl.float32) + 0.5) * across, box_top + (y.to(tl.float32) + 0.5) * down
    first_x = tl.floor(center_x - stretch_x + 0.5).to(tl.int32)
    first_y = tl.floor(center_y - stretch_y + 0.5).to(tl.int32)
    is_there = (y < size) & (x < size)
    red = tl.zeros([TALL * WIDE], tl.float32)
    green = tl.zeros([TALL * WIDE], tl.float32)
    blue = tl.zeros([TALL * WIDE], tl.float32)
    total = tl.zeros([TALL * WIDE], tl.float32)
    for v in range((2 * stretch_y).to(tl.int32) + 1):
        line = first_y + v
        of_line = _weight(line, tall, center_y, narrowing_y)
        start = (top + line) * width + left
        for h in range((2 * stretch_x).to(tl.int32) + 1):
            column = first_x + h
            weight = of_line * _weight(column, wide, center_x, narrowing_x)
            at, mask = image + (start + column), is_there & (weight > 0)
            red += weight * tl.load(at, mask=mask, other=0).to(tl.float32)
            green += weight * tl.load(at + height * width, mask=mask, other=0).to(tl.float32)
            blue += weight * tl.load(at + 2 * height * width, mask=mask, other=0).to(tl.float32)
            total += weight
    total = tl.where(is_there, total, 1.0)  # outside the image all weights are zero
    to = out + row * 3 * size * size + y * size + x
    tl.store(to, tl.floor(red / total + 0.5).to(tl.uint8), mask=is_there)
    tl.store(to + size * size, tl.floor(green / total + 0.5).to(tl.uint8), mask=is_there)
    tl.store(to + 2 * size * size, tl.floor(blue / total + 0.5).to(tl.uint8), mask=is_there)
