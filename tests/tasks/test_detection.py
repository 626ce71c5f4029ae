"""SSD losses equal a loop over images and anchors, and are finite for any boxes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.core.batch import Batch
from reconv.detection.anchors import generate_anchors
from reconv.detection.annotation import Annotation
from reconv.detection.box_coder import encode_boxes
from reconv.detection.box_ops import broadcast_iou, cxcywh_to_xyxy
from reconv.detection.postprocess import PostprocessConfig
from reconv.models.architecture import SSDOutput
from reconv.tasks.detection import DetectionTask, MatchConfig, ssd_losses

ANCHORS = generate_anchors([0.25, 0.5], [4, 2], [0.3, 0.5, 0.8], [(2.0,), (2.0,)])
MAX_BOXES = 6
NUM_CLASSES = 5


def no_annotation(index: int) -> Annotation:
    raise AssertionError("training needs no annotation")


TASK = DetectionTask(ANCHORS, MatchConfig(), PostprocessConfig(), ("a", "b", "c", "d"), no_annotation)


def random_batch(n: int, seed: int, counts: list[int] | None = None) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    num_boxes = torch.tensor(counts) if counts else torch.randint(0, MAX_BOXES + 1, (n,), generator=generator)
    low = torch.rand(n, MAX_BOXES, 2, generator=generator) * 0.7
    boxes = torch.cat([low, low + 0.05 + 0.25 * torch.rand(n, MAX_BOXES, 2, generator=generator)], dim=2)
    labels = torch.randint(1, NUM_CLASSES, (n, MAX_BOXES), generator=generator)
    is_padding = torch.arange(MAX_BOXES) >= num_boxes[:, None]
    tensors = {
        "images": torch.zeros(n, 3, 8, 8),
        "boxes": boxes.masked_fill(is_padding[:, :, None], 0),
        "labels": labels.masked_fill(is_padding, 0),
        "num_boxes": num_boxes,
    }
    return Batch(tensors, torch.arange(n), (n,))


def random_outputs(n: int, seed: int, dtype: torch.dtype = torch.float64) -> SSDOutput:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(n, len(ANCHORS), 4, generator=generator, dtype=torch.float64)
    logits = torch.randn(n, len(ANCHORS), NUM_CLASSES, generator=generator, dtype=torch.float64)
    return SSDOutput(codes.to(dtype).requires_grad_(), logits.to(dtype).requires_grad_())


def reference_losses(codes: Tensor, logits: Tensor, boxes: Tensor, labels: Tensor) -> tuple[float, float]:
    """The classification and box loss of one image as in the paper, one anchor at a time."""
    anchors = cxcywh_to_xyxy(ANCHORS)
    overlaps = [[broadcast_iou(box, anchor).item() for box in boxes] for anchor in anchors]
    owner: dict[int, int] = {}
    for j, row in enumerate(overlaps):
        if row and max(row) >= 0.5:
            owner[j] = row.index(max(row))
    for i in reversed(range(len(boxes))):
        column = [row[i] for row in overlaps]
        owner[column.index(max(column))] = i
    if not owner:
        return 0.0, 0.0
    entropies = [-F.log_softmax(logits[j], dim=0) for j in range(len(anchors))]
    positive = sum(entropies[j][labels[i]].item() for j, i in owner.items())
    negative = sorted((entropies[j][0].item() for j in range(len(anchors)) if j not in owner), reverse=True)
    boxes_loss = 0.0
    for j, i in owner.items():
        for difference in (codes[j] - encode_boxes(boxes[i], ANCHORS[j], (0.1, 0.2))).abs().tolist():
            boxes_loss += 0.5 * difference**2 if difference < 1 else difference - 0.5
    return (positive + sum(negative[: 3 * len(owner)])) / len(owner), boxes_loss / len(owner)


@pytest.mark.parametrize("seed", range(5))
def test_the_losses_of_a_batch_equal_brute_force(seed: int) -> None:
    n = 5
    batch, outputs = random_batch(n, seed), random_outputs(n, seed)
    sums = TASK.loss(outputs, batch)
    expected = []
    for i in range(n):
        count = int(batch["num_boxes"][i])
        expected.append(
            reference_losses(
                outputs.box_deltas[i], outputs.logits[i], batch["boxes"][i, :count], batch["labels"][i, :count]
            )
        )
    class_loss, box_loss = (math.fsum(column) for column in zip(*expected, strict=True))
    assert sums.metrics["class_loss"].item() == pytest.approx(class_loss, rel=1e-5)
    assert sums.metrics["box_loss"].item() == pytest.approx(box_loss, rel=1e-5)
    assert sums.loss.item() == pytest.approx(class_loss + box_loss, rel=1e-5)


def test_the_sum_does_not_depend_on_the_batch_size() -> None:
    n = 6
    batch, outputs = random_batch(n, 3), random_outputs(n, 3)
    whole = TASK.loss(outputs, batch).loss
    parts = []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        piece = Batch({k: t[rows] for k, t in batch.tensors.items()}, batch.positions[rows], (len(range(n)[rows]),))
        parts.append(TASK.loss(SSDOutput(outputs.box_deltas[rows], outputs.logits[rows]), piece))
        assert TASK.weight(piece) == len(piece)
    assert sum(p.loss.item() for p in parts) == pytest.approx(whole.item(), rel=1e-12)


def test_images_without_boxes_have_no_loss_and_no_gradient() -> None:
    batch, outputs = random_batch(3, 1, [0, 0, 0]), random_outputs(3, 1)
    sums = TASK.loss(outputs, batch)
    sums.loss.backward()
    assert sums.loss.item() == 0
    for tensor in outputs:
        assert tensor.grad is not None and not tensor.grad.any()


@pytest.mark.parametrize(
    "box",
    [
        (0.5, 0.5, 0.5, 0.5),  # a point
        (0.7, 0.7, 0.2, 0.2),  # corners swapped
        (0.0, 0.0, 1.0, 1.0),
        (0.999, 0.999, 1.0, 1.0),
        (-3.0, -3.0, -2.0, -2.0),  # outside
        (0.2, 0.2, 0.2 + 1e-7, 0.9),
    ],
)
def test_degenerate_boxes_give_finite_losses_and_gradients(box: tuple[float, ...]) -> None:
    batch, outputs = random_batch(2, 4, [1, 2]), random_outputs(2, 4, torch.float32)
    batch["boxes"][0, 0] = torch.tensor(box)
    sums = TASK.loss(outputs, batch)
    sums.loss.backward()
    assert sums.loss.isfinite()
    for tensor in outputs:
        assert tensor.grad is not None and tensor.grad.isfinite().all()


def test_the_losses_are_computed_in_float32_or_better() -> None:
    batch = random_batch(2, 5)
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert TASK.loss(random_outputs(2, 5, dtype), batch).loss.dtype == expected


def test_shapes_do_not_depend_on_values() -> None:
    """A graph traced with one batch gives the losses of another: no host sync, no data-dependent shape."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def losses(codes: Tensor, logits: Tensor, *truth: Tensor) -> Any:
        return ssd_losses(codes, logits, *truth, ANCHORS, MatchConfig())  # type: ignore[call-arg]

    def inputs(seed: int) -> tuple[Tensor, ...]:
        batch, outputs = random_batch(3, seed), random_outputs(3, seed)
        return (*(t.detach() for t in outputs), batch["boxes"], batch["labels"], batch["num_boxes"])

    graph = make_fx(losses)(*inputs(1))
    for got, expected in zip(graph(*inputs(2)), losses(*inputs(2)), strict=True):
        assert torch.equal(got, expected)


def test_detections_are_decoded_from_the_outputs() -> None:
    codes = torch.zeros(1, len(ANCHORS), 4)
    logits = torch.zeros(1, len(ANCHORS), NUM_CLASSES)
    logits[..., 0] = 9.0
    logits[0, 7] = torch.tensor([0.0, 0.0, 9.0, 0.0, 0.0])
    found = TASK.detections(SSDOutput(codes, logits))
    assert found.counts.tolist() == [1]
    assert found.labels[0, 0] == 2
    assert torch.allclose(found.boxes_xyxy[0, 0], cxcywh_to_xyxy(ANCHORS[7]).clamp(0, 1), atol=1e-6)
