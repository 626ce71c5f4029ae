"""Triton kernel of the weight gradient of a stem: convolution over blocks, batch norm, ReLU, 3x3 max-pool of stride 2.

The gradient of the convolution's output is never in memory: each tile of it is computed as `norm_max_pool` would,
rounded, and multiplied with the blocks below it. It is rounded with the norm's scale in it: without, the gradient of a
window that is rounded already would swallow what the norm adds to it, always in the same direction.

A tile has two lines, so that both of them belong to the same two lines of windows: window w covers the second line of
tile w - 1 and both lines of tile w. Columns are in such pairs, too. The left one of a pair is the middle of a window
("near"), the right one the first pixel of a window (near) and the last one of the window before it ("far").

Shapes: dz and place [windows, outputs]; x [rows, outputs]; stats [groups, 3, outputs]; sums [2, groups, outputs];
blocks [n, height + TAPS - 1, width + TAPS - 1, 16]; partials [groups * splits, outputs, TAPS, TAPS, 16].

Hazards: a window's place counts taps from its own corner, also outside of the image. Conditions on whole lines are
tensors [1, 1], since the interpreter takes no scalars as masks.
"""

import triton
import triton.language as tl

from reconv.kernels.triton.batch_norm import STATISTICS, bounds, channels_of, norm_line
from reconv.kernels.triton.conv_epilogue import add_product, strips_of
from reconv.kernels.triton.stem import BLOCK_CHANNELS

_COUNTS = ["num_images", "group_images", "height", "width", "out_height", "out_width", "above", "left", "tiles"]
_COUNTS += ["out_eighths"]


@triton.jit
def _window(dz, place, at, mask):
    """Gradient and place of windows; a window that does not exist has gradient 0, so that its place does not matter."""
    return tl.load(dz + at, mask=mask, other=0.0), tl.load(place + at, mask=mask, other=0)


@triton.jit
def _add_window(total, gradient, place, index, scale):
    """The sum, with a window's gradient times scale where its maximum is at this index. As a choice between sums it is
    one conditional instruction, as a sum with a choice it would be two."""
    return tl.where(place == index, total + gradient.to(tl.float32) * scale, total)


@triton.jit
def _line(blocks, offset, mask):
    """The blocks below a row of taps [taps * 16, columns]."""
    return tl.trans(tl.load(blocks + offset, mask=mask, other=0.0))


@triton.jit
def _norm_gradient(stats, weight, sums, count, channels, channel, exists):
    """Scale, slope and offset [1, outputs]: the gradient of the norm's input is dz * scale + x * slope + offset."""
    sums += tl.program_id(2) * channels
    stats += tl.program_id(2) * STATISTICS * channels
    mean, rstd, scale, _ = norm_line(stats, weight, weight, channels, channel, exists)
    mean_dz = tl.load(sums + channel, mask=exists, other=0.0) / count
    slope = tl.load(sums + tl.num_programs(2) * channels + channel, mask=exists, other=0.0) / count * rstd
    return scale[None, :], (-scale * slope)[None, :], (scale * (mean * slope - mean_dz))[None, :]


@triton.jit
def _store_sums(partials, total, channel, exists, channels, TAP: tl.constexpr, TAPS: tl.constexpr):
    """Store one row of taps [taps * 16, outputs] of this program's sums [outputs, taps, taps, 16]."""
    mine = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * channels + channel
    k = tl.arange(0, TAPS * BLOCK_CHANNELS)
    at = (mine[None, :] * TAPS + TAP) * (TAPS * BLOCK_CHANNELS) + k[:, None]
    tl.store(partials + at, total, mask=exists[None, :])


