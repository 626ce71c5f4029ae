"""Triton kernel that rearranges images into 2x2 blocks of pixels."""

import triton
import triton.language as tl

_COUNTS = ["num_pixels", "height", "width", "stride_n", "stride_c", "stride_h", "stride_w"]


@triton.jit(do_not_specialize=_COUNTS)
def space_to_depth(
    images, out, num_pixels, height, width, stride_n, stride_c, stride_h, stride_w, CHANNELS: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, DEPTH: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """out[n, i, j, (down, right, c)] = images[n, c, 2 (i - before) + down, 2 (j - before) + right], zero outside."""
    out_width = width // 2 + BEFORE + AFTER
    out_height = height // 2 + BEFORE + AFTER
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    line = pixel // out_width
    depth = tl.arange(0, DEPTH)
    down, right, c = depth // (2 * CHANNELS), depth // CHANNELS % 2, depth % CHANNELS
    v = ((line % out_height - BEFORE) * 2)[:, None] + down[None, :]
    h = ((pixel % out_width - BEFORE) * 2)[:, None] + right[None, :]
    inside = (v >= 0) & (v < height) & (h >= 0) & (h < width) & (pixel < num_pixels)[:, None] & (down < 2)[None, :]
    at = (line // out_height * stride_n)[:, None] + (c * stride_c)[None, :] + v * stride_h + h * stride_w
    value = tl.load(images + at, mask=inside, other=0.0)
    value = value.to(out.dtype.element_ty)
    tl.store(out + pixel[:, None] * DEPTH + depth[None, :], value, mask=(pixel < num_pixels)[:, None])
