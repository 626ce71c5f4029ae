"""Triton kernels of a grouped 3x3 convolution of stride 1, channels_last: output and weight gradient.

A program has some columns (image, x) and walks down their lines. Each line is loaded three times, shifted by one pixel,
and used for three lines of the output or of the weight gradient. A warp computes 16 channels, the warps of a program
those next to each other. Groups of less than 16 channels share a product with zeros between them.

Operands of tensor cores are loaded from global memory straight into the registers where they are needed, without shared
memory: the order of a product's inner dimension is arbitrary, so a thread's share of it can be contiguous in memory.
The rows of a load tensor are [count, blocks, 8, 4]: Triton distributes them over the threads of a warp, the warps and
the registers from the last to the first, as the operands of tensor cores are.

Shapes: x, y and dy [images, height, width, channels]; filters and transposed [channels, 3, 3, SIZE]; partials [splits,
channels, 3, 3, SIZE]. Operands of a product: [blocks, columns, 16] and [blocks, 16, 16].

Hazards: reshapes and permutes describe which register of which thread holds a value; a change that computes the same
may move values through shared memory and cost the whole gain. Later lines than the last are read as the last one and
must be cut off afterwards.
"""

import os

import triton
import triton.language as tl

_COUNTS = ["num_columns", "sixteenths", "height", "width", "lines", "strips", "size"]
_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_TAPS: tl.constexpr = tl.constexpr(9)


@triton.jit
def _indices(COUNT: tl.constexpr, BLOCKS: tl.constexpr):
    """The four indices [rows, 1] of each row of a load tensor [count * blocks * 8 * 4, values]."""
    row = tl.arange(0, COUNT * BLOCKS * 32)[:, None]
    return row // (BLOCKS * 32), row // 32 % BLOCKS, row // 4 % 8, row % 4


@triton.jit
def _dot(a, b, product):
    """The products plus those of a and b, for each block."""
    if _INTERPRETED:  # it would multiply the bits of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, product, input_precision="ieee")


