"""Triton kernels of SSD's matching, losses, hard-negative mining and gradient.

A map is read as its convolution writes it: for each pixel the logits of its anchors, then their box deltas, then
padding; biases are still to be added. Everything else about anchors is ordered by map, then shape, then pixel. IoU is
rounded as by the plain operations.

Shapes: boxes [images, rows, 4] (xyxy); labels [images, rows]; num_boxes [images]; anchors_cxcywh [anchors, 4]; rows,
by_class, by_box and log_sums [images, anchors]; best_anchors [images, rows]; x and dx of a map [images, cells,
channels]; class_bias [shapes * classes]; box_bias [shapes * 4]; class_loss, box_loss and shares [images].

Hazards: `by_box` is written for positive anchors alone and must be read for those alone. `gradient` writes selected
anchors only, so dx must be zero before. Losses are compared as integers: they must not be negative. Fused multiply-add
is switched off by the caller, else IoU would not be that of the plain operations.
"""

import triton
import triton.language as tl

HARD: tl.constexpr = tl.constexpr(-1)  # instead of a ground-truth row: a selected negative
UNUSED: tl.constexpr = tl.constexpr(-2)  # a negative that is not selected
EPSILON: tl.constexpr = tl.constexpr(1e-8)  # of the box coder, as published

_COUNTS = ["num_rows", "num_anchors", "num_cells", "per_cell", "num_classes", "channels", "first"]


@triton.jit
def _corners(anchors_cxcywh, anchor, exists):
    x = tl.load(anchors_cxcywh + anchor * 4, mask=exists, other=0.0)
    y = tl.load(anchors_cxcywh + anchor * 4 + 1, mask=exists, other=0.0)
    w = tl.load(anchors_cxcywh + anchor * 4 + 2, mask=exists, other=0.0) / 2
    h = tl.load(anchors_cxcywh + anchor * 4 + 3, mask=exists, other=0.0) / 2
    return x - w, y - h, x + w, y + h


@triton.jit
def _overlap(box, left, top, right, bottom):
    """IoU of one ground-truth box with anchors."""
    x0, y0, x1, y1 = tl.load(box), tl.load(box + 1), tl.load(box + 2), tl.load(box + 3)
    width = tl.maximum(tl.minimum(x1, right) - tl.maximum(x0, left), 0.0)
    height = tl.maximum(tl.minimum(y1, bottom) - tl.maximum(y0, top), 0.0)
    common = width * height
    box_area = tl.maximum(x1 - x0, 0.0) * tl.maximum(y1 - y0, 0.0)
    union = box_area + tl.maximum(right - left, 0.0) * tl.maximum(bottom - top, 0.0) - common
    return tl.where(common > 0.0, tl.div_rn(common, tl.where(common > 0.0, union, 1.0)), 0.0)


@triton.jit(do_not_specialize=_COUNTS)
def best_anchor_per_box(boxes, num_boxes, anchors_cxcywh, best_anchors, num_rows, num_anchors, LANES: tl.constexpr):
    """The anchor with the highest IoU for each ground-truth box, the first of equals; `num_anchors` if it overlaps
    none."""
    image = tl.program_id(1)
    count = tl.load(num_boxes + image).to(tl.int32)
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        most = tl.zeros([LANES], tl.float32)
        where = tl.zeros([LANES], tl.int32) + num_anchors
        for start in range(0, num_anchors, LANES):
            anchor = start + tl.arange(0, LANES)
            left, top, right, bottom = _corners(anchors_cxcywh, anchor, anchor < num_anchors)
            overlap = _overlap(boxes + (image * num_rows + row) * 4, left, top, right, bottom)
            where = tl.where(overlap > most, anchor, where)
            most = tl.maximum(overlap, most)
        first = tl.min(tl.where(most == tl.max(most, 0), where, num_anchors), 0)
        tl.store(best_anchors + image * num_rows + row, first)


@triton.jit(do_not_specialize=_COUNTS)
def match(boxes, num_boxes, anchors_cxcywh, best_anchors, rows, num_rows, num_anchors, threshold, LANES: tl.constexpr):
    """The row of each anchor's ground-truth box, or `UNUSED`."""
    image = tl.program_id(1)
    count = tl.load(num_boxes + image).to(tl.int32)
    anchor = tl.program_id(0) * LANES + tl.arange(0, LANES)
    exists = anchor < num_anchors
    left, top, right, bottom = _corners(anchors_cxcywh, anchor, exists)
    most = tl.full([LANES], -1.0, tl.float32)
    best = tl.zeros([LANES], tl.int32)
    forced_box = tl.zeros([LANES], tl.int32) + num_rows
    for row in range(count):
        overlap = _overlap(boxes + (image * num_rows + row) * 4, left, top, right, bottom)
        best = tl.where(overlap > most, row, best)
        most = tl.maximum(overlap, most)
        is_best_anchor = tl.load(best_anchors + image * num_rows + row) == anchor
        forced_box = tl.where(is_best_anchor & (forced_box == num_rows), row, forced_box)
    is_forced = forced_box < num_rows
    matched_row = tl.where(is_forced, forced_box, tl.where(most >= threshold, best, UNUSED))
    tl.store(rows + image * num_anchors + anchor, matched_row, mask=exists)


