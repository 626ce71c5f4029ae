"""Triton kernels of batch norm, ReLU and a 3x3 max-pool of stride 2 in one pass, and of the gradient.

The normalized image is never written: forward stores the pooled values, the inputs they came from and their index
within the window. The first window begins `above` and `left` pixels outside the image, 0 or 1.

Shapes: x and dx [images, height, width, channels]; y, peak, place and dy [images, out_height, out_width, channels];
stats [groups, 3, channels]; sums [2, groups, channels].

Hazards: the maximum is sought among inputs, not normalized values, so the sign of the scale matters, and a scale of 0
has its own branch. `peak` is in the dtype of x and exact.
"""

import triton
import triton.language as tl

from reconv.kernels.triton.batch_norm import MEAN, RSTD, STATISTICS, bounds
from reconv.kernels.triton.max_pool import first_or_greater

NOWHERE: tl.constexpr = tl.constexpr(15)  # the index of a window whose maximum is below zero

_COUNTS = ["eighths", "num_rows", "group_rows", "height", "width", "out_height", "out_width", "above", "left"]


@triton.jit
def _parameters(stats, weight, bias, channels, channel, exists, group):
    """Mean, 1 / std, scale and shift of a group, as [1, channels]."""
    stats += group * STATISTICS * channels
    mean = tl.load(stats + MEAN * channels + channel, mask=exists, other=0.0)
    rstd = tl.load(stats + RSTD * channels + channel, mask=exists, other=0.0)
    scale = tl.load(weight + channel, mask=exists, other=0.0).to(tl.float32) * rstd
    shift = tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
    return mean[None, :], rstd[None, :], scale[None, :], shift[None, :]


@triton.jit
def _line(x, sign, v, column, left, channel, exists, height, width, channels):
    """The maxima of three neighbors in a line of values times sign, and their indices from 0 to 2.

    Where there is nothing it is minus infinity, which loses to all that follows.
    """
    h = column * 2 - left
    in_line = (h * 0 + v >= 0) & (h * 0 + v < height)
    at = ((v * width + h) * channels)[:, None] + channel[None, :]
    best = tl.full([column.shape[0], channel.shape[0]], float("-inf"), tl.float32)
    where = tl.zeros([column.shape[0], channel.shape[0]], tl.int32)
    for tap in tl.static_range(3):
        mask = (in_line & (h + tap >= 0) & (h + tap < width))[:, None] & exists[None, :]
        value = tl.load(x + at + tap * channels, mask=mask, other=0.0).to(tl.float32) * sign
        wins = mask & ((value > best) | (value != value))
        best, where = tl.where(wins, value, best), tl.where(wins, tap, where)
    return best, where


