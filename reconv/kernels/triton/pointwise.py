"""Triton kernels of pointwise inference operations, channels_last: convolution epilogue, gating and concatenation.

Every value is read once and written once. Programs process values in memory order, whatever the number of channels; a
thread's vector of eight values is always of one pixel.

Shapes: x, y and other [rows, channels], a row being a pixel; bias [channels]; gate [images, channels]; a to d [rows,
their channels].

Hazards: `bias_add_act` works in place: y must not be read by anything that still needs the convolution's output.
Offsets have 32 bits, and one beyond them is negative, which the mask excludes.
"""

import triton
import triton.language as tl

from reconv.kernels.triton.batch_norm import apply_activation

SIGMOID: tl.constexpr = tl.constexpr(4)  # of a gate; the others are batch_norm's


@triton.jit
def epilogue(value, ACT: tl.constexpr):
    """The activation at the end of an operation."""
    if ACT == SIGMOID:
        return 1.0 / (1.0 + tl.exp(-value))
    return apply_activation(value, ACT)


@triton.jit
def _places(num_values, VALUES: tl.constexpr):
    """This program's values, and which of them exist; an offset beyond 32 bits is negative."""
    at = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    return at, (at >= 0) & (at < num_values)


@triton.jit(do_not_specialize=["num_rows", "eighths"])
def bias_add_act(y, bias, other, num_rows, eighths, ADDS: tl.constexpr, ACT: tl.constexpr, VALUES: tl.constexpr):
    """act(y + bias (+ other)) in place."""
    channels = eighths * 8
    at, mask = _places(num_rows * channels, VALUES)
    value = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(bias + at % channels, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(other + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, epilogue(value, ACT).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["images", "pixels", "eighths"])
def gate_add_act(
    x, gate, other, y, images, pixels, eighths, ADDS: tl.constexpr, ACT: tl.constexpr, VALUES: tl.constexpr
):
    """act(x * gate (+ other)), with one gate per image and channel."""
    channels = eighths * 8
    each = pixels * channels
    at, mask = _places(images * each, VALUES)
    factor = tl.load(gate + at // each * channels + at % channels, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * factor
    if ADDS:
        value += tl.load(other + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, epilogue(value, ACT).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _part(value, x, row, channel, first, eighths, mask):
    """Values with those of one input, whose channels begin at `first`."""
    mine = (channel >= first) & (channel < first + eighths * 8)
    return tl.where(mine, tl.load(x + row * (eighths * 8) + channel - first, mask=mask & mine, other=0.0), value)


@triton.jit(do_not_specialize=["num_rows", "a_eighths", "b_eighths", "c_eighths", "d_eighths"])
def concat(a, b, c, d, y, num_rows, a_eighths, b_eighths, c_eighths, d_eighths, VALUES: tl.constexpr):
    """The concatenation of up to four tensors along the channels."""
    channels = (a_eighths + b_eighths + c_eighths + d_eighths) * 8
    at, mask = _places(num_rows * channels, VALUES)
    row, channel = at // channels, at % channels
    value = tl.load(a + row * (a_eighths * 8) + channel, mask=mask & (channel < a_eighths * 8), other=0.0)
    value = _part(value, b, row, channel, a_eighths * 8, b_eighths, mask)
    value = _part(value, c, row, channel, (a_eighths + b_eighths) * 8, c_eighths, mask)
    value = _part(value, d, row, channel, (a_eighths + b_eighths + c_eighths) * 8, d_eighths, mask)
    tl.store(y + at, value, mask=mask)