@triton.jit
def _operand(tile, ROWS: tl.constexpr, BLOCKS: tl.constexpr, VALUES: tl.constexpr):
    """[blocks, rows, 4 * values] of a load tensor. Values of a thread stay with it."""
    tile = tl.reshape(tile, [ROWS // 8, BLOCKS, 8, 4, VALUES // 2, 2])
    return tl.reshape(tl.permute(tile, [1, 0, 2, 4, 3, 5]), [BLOCKS, ROWS, 4 * VALUES])


@triton.jit
def _filters(filters, first_block, sixteenths, TAP: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """One tap of the filters of 16 outputs [blocks, inputs, 16], with zeros between groups."""
    VALUES: tl.constexpr = max(SIZE, 16) // 4
    half, block, row, lane = _indices(2, BLOCKS)
    block += first_block
    # The output that a thread of the product finds next to its others: it then stores four neighbors.
    out = block * 16 + row // 2 * 4 + half * 2 + row % 2
    channel = block * 16 // (4 * VALUES) * (4 * VALUES) + lane * VALUES + tl.arange(0, VALUES)[None, :]
    mask = (out // SIZE == channel // SIZE) & (block < sixteenths)
    tile = tl.load(filters + (out * _TAPS + TAP) * SIZE + channel % SIZE, mask=mask, other=0.0)
    return tl.permute(_operand(tile, 16, BLOCKS, VALUES), [0, 2, 1])


@triton.jit
def _load_line(x, line, end, at, step, channels, has_left, exists, has_right):
    """A line of the columns to the left, of the columns and of those to the right; the last line in place of later
    ones."""
    source = x + tl.minimum(line, end - 1) * step
    left = tl.load(source - channels + at, mask=has_left, other=0.0)
    middle = tl.load(source + at, mask=exists, other=0.0)
    return left, middle, tl.load(source + channels + at, mask=has_right, other=0.0)


@triton.jit
def _load_gradient(dy, line, height, out, step, exists, column, num_columns):
    """A line of the gradient, or zeros."""
    limit = tl.where(line < height, num_columns, 0)
    return tl.load(dy + line * step + out, mask=exists & (column < limit), other=0.0)


@triton.jit
def _add_line(total, left, middle, right, a, b, c):
    """The products plus those of a line and one row of taps."""
    return _dot(right, c, _dot(middle, b, _dot(left, a, total)))


@triton.jit
def _store_line(y, at, exists, total, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr):
    """Store 16 outputs of each column."""
    total = tl.reshape(total, [BLOCKS, COLUMNS // 8, 8, 2, 4, 2])
    total = tl.reshape(tl.permute(total, [1, 0, 2, 4, 3, 5]), [COLUMNS * BLOCKS * 4, 4])
    tl.store(y + at, total.to(y.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=_COUNTS)
def conv(
    x, filters, y, num_columns, sixteenths, height, width, lines, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
    AHEAD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The convolution with filters [channels, 3, 3, SIZE], for some lines of some columns."""
    VALUES: tl.constexpr = max(SIZE, 16) // 4
    channels = sixteenths * 16
    program, num_blocks, parts = tl.program_id(0), tl.cdiv(sixteenths, BLOCKS), tl.cdiv(height, lines)
    first_block = program % num_blocks * BLOCKS
    count, block, row, lane = _indices(COLUMNS // 8, BLOCKS)
    block += first_block
    first = program // num_blocks % parts * lines
    column = program // num_blocks // parts * COLUMNS + count * 8 + row
    place = column % width
    pixel = (column // width * (height * width) + place) * channels
    at = pixel + block * 16 // (4 * VALUES) * (4 * VALUES) + lane * VALUES + tl.arange(0, VALUES)[None, :]
    out = pixel + block * 16 + lane * 4 + tl.arange(0, 4)[None, :]
    exists = (column < num_columns) & (block < sixteenths)
    has_left, has_right = exists & (place > 0), exists & (place < width - 1)
    w0 = _filters(filters, first_block, sixteenths, 0, BLOCKS, SIZE)
    w1 = _filters(filters, first_block, sixteenths, 1, BLOCKS, SIZE)
    w2 = _filters(filters, first_block, sixteenths, 2, BLOCKS, SIZE)
    w3 = _filters(filters, first_block, sixteenths, 3, BLOCKS, SIZE)
    w4 = _filters(filters, first_block, sixteenths, 4, BLOCKS, SIZE)
    w5 = _filters(filters, first_block, sixteenths, 5, BLOCKS, SIZE)
    w6 = _filters(filters, first_block, sixteenths, 6, BLOCKS, SIZE)
    w7 = _filters(filters, first_block, sixteenths, 7, BLOCKS, SIZE)
    w8 = _filters(filters, first_block, sixteenths, 8, BLOCKS, SIZE)
    start, end, step = tl.maximum(first - 1, 0), tl.minimum(first + lines + 1, height), width * channels
    a0, a1, a2 = _load_line(x, start, end, at, step, channels, has_left, exists, has_right)
    b0, b1, b2 = a0, a1, a2
    if AHEAD == 2:
        b0, b1, b2 = _load_line(x, start + 1, end, at, step, channels, has_left, exists, has_right)
    above = tl.zeros([BLOCKS, COLUMNS, 16], tl.float32)
    here = tl.zeros([BLOCKS, COLUMNS, 16], tl.float32)
    for line in tl.range(start, end, num_stages=1):
        left = _operand(a0, COLUMNS, BLOCKS, VALUES)
        middle = _operand(a1, COLUMNS, BLOCKS, VALUES)
        right = _operand(a2, COLUMNS, BLOCKS, VALUES)
        # The next lines are in flight during the products of this one.
        if AHEAD == 2:
            a0, a1, a2 = b0, b1, b2
            b0, b1, b2 = _load_line(x, line + 2, end, at, step, channels, has_left, exists, has_right)
        else:
            a0, a1, a2 = _load_line(x, line + 1, end, at, step, channels, has_left, exists, has_right)
        above = _add_line(above, left, middle, right, w6, w7, w8)
        if line > first:
            _store_line(y + (line - 1) * step, out, exists, above, COLUMNS, BLOCKS)
        above = _add_line(here, left, middle, right, w3, w4, w5)
        here = _add_line(tl.zeros([BLOCKS, COLUMNS, 16], tl.float32), left, middle, right, w0, w1, w2)
    if first + lines >= height:
        _store_line(y + (height - 1) * step, out, exists, above, COLUMNS, BLOCKS)


@triton.jit
def _pixels(tile, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr):
    """[blocks, columns, 16] of a load tensor of two values: channel 2 q + c is at c * 8 + q."""
    tile = tl.reshape(tile, [COLUMNS // 8, 2, BLOCKS, 8, 4, 2])
    return tl.reshape(tl.permute(tile, [2, 0, 4, 1, 5, 3]), [BLOCKS, COLUMNS, 16])


@triton.jit
def _store_sums(partials, out, channel, exists, total, TAP: tl.constexpr, SIZE: tl.constexpr):
    """Store one tap's sums [blocks, outputs, inputs], those of inputs and outputs of the same group."""
    at = (out * _TAPS + TAP) * SIZE + channel % SIZE
    tl.store(partials + at, total, mask=exists & (out // SIZE == channel // SIZE))


@triton.jit(do_not_specialize=_COUNTS)
def weight_gradient(
    x, dy, partials, num_columns, sixteenths, height, width, strips, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
    AHEAD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Sums over some strips of columns: partials [splits, channels, 3, 3, SIZE]."""
    PAIRS: tl.constexpr = max(SIZE, 16) // 16  # blocks of inputs for each block of outputs
    channels = sixteenths * 16
    program, num_blocks = tl.program_id(0), tl.cdiv(sixteenths * PAIRS, BLOCKS)
    first_block, split = program % num_blocks * BLOCKS, program // num_blocks
    count, block, row, lane = _indices(COLUMNS // 4, BLOCKS)
    block += first_block
    channel = row * 2 + tl.arange(0, 2)[None, :]
    out_channel = block // PAIRS * 16 + channel
    in_channel = (block // PAIRS // PAIRS * PAIRS + block % PAIRS) * 16 + channel
    step = width * channels
    zero = tl.zeros([BLOCKS, 16, 16], tl.float32)
    s0, s1, s2, s3, s4, s5, s6, s7, s8 = zero, zero, zero, zero, zero, zero, zero, zero, zero
    for strip in tl.range(split * strips, (split + 1) * strips, num_stages=1):
        column = strip * COLUMNS + count * 4 + lane
        place = column % width
        pixel = (column // width * (height * width) + place) * channels
        exists = (column < num_columns) & (block < sixteenths * PAIRS)
        has_left, has_right = exists & (place > 0), exists & (place < width - 1)
        at, out = pixel + in_channel, pixel + out_channel
        a0, a1, a2 = _load_line(x, 0, height, at, step, channels, has_left, exists, has_right)
        here = tl.load(dy + out, mask=exists, other=0.0)
        above = tl.zeros_like(here)
        a3 = _load_gradient(dy, 1, height, out, step, exists, column, num_columns)
        b0, b1, b2, b3 = a0, a1, a2, a3
        if AHEAD == 2:
            b0, b1, b2 = _load_line(x, 1, height, at, step, channels, has_left, exists, has_right)
            b3 = _load_gradient(dy, 2, height, out, step, exists, column, num_columns)
        for line in tl.range(0, height, num_stages=1):
            left = _pixels(a0, COLUMNS, BLOCKS)
            middle = _pixels(a1, COLUMNS, BLOCKS)
            right = _pixels(a2, COLUMNS, BLOCKS)
            below = a3
            # The next lines are in flight during the products of this one.
            if AHEAD == 2:
                a0, a1, a2, a3 = b0, b1, b2, b3
                b0, b1, b2 = _load_line(x, line + 2, height, at, step, channels, has_left, exists, has_right)
                b3 = _load_gradient(dy, line + 3, height, out, step, exists, column, num_columns)
            else:
                a0, a1, a2 = _load_line(x, line + 1, height, at, step, channels, has_left, exists, has_right)
                a3 = _load_gradient(dy, line + 2, height, out, step, exists, column, num_columns)
            gradient = tl.permute(_pixels(above, COLUMNS, BLOCKS), [0, 2, 1])
            s6, s7, s8 = _dot(gradient, left, s6), _dot(gradient, middle, s7), _dot(gradient, right, s8)
            gradient = tl.permute(_pixels(here, COLUMNS, BLOCKS), [0, 2, 1])
            s3, s4, s5 = _dot(gradient, left, s3), _dot(gradient, middle, s4), _dot(gradient, right, s5)
            gradient = tl.permute(_pixels(below, COLUMNS, BLOCKS), [0, 2, 1])
            s0, s1, s2 = _dot(gradient, left, s0), _dot(gradient, middle, s1), _dot(gradient, right, s2)
            above, here = here, below
    block = first_block + tl.arange(0, BLOCKS)[:, None, None]
    row = tl.arange(0, 16)
    channel = row % 8 * 2 + row // 8
    out = block // PAIRS * 16 + channel[None, :, None]
    channel = (block // PAIRS // PAIRS * PAIRS + block % PAIRS) * 16 + channel[None, None, :]
    exists = block < sixteenths * PAIRS
    partials += split * (channels * _TAPS * SIZE)
    _store_sums(partials, out, channel, exists, s0, 0, SIZE)
    _store_sums(partials, out, channel, exists, s1, 1, SIZE)
    _store_sums(partials, out, channel, exists, s2, 2, SIZE)
    _store_sums(partials, out, channel, exists, s3, 3, SIZE)
    _store_sums(partials, out, channel, exists, s4, 4, SIZE)
    _store_sums(partials, out, channel, exists, s5, 5, SIZE)
    _store_sums(partials, out, channel, exists, s6, 6, SIZE)
    _store_sums(partials, out, channel, exists, s7, 7, SIZE)
    _store_sums(partials, out, channel, exists, s8, 8, SIZE)


@triton.jit(do_not_specialize=_COUNTS)
def transpose_filters(filters, transposed, size, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Filters [channels, 3, 3, SIZE] with inputs and outputs exchanged in each group, and flipped taps."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    out, tap, channel = at // (_TAPS * SIZE), at // SIZE % _TAPS, at % SIZE
    source = ((out // SIZE * SIZE + channel) * _TAPS + (_TAPS - 1 - tap)) * SIZE + out % SIZE
    tl.store(transposed + at, tl.load(filters + source, mask=at < size), mask=at < size)
