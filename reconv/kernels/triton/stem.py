"""Triton kernels of a stem: images rearranged into 2x2 blocks of pixels, and the convolution over the blocks.

Shapes: images [n, c, height, width] of any strides; blocks [n, height / 2 + padding, width / 2 + padding, 16]; filters
[outputs, TAPS, TAPS, 16]; y [rows, outputs]; stats [groups, 3, outputs]; partials [groups, splits, 2, outputs].
Product: [outputs, columns].

Hazards: blocks are padded once by `space_to_depth`, so the convolution reads without bounds: a tensor of blocks without
its padding is read beyond its end.
"""

import triton
import triton.language as tl

from reconv.kernels.triton.batch_norm import bounds, channels_of
from reconv.kernels.triton.conv_epilogue import HEAD, add_product, head_mean, merge_statistics, store_tile, strips_of

BLOCK_CHANNELS: tl.constexpr = tl.constexpr(16)

_COUNTS = ["num_pixels", "height", "width", "stride_n", "stride_c", "stride_h", "stride_w"]
_CONV_COUNTS = ["num_images", "group_images", "height", "width", "tiles", "out_eighths"]


@triton.jit(do_not_specialize=_COUNTS)
def space_to_depth(
    images, out, num_pixels, height, width, stride_n, stride_c, stride_h, stride_w, CHANNELS: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, DEPTH: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """out[n, i, j, (down, right, c)] = images[n, c, 2 (i - before) + down, 2 (j - before) + right], zero outside."""
    out_width = width // 2 + BEFORE + AFTER
    out_height = height // 2 + BEFORE + AFTER
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    line = pixel // out_width
    depth = tl.arange(0, DEPTH)
    down, right, c = depth // (2 * CHANNELS), depth // CHANNELS % 2, depth % CHANNELS
    v = ((line % out_height - BEFORE) * 2)[:, None] + down[None, :]
    h = ((pixel % out_width - BEFORE) * 2)[:, None] + right[None, :]
    inside = (v >= 0) & (v < height) & (h >= 0) & (h < width) & (pixel < num_pixels)[:, None] & (down < 2)[None, :]
    at = (line // out_height * stride_n)[:, None] + (c * stride_c)[None, :] + v * stride_h + h * stride_w
    value = tl.load(images + at, mask=inside, other=0.0)
    value = value.to(out.dtype.element_ty)
    tl.store(out + pixel[:, None] * DEPTH + depth[None, :], value, mask=(pixel < num_pixels)[:, None])


@triton.jit
def _filters(filters, out, exists, FIRST: tl.constexpr, TAPS: tl.constexpr, LINES: tl.constexpr):
    """LINES rows of taps from the first one on [outputs, lines * taps * 16]."""
    k = tl.arange(0, LINES * TAPS * BLOCK_CHANNELS)
    at = (out[:, None] * TAPS + FIRST) * (TAPS * BLOCK_CHANNELS) + k[None, :]
    return tl.load(filters + at, mask=exists[:, None], other=0.0)


@triton.jit
def _inputs(blocks, at, inside, step, TAPS: tl.constexpr, LINES: tl.constexpr):
    """The blocks below LINES rows of taps [lines * taps * 16, columns]: in a line, a pixel's are next to each other."""
    k = tl.arange(0, LINES * TAPS * BLOCK_CHANNELS)
    tap = k // (TAPS * BLOCK_CHANNELS) * step + k % (TAPS * BLOCK_CHANNELS)
    return tl.trans(tl.load(blocks + at[:, None] + tap[None, :], mask=inside[:, None], other=0.0))


@triton.jit
def _product(
    blocks, at, inside, step, a, b, c, d, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, TAPS: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """The convolution's output [outputs, columns]; `at` are the blocks below the first row of taps."""
    product = tl.zeros([BLOCK, COLUMNS], tl.float32)
    product = add_product(a, _inputs(blocks, at, inside, step, TAPS, LINES), product)
    if TAPS > LINES:
        product = add_product(b, _inputs(blocks, at + LINES * step, inside, step, TAPS, LINES), product)
    if TAPS > 2 * LINES:
        product = add_product(c, _inputs(blocks, at + 2 * LINES * step, inside, step, TAPS, LINES), product)
        product = add_product(d, _inputs(blocks, at + 3 * LINES * step, inside, step, TAPS, LINES), product)
    return product


@triton.jit(do_not_specialize=_CONV_COUNTS)
def conv(
    blocks, filters, y, running_var, stats, partials, counters, num_images, group_images, height, width, tiles,
    out_eighths, eps, TAPS: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The convolution over padded blocks with filters [outputs, TAPS, TAPS, 16], and the statistics of its output.

    Programs are (block of outputs, split of the tiles, group). A column is (image, x): strips of columns need no
    borders, and the lines of a strip differ by a constant. `height` and `width` are those of the output. LINES rows of
    taps are loaded at a time.
    """
    out_channels = out_eighths * 8
    start, end = bounds(num_images, group_images)
    out, exists = channels_of(out_channels, BLOCK)
    a = _filters(filters, out, exists, 0, TAPS, LINES)
    b, c, d = a, a, a
    if TAPS > LINES:
        b = _filters(filters, out, exists, LINES, TAPS, LINES)
    if TAPS > 2 * LINES:
        c = _filters(filters, out, exists, 2 * LINES, TAPS, LINES)
        d = _filters(filters, out, exists, 3 * LINES, TAPS, LINES)
    in_height, in_width = height + TAPS - 1, width + TAPS - 1
    step, num_columns = in_width * BLOCK_CHANNELS, (end - start) * width
    head = tl.arange(0, HEAD)  # of the line in the middle: borders have another mean
    at = (((start + head // width) * in_height + height // 2) * in_width + head % width) * BLOCK_CHANNELS
    product = _product(blocks, at, head < num_columns, step, a, b, c, d, BLOCK, HEAD, TAPS, LINES)
    shift = head_mean(product, num_columns)
    total = tl.zeros([BLOCK, 4], tl.float32)
    squares = tl.zeros([BLOCK, 4], tl.float32)
    begin, last, first_strip, last_strip = strips_of(num_columns, height, tiles, COLUMNS)
    for strip in tl.range(first_strip, last_strip, num_stages=1):
        column = strip * COLUMNS + tl.arange(0, COLUMNS)
        inside, is_whole = column < num_columns, (strip + 1) * COLUMNS <= num_columns
        image, place = start + column // width, column % width
        source, row = (image * in_height * in_width + place) * BLOCK_CHANNELS, image * height * width + place
        top, bottom = tl.maximum(begin - strip * height, 0), tl.minimum(last - strip * height, height)
        for line in tl.range(top, bottom, num_stages=STAGES):
            tile = _product(blocks, source + line * step, inside, step, a, b, c, d, BLOCK, COLUMNS, TAPS, LINES)
            total, squares = store_tile(
                tile, y, total, squares, shift, row + line * width, inside, is_whole, out, exists, out_channels,
                COLUMNS, BLOCK,
            )  # fmt: skip
    merge_statistics(
        total, squares, shift, running_var, stats, partials, counters, out_channels, out, exists, num_columns * height,
        eps, BLOCK,
    )  # fmt: skip
