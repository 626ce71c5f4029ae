"""Depthwise convolutions over channels_last images and both their gradients, in Triton.

Owns the device code. Refuses to know autograd and memory. Products are added in float32, and the weight is rounded to
the images' type when it is read, as a cast before the convolution would. A program takes a tile of pixels by a block
of channels: the taps of neighbouring pixels come out of its own cache.
"""

import triton
import triton.language as tl

_COUNTS = ["eighths", "height", "width", "out_height", "out_width", "tiles_across", "num_lines", "num_pieces"]


@triton.jit
def _taps(weight, dtype: tl.constexpr, channel, exists, tap, TAPS: tl.constexpr):
    """One tap of each channel, as [1, channels]."""
    taps = tl.load(weight + channel * TAPS + tap, mask=exists, other=0.0)
    return taps.to(dtype).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=_COUNTS)
def convolve(
    x, weight, y, eighths, height, width, out_height, out_width, tiles_across,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of `TALL` x `WIDE` pixels of the output."""
    channels = eighths * 8
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    tile, image = tl.program_id(1), tl.program_id(2)
    pixel = tl.arange(0, TALL * WIDE)
    line = tile // tiles_across * TALL + pixel // WIDE
    column = tile % tiles_across * WIDE + pixel % WIDE
    total = tl.zeros([TALL * WIDE, BLOCK], tl.float32)
    for tap in tl.static_range(KERNEL * KERNEL):
        v = line * STRIDE + tap // KERNEL - KERNEL // 2
        h = column * STRIDE + tap % KERNEL - KERNEL // 2
        inside = (v >= 0) & (v < height) & (h >= 0) & (h < width)
        at = ((image * height + v) * width + h)[:, None] * channels + channel[None, :]
        value = tl.load(x + at, mask=inside[:, None] & exists[None, :], other=0.0).to(tl.float32)
        total += value * _taps(weight, x.dtype.element_ty, channel, exists, tap, KERNEL * KERNEL)
    inside = (line < out_height) & (column < out_width)
    at = ((image * out_height + line) * out_width + column)[:, None] * channels + channel[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside[:, None] & exists[None, :])


@triton.jit(do_not_specialize=_COUNTS)
def spread(
    dy, weight, dx, eighths, height, width, out_height, out_width, tiles_across,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the images: a tile of pixels of the input gathers from the outputs that read it."""
    channels = eighths * 8
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    tile, image = tl.program_id(1), tl.program_id(2)
    pixel = tl.arange(0, TALL * WIDE)
    line = tile // tiles_across * TALL + pixel // WIDE
    column = tile % tiles_across * WIDE + pixel % WIDE
    total = tl.zeros([TALL * WIDE, BLOCK], tl.float32)
    for tap in tl.static_range(KERNEL * KERNEL):
        v = line + KERNEL // 2 - tap // KERNEL
        h = column + KERNEL // 2 - tap % KERNEL
        inside = (v >= 0) & (h >= 0) & (v % STRIDE == 0) & (h % STRIDE == 0)
        v //= STRIDE
        h //= STRIDE
        inside &= (v < out_height) & (h < out_width)
        at = ((image * out_height + v) * out_width + h)[:, None] * channels + channel[None, :]
        value = tl.load(dy + at, mask=inside[:, None] & exists[None, :], other=0.0).to(tl.float32)
        total += value * _taps(weight, dy.dtype.element_ty, channel, exists, tap, KERNEL * KERNEL)
    inside = (line < height) & (column < width)
    at = ((image * height + line) * width + column)[:, None] * channels + channel[None, :]
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=inside[:, None] & exists[None, :])


@triton.jit(do_not_specialize=_COUNTS)
def weigh(
    dy, x, partial, eighths, height, width, out_height, out_width, num_lines, num_pieces,
    KERNEL: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one line of taps, over every so many pieces of `WIDE` pixels: [splits, taps, channels] in all.

    Lines of taps are the fastest axis, so that those who read the same pixels run at the same time.
    """
    channels = eighths * 8
    down = tl.program_id(0) % KERNEL
    channel = tl.program_id(0) // KERNEL * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    across = tl.arange(0, COLUMNS)
    total = tl.zeros([WIDE, COLUMNS, BLOCK], tl.float32)
    for piece in range(tl.program_id(1), num_lines * num_pieces, tl.num_programs(1)):
        line = piece // num_pieces  # of all images
        column = piece % num_pieces * WIDE + tl.arange(0, WIDE)
        inside = (column < out_width)[:, None] & exists[None, :]
        at = (line * out_width + column)[:, None] * channels + channel[None, :]
        gradient = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.full([WIDE, COLUMNS], 0, tl.int32) + (line % out_height * STRIDE + down - KERNEL // 2)
        h = (column * STRIDE)[:, None] + across[None, :] - KERNEL // 2
        inside = (v >= 0) & (v < height) & (h >= 0) & (h < width) & (across < KERNEL)[None, :]
        at = ((line // out_height * height + v) * width + h)[:, :, None] * channels + channel[None, None, :]
        value = tl.load(x + at, mask=inside[:, :, None] & exists[None, None, :], other=0.0).to(tl.float32)
        total += value * gradient[:, None, :]
    sums = tl.sum(total, axis=0)
    tap = tl.program_id(1) * KERNEL * KERNEL + down * KERNEL + across
    at = tap[:, None] * channels + channel[None, :]
    tl.store(partial + at, sums, mask=(across < KERNEL)[:, None] & exists[None, :])
