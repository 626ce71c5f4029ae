"""Triton kernels of max-pooling and its gradient, channels_last.

In training, forward stores the index of each value within its window in one byte; backward gathers, so that no two
programs add to the same value. A program processes a tile of pixels by a block of channels, or, for windows of 3x3, a
strip of a few columns from top to bottom, so that what it computes of a line serves all windows that contain it.

Shapes: x, other and dx [images, height, width, channels]; y, place and dy [images, out_height, out_width, channels];
place is uint8.

Hazards: a window may have nothing but minus infinity: its place is then that of its first pixel inside of the image, as
in torch. Indices of one byte allow windows of 15 x 15.
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


@triton.jit
def first_or_greater(best, where, value, index):
    """The greater of two values and its index: the first of equal ones, NaN above all."""
    wins = (value > best) | (value != value)
    return tl.where(wins, value, best), tl.where(wins, index, where)


@triton.jit
def _best_of_line(
    x, v, column, left, channel, exists, height, width, channels, STRIDE: tl.constexpr
):  # fmt: skip
    """The maxima of three neighbors in line v of an image, and their indices from 0 to 2.

    Where there is nothing it is minus infinity, which loses to all that follows; its index is that of the first value
    inside of the image, as minus infinity may be the maximum of a window.
    """
    h = column * STRIDE - left
    in_line = (h * 0 + v >= 0) & (h * 0 + v < height)
    at = ((v * width + h) * channels)[:, None] + channel[None, :]
    mask = (in_line & (h >= 0) & (h < width))[:, None] & exists[None, :]
    best = tl.load(x + at, mask=mask, other=float("-inf")).to(tl.float32)
    where = ((h < 0).to(tl.int32) + tl.where(v < 0, 3, 0))[:, None] + tl.zeros_like(best).to(tl.int32)
    for tap in tl.static_range(1, 3):
        mask = (in_line & (h + tap < width))[:, None] & exists[None, :]
        value = tl.load(x + at + tap * channels, mask=mask, other=float("-inf")).to(tl.float32)
        best, where = first_or_greater(best, where, value, tap)
    return best, where


@triton.jit
def _strip(channels, tiles_across, lines, height, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """This program's channels, which of them exist, its columns, first line and end."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) % tiles_across * WIDE + tl.arange(0, WIDE)
    start = tl.program_id(1) // tiles_across * lines
    return channel, channel < channels, column, start, tl.minimum(start + lines, height)


