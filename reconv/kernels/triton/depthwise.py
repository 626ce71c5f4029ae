"""Triton kernels of depthwise convolutions, channels_last.

Output and weight gradient: a thread has PIXELS neighboring columns of two channels and walks down their lines. Each
line of the input is loaded once, with the columns beside it, and used for all lines of the output, or of its gradient,
that depend on it; the next lines are in flight meanwhile. A program has GROUPS such groups of columns, (image, x), by a
block of channels. Step t has STRIDE lines, on which the outputs from t - LAG to t + LEAD depend.

At stride 1 the input gradient is the convolution with flipped filters. At stride 2 a program computes squares of 2x2
pixels, which depend on the same few outputs: each output is loaded once per square.

Shapes: x and dx [images, height, width, channels]; y and dy [images, out_height, out_width, channels]; weight
[channels, K, K]; bias [channels]; stats [groups, 3, channels]; partials [splits, channels, K * K] of the weight
gradient, [groups, splits, 2, channels] of statistics.

Hazards: tuples of tiles live in registers; one tile more spills. `masks` are for columns only, and lines that do not
exist are read as the last one, so each use must exclude them.
"""

import triton
import triton.language as tl

from reconv.kernels.triton.batch_norm import (
    bounds,
    channels_of,
    is_last,
    row_of,
    store_partial,
    store_statistics,
)
from reconv.kernels.triton.conv_epilogue import round_pairs, strips_of

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
def _masks(column, width, inside, WHOLE: tl.constexpr, COUNT: tl.constexpr, BESIDE: tl.constexpr):
    """Masks of the columns that exist among COUNT; `WHOLE`: all but BESIDE of them at each end do wherever the group
    does.
    """
    masks = ()
    for j in tl.static_range(COUNT):
        if WHOLE and ((j >= BESIDE) and (j < COUNT - BESIDE)):
            masks = masks + (inside,)
        else:
            masks = masks + (inside & ((column + j >= 0) & (column + j < width))[:, None],)
    return masks


@triton.jit
def _load_line(x, at, channels, masks, COUNT: tl.constexpr):
    """COUNT columns of a line."""
    values = ()
    for j in tl.static_range(COUNT):
        values = values + (tl.load(x + j * channels + at, mask=masks[j], other=0.0),)
    return values


@triton.jit
def _load_existing(x, at, line, height, column, step, channels, masks, COUNT: tl.constexpr):
    """COUNT columns of a line, or zeros."""
    is_line = (column < tl.where((line >= 0) & (line < height), step, -step))[:, None]
    line_masks = ()
    for j in tl.static_range(COUNT):
        line_masks = line_masks + (masks[j] & is_line,)
    return _load_line(x + line * step, at, channels, line_masks, COUNT)


