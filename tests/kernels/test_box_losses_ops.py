"""Losses computed from a detector's feature maps equal the plain ones, ties and empty images included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reconv.core.batch import Batch
from reconv.detection.anchors import generate_anchors
from reconv.detection.annotation import Annotation
from reconv.detection.box_ops import cxcywh_to_xyxy
from reconv.detection.matcher import match_anchors
from reconv.detection.postprocess import PostprocessConfig
from reconv.kernels.fused.ssd import SSDFeatureMaps
from reconv.kernels.ops.box_losses import AnchorLayout, GroundTruthBatch, box_losses, match_anchors_fused
from reconv.tasks.detection import DetectionTask, MatchConfig, ssd_losses

SIDES, PER_CELL, NUM_CLASSES = (5, 2), (4, 6), 7
ANCHORS = generate_anchors([0.2, 0.5], SIDES, [0.3, 0.5, 0.8], [(2.0,), (2.0, 3.0)])
LAYOUT = AnchorLayout(PER_CELL, NUM_CLASSES)
RULES = MatchConfig()


def truth(counts: list[int], seed: int, most: int = 6) -> GroundTruthBatch:
    random = torch.Generator().manual_seed(seed)
    n = len(counts)
    low = torch.rand(n, most, 2, generator=random) * 0.6
    boxes = torch.cat([low, low + 0.1 + 0.4 * torch.rand(n, most, 2, generator=random)], dim=2)
    labels = torch.randint(1, NUM_CLASSES, (n, most), generator=random)
    return GroundTruthBatch(
        boxes, labels, torch.tensor(counts), ANCHORS, RULES.variances, RULES.match_iou, RULES.negative_ratio
    )


def no_annotation(index: int) -> Annotation:
    raise AssertionError("training asks for no annotation")


def draw_maps(n: int, seed: int, dtype: torch.dtype, equal: bool = False) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    maps = []
    for side, boxes in zip(SIDES, PER_CELL, strict=True):
        x = torch.randn(n, LAYOUT.channels(boxes), side, side, generator=random)
        if equal:  # every default box of a class has the same loss
            x[:, : boxes * NUM_CLASSES] = torch.arange(boxes * NUM_CLASSES).remainder(NUM_CLASSES).view(-1, 1, 1) / 4
        maps.append(x.to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_())
    return maps


def draw_biases(seed: int) -> tuple[tuple[Tensor, Tensor], ...]:
    random = torch.Generator().manual_seed(seed)
    return tuple(
        (
            torch.randn(NUM_CLASSES, generator=random).repeat(b).requires_grad_(),
            torch.randn(4 * b, generator=random).requires_grad_(),
        )
        for b in PER_CELL
    )


def plain(maps: list[Tensor], biases: tuple[tuple[Tensor, Tensor], ...], of: GroundTruthBatch) -> tuple[Tensor, Tensor]:
    codes, logits = SSDFeatureMaps(tuple(maps), biases, PER_CELL, NUM_CLASSES).output()
    return ssd_losses(codes, logits, of.boxes_xyxy, of.labels, of.num_boxes, ANCHORS, RULES)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.float16, 2e-3)])
def test_losses_and_gradients_from_maps_equal_the_reference(dtype: torch.dtype, tolerance: float, equal: bool) -> None:
    of = truth([3, 0, 6, 1], seed=1)
    maps, again = draw_maps(4, 2, dtype, equal), draw_maps(4, 2, dtype, equal)
    weights = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
    biases, again_biases = draw_biases(7), draw_biases(7)
    losses, expected = box_losses(maps, biases, LAYOUT, of), plain(again, again_biases, of)
    for found, wanted in zip(losses, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert found[1] == 0 and (found[[0, 2, 3]] > 0).all()
    for values in (losses, expected):
        sum((value * weight).sum() for value, weight in zip(values, weights, strict=True)).backward()
    for x, y in zip(maps, again, strict=True):
        assert x.grad is not None and y.grad is not None
        assert x.grad.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(x.grad, y.grad, rtol=tolerance, atol=tolerance / 10)
        assert torch.equal(x.grad != 0, y.grad != 0), "the same default boxes count"
        assert not x.grad[1].any() and x.grad[2].any()
    for ours, theirs in zip(biases, again_biases, strict=True):
        for bias, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(bias.grad, other.grad, rtol=tolerance, atol=tolerance)


def test_losses_of_many_classes_equal_the_reference() -> None:
    """A program takes 8 default boxes of 81 classes: most have no positive one."""
    num_classes, of = 81, truth([3, 0, 6, 1], seed=1)
    random = torch.Generator().manual_seed(2)
    found, expected = [], []
    shapes = [
        (4, -(-boxes * (num_classes + 4) // 8) * 8, side, side) for side, boxes in zip(SIDES, PER_CELL, strict=True)
    ]
    maps = [torch.randn(*shape, generator=random).contiguous(memory_format=torch.channels_last) for shape in shapes]
    biases = [torch.randn(boxes * width, generator=random) for boxes in PER_CELL for width in (num_classes, 4)]
    for values in (found, expected):
        leaves = [tensor.clone(memory_format=torch.preserve_format).requires_grad_() for tensor in (*maps, *biases)]
        pairs = tuple(zip(leaves[2::2], leaves[3::2], strict=True))
        if values is found:
            losses = box_losses(leaves[:2], pairs, AnchorLayout(PER_CELL, num_classes), of)
        else:
            output = SSDFeatureMaps(tuple(leaves[:2]), pairs, PER_CELL, num_classes).output()
            losses = ssd_losses(*output, of.boxes_xyxy, of.labels, of.num_boxes, ANCHORS, RULES)
        torch.autograd.backward(losses, (torch.arange(1.0, 5.0), torch.arange(2.0, 6.0)))
        values += [*(loss.detach() for loss in losses), *(leaf.grad for leaf in leaves)]
    assert len(found) == 8
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # kernels do not take the second
def test_the_task_loss_from_maps_equals_that_from_outputs(dtype: torch.dtype) -> None:
    of = truth([2, 0, 5], seed=4)
    task = DetectionTask(ANCHORS, RULES, PostprocessConfig(), ("a",) * (NUM_CLASSES - 1), no_annotation)
    shown = {"images": torch.zeros(3, 3, 8, 8), "boxes": of.boxes_xyxy, "labels": of.labels, "num_boxes": of.num_boxes}
    batch = Batch(shown, torch.arange(3), (3,))
    maps = SSDFeatureMaps(tuple(draw_maps(3, 5, dtype)), draw_biases(6), PER_CELL, NUM_CLASSES)
    found, expected = task.loss(maps, batch), task.loss(maps.output(), batch)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert found.metrics.keys() == expected.metrics.keys() and found.loss.dtype == dtype
    for name, value in expected.metrics.items():
        torch.testing.assert_close(found.metrics[name], value, rtol=1e-5, atol=1e-6)


boxes_on_a_grid = st.tuples(*[st.integers(0, 6)] * 2, *[st.integers(0, 5)] * 2).map(
    lambda v: (v[0] / 8, v[1] / 8, (v[0] + v[2]) / 8, (v[1] + v[3]) / 8)
)


@settings(max_examples=25)
@given(st.lists(st.lists(boxes_on_a_grid, max_size=4), min_size=1, max_size=3), st.sampled_from([0.3, 0.5]))
def test_matching_equals_the_reference_with_ties(images: list[list[Any]], threshold: float) -> None:
    anchors = generate_anchors([0.25], [4], [0.25, 0.5], [(4.0,)])
    rows = torch.zeros(len(images), 5, 4)
    for i, image in enumerate(images):
        rows[i, : len(image)] = torch.tensor(image).view(-1, 4)
    counts = torch.tensor([len(image) for image in images])
    labels = torch.ones(len(images), 5, dtype=torch.int64)
    found = match_anchors_fused(GroundTruthBatch(rows, labels, counts, anchors, RULES.variances, threshold, 3.0))
    expected = match_anchors(cxcywh_to_xyxy(anchors), rows, counts, threshold)
    assert torch.equal(found >= 0, expected.positive)
    assert torch.equal(found[found >= 0].long(), expected.box_index[expected.positive])


def test_predictions_from_maps_are_in_the_published_order() -> None:
    maps = draw_maps(2, 1, torch.float32)
    zeros = tuple((torch.zeros(NUM_CLASSES * b), torch.zeros(4 * b)) for b in PER_CELL)
    codes, logits = SSDFeatureMaps(tuple(maps), zeros, PER_CELL, NUM_CLASSES).output()
    assert codes.shape == (2, len(ANCHORS), 4) and logits.shape == (2, len(ANCHORS), NUM_CLASSES)
    shape, row, column = 3, 1, 0  # of the second map
    place = PER_CELL[0] * SIDES[0] ** 2 + (shape * SIDES[1] + row) * SIDES[1] + column
    pixel = maps[1][0, :, row, column]
    assert torch.equal(logits[0, place], pixel[shape * NUM_CLASSES : (shape + 1) * NUM_CLASSES])
    start = PER_CELL[1] * NUM_CLASSES + 4 * shape
    assert torch.equal(codes[0, place], pixel[start : start + 4])