@triton.jit(do_not_specialize=[*_COUNTS, "lines"])
def pool_lines(
    x, y, place, eighths, height, width, out_height, out_width, tiles_across, lines,
    STRIDE: tl.constexpr, ABOVE: tl.constexpr, LEFT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """`pool` with windows of 3x3 and stride 1 or 2: a strip of `WIDE` columns and `lines` lines of the output.

    ABOVE and LEFT are 0 or 1.
    """
    channels, image = eighths * 8, tl.program_id(2)
    channel, exists, column, start, end = _strip(channels, tiles_across, lines, out_height, WIDE, BLOCK)
    mask = (column < out_width)[:, None] & exists[None, :]
    at = ((image * out_height * out_width + column) * channels)[:, None] + channel[None, :]
    x += image * height * width * channels
    v = start * STRIDE - ABOVE
    top, top_place = _best_of_line(x, v, column, LEFT, channel, exists, height, width, channels, STRIDE)
    if STRIDE == 1:
        middle, middle_place = _best_of_line(x, v + 1, column, LEFT, channel, exists, height, width, channels, STRIDE)
    for line in range(start, end):
        v = line * STRIDE - ABOVE
        if STRIDE == 2:
            middle, middle_place = _best_of_line(
                x, v + 1, column, LEFT, channel, exists, height, width, channels, STRIDE
            )  # fmt: skip
        bottom, bottom_place = _best_of_line(x, v + 2, column, LEFT, channel, exists, height, width, channels, STRIDE)
        best, where = first_or_greater(top, top_place, middle, middle_place + 3)
        best, where = first_or_greater(best, where, bottom, bottom_place + 6)
        tl.store(y + at + line * out_width * channels, best.to(y.dtype.element_ty), mask=mask)
        if PLACES:
            tl.store(place + at + line * out_width * channels, where.to(tl.uint8), mask=mask)
        if STRIDE == 1:
            top, top_place, middle, middle_place = middle, middle_place, bottom, bottom_place
        else:
            top, top_place = bottom, bottom_place


@triton.jit(do_not_specialize=_COUNTS)
def gradient(
    dy, place, other, dx, eighths, height, width, out_height, out_width, tiles_across,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, ABOVE: tl.constexpr, LEFT: tl.constexpr, TALL: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, WINDOWS: tl.constexpr, TWO_GRADS: tl.constexpr,
):  # fmt: skip
    """A tile of input pixels gathers the gradients of the windows whose maximum it is.

    A pixel is in at most `WINDOWS` windows along each axis. If `TWO_GRADS`, the gradient of another use of the input is
    added.
    """
    channels = eighths * 8
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    tile, image = tl.program_id(1), tl.program_id(2)
    pixel = tl.arange(0, TALL * WIDE)
    line = tile // tiles_across * TALL + pixel // WIDE
    column = tile % tiles_across * WIDE + pixel % WIDE
    is_pixel = ((line < height) & (column < width))[:, None] & exists[None, :]
    pixel_at = ((image * height + line) * width + column)[:, None] * channels + channel[None, :]
    if TWO_GRADS:
        total = tl.load(other + pixel_at, mask=is_pixel, other=0.0).to(tl.float32)
    else:
        total = tl.zeros([TALL * WIDE, BLOCK], tl.float32)
    last_v, last_h = (line + ABOVE) // STRIDE, (column + LEFT) // STRIDE  # the last windows that may contain a pixel
    for index in tl.static_range(WINDOWS * WINDOWS):
        v, h = last_v - index // WINDOWS, last_h - index % WINDOWS
        tap_row, tap_column = line + ABOVE - v * STRIDE, column + LEFT - h * STRIDE
        inside = (v >= 0) & (v < out_height) & (tap_row < KERNEL)
        inside &= (h >= 0) & (h < out_width) & (tap_column < KERNEL)
        mask = inside[:, None] & exists[None, :]
        at = ((image * out_height + v) * out_width + h)[:, None] * channels + channel[None, :]
        total = _add_if_won(total, dy, place, at, mask, (tap_row * KERNEL + tap_column)[:, None])
    tl.store(dx + pixel_at, total.to(dx.dtype.element_ty), mask=is_pixel)


@triton.jit
def _add_if_won(total, dy, place, at, mask, tap):
    """The total, with the gradients of windows whose maximum is at `tap`."""
    won = tl.load(place + at, mask=mask, other=255) == tap
    value = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)  # masked by `won` it would not be a vector load
    return tl.where(won, total + value, total)


@triton.jit(do_not_specialize=[*_COUNTS, "lines"])
def gradient_lines(
    dy, place, other, dx, eighths, height, width, out_height, out_width, tiles_across, lines,
    ABOVE: tl.constexpr, LEFT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, TWO_GRADS: tl.constexpr,
):  # fmt: skip
    """`gradient` with windows of 3x3 and stride 1: a strip of `WIDE` columns and `lines` lines of the input.

    Each line of windows is read once, and added to the three lines of pixels below it.
    """
    channels, image = eighths * 8, tl.program_id(2)
    channel, exists, column, start, end = _strip(channels, tiles_across, lines, height, WIDE, BLOCK)
    is_pixel = (column < width)[:, None] & exists[None, :]
    pixel_at = ((image * height * width + column) * channels)[:, None] + channel[None, :]
    now = tl.zeros([WIDE, BLOCK], tl.float32)
    next_line = tl.zeros([WIDE, BLOCK], tl.float32)
    for line in range(start - 2, end):
        last_line = tl.zeros([WIDE, BLOCK], tl.float32)
        v = line + ABOVE
        for tap in tl.static_range(3):
            h = column + LEFT - tap
            inside = (h * 0 + v >= 0) & (h * 0 + v < out_height) & (h >= 0) & (h < out_width)
            mask = inside[:, None] & exists[None, :]
            at = (((image * out_height + v) * out_width + h) * channels)[:, None] + channel[None, :]
            where = tl.load(place + at, mask=mask, other=255).to(tl.int32)
            value = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
            now = tl.where(where == tap, now + value, now)
            next_line = tl.where(where == 3 + tap, next_line + value, next_line)
            last_line = tl.where(where == 6 + tap, last_line + value, last_line)
        mask = is_pixel & (tl.zeros([WIDE, BLOCK], tl.int32) + line >= start)
        at = pixel_at + line * width * channels
        if TWO_GRADS:
            now += tl.load(other + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at, now.to(dx.dtype.element_ty), mask=mask)
        now, next_line = next_line, last_line
