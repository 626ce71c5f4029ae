"""Device code shared by convolutions with batch norm statistics: tiles, products, and what follows them.

Products are [outputs, rows], not [rows, outputs]: a thread then holds many rows of few outputs, and keeps few sums.
Statistics are those of the rounded output, as if it were read again.

Shapes: a product tile [outputs, rows]; y [rows, outputs]; total and squares [outputs, 4]; stats [groups, 3, outputs];
partials [groups, splits, 2, outputs].

Hazards: the reshape of sums assumes the layout of a tensor core's product (eight rows in groups of four pairs); with
another layout sums stay right and become slow. `round_pairs` is assembly of Nvidia GPUs.
"""

import os

import triton
import triton.language as tl

from reconv.kernels.triton.batch_norm import is_last, store_partial, store_statistics

_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_TO_BFLOAT16: tl.constexpr = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_TO_FLOAT16: tl.constexpr = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
HEAD: tl.constexpr = tl.constexpr(16)  # rows of a group whose mean is subtracted


@triton.jit
def strips_of(num_columns, num_lines, tiles, COLUMNS: tl.constexpr):
    """First and last tile of this program, and its first and last strip of columns.

    A group's tiles are numbered down its strips, one strip after another; a tile is a line of a strip.
    """
    begin = tl.program_id(1) * tiles
    end = tl.minimum(begin + tiles, tl.cdiv(num_columns, COLUMNS) * num_lines)
    return begin, end, begin // num_lines, tl.cdiv(end, num_lines)


@triton.jit
def add_product(a, b, product):
    """The product plus that of a and b."""
    if _INTERPRETED:  # it would multiply the bits of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, product, input_precision="ieee")


@triton.jit
def head_mean(product, num_rows):
    """The mean of the products of some of a group's rows, at most HEAD, which is subtracted from its values."""
    return tl.sum(product, 1) / tl.minimum(num_rows, HEAD).to(tl.float32)


@triton.jit
def round_pairs(values, dtype: tl.constexpr):
    """The float32 values in half precision, two at a time.

    Triton 3.6 converts values with more than one use one by one, by an instruction that takes eight times as long.
    """
    if _INTERPRETED:
        return values.to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_TO_BFLOAT16, "=r,r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(_TO_FLOAT16, "=r,r,r", [values], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _add_values(total, squares, value, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of a tile [outputs, 4], over each thread's own values of a tensor core's product."""
    value = tl.reshape(value, [BLOCK, ROWS // 8, 4, 2])
    return total + tl.sum(tl.sum(value, 3), 1), squares + tl.sum(tl.sum(value * value, 3), 1)


@triton.jit
def store_tile(
    product, y, total, squares, shift, row, inside, is_whole, out, exists, out_channels, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a tile of the output; returns the sums with the tile's values minus `shift` and their squares added.

    `inside` is the mask of rows that exist, `is_whole` whether all of them do.
    """
    rounded = round_pairs(product, y.dtype.element_ty)
    mask = exists[:, None] & inside[None, :]
    tl.store(y + row[None, :] * out_channels + out[:, None], rounded, mask=mask)
    value = rounded.to(tl.float32) - shift[:, None]
    # Two branches, since LLVM would turn one that only masks the values into a selection for each of them.
    if is_whole:
        total, squares = _add_values(total, squares, value, ROWS, BLOCK)
    else:
        value = tl.where(inside[None, :], value, 0.0)
        total, squares = _add_values(total, squares, value, ROWS, BLOCK)
    return total, squares


@triton.jit
def merge_statistics(
    total, squares, shift, running_var, stats, partials, counters, out_channels, out, exists, num_values, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store this program's sums; the last program stores the statistics."""
    store_partial(partials, 0, 2, out_channels, out, exists, tl.sum(total, 1))
    store_partial(partials, 1, 2, out_channels, out, exists, tl.sum(squares, 1))
    if is_last(counters):
        store_statistics(stats, running_var, partials, shift, num_values, out_channels, out, exists, eps, BLOCK)
