"""Triton kernel of a 1x1 inference convolution with bias, residual sum and activation as epilogue.

Products are in the tensors' dtype and accumulated in float32; every output is written once.

Shapes: x [rows, inputs]; weight [outputs, inputs]; bias [outputs]; gate [images, inputs]; other and y [rows, outputs].
Tiles: x_tile [rows, inputs], w_tile [inputs, outputs].

Hazards: rows of a tile are of one image, so images of few pixels waste most of it.
"""

import triton
import triton.language as tl

from reconv.kernels.triton.pointwise import epilogue


@triton.jit(do_not_specialize=["pixels", "in_parts", "out_parts"])
def gemm_epilogue(
    x, weight, bias, gate, other, y, pixels, in_parts, out_parts, IN_PART: tl.constexpr, OUT_PART: tl.constexpr,
    GATES: tl.constexpr, ADDS: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y[row, out] = act(sum over channels of x[row, channel] (* gate[image, channel]) * weight[out, channel] + bias (+
    other)). A tile's rows belong to one image of `pixels` rows; consecutive programs share rows."""
    channels, out_channels = in_parts * IN_PART, out_parts * OUT_PART
    num_blocks = tl.cdiv(out_channels, OUT)
    tile = tl.program_id(0) // num_blocks
    out = tl.program_id(0) % num_blocks * OUT + tl.arange(0, OUT)
    tiles_each = tl.cdiv(pixels, ROWS)
    image = tile // tiles_each
    pixel = tile % tiles_each * ROWS + tl.arange(0, ROWS)
    row = (image * pixels + pixel)[:, None]
    here, has_out = (pixel < pixels)[:, None], out < out_channels
    total = tl.zeros([ROWS, OUT], tl.float32)
    for first in tl.range(0, channels, BLOCK, num_stages=STAGES):
        channel = first + tl.arange(0, BLOCK)
        exists = channel < channels
        x_tile = tl.load(x + row * channels + channel[None, :], mask=here & exists[None, :], other=0.0)
        w_tile = tl.load(
            weight + channel[:, None] + out[None, :] * channels, mask=exists[:, None] & has_out[None, :], other=0.0
        )
        if GATES:
            factor = tl.load(gate + image * channels + channel, mask=exists, other=0.0).to(tl.float32)
            x_tile = (x_tile.to(tl.float32) * factor[None, :]).to(w_tile.dtype)
        total = tl.dot(x_tile, w_tile, total, input_precision="ieee")
    total += tl.load(bias + out, mask=has_out, other=0.0).to(tl.float32)[None, :]
    at, mask = row * out_channels + out[None, :], here & has_out[None, :]
    if ADDS:
        total += tl.load(other + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, epilogue(total, ACT).to(y.dtype.element_ty), mask=mask)