@triton.jit(do_not_specialize=[*_COUNTS, "group_images", "groups", "tiles_across", "tiles"])
def pool(
    x, stats, weight, bias, y, peak, place, eighths, group_images, groups, height, width, out_height, out_width,
    above, left, tiles_across, tiles, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of `WIDE` columns and two lines of an image's output, whose windows share a line.

    Inputs are compared, times the sign of the norm's scale: their order is that of the normalized values.
    """
    channels = eighths * 8
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    image, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    group = tl.minimum(image // group_images, groups - 1)
    mean, _, scale, shift = _parameters(stats, weight, bias, channels, channel, exists, group)
    sign = tl.where(scale < 0.0, -1.0, 1.0)
    column, line = tile % tiles_across * WIDE + tl.arange(0, WIDE), tile // tiles_across * 2
    x += image * height * width * channels
    v, h = line * 2 - above, column * 2 - left
    a, a_place = _line(x, sign, v, column, left, channel, exists, height, width, channels)
    b, b_place = _line(x, sign, v + 1, column, left, channel, exists, height, width, channels)
    c, c_place = _line(x, sign, v + 2, column, left, channel, exists, height, width, channels)
    d, d_place = _line(x, sign, v + 3, column, left, channel, exists, height, width, channels)
    e, e_place = _line(x, sign, v + 4, column, left, channel, exists, height, width, channels)
    first, first_place = first_or_greater(a, a_place, b, b_place + 3)
    first, first_place = first_or_greater(first, first_place, c, c_place + 6)
    second, second_place = first_or_greater(c, c_place, d, d_place + 3)
    second, second_place = first_or_greater(second, second_place, e, e_place + 6)
    mask = (column < out_width)[:, None] & exists[None, :]
    has_second = mask & (tl.zeros([WIDE, BLOCK], tl.int32) + line + 1 < out_height)
    first, second = tl.where(mask, first * sign, 0.0), tl.where(has_second, second * sign, 0.0)
    is_constant = exists[None, :] & (scale == 0.0)
    if tl.max(is_constant.to(tl.int32)) > 0:  # a branch, because loads with such masks are slow
        first, first_place = _first_value(x, first, first_place, v, h, width, channels, channel, is_constant, mask)
        second, second_place = _first_value(
            x, second, second_place, v + 2, h, width, channels, channel, is_constant, has_second
        )  # fmt: skip
    at = (((image * out_height + line) * out_width + column) * channels)[:, None] + channel[None, :]
    _store(y, peak, place, first, first_place, (first - mean) * scale + shift, at, mask)
    at += out_width * channels
    _store(y, peak, place, second, second_place, (second - mean) * scale + shift, at, has_second)


@triton.jit
def _first_value(x, raw, where, v, h, width, channels, channel, is_constant, mask):
    """In channels whose scale is zero all normalized values are equal, and the first one inside of the image wins."""
    first_v, first_h = tl.maximum(v, 0), tl.maximum(h, 0)
    at = ((first_v * width + first_h) * channels)[:, None] + channel[None, :]
    value = tl.load(x + at, mask=mask & is_constant, other=0.0).to(tl.float32)
    index = ((first_v - v) * 3 + first_h - h)[:, None]
    return tl.where(is_constant, value, raw), tl.where(is_constant, index, where)


@triton.jit
def _store(y, peak, place, raw, where, z, at, mask):
    """Store the ReLU of normalized maxima, the inputs they came from and their indices."""
    tl.store(y + at, tl.where(z < 0.0, 0.0, z).to(y.dtype.element_ty), mask=mask)
    tl.store(peak + at, raw.to(peak.dtype.element_ty), mask=mask)
    tl.store(place + at, tl.where(z <= 0.0, NOWHERE, where).to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
def pool_gradient(
    dy, place, x, stats, weight, bias, sums, dx, eighths, num_rows, group_rows, height, width, out_height, out_width,
    above, left, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows are input pixels: each gathers from the windows whose maximum it is, four at most."""
    channels = eighths * 8
    start, end = bounds(num_rows, group_rows)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    mean, rstd, scale, _ = _parameters(stats, weight, bias, channels, channel, exists, tl.program_id(2))
    count = (end - start).to(tl.float32)
    sums += tl.program_id(2) * channels
    offset = tl.load(sums + channel, mask=exists, other=0.0)[None, :] / count
    slope = tl.load(sums + tl.num_programs(2) * channels + channel, mask=exists, other=0.0)[None, :] / count * rstd
    for tile in range(tl.program_id(1), tl.cdiv(end - start, LANES), tl.num_programs(1)):
        row = start + tile * LANES + tl.arange(0, LANES)
        h = row % width
        line = row // width
        v = line % height
        image = line // height * out_height
        dz = tl.zeros([LANES, BLOCK], tl.float32)
        for index in tl.static_range(4):
            window_v, window_h = (v + above) // 2 - index // 2, (h + left) // 2 - index % 2
            place_v, place_h = v + above - 2 * window_v, h + left - 2 * window_h
            inside = (place_v < 3) & (window_v >= 0) & (window_v < out_height)
            inside &= (place_h < 3) & (window_h >= 0) & (window_h < out_width) & (row < end)
            at = ((image + window_v) * out_width + window_h)[:, None] * channels + channel[None, :]
            mask = inside[:, None] & exists[None, :]
            where = tl.load(place + at, mask=mask, other=NOWHERE).to(tl.int32)
            value = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
            dz = tl.where(where == (place_v * 3 + place_h)[:, None], dz + value, dz)
        at = row[:, None] * channels + channel[None, :]
        mask = (row < end)[:, None] & exists[None, :]
        centered = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean
        tl.store(dx + at, (scale * (dz - offset - centered * slope)).to(dx.dtype.element_ty), mask=mask)
