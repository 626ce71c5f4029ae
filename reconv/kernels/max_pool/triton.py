"""Triton kernels of max-pooling and its gradient, channels_last.

In training, forward stores the index of each value within its window in one byte; backward gathers, so that no two
programs add to the same value. A program processes a tile of pixels by a block of channels.
"""

import triton
import triton.language as tl

_COUNTS = ["eighths", "height", "width", "out_height", "out_width", "tiles_across"]


@triton.jit(do_not_specialize=_COUNTS)
def pool(
    x, y, place, eighths, height, width, out_height, out_width, tiles_across,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, ABOVE: tl.constexpr, LEFT: tl.constexpr, TALL: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """A tile of `TALL` x `WIDE` output pixels; the first of equal values wins, and NaN always.

    Indices are stored if `PLACES`.
    """
    channels = eighths * 8
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    tile, image = tl.program_id(1), tl.program_id(2)
    pixel = tl.arange(0, TALL * WIDE)
    line = tile // tiles_across * TALL + pixel // WIDE
    column = tile % tiles_across * WIDE + pixel % WIDE
    best = tl.full([TALL * WIDE, BLOCK], float("-inf"), tl.float32)
    where = tl.full([TALL * WIDE, BLOCK], KERNEL * KERNEL, tl.int32)
    for tap in tl.static_range(KERNEL * KERNEL):
        v = line * STRIDE + tap // KERNEL - ABOVE
        h = column * STRIDE + tap % KERNEL - LEFT
        inside = (v >= 0) & (v < height) & (h >= 0) & (h < width)
        mask = inside[:, None] & exists[None, :]
        at = ((image * height + v) * width + h)[:, None] * channels + channel[None, :]
        value = tl.load(x + at, mask=mask, other=float("-inf")).to(tl.float32)
        if PLACES:
            wins = mask & ((value > best) | (value != value) | (where == KERNEL * KERNEL))
            best = tl.where(wins, value, best)
            where = tl.where(wins, tap, where)
        else:
            best = tl.maximum(best, value, propagate_nan=tl.PropagateNan.ALL)
    mask = ((line < out_height) & (column < out_width))[:, None] & exists[None, :]
    at = ((image * out_height + line) * out_width + column)[:, None] * channels + channel[None, :]
    tl.store(y + at, best.to(y.dtype.element_ty), mask=mask)
    if PLACES:
        tl.store(place + at, where.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
def gradient(
    dy, place, other, dx, eighths, height, width, out_height, out_width, tiles_across,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, ABOVE: tl.constexpr, LEFT: tl.constexpr, TALL: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, TWO_GRADS: tl.constexpr,
):  # fmt: skip
    """A tile of input pixels gathers the gradients of the windows whose maximum it is.

    If `TWO_GRADS`, the gradient of another use of the input is added.
    """
    channels = eighths * 8
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    tile, image = tl.program_id(1), tl.program_id(2)
    pixel = tl.arange(0, TALL * WIDE)
    line = tile // tiles_across * TALL + pixel // WIDE
    column = tile % tiles_across * WIDE + pixel % WIDE
    own = ((line < height) & (column < width))[:, None] & exists[None, :]
    own_at = ((image * height + line) * width + column)[:, None] * channels + channel[None, :]
    if TWO_GRADS:
        total = tl.load(other + own_at, mask=own, other=0.0).to(tl.float32)
    else:
        total = tl.zeros([TALL * WIDE, BLOCK], tl.float32)
    if KERNEL <= STRIDE:  # windows do not overlap: a pixel is in at most one
        v, h = line + ABOVE, column + LEFT
        tap_row, tap_column = v % STRIDE, h % STRIDE
        inside = (tap_row < KERNEL) & (tap_column < KERNEL) & (v // STRIDE < out_height) & (h // STRIDE < out_width)
        tap = (tap_row * KERNEL + tap_column)[:, None]
        window = (image * out_height + v // STRIDE) * out_width + h // STRIDE
        total += _gradient_of_winners(dy, place, window, inside, tap, channel, channels)
    else:
        for tap in tl.static_range(KERNEL * KERNEL):
            v = line + ABOVE - tap // KERNEL
            h = column + LEFT - tap % KERNEL
            inside = (v >= 0) & (h >= 0) & (v % STRIDE == 0) & (h % STRIDE == 0)
            inside &= (v // STRIDE < out_height) & (h // STRIDE < out_width)
            window = (image * out_height + v // STRIDE) * out_width + h // STRIDE
            total += _gradient_of_winners(dy, place, window, inside, tap, channel, channels)
    tl.store(dx + own_at, total.to(dx.dtype.element_ty), mask=own)


@triton.jit
def _gradient_of_winners(dy, place, window, inside, tap, channel, channels):
    """The gradients of windows [pixels], for those `inside` and the channels whose maximum is at `tap`; else 0."""
    mask = inside[:, None] & (channel < channels)[None, :]
    at = window[:, None] * channels + channel[None, :]
    won = tl.load(place + at, mask=mask, other=255) == tap
    value = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)  # masked by `won` it would not be a vector load
    return tl.where(won, value, 0.0)
