"""Triton kernels of depthwise convolutions, channels_last.

At stride 1 a thread has PIXELS neighboring columns of two channels and walks down their lines: each line is loaded
once, with the columns beside it, and used for all lines of the output, or of the gradient, that depend on it. The next
line is in flight meanwhile. A program has GROUPS such groups of columns, (image, x), by a block of channels.

At stride 2 a program of the input gradient computes squares of 2x2 pixels, which depend on the same few outputs: each
output is loaded once per square.
"""

import triton
import triton.language as tl

from reconv.kernels.batch_norm.triton import bounds, channels_of, is_last, store_partial, store_statistics
from reconv.kernels.conv_epilogue.triton import round_pairs
from reconv.kernels.stem.triton import strips_of

_COUNTS = ["num_squares", "eighths", "height", "width", "out_height", "out_width"]
_STRIP_COUNTS = ["num_images", "group_images", "height", "width", "tiles", "eighths"]


@triton.jit
def _taps(weight, channel, exists, FLIP: tl.constexpr, K: tl.constexpr):
    """The taps of each filter, each [1, channels]."""
    taps = ()
    for tap in tl.static_range(K * K):
        at = weight + channel * (K * K) + (K * K - 1 - tap if FLIP else tap)
        taps = taps + (tl.load(at, mask=exists, other=0.0).to(tl.float32)[None, :],)
    return taps


