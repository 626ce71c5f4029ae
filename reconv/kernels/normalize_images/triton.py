"""Triton kernel that flips, scales, shifts and casts uint8 images."""

import triton
import triton.language as tl

_COUNTS = ["height", "width", "runs_per_line", "stride_n", "stride_c", "stride_h", "stride_w"]


@triton.jit(do_not_specialize=_COUNTS)
def normalize(
    images, flips, factor, shift, out, height, width, runs_per_line, stride_n, stride_c, stride_h, stride_w,
    CHANNELS: tl.constexpr, FLIPS: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """out[n, i, j, c] = images[n, c, i, j or the mirrored j] * factor[c] + shift[c].

    A thread writes runs of RUN neighboring values, each at once, at the same place in LINES lines.
    """
    sample = tl.program_id(1)
    number = tl.program_id(0) * RUNS + tl.arange(0, RUNS)
    line = number // runs_per_line
    first = (number - line * runs_per_line) * RUN
    line *= LINES

    # A run begins in `channel` of `pixel`; its k-th value is k % CHANNELS channels and k // CHANNELS pixels further.
    pixel = first // CHANNELS
    channel = first - pixel * CHANNELS
    k = tl.arange(0, RUN)[None, :]
    c = channel[:, None] + k % CHANNELS
    is_wrapped = c >= CHANNELS
    c = tl.where(is_wrapped, c - CHANNELS, c)
    h = pixel[:, None] + (k // CHANNELS + is_wrapped.to(tl.int32))
    scale = tl.zeros([RUNS, RUN], tl.float32)
    offset = tl.zeros([RUNS, RUN], tl.float32)
    for i in tl.static_range(CHANNELS):
        scale = tl.where(c == i, tl.load(factor + i), scale)
        offset = tl.where(c == i, tl.load(shift + i), offset)

    step, start = stride_w, 0
    if FLIPS:
        is_flipped = tl.load(flips + sample) != 0
        step = tl.where(is_flipped, -stride_w, stride_w)
        start = tl.where(is_flipped, (width - 1) * stride_w, 0)
    at = images + (sample * stride_n + start + line * stride_h)[:, None] + (h * step + c * stride_c)
    at_out = out + ((sample * height + line) * runs_per_line * RUN + first)[:, None] + k
    for i in tl.static_range(LINES):
        exists = (line + i < height)[:, None]
        value = tl.load(at + i * stride_h, mask=exists).to(tl.float32) * scale + offset
        tl.store(at_out + i * runs_per_line * RUN, value.to(out.dtype.element_ty), mask=exists)
