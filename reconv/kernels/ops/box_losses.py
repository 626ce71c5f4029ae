"""The losses of an SSD, computed directly from its feature maps.

Four numbers are saved per anchor, and the table of anchors by ground-truth boxes is never written. Matching and its
ties are those of `reconv.detection`. There is no host synchronization and no shape that depends on a value, so all of
it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels import dispatch
from reconv.kernels.jit.launch import launch
from reconv.kernels.ops.bias_relu import channel_sums
from reconv.kernels.triton import box_losses as device

Biases = Sequence[tuple[Tensor, Tensor]]  # of each map's class head and box head

MAX_ANCHORS = 65536  # one program sorts the losses of an image
MAX_CLASSES = 4096
# Of one warp: Triton puts further warps side by side along the classes, where each would hold one value of a row and
# all of them would exchange every row's maximum and sums through shared memory.
_WARP_VALUES = 1024
_LANES = 256
_CLAIM_PROGRAMS = 16  # per image; each processes every 16th ground-truth box
_ANCHORS_PER_WARP = 512


@dataclass(frozen=True, slots=True)
class GroundTruthBatch:
    """The ground truth of n images, the anchors, and the matching rules."""

    boxes_xyxy: Tensor  # [n, rows, 4]
    labels: Tensor  # [n, rows] int64
    num_boxes: Tensor  # [n] int64: the rows in use
    anchors_cxcywh: Tensor  # [num_anchors, 4]
    variances: tuple[float, float]
    threshold: float
    negatives: float


@dataclass(frozen=True, slots=True)
class AnchorLayout:
    """The number of anchors per cell of each map, and the number of classes."""

    per_cell: tuple[int, ...]
    num_classes: int

    def channels(self, boxes: int) -> int:
        """Channels of a map with this many anchors per cell, padded to a multiple of 8."""
        num_outputs = boxes * (self.num_classes + 4)
        return -(-num_outputs // dispatch.CHANNEL_MULTIPLE) * dispatch.CHANNEL_MULTIPLE


def empty_ground_truth(maps: Sequence[Tensor], layout: AnchorLayout) -> GroundTruthBatch:
    """Ground truth without boxes, for a traced pass."""
    num_anchors = sum(b * x.shape[2] * x.shape[3] for x, b in zip(maps, layout.per_cell, strict=True))
    empty, n = maps[0].new_empty, len(maps[0])
    boxes, anchors = (empty(*shape, 4, dtype=torch.float32) for shape in ((n, 1), (num_anchors,)))
    labels, num_boxes = empty(n, 1, dtype=torch.int64), empty(n, dtype=torch.int64)
    return GroundTruthBatch(boxes, labels, num_boxes, anchors, variances=(0.1, 0.2), threshold=0.5, negatives=3.0)


def supports(maps: Sequence[Tensor], layout: AnchorLayout, truth: GroundTruthBatch) -> bool:
    """True if kernels support these maps [n, channels, height, width] and boxes."""
    tensors = (truth.boxes_xyxy, truth.anchors_cxcywh)
    return (
        truth.anchors_cxcywh.shape[0] <= MAX_ANCHORS
        and layout.num_classes <= MAX_CLASSES
        and all(dispatch.supports(x) for x in maps)
        and all(x.dtype == torch.float32 for x in tensors)
    )


def box_losses(
    maps: Sequence[Tensor], biases: Biases, layout: AnchorLayout, truth: GroundTruthBatch
) -> tuple[Tensor, Tensor]:
    """The class loss and the box loss of each image [n], divided by its number of positive anchors."""
    flat = (bias for pair in biases for bias in pair)
    losses: tuple[Tensor, Tensor] = _BoxLosses.apply(layout, truth, *maps, *flat)  # type: ignore[no-untyped-call]
    return losses


class _BoxLosses(Function):
    @staticmethod
    def forward(ctx: Any, layout: AnchorLayout, truth: GroundTruthBatch, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        n, num_anchors = len(truth.num_boxes), len(truth.anchors_cxcywh)
        targets = tuple(t.contiguous() for t in (truth.boxes_xyxy, truth.labels, truth.anchors_cxcywh))
        rows = match_anchors_fused(truth)
        by_class, by_box, log_sums = torch.empty(3, n, num_anchors, dtype=torch.float32, device=rows.device).unbind()
        for read, numbers, grid, constants in _calls(inputs, layout, truth):
            launch(device.losses, grid, *read, rows, *targets, by_class, by_box, log_sums, *numbers, **constants)
        losses = torch.empty(3, n, dtype=torch.float32, device=rows.device)
        block = 1 << (num_anchors - 1).bit_length()
        launch(
            device.hard_negatives, (n,), by_class, by_box, rows, *losses.unbind(), num_anchors, truth.negatives,
            BLOCK=block, BITS=block.bit_length() - 1, num_warps=max(1, min(32, block // _ANCHORS_PER_WARP)),
        )  # fmt: skip
        ctx.save_for_backward(rows, *targets, log_sums, losses, *inputs)
        ctx.layout, ctx.truth = layout, truth
        return losses[0].clone(), losses[1].clone()

    @staticmethod
    def backward(ctx: Any, dclasses: Tensor, dboxes: Tensor) -> tuple[Tensor | None, ...]:
        rows, boxes, labels, anchors, log_sums, losses, *inputs = ctx.saved_tensors
        saved = (rows, boxes, labels, anchors, log_sums, losses[2], dclasses.contiguous(), dboxes.contiguous())
        gradients, of_biases = [], []
        for read, numbers, grid, constants in _calls(inputs, ctx.layout, ctx.truth):
            dx = torch.empty_like(read[0]).zero_()
            launch(device.gradient, grid, *read, *saved, dx, *numbers, **constants)
            gradients.append(dx)
            sums, widths = channel_sums(dx).to(read[1].dtype), [len(bias) for bias in read[1:]]
            of_biases += sums[: sum(widths)].split(widths)
        return None, None, *gradients, *of_biases


def match_anchors_fused(truth: GroundTruthBatch) -> Tensor:
    """The index of each anchor's ground-truth box [n, num_anchors] int32; negative where there is none."""
    n, num_rows = truth.labels.shape
    num_anchors, on = len(truth.anchors_cxcywh), truth.labels.device
    best_anchors = torch.empty(n, num_rows, dtype=torch.int32, device=on)
    rows = torch.empty(n, num_anchors, dtype=torch.int32, device=on)
    inputs = (truth.boxes_xyxy.contiguous(), truth.num_boxes, truth.anchors_cxcywh.contiguous(), best_anchors)
    # Without FMA, ties and the threshold are those of the plain operations, which round products before adding.
    constants = {"LANES": _LANES, "enable_fp_fusion": False}
    programs = min(num_rows, _CLAIM_PROGRAMS)
    launch(device.best_anchor_per_box, (programs, n), *inputs, num_rows, num_anchors, **constants)
    grid = (-(-num_anchors // _LANES), n)
    launch(device.match, grid, *inputs, rows, num_rows, num_anchors, truth.threshold, **constants)
    return rows


def _calls(
    inputs: Sequence[Tensor], layout: AnchorLayout, truth: GroundTruthBatch
) -> Iterator[tuple[tuple[Tensor, Tensor, Tensor], tuple[float, ...], tuple[int, int], dict[str, int]]]:
    """For each map: the map and its two biases, the kernels' numbers, the launch grid and the constants."""
    classes = 1 << (layout.num_classes - 1).bit_length()
    rows, warps = max(1, _WARP_VALUES // classes), max(1, classes // _WARP_VALUES)
    constants = {"ROWS": rows, "CLASSES": classes, "num_warps": warps}
    first = 0
    number = len(layout.per_cell)
    maps, biases = inputs[:number], inputs[number:]
    for x, class_bias, box_bias, boxes in zip(maps, biases[::2], biases[1::2], layout.per_cell, strict=True):
        n, channels, height, width = x.shape
        cells = height * width
        counts = (truth.labels.shape[1], len(truth.anchors_cxcywh), cells, boxes, layout.num_classes, channels, first)
        yield (x, class_bias, box_bias), (*counts, *truth.variances), (-(-cells * boxes // rows), n), constants
        first += cells * boxes