@triton.jit(do_not_specialize=_COUNTS)
def weight_gradient(
    dz, place, x, stats, weight, sums, blocks, partials, num_images, group_images, height, width, out_height, out_width,
    above, left, tiles, out_eighths, TAPS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over some tiles: partials [groups * splits, outputs, TAPS, TAPS, 16].

    Programs are (block of outputs, split of the tiles, group). `height` and `width` are those of x, the convolution's
    output; the first window begins `above` and `left` pixels outside of it, 0 or 1.
    """
    channels = out_eighths * 8
    start, end = bounds(num_images, group_images)
    channel, exists = channels_of(channels, BLOCK)
    count = ((end - start) * height * width).to(tl.float32)
    scale, slope, offset = _norm_gradient(stats, weight, sums, count, channels, channel, exists)
    in_height, in_width = height + TAPS - 1, width + TAPS - 1
    step, out_step, x_step = in_width * BLOCK_CHANNELS, out_width * channels, width * channels
    num_lines, padded = (height + 2 - above) // 2, (width + 2 - left) // 2 * 2  # tiles below each other, columns
    zero = tl.zeros([1, 1], tl.int32)  # the interpreter takes no conditions without axes as masks
    zeros = tl.zeros([TAPS * BLOCK_CHANNELS, BLOCK], tl.float32)
    a, b, c, d = zeros, zeros, zeros, zeros
    k = tl.arange(0, TAPS * BLOCK_CHANNELS)
    num_columns = (end - start) * padded
    begin, last, first_strip, last_strip = strips_of(num_columns, num_lines, tiles, COLUMNS)
    for strip in tl.range(first_strip, last_strip, num_stages=1):
        column = strip * COLUMNS + tl.arange(0, COLUMNS)
        image, pair, right = start + column // padded, column % padded // 2, column % padded % 2
        h, window = 2 * pair + right - 1 + left, pair - 1 + left
        inside = (column < num_columns) & (h >= 0) & (h < width)
        has_near = (inside & (window + right < out_width))[:, None] & exists[None, :]
        has_far = (inside & (right == 1) & (window >= 0))[:, None] & exists[None, :]
        far = (image * out_height * out_width + window)[:, None] * channels + channel[None, :]
        near = far + (right * channels)[:, None]
        pixel = (image * height * width + h)[:, None] * channels + channel[None, :]
        source = ((image * in_height * in_width + h) * BLOCK_CHANNELS)[:, None] + k[None, :]
        has_pixel, has_blocks = inside[:, None] & exists[None, :], inside[:, None]
        middle = 1 - right[:, None]  # the near window's column of a pixel
        top, bottom = tl.maximum(begin - strip * num_lines, 0), tl.minimum(last - strip * num_lines, num_lines)
        for line in tl.range(top, bottom, num_stages=STAGES):
            v, w = 2 * line - 1 + above, line - 1 + above
            has_first, has_second = zero + v >= 0, zero + v + 1 < height
            has_window, has_below = (zero + w >= 0) & (zero + w < out_height), zero + w + 1 < out_height
            window_at = w * out_step
            near_dz, near_place = _window(dz, place, near + window_at, has_near & has_window)
            far_dz, far_place = _window(dz, place, far + window_at, has_far & has_window)
            window_at += out_step
            below_dz, below_place = _window(dz, place, near + window_at, has_near & has_below)
            last_dz, last_place = _window(dz, place, far + window_at, has_far & has_below)
            pixel_at = pixel + v * x_step
            first = tl.load(x + pixel_at, mask=has_pixel & has_first, other=0.0)
            second = tl.load(x + pixel_at + x_step, mask=has_pixel & has_second, other=0.0)
            blocks_at = source + v * step
            # A column outside of the image has blocks 0 in its products; a line outside of it has gradient 0.
            r0 = _line(blocks + blocks_at, 0, has_blocks & has_first)
            r1 = _line(blocks + blocks_at, 1 * step, has_blocks)
            r2 = _line(blocks + blocks_at, 2 * step, has_blocks & (zero + v + 2 < in_height))
            dy = first.to(tl.float32) * slope + tl.where(has_first, offset, 0.0)
            dy = _add_window(dy, near_dz, near_place, 3 + middle, scale)
            dy = _add_window(dy, far_dz, far_place, 5, scale)
            dy = dy.to(x.dtype.element_ty)
            dy2 = second.to(tl.float32) * slope + tl.where(has_second, offset, 0.0)
            dy2 = _add_window(dy2, near_dz, near_place, 6 + middle, scale)
            dy2 = _add_window(dy2, far_dz, far_place, 8, scale)
            dy2 = _add_window(dy2, below_dz, below_place, middle, scale)
            dy2 = _add_window(dy2, last_dz, last_place, 2, scale)
            dy2 = dy2.to(x.dtype.element_ty)
            a = add_product(r1, dy2, add_product(r0, dy, a))
            b = add_product(r2, dy2, add_product(r1, dy, b))
            if TAPS == 4:
                r3 = _line(blocks + blocks_at, 3 * step, has_blocks)
                r4 = _line(blocks + blocks_at, 4 * step, has_blocks & (zero + v + 4 < in_height))
                c = add_product(r3, dy2, add_product(r2, dy, c))
                d = add_product(r4, dy2, add_product(r3, dy, d))
    _store_sums(partials, a, channel, exists, channels, 0, TAPS)
    _store_sums(partials, b, channel, exists, channels, 1, TAPS)
    if TAPS == 4:
        _store_sums(partials, c, channel, exists, channels, 2, TAPS)
        _store_sums(partials, d, channel, exists, channels, 3, TAPS)