@triton.jit
def _masks(place, width, inside, WHOLE: tl.constexpr, PIXELS: tl.constexpr, K: tl.constexpr):
    """Which columns of a group and beside it exist; `WHOLE`: no group is wider than the rest of its line."""
    masks = ()
    for j in tl.static_range(PIXELS + K - 1):
        if WHOLE and ((j >= K // 2) and (j < PIXELS + K // 2)):
            masks = masks + (inside,)
        else:
            column = place + (j - K // 2)
            masks = masks + (inside & ((column >= 0) & (column < width))[:, None],)
    return masks


@triton.jit
def _load_line(x, at, step, channels, masks, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT columns of a line, the first of them FIRST columns from the first of the group."""
    values = ()
    for j in tl.static_range(COUNT):
        values = values + (tl.load(x + (step + (j + FIRST) * channels) + at, mask=masks[j], other=0.0),)
    return values


@triton.jit
def _to_float32(line, COUNT: tl.constexpr):
    values = ()
    for j in tl.static_range(COUNT):
        values = values + (line[j].to(tl.float32),)
    return values


@triton.jit
def _store_line(
    y, at, step, channels, parts, masks, total, squares, shift, STATISTICS: tl.constexpr, WHOLE: tl.constexpr,
    PIXELS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Store a line of a group; returns the sums with its values minus `shift` and their squares added."""
    for p in tl.static_range(PIXELS):
        rounded = round_pairs(parts[p], y.dtype.element_ty)
        tl.store(y + (step + p * channels) + at, rounded, mask=masks[p + K // 2])
        if STATISTICS:
            value = rounded.to(tl.float32) - shift
            if not WHOLE:
                value = tl.where(masks[p + K // 2], value, 0.0)
            total += value
            squares += value * value
    return total, squares


@triton.jit
def _conv_lines(
    x, y, taps, at, masks, top, bottom, height, step, channels, total, squares, shift, STATISTICS: tl.constexpr,
    WHOLE: tl.constexpr, PIXELS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Some lines of the output of a strip. `sums` are of the lines that the next line is above, in or below of."""
    HALF: tl.constexpr = K // 2
    zero = tl.zeros(at.shape, tl.float32)
    sums = (zero,) * ((K - 1) * PIXELS)
    first, end = tl.maximum(top - HALF, 0), tl.minimum(bottom + HALF, height)
    ahead = _load_line(x, at, first * step, channels, masks, -HALF, PIXELS + K - 1)
    for line in tl.range(first, end, num_stages=1):
        values = _to_float32(ahead, PIXELS + K - 1)
        ahead = _load_line(x, at, tl.minimum(line + 1, height - 1) * step, channels, masks, -HALF, PIXELS + K - 1)
        parts = ()
        for m in tl.static_range(K):
            for p in tl.static_range(PIXELS):
                part = sums[m * PIXELS + p] if m < K - 1 else zero
                for j in tl.static_range(K):
                    part += values[p + j] * taps[(K - 1 - m) * K + j]
                parts = parts + (part,)
        if line >= top + HALF:
            total, squares = _store_line(
                y, at, (line - HALF) * step, channels, parts, masks, total, squares, shift, STATISTICS, WHOLE, PIXELS, K
            )  # fmt: skip
        sums = parts[PIXELS:]
    for m in tl.static_range(HALF):  # the last lines of an image have fewer lines below them
        line = end - HALF + m
        if (line >= top) & (line < bottom):
            total, squares = _store_line(
                y, at, line * step, channels, sums[m * PIXELS :], masks, total, squares, shift, STATISTICS, WHOLE,
                PIXELS, K,
            )  # fmt: skip
    return total, squares


@triton.jit
def _head_mean(
    x, taps, start, num_groups, fours, height, width, channels, channel, exists, GROUPS: tl.constexpr,
    PIXELS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The mean of the first output of some groups, in the middle line of an image: it is subtracted from all."""
    group = tl.arange(0, GROUPS)
    place = group % fours * PIXELS
    at = ((start + group // fours) * (height * width) + place)[:, None] * channels + channel[None, :]
    masks = _masks(place, width, (group < num_groups)[:, None] & exists[None, :], False, 1, K)
    head = tl.zeros(at.shape, tl.float32)
    for i in tl.static_range(K):
        line = height // 2 + (i - K // 2)
        line = tl.minimum(tl.maximum(line, 0), height - 1)  # a shift may be any value near the mean
        values = _load_line(x, at, line * (width * channels), channels, masks, -(K // 2), K)
        for j in tl.static_range(K):
            head += values[j].to(tl.float32) * taps[i * K + j]
    return tl.sum(head, 0) / tl.minimum(num_groups, GROUPS).to(tl.float32)


@triton.jit(do_not_specialize=_STRIP_COUNTS)
def conv(
    x, weight, y, running_var, stats, partials, counters, num_images, group_images, height, width, tiles, eighths, eps,
    FLIP: tl.constexpr, STATISTICS: tl.constexpr, WHOLE: tl.constexpr, K: tl.constexpr, PIXELS: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The convolution of stride 1 with filters [channels, K, K], flipped or not, and the statistics of its output.

    Programs are (block of channels, split of the lines of strips, group of images).
    """
    channels = eighths * 8
    start, end = bounds(num_images, group_images)
    channel, exists = channels_of(channels, BLOCK)
    taps = _taps(weight, channel, exists, FLIP, K)
    fours = tl.cdiv(width, PIXELS)
    num_groups = (end - start) * fours
    total = tl.zeros([GROUPS, BLOCK], tl.float32)
    squares, mean = total, tl.zeros([BLOCK], tl.float32)
    if STATISTICS:
        mean = _head_mean(
            x, taps, start, num_groups, fours, height, width, channels, channel, exists, GROUPS, PIXELS, K
        )  # fmt: skip
    begin, last, first_strip, last_strip = strips_of(num_groups, height, tiles, GROUPS)
    for strip in tl.range(first_strip, last_strip, num_stages=1):
        group = strip * GROUPS + tl.arange(0, GROUPS)
        place, inside = group % fours * PIXELS, (group < num_groups)[:, None] & exists[None, :]
        at = ((start + group // fours) * (height * width) + place)[:, None] * channels + channel[None, :]
        total, squares = _conv_lines(
            x, y, taps, at, _masks(place, width, inside, WHOLE, PIXELS, K), tl.maximum(begin - strip * height, 0),
            tl.minimum(last - strip * height, height), height, width * channels, channels, total, squares,
            tl.where(inside, mean[None, :], 0.0), STATISTICS, WHOLE, PIXELS, K,
        )  # fmt: skip
    if STATISTICS:
        store_partial(partials, 0, 2, channels, channel, exists, tl.sum(total, 0))
        store_partial(partials, 1, 2, channels, channel, exists, tl.sum(squares, 0))
        if is_last(counters):
            num_values = (end - start) * (height * width)
            store_statistics(stats, running_var, partials, mean, num_values, channels, channel, exists, eps, BLOCK)


@triton.jit
def _gradient_line(dy, at, line, height, place, step, channels, inside, PIXELS: tl.constexpr):
    """A line of the gradient, or zeros."""
    is_line = (place < tl.where((line >= 0) & (line < height), step, 0))[:, None]
    masks = ()
    for p in tl.static_range(PIXELS):
        masks = masks + (inside[p] & is_line,)
    return _load_line(dy, at, line * step, channels, masks, 0, PIXELS)


@triton.jit
def _weight_lines(
    x, dy, sums, at, masks, top, bottom, height, place, step, channels, PIXELS: tl.constexpr, K: tl.constexpr
):
    """The sums with the products of some lines of the input and the lines of the gradient that depend on them."""
    HALF: tl.constexpr = K // 2
    inside = masks[HALF : HALF + PIXELS]
    window = ()  # the lines of the gradient from HALF above to HALF below
    for m in tl.static_range(K):
        above = _gradient_line(dy, at, top - HALF + m, height, place, step, channels, inside, PIXELS)
        window = window + _to_float32(above, PIXELS)
    below = _gradient_line(dy, at, top + 1 + HALF, height, place, step, channels, inside, PIXELS)
    ahead = _load_line(x, at, top * step, channels, masks, -HALF, PIXELS + K - 1)
    for line in tl.range(top, bottom, num_stages=1):
        values = _to_float32(ahead, PIXELS + K - 1)
        ahead = _load_line(x, at, tl.minimum(line + 1, height - 1) * step, channels, masks, -HALF, PIXELS + K - 1)
        next_line = below
        below = _gradient_line(dy, at, line + 2 + HALF, height, place, step, channels, inside, PIXELS)
        added = ()
        for i in tl.static_range(K):
            for j in tl.static_range(K):
                part = sums[i * K + j]
                for p in tl.static_range(PIXELS):
                    part += window[(K - 1 - i) * PIXELS + p] * values[p + j]
                added = added + (part,)
        sums = added
        window = window[PIXELS:] + _to_float32(next_line, PIXELS)
    return sums


@triton.jit(do_not_specialize=_STRIP_COUNTS)
def weight_gradient(
    x, dy, partials, num_images, height, width, tiles, eighths, WHOLE: tl.constexpr, K: tl.constexpr,
    PIXELS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the filters at stride 1: partials [splits, channels, K * K]. Programs are (block, split)."""
    channels = eighths * 8
    channel, exists = channels_of(channels, BLOCK)
    fours = tl.cdiv(width, PIXELS)
    num_groups = num_images * fours
    sums = (tl.zeros([GROUPS, BLOCK], tl.float32),) * (K * K)
    begin, last, first_strip, last_strip = strips_of(num_groups, height, tiles, GROUPS)
    for strip in tl.range(first_strip, last_strip, num_stages=1):
        group = strip * GROUPS + tl.arange(0, GROUPS)
        place, inside = group % fours * PIXELS, (group < num_groups)[:, None] & exists[None, :]
        at = (group // fours * (height * width) + place)[:, None] * channels + channel[None, :]
        sums = _weight_lines(
            x, dy, sums, at, _masks(place, width, inside, WHOLE, PIXELS, K), tl.maximum(begin - strip * height, 0),
            tl.minimum(last - strip * height, height), height, place, width * channels, channels, PIXELS, K,
        )  # fmt: skip
    partials += (tl.program_id(1) * channels + channel) * (K * K)
    for tap in tl.static_range(K * K):
        tl.store(partials + tap, tl.sum(sums[tap], 0), mask=exists)


@triton.jit
def _with(total, value, weight, channel, exists, V: tl.constexpr, H: tl.constexpr, K: tl.constexpr):
    """The total plus values times one tap of each filter, where the tap exists."""
    if ((V >= 0) and (V < K)) and ((H >= 0) and (H < K)):
        tap = tl.load(weight + channel * (K * K) + V * K + H, mask=exists, other=0.0).to(tl.float32)
        total += value * tap[None, :]
    return total


@triton.jit(do_not_specialize=_COUNTS)
def input_gradient(
    dy, weight, dx, num_squares, eighths, height, width, out_height, out_width, K: tl.constexpr, SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dx[n, i, j] = sum of dy[n, u, v] * weight[i + K // 2 - 2 u, j + K // 2 - 2 v], per channel."""
    channels = eighths * 8
    num_blocks = tl.cdiv(channels, BLOCK)
    channel = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    square = tl.program_id(0) // num_blocks * SQUARES + tl.arange(0, SQUARES)
    line = square // out_width
    u, v, first = line % out_height, square % out_width, line // out_height * out_height
    HALF: tl.constexpr = K // 2
    even_even = tl.zeros([SQUARES, BLOCK], tl.float32)
    even_odd = tl.zeros([SQUARES, BLOCK], tl.float32)
    odd_even = tl.zeros([SQUARES, BLOCK], tl.float32)
    odd_odd = tl.zeros([SQUARES, BLOCK], tl.float32)
    for down in tl.static_range(-(HALF // 2), (HALF + 1) // 2 + 1):
        for right in tl.static_range(-(HALF // 2), (HALF + 1) // 2 + 1):
            seen = (u + down >= 0) & (u + down < out_height) & (v + right >= 0) & (v + right < out_width)
            seen = (seen & (square < num_squares))[:, None] & exists[None, :]
            at = ((first + u + down) * out_width + v + right)[:, None] * channels + channel[None, :]
            value = tl.load(dy + at, mask=seen, other=0.0).to(tl.float32)
            even_even = _with(even_even, value, weight, channel, exists, HALF - 2 * down, HALF - 2 * right, K)
            even_odd = _with(even_odd, value, weight, channel, exists, HALF - 2 * down, HALF - 2 * right + 1, K)
            odd_even = _with(odd_even, value, weight, channel, exists, HALF - 2 * down + 1, HALF - 2 * right, K)
            odd_odd = _with(odd_odd, value, weight, channel, exists, HALF - 2 * down + 1, HALF - 2 * right + 1, K)
    at = ((line // out_height * height + 2 * u) * width + 2 * v)[:, None] * channels + channel[None, :]
    here = (square < num_squares)[:, None] & exists[None, :]
    right_of = here & (2 * v + 1 < width)[:, None]
    below = (2 * u + 1 < height)[:, None]
    tl.store(dx + at, even_even.to(dx.dtype.element_ty), mask=here)
    tl.store(dx + at + channels, even_odd.to(dx.dtype.element_ty), mask=right_of)
    tl.store(dx + at + width * channels, odd_even.to(dx.dtype.element_ty), mask=here & below)
    tl.store(dx + at + (width + 1) * channels, odd_odd.to(dx.dtype.element_ty), mask=right_of & below)
