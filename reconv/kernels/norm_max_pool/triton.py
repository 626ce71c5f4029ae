"""Triton kernels of batch norm, ReLU and a 3x3 max-pool of stride 2 in one pass, and of the gradient.

The normalized image is never written: forward stores the pooled values, the inputs they came from and their index
within the window. The first window begins `above` and `left` pixels outside the image, 0 or 1.
"""

import triton
import triton.language as tl

from reconv.kernels.batch_norm.triton import MEAN, RSTD, STATISTICS, bounds

NOWHERE: tl.constexpr = tl.constexpr(15)  # the index of a window whose maximum is below zero

_COUNTS = ["eighths", "num_rows", "group_rows", "height", "width", "out_height", "out_width", "above", "left"]


@triton.jit
def _parameters(stats, weight, bias, channels, channel, exists):
    """Mean, 1 / std, scale and shift of this program's group, as [1, channels]."""
    stats += tl.program_id(2) * STATISTICS * channels
    mean = tl.load(stats + MEAN * channels + channel, mask=exists, other=0.0)
    rstd = tl.load(stats + RSTD * channels + channel, mask=exists, other=0.0)
    scale = tl.load(weight + channel, mask=exists, other=0.0).to(tl.float32) * rstd
    shift = tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
    return mean[None, :], rstd[None, :], scale[None, :], shift[None, :]


@triton.jit(do_not_specialize=_COUNTS)
def pool(
    x, stats, weight, bias, y, peak, place, eighths, num_rows, group_rows, height, width, out_height, out_width,
    above, left, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows are output pixels.

    Inputs are compared, times the sign of the norm's scale: their order is that of the normalized values. If the scale
    is zero these are all equal, and the first one in the window wins.
    """
    channels = eighths * 8
    start, end = bounds(num_rows, group_rows)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    mean, _, scale, shift = _parameters(stats, weight, bias, channels, channel, exists)
    sign = tl.where(scale < 0.0, -1.0, 1.0)
    is_constant = scale == 0.0
    for tile in range(tl.program_id(1), tl.cdiv(end - start, LANES), tl.num_programs(1)):
        row = start + tile * LANES + tl.arange(0, LANES)
        first = row % out_width * 2 - left
        line = row // out_width
        top = line % out_height * 2 - above
        image = line // out_height * height
        best = tl.full([LANES, BLOCK], float("-inf"), tl.float32)
        where = tl.zeros([LANES, BLOCK], tl.int32)
        for index in tl.static_range(9):
            v, h = top + index // 3, first + index % 3
            inside = (v >= 0) & (v < height) & (h >= 0) & (h < width) & (row < end)
            at = ((image + v) * width + h)[:, None] * channels + channel[None, :]
            mask = inside[:, None] & exists[None, :]
            value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * sign
            wins = mask & ((value > best) | (value != value))
            best = tl.where(wins, value, best)
            where = tl.where(wins, index, where)
        v, h = tl.maximum(top, 0), tl.maximum(first, 0)
        at = ((image + v) * width + h)[:, None] * channels + channel[None, :]
        value = tl.load(x + at, mask=(row < end)[:, None] & (exists[None, :] & is_constant), other=0.0).to(tl.float32)
        raw = tl.where(is_constant, value, best * sign)
        where = tl.where(is_constant, ((v - top) * 3 + h - first)[:, None], where)
        z = (raw - mean) * scale + shift
        where = tl.where(z <= 0.0, NOWHERE, where)
        at = row[:, None] * channels + channel[None, :]
        mask = (row < end)[:, None] & exists[None, :]
        tl.store(y + at, tl.where(z < 0.0, 0.0, z).to(y.dtype.element_ty), mask=mask)
        tl.store(peak + at, raw.to(peak.dtype.element_ty), mask=mask)
        tl.store(place + at, where.to(tl.uint8), mask=mask)


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
    mean, rstd, scale, _ = _parameters(stats, weight, bias, channels, channel, exists)
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