@triton.jit
def _target_deltas(boxes, row, anchors_cxcywh, anchor, positive, center_variance, size_variance):
    """The target box deltas of positive anchors, four columns."""
    x = tl.load(anchors_cxcywh + anchor * 4, mask=positive, other=0.0)
    y = tl.load(anchors_cxcywh + anchor * 4 + 1, mask=positive, other=0.0)
    w = tl.load(anchors_cxcywh + anchor * 4 + 2, mask=positive, other=1.0) + EPSILON
    h = tl.load(anchors_cxcywh + anchor * 4 + 3, mask=positive, other=1.0) + EPSILON
    left = tl.load(boxes + row * 4, mask=positive, other=0.0)
    top = tl.load(boxes + row * 4 + 1, mask=positive, other=0.0)
    right = tl.load(boxes + row * 4 + 2, mask=positive, other=1.0)
    bottom = tl.load(boxes + row * 4 + 3, mask=positive, other=1.0)
    across = ((left + right) / 2 - x) / w / center_variance
    down = ((top + bottom) / 2 - y) / h / center_variance
    wider = tl.log((tl.maximum(right - left, 0.0) + EPSILON) / w) / size_variance
    taller = tl.log((tl.maximum(bottom - top, 0.0) + EPSILON) / h) / size_variance
    return across, down, wider, taller


@triton.jit
def _delta_error(x, at, bias, column, target, positive):
    """The difference of a column of box deltas from its target."""
    code = tl.load(x + at + column, mask=positive, other=0.0).to(tl.float32)
    return code + tl.load(bias + column, mask=positive, other=0.0) - target


@triton.jit
def _smooth_l1(error):
    """Smooth L1."""
    far = tl.abs(error)
    return tl.where(far < 1.0, 0.5 * far * far, far - 0.5)


@triton.jit
def _anchor_offsets(num_cells, per_cell, num_classes, channels, first, ROWS: tl.constexpr):
    """For this program's anchors of a map: which exist, their shapes, their index in the output order, and the offsets
    of their logits and box deltas."""
    box = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cell, shape = box // per_cell, box % per_cell
    pixel = (tl.program_id(1) * num_cells + cell) * channels
    logits = pixel + shape * num_classes
    codes = pixel + per_cell * num_classes + shape * 4
    return cell < num_cells, shape, first + shape * num_cells + cell, logits, codes


