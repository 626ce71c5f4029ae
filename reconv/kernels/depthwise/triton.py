"""Triton kernel of the input gradient of a depthwise convolution of stride 2, channels_last.

A program computes squares of 2x2 pixels, which depend on the same few outputs: each output is loaded once per square.
"""

import triton
import triton.language as tl

_COUNTS = ["num_squares", "eighths", "height", "width", "out_height", "out_width"]


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
