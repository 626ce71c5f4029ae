"""Triton kernels that flip, scale, shift, mix and cast uint8 images.

Shapes: images [n, c, height, width] uint8 of any strides; flips [n]; factor and shift [c]; mixup_offsets, mixup_weights
and cutmix_offsets [n]; cutmix_boxes [n, 4]; out [n, height, width, c].

Hazards: a run of values may begin in the middle of a pixel, so the channel is one per value. Offsets to partners are
relative to an image's own row and may be negative.
"""

import triton
import triton.language as tl

_COUNTS = ["height", "width", "runs_per_line", "stride_n", "stride_c", "stride_h", "stride_w"]


@triton.jit
def _runs(runs_per_line, CHANNELS: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr, LINES: tl.constexpr):
    """The runs of a program: their first line and their first value in it, and the channel and column of each value.

    A run begins in `channel` of `pixel`; its k-th value is k % CHANNELS channels and k // CHANNELS pixels further.
    """
    number = tl.program_id(0) * RUNS + tl.arange(0, RUNS)
    line = number // runs_per_line
    first = (number - line * runs_per_line) * RUN
    pixel = first // CHANNELS
    channel = first - pixel * CHANNELS
    k = tl.arange(0, RUN)[None, :]
    c = channel[:, None] + k % CHANNELS
    is_wrapped = c >= CHANNELS
    column = pixel[:, None] + (k // CHANNELS + is_wrapped.to(tl.int32))
    return line * LINES, first, tl.where(is_wrapped, c - CHANNELS, c), column


@triton.jit
def _by_channel(values, c, CHANNELS: tl.constexpr):
    """values[c]"""
    chosen = tl.zeros(c.shape, tl.float32)
    for i in tl.static_range(CHANNELS):
        chosen = tl.where(c == i, tl.load(values + i), chosen)
    return chosen


@triton.jit
def _offsets(flips, sample, c, column, width, stride_n, stride_c, stride_w, FLIPS: tl.constexpr):
    """Offsets of the values of an image's first line, mirrored if it is flipped."""
    step, start = stride_w, 0
    if FLIPS:
        is_flipped = tl.load(flips + sample) != 0
        step = tl.where(is_flipped, -stride_w, stride_w)
        start = tl.where(is_flipped, (width - 1) * stride_w, 0)
    return (sample * stride_n + start) + (column * step + c * stride_c)


@triton.jit(do_not_specialize=_COUNTS)
def normalize(
    images, flips, factor, shift, out, height, width, runs_per_line, stride_n, stride_c, stride_h, stride_w,
    CHANNELS: tl.constexpr, FLIPS: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """out[n, i, j, c] = images[n, c, i, j or the mirrored j] * factor[c] + shift[c].

    A thread writes runs of RUN neighboring values, each at once, at the same place in LINES lines.
    """
    sample = tl.program_id(1)
    line, first, c, column = _runs(runs_per_line, CHANNELS, RUN, RUNS, LINES)
    scale, offset = _by_channel(factor, c, CHANNELS), _by_channel(shift, c, CHANNELS)
    at = images + _offsets(flips, sample, c, column, width, stride_n, stride_c, stride_w, FLIPS)
    at += (line * stride_h)[:, None]
    at_out = out + ((sample * height + line) * runs_per_line * RUN + first)[:, None] + tl.arange(0, RUN)[None, :]
    for i in tl.static_range(LINES):
        exists = (line + i < height)[:, None]
        value = tl.load(at + i * stride_h, mask=exists).to(tl.float32) * scale + offset
        tl.store(at_out + i * runs_per_line * RUN, value.to(out.dtype.element_ty), mask=exists)


@triton.jit
def _mixed(images, at, at_partner, weight, exists, scale, offset, MIXUP: tl.constexpr):
    """Normalized values of an image, mixed with those of its MixUp partner."""
    value = tl.load(images + at, mask=exists, other=0).to(tl.float32) * scale + offset
    if MIXUP:
        # Not a scalar: Triton's interpreter takes the type of a scalar comparison to be that of its operands.
        is_mixed = tl.zeros(exists.shape, tl.float32) + weight < 1
        partner = tl.load(images + at_partner, mask=exists & is_mixed, other=0).to(tl.float32)
        value = value * weight + (partner * scale + offset) * (1 - weight)
    return value


@triton.jit(do_not_specialize=_COUNTS)
def normalize_and_mix(
    images, flips, factor, shift, mixup_offsets, mixup_weights, cutmix_offsets, cutmix_boxes, out,
    height, width, runs_per_line, stride_n, stride_c, stride_h, stride_w,
    CHANNELS: tl.constexpr, FLIPS: tl.constexpr, MIXUP: tl.constexpr, CUTMIX: tl.constexpr,
    RUN: tl.constexpr, RUNS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """`normalize`, then MixUp with the image `mixup_offsets` further, then CutMix: inside of its box an image is
    the mixed one `cutmix_offsets` further.
    """
    sample = tl.program_id(1)
    line, first, c, column = _runs(runs_per_line, CHANNELS, RUN, RUNS, LINES)
    scale, offset = _by_channel(factor, c, CHANNELS), _by_channel(shift, c, CHANNELS)
    at = _offsets(flips, sample, c, column, width, stride_n, stride_c, stride_w, FLIPS)
    at_partner, weight = at, 1.0
    if MIXUP:
        partner = sample + tl.load(mixup_offsets + sample).to(tl.int32)
        weight = tl.load(mixup_weights + sample)
        at_partner = _offsets(flips, partner, c, column, width, stride_n, stride_c, stride_w, FLIPS)
    if CUTMIX:
        other = sample + tl.load(cutmix_offsets + sample).to(tl.int32)
        at_other = _offsets(flips, other, c, column, width, stride_n, stride_c, stride_w, FLIPS)
        at_others_partner, others_weight = at_other, 1.0
        if MIXUP:
            others_partner = other + tl.load(mixup_offsets + other).to(tl.int32)
            others_weight = tl.load(mixup_weights + other)
            at_others_partner = _offsets(
                flips, others_partner, c, column, width, stride_n, stride_c, stride_w, FLIPS
            )  # fmt: skip
        left, top = tl.load(cutmix_boxes + 4 * sample), tl.load(cutmix_boxes + 4 * sample + 1)
        right, bottom = tl.load(cutmix_boxes + 4 * sample + 2), tl.load(cutmix_boxes + 4 * sample + 3)

    at_out = out + ((sample * height + line) * runs_per_line * RUN + first)[:, None] + tl.arange(0, RUN)[None, :]
    for i in tl.static_range(LINES):
        row = line + i
        further = (row * stride_h)[:, None]
        exists = (row < height)[:, None]
        if CUTMIX:
            is_cut = ((row >= top) & (row < bottom))[:, None] & (column >= left) & (column < right)
            uncut = _mixed(
                images, at + further, at_partner + further, weight, exists & (is_cut == 0), scale, offset, MIXUP
            )  # fmt: skip
            others = _mixed(
                images, at_other + further, at_others_partner + further, others_weight, exists & is_cut,
                scale, offset, MIXUP,
            )  # fmt: skip
            value = tl.where(is_cut, others, uncut)
        else:
            value = _mixed(images, at + further, at_partner + further, weight, exists, scale, offset, MIXUP)
        tl.store(at_out + i * runs_per_line * RUN, value.to(out.dtype.element_ty), mask=exists)