@triton.jit
def _load_step(
    x, at, t, height, column, step, channels, masks, EVEN: tl.constexpr, STRIDE: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """The lines of a step, of the last one in place of later ones; `EVEN`: every step has STRIDE lines."""
    line = tl.minimum(t, tl.cdiv(height, STRIDE) - 1) * STRIDE
    lines = _load_line(x + line * step, at, channels, masks, COUNT)
    if STRIDE == 2:
        if EVEN:
            lines = lines + _load_line(x + (line + 1) * step, at, channels, masks, COUNT)
        else:
            lines = lines + _load_existing(x, at, line + 1, height, column, step, channels, masks, COUNT)
    return lines


@triton.jit
def _to_float32(line, COUNT: tl.constexpr):
    values = ()
    for j in tl.static_range(COUNT):
        values = values + (line[j].to(tl.float32),)
    return values


@triton.jit
def _store_line(
    y, at, channels, parts, masks, total, squares, shift, STATISTICS: tl.constexpr, WHOLE: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    """Store a line of a group; returns the sums with its values minus `shift` and their squares added."""
    for p in tl.static_range(PIXELS):
        rounded = round_pairs(parts[p], y.dtype.element_ty)
        tl.store(y + p * channels + at, rounded, mask=masks[p])
        if STATISTICS:
            value = rounded.to(tl.float32) - shift
            if not WHOLE:
                value = tl.where(masks[p], value, 0.0)
            total += value
            squares += value * value
    return total, squares


@triton.jit
def _conv_lines(
    x, y, taps, bias, at, out, masks, out_masks, column, top, bottom, height, width, channels, total, squares, shift,
    STATISTICS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, STRIDE: tl.constexpr, PIXELS: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Some lines of the output of a strip. `sums` are of the lines that have begun."""
    LAG: tl.constexpr = K // 2 // STRIDE
    LEAD: tl.constexpr = (STRIDE - 1 + K // 2) // STRIDE
    COUNT: tl.constexpr = STRIDE * (PIXELS - 1) + K
    empty = tl.zeros(at.shape, tl.float32) + bias
    sums = (empty,) * ((LAG + LEAD) * PIXELS)
    step, out_step, num_steps = width * channels, tl.cdiv(width, STRIDE) * channels, tl.cdiv(height, STRIDE)
    first, end = tl.maximum(top - LEAD, 0), tl.minimum(bottom + LAG, num_steps)
    ahead = _load_step(x, at, first, height, column, step, channels, masks, EVEN, STRIDE, COUNT)
    for t in tl.range(first, end, num_stages=1):
        values = _to_float32(ahead, STRIDE * COUNT)
        ahead = _load_step(x, at, t + 1, height, column, step, channels, masks, EVEN, STRIDE, COUNT)
        parts = ()
        for m in tl.static_range(LAG + LEAD + 1):
            for p in tl.static_range(PIXELS):
                part = sums[m * PIXELS + p] if m < LAG + LEAD else empty
                for s in tl.static_range(STRIDE):
                    for row in tl.static_range(K):
                        if s + K // 2 - STRIDE * (m - LAG) == row:
                            for j in tl.static_range(K):
                                part += values[s * COUNT + STRIDE * p + j] * taps[row * K + j]
                parts = parts + (part,)
        if t >= top + LAG:
            total, squares = _store_line(
                y + (t - LAG) * out_step, out, channels, parts, out_masks, total, squares, shift, STATISTICS, WHOLE,
                PIXELS,
            )  # fmt: skip
        sums = parts[PIXELS:]
    for m in tl.static_range(LAG):  # the last lines of an image have fewer lines below them
        line = end - LAG + m
        if (line >= top) & (line < bottom):
            total, squares = _store_line(
                y + line * out_step, out, channels, sums[m * PIXELS :], out_masks, total, squares, shift, STATISTICS,
                WHOLE, PIXELS,
            )  # fmt: skip
    return total, squares


@triton.jit
def _head_mean(
    x, taps, start, num_groups, line_groups, height, width, channels, channel, exists, STRIDE: tl.constexpr,
    GROUPS: tl.constexpr, PIXELS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The mean of the first output of some groups, in the middle line of an image: it is subtracted from all."""
    group = tl.arange(0, GROUPS)
    column = group % line_groups * (STRIDE * PIXELS) - K // 2
    at = ((start + group // line_groups) * (height * width) + column)[:, None] * channels + channel[None, :]
    masks = _masks(column, width, (group < num_groups)[:, None] & exists[None, :], False, K, 0)
    head = tl.zeros(at.shape, tl.float32)
    for i in tl.static_range(K):
        line = tl.cdiv(height, STRIDE) // 2 * STRIDE + (i - K // 2)
        values = _load_existing(x, at, line, height, column, width * channels, channels, masks, K)
        for j in tl.static_range(K):
            head += values[j].to(tl.float32) * taps[i * K + j]
    return tl.sum(head, 0) / tl.minimum(num_groups, GROUPS).to(tl.float32)


@triton.jit(do_not_specialize=_STRIP_COUNTS)
def conv(
    x, weight, bias, y, running_var, stats, partials, counters, num_images, group_images, height, width, tiles, eighths,
    eps, FLIP: tl.constexpr, BIAS: tl.constexpr, STATISTICS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    STRIDE: tl.constexpr, K: tl.constexpr, PIXELS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The convolution with filters [channels, K, K], flipped or not, and a bias or none; without a bias also the
    statistics of its output.

    Programs are (block of channels, split of the lines of strips, group of images).
    """
    COUNT: tl.constexpr = STRIDE * (PIXELS - 1) + K
    channels = eighths * 8
    start, end = bounds(num_images, group_images)
    channel, exists = channels_of(channels, BLOCK)
    taps = _taps(weight, channel, exists, FLIP, K)
    out_height, out_width = tl.cdiv(height, STRIDE), tl.cdiv(width, STRIDE)
    line_groups = tl.cdiv(out_width, PIXELS)
    num_groups = (end - start) * line_groups
    total = tl.zeros([GROUPS, BLOCK], tl.float32)
    squares, mean = total, tl.zeros([BLOCK], tl.float32)
    added = tl.zeros([1, BLOCK], tl.float32)
    if BIAS:
        added = row_of(bias, channel, exists)
    if STATISTICS:
        mean = _head_mean(
            x, taps, start, num_groups, line_groups, height, width, channels, channel, exists, STRIDE, GROUPS, PIXELS,
            K,
        )  # fmt: skip
    begin, last, first_strip, last_strip = strips_of(num_groups, out_height, tiles, GROUPS)
    for strip in tl.range(first_strip, last_strip, num_stages=1):
        group = strip * GROUPS + tl.arange(0, GROUPS)
        image, place = start + group // line_groups, group % line_groups * PIXELS
        column, inside = place * STRIDE - K // 2, (group < num_groups)[:, None] & exists[None, :]
        at = (image * (height * width) + column)[:, None] * channels + channel[None, :]
        out = (image * (out_height * out_width) + place)[:, None] * channels + channel[None, :]
        total, squares = _conv_lines(
            x, y, taps, added, at, out, _masks(column, width, inside, WHOLE, COUNT, K // 2),
            _masks(place, out_width, inside, WHOLE, PIXELS, 0), column, tl.maximum(begin - strip * out_height, 0),
            tl.minimum(last - strip * out_height, out_height), height, width, channels, total, squares,
            tl.where(inside, mean[None, :], 0.0), STATISTICS, WHOLE, EVEN, STRIDE, PIXELS, K,
        )  # fmt: skip
    if STATISTICS:
        store_partial(partials, 0, 2, channels, channel, exists, tl.sum(total, 0))
        store_partial(partials, 1, 2, channels, channel, exists, tl.sum(squares, 0))
        if is_last(counters):
            num_values = (end - start) * (out_height * out_width)
            store_statistics(stats, running_var, partials, mean, num_values, channels, channel, exists, eps, BLOCK)


@triton.jit
def _weight_lines(
    x, dy, sums, at, out, masks, out_masks, column, top, bottom, height, width, channels, EVEN: tl.constexpr,
    STRIDE: tl.constexpr, PIXELS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The sums with the products of some lines of the input and the lines of the gradient that depend on them."""
    LAG: tl.constexpr = K // 2 // STRIDE
    LEAD: tl.constexpr = (STRIDE - 1 + K // 2) // STRIDE
    COUNT: tl.constexpr = STRIDE * (PIXELS - 1) + K
    step, out_step, num_steps = width * channels, tl.cdiv(width, STRIDE) * channels, tl.cdiv(height, STRIDE)
    window = ()  # the lines of the gradient from `lag` above to `lead` below
    for m in tl.static_range(LAG + LEAD + 1):
        line = _load_existing(dy, out, top - LAG + m, num_steps, column, out_step, channels, out_masks, PIXELS)
        window = window + _to_float32(line, PIXELS)
    below = _load_existing(dy, out, top + 1 + LEAD, num_steps, column, out_step, channels, out_masks, PIXELS)
    ahead = _load_step(x, at, top, height, column, step, channels, masks, EVEN, STRIDE, COUNT)
    for t in tl.range(top, bottom, num_stages=1):
        values = _to_float32(ahead, STRIDE * COUNT)
        ahead = _load_step(x, at, t + 1, height, column, step, channels, masks, EVEN, STRIDE, COUNT)
        next_line = below
        below = _load_existing(dy, out, t + 2 + LEAD, num_steps, column, out_step, channels, out_masks, PIXELS)
        added = ()
        for row in tl.static_range(K):
            for j in tl.static_range(K):
                part = sums[row * K + j]
                for s in tl.static_range(STRIDE):
                    for m in tl.static_range(LAG + LEAD + 1):
                        if s + K // 2 - STRIDE * (m - LAG) == row:
                            for p in tl.static_range(PIXELS):
                                part += window[m * PIXELS + p] * values[s * COUNT + STRIDE * p + j]
                added = added + (part,)
        sums = added
        window = window[PIXELS:] + _to_float32(next_line, PIXELS)
    return sums


@triton.jit(do_not_specialize=_STRIP_COUNTS)
def weight_gradient(
    x, dy, partials, num_images, height, width, tiles, eighths, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    STRIDE: tl.constexpr, K: tl.constexpr, PIXELS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the filters: partials [splits, channels, K * K]. Programs are (block of channels, split)."""
    COUNT: tl.constexpr = STRIDE * (PIXELS - 1) + K
    channels = eighths * 8
    channel, exists = channels_of(channels, BLOCK)
    out_height, out_width = tl.cdiv(height, STRIDE), tl.cdiv(width, STRIDE)
    line_groups = tl.cdiv(out_width, PIXELS)
    num_groups = num_images * line_groups
    sums = (tl.zeros([GROUPS, BLOCK], tl.float32),) * (K * K)
    begin, last, first_strip, last_strip = strips_of(num_groups, out_height, tiles, GROUPS)
    for strip in tl.range(first_strip, last_strip, num_stages=1):
        group = strip * GROUPS + tl.arange(0, GROUPS)
        image, place = group // line_groups, group % line_groups * PIXELS
        column, inside = place * STRIDE - K // 2, (group < num_groups)[:, None] & exists[None, :]
        at = (image * (height * width) + column)[:, None] * channels + channel[None, :]
        out = (image * (out_height * out_width) + place)[:, None] * channels + channel[None, :]
        sums = _weight_lines(
            x, dy, sums, at, out, _masks(column, width, inside, WHOLE, COUNT, K // 2),
            _masks(place, out_width, inside, WHOLE, PIXELS, 0), column, tl.maximum(begin - strip * out_height, 0),
            tl.minimum(last - strip * out_height, out_height), height, width, channels, EVEN, STRIDE, PIXELS, K,
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
