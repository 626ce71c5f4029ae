"""Triton kernels of a 1x1 convolution that also reduces the batch norm statistics of its output.

Programs are (block of outputs, split of the rows, group); those of the same rows are launched next to each other, so
that they read them from the L2 cache. Products are [outputs, rows], not [rows, outputs]: a thread then holds many rows
of few outputs, and keeps few sums. Statistics are those of the rounded output, as if it were read again.
"""

import os

import triton
import triton.language as tl

from reconv.kernels.batch_norm.triton import bounds, channels_of, is_last, store_partial, store_statistics

_COUNTS = ["eighths", "num_rows", "group_rows", "out_eighths"]
_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_TO_BFLOAT16: tl.constexpr = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_TO_FLOAT16: tl.constexpr = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_HEAD: tl.constexpr = tl.constexpr(16)  # first rows of a group whose mean is subtracted


@triton.jit
def _filters(filters, out, exists, channel, channels):
    """The filters of some outputs and channels [outputs, channels]."""
    mask = exists[:, None] & (channel < channels)[None, :]
    return tl.load(filters + out[:, None] * channels + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _rows(x, row, end, channel, channels):
    """Some channels of the input's rows [rows, channels]."""
    mask = (row < end)[:, None] & (channel < channels)[None, :]
    return tl.load(x + row[:, None] * channels + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _dot(some, rows, product):
    """The product [outputs, rows] plus that of some channels' filters and rows."""
    if _INTERPRETED:  # it would multiply the bits of bfloat16
        some, rows = some.to(tl.float32), rows.to(tl.float32)
    return tl.dot(some, tl.trans(rows), product, input_precision="ieee")


@triton.jit
def _head_mean(product, start, end):
    """The mean of the products of a group's first rows, which is subtracted from its values."""
    return tl.sum(product, 1) / tl.minimum(end - start, _HEAD).to(tl.float32)


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
def _store_tile(
    product, y, total, squares, shift, first, end, out, exists, out_channels, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Store a tile of the output; returns the sums with the tile's values minus `shift` and their squares added."""
    row = first + tl.arange(0, ROWS)
    rounded = round_pairs(product, y.dtype.element_ty)
    mask = exists[:, None] & (row < end)[None, :]
    tl.store(y + row[None, :] * out_channels + out[:, None], rounded, mask=mask)
    value = rounded.to(tl.float32) - shift[:, None]
    # Two branches, since LLVM would turn one that only masks the values into a selection for each of them.
    if first + ROWS <= end:
        total, squares = _add_values(total, squares, value, ROWS, BLOCK)
    else:
        value = tl.where((row < end)[None, :], value, 0.0)
        total, squares = _add_values(total, squares, value, ROWS, BLOCK)
    return total, squares


@triton.jit
def _merge(
    total, squares, shift, running_var, stats, partials, counters, out_channels, out, exists, start, end, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store this program's sums; the last program stores the statistics."""
    store_partial(partials, 0, 2, out_channels, out, exists, tl.sum(total, 1))
    store_partial(partials, 1, 2, out_channels, out, exists, tl.sum(squares, 1))
    if is_last(counters):
        count = end - start
        store_statistics(stats, running_var, partials, shift, count, out_channels, out, exists, eps, BLOCK)


@triton.jit(do_not_specialize=_COUNTS)
def conv_few_inputs(
    x, filters, y, running_var, stats, partials, counters, eighths, num_rows, group_rows, out_eighths, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A convolution of at most BLOCK_K inputs: a program reads its filters once."""
    channels, out_channels = eighths * 8, out_eighths * 8
    start, end = bounds(num_rows, group_rows)
    out, exists = channels_of(out_channels, BLOCK)
    channel = tl.arange(0, BLOCK_K)
    some = _filters(filters, out, exists, channel, channels)
    head = _rows(x, start + tl.arange(0, _HEAD), end, channel, channels)
    shift = _head_mean(_dot(some, head, tl.zeros([BLOCK, _HEAD], tl.float32)), start, end)
    total = tl.zeros([BLOCK, 4], tl.float32)
    squares = tl.zeros([BLOCK, 4], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(end - start, ROWS), tl.num_programs(1), num_stages=STAGES):
        first_row = start + tile * ROWS
        row = first_row + tl.arange(0, ROWS)
        product = _dot(some, _rows(x, row, end, channel, channels), tl.zeros([BLOCK, ROWS], tl.float32))
        total, squares = _store_tile(
            product, y, total, squares, shift, first_row, end, out, exists, out_channels, ROWS, BLOCK
        )
    _merge(
        total, squares, shift, running_var, stats, partials, counters, out_channels, out, exists, start, end, eps,
        BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS)
def conv_many_inputs(
    x, filters, y, running_var, stats, partials, counters, eighths, num_rows, group_rows, out_eighths, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A convolution of any number of inputs, BLOCK_K at a time."""
    channels, out_channels = eighths * 8, out_eighths * 8
    start, end = bounds(num_rows, group_rows)
    out, exists = channels_of(out_channels, BLOCK)
    head = tl.zeros([BLOCK, _HEAD], tl.float32)
    for first in tl.range(0, channels, BLOCK_K, num_stages=STAGES):
        channel = first + tl.arange(0, BLOCK_K)
        some = _filters(filters, out, exists, channel, channels)
        head = _dot(some, _rows(x, start + tl.arange(0, _HEAD), end, channel, channels), head)
    shift = _head_mean(head, start, end)
    total = tl.zeros([BLOCK, 4], tl.float32)
    squares = tl.zeros([BLOCK, 4], tl.float32)
    product = tl.zeros([BLOCK, ROWS], tl.float32)
    first_row, first = start + tl.program_id(1) * ROWS, 0
    tiles = tl.cdiv(tl.cdiv(end - start, ROWS) - tl.program_id(1), tl.num_programs(1))
    # One loop for tiles and inputs: the first loads of a tile are in flight while the tile before it is stored.
    for _step in tl.range(0, tiles * tl.cdiv(channels, BLOCK_K), num_stages=STAGES):
        channel = first + tl.arange(0, BLOCK_K)
        rows = _rows(x, first_row + tl.arange(0, ROWS), end, channel, channels)
        some = _filters(filters, out, exists, channel, channels)
        product = _dot(some, rows, product)
        is_whole = first + BLOCK_K >= channels
        if is_whole:
            total, squares = _store_tile(
                product, y, total, squares, shift, first_row, end, out, exists, out_channels, ROWS, BLOCK
            )
            product = tl.zeros([BLOCK, ROWS], tl.float32)
        # Not in the branch: Triton 3.6 pipelines no loads whose addresses depend on one.
        first = tl.where(is_whole, 0, first + BLOCK_K)
        first_row += tl.where(is_whole, tl.num_programs(1) * ROWS, 0)
    _merge(
        total, squares, shift, running_var, stats, partials, counters, out_channels, out, exists, start, end, eps,
        BLOCK,
    )  # fmt: skip