@triton.jit(do_not_specialize=_COUNTS)
def losses(
    x, class_bias, box_bias, rows, boxes, labels, anchors_cxcywh, by_class, by_box, log_sums, num_rows, num_anchors,
    num_cells, per_cell, num_classes, channels, first, center_variance, size_variance, ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """Cross-entropy and its log-sum of each anchor of a map; of positive anchors also smooth L1, which others leave
    unwritten."""
    exists, shape, anchor, logits, codes = _anchor_offsets(num_cells, per_cell, num_classes, channels, first, ROWS)
    image = tl.program_id(1)
    at = image * num_anchors + anchor
    number = tl.arange(0, CLASSES)[None, :]
    mask = exists[:, None] & (number < num_classes)
    z = tl.load(x + logits[:, None] + number, mask=mask, other=0.0).to(tl.float32)
    z += tl.load(class_bias + (shape * num_classes)[:, None] + number, mask=mask, other=0.0)
    row = tl.load(rows + at, mask=exists, other=UNUSED)  # after the logits' load, which need not wait for it
    positive = row >= 0
    label = tl.load(labels + image * num_rows + row, mask=positive, other=0).to(tl.int32)

    z = tl.where(number < num_classes, z, float("-inf"))
    most = tl.max(z, 1)
    log_sum = most + tl.log(tl.sum(tl.exp(z - most[:, None]), 1))
    label_logit = tl.sum(tl.where(number == label[:, None], z, 0.0), 1)
    tl.store(by_class + at, log_sum - label_logit, mask=exists)
    tl.store(log_sums + at, log_sum, mask=exists)

    if tl.max(row, 0) >= 0:  # few programs have a positive anchor
        row += image * num_rows
        across, down, wider, taller = _target_deltas(
            boxes, row, anchors_cxcywh, anchor, positive, center_variance, size_variance
        )
        delta_bias = box_bias + shape * 4
        loss = _smooth_l1(_delta_error(x, codes, delta_bias, 0, across, positive))
        loss += _smooth_l1(_delta_error(x, codes, delta_bias, 1, down, positive))
        loss += _smooth_l1(_delta_error(x, codes, delta_bias, 2, wider, positive))
        loss += _smooth_l1(_delta_error(x, codes, delta_bias, 3, taller, positive))
        tl.store(by_box + at, loss, mask=positive)


@triton.jit(do_not_specialize=_COUNTS)
def hard_negatives(
    by_class, by_box, rows, class_loss, box_loss, shares, num_anchors, ratio, BLOCK: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """An image's losses over its positives and `ratio` times as many of the negatives with the highest losses.

    A sort key has the bits of a loss, which order like non-negative floats, then the index from the end: keys are
    unique, and of equal losses the first is higher. The smallest selected key is found bit by bit.
    """
    image = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    exists = place < num_anchors
    at = image * num_anchors + place
    row = tl.load(rows + at, mask=exists, other=UNUSED)
    loss = tl.load(by_class + at, mask=exists, other=0.0)
    positive = row >= 0
    num_positives = tl.sum(positive.to(tl.int32), 0)
    num_hard = tl.floor(num_positives.to(tl.float32) * ratio).to(tl.int32)
    share = 1.0 / tl.maximum(num_positives, 1).to(tl.float32)
    tl.store(shares + image, share)
    tl.store(box_loss + image, tl.sum(tl.load(by_box + at, mask=positive, other=0.0), 0) * share)
    positive_loss = tl.sum(tl.where(positive, loss, 0.0), 0)

    # From here on only keys are kept, 16 or 32 per thread: a negative's loss is recovered from its key.
    bits = (loss.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64)
    key = tl.where(exists & (row < 0), (bits << BITS) | (BLOCK - 1 - place), -1)
    least = tl.zeros([], tl.int64)
    bit = tl.full([], 1, tl.int64) << (30 + BITS)
    for _ in range(31 + BITS):
        is_enough = tl.sum((key >= (least | bit)).to(tl.int32), 0) >= num_hard
        least = tl.where(is_enough, least | bit, least)
        bit = bit >> 1
    hard = key >= least  # none if none are requested: `least` is then all ones, above every key

    tl.store(rows + image * num_anchors + place, tl.full([BLOCK], HARD, tl.int32), mask=hard)
    loss = (key >> BITS).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(class_loss + image, (positive_loss + tl.sum(tl.where(hard, loss, 0.0), 0)) * share)


@triton.jit
def _store_delta_grad(dx, at, error, positive, factor):
    """The gradient of a column of box deltas."""
    slope = tl.minimum(tl.maximum(error, -1.0), 1.0) * factor
    tl.store(dx + at, slope.to(dx.dtype.element_ty), mask=positive)


@triton.jit(do_not_specialize=_COUNTS)
def gradient(
    x, class_bias, box_bias, rows, boxes, labels, anchors_cxcywh, log_sums, shares, dclass_loss, dbox_loss, dx,
    num_rows, num_anchors, num_cells, per_cell, num_classes, channels, first, center_variance, size_variance,
    ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """The gradient of a map, zero but for selected anchors: only those are read and written."""
    exists, shape, anchor, logits, codes = _anchor_offsets(num_cells, per_cell, num_classes, channels, first, ROWS)
    image = tl.program_id(1)
    at = image * num_anchors + anchor
    row = tl.load(rows + at, mask=exists, other=UNUSED)
    counts, positive = row >= HARD, row >= 0
    if tl.max(row, 0) >= HARD:
        number = tl.arange(0, CLASSES)[None, :]
        mask = counts[:, None] & (number < num_classes)
        z = tl.load(x + logits[:, None] + number, mask=mask, other=0.0).to(tl.float32)
        z += tl.load(class_bias + (shape * num_classes)[:, None] + number, mask=mask, other=0.0)
        share = tl.load(shares + image)
        row += image * num_rows
        label = tl.load(labels + row, mask=positive, other=0).to(tl.int32)
        log_sum = tl.load(log_sums + at, mask=counts, other=0.0)
        slope = tl.exp(z - log_sum[:, None]) - (number == label[:, None]).to(tl.float32)
        slope *= tl.load(dclass_loss + image) * share
        tl.store(dx + logits[:, None] + number, slope.to(dx.dtype.element_ty), mask=mask)

        across, down, wider, taller = _target_deltas(
            boxes, row, anchors_cxcywh, anchor, positive, center_variance, size_variance
        )
        factor = tl.load(dbox_loss + image) * share
        delta_bias = box_bias + shape * 4
        _store_delta_grad(dx, codes, _delta_error(x, codes, delta_bias, 0, across, positive), positive, factor)
        _store_delta_grad(dx, codes + 1, _delta_error(x, codes, delta_bias, 1, down, positive), positive, factor)
        _store_delta_grad(dx, codes + 2, _delta_error(x, codes, delta_bias, 2, wider, positive), positive, factor)
        _store_delta_grad(dx, codes + 3, _delta_error(x, codes, delta_bias, 3, taller, positive), positive, factor)
