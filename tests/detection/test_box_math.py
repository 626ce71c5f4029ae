"""Batched matching, coding, hard negative mining and NMS equal loops over boxes, ties included."""

from __future__ import annotations

import math
from typing import Any

import detection_reference as reference
import numpy as np
import pytest
import torch
from detection_reference import Box
from hypothesis import given, settings
from hypothesis import strategies as st

from reconv.detection import nms as nms_module
from reconv.detection.box_coder import decode_boxes, encode_boxes
from reconv.detection.box_ops import broadcast_iou, cxcywh_to_xyxy, xyxy_to_cxcywh
from reconv.detection.matcher import hard_negatives, match_anchors
from reconv.detection.nms import batched_nms
from reconv.detection.postprocess import PostprocessConfig, postprocess

VARIANCES = (0.1, 0.2)


@st.composite
def boxes(draw: Any, min_size: int = 0) -> Box:
    """Boxes on a coarse grid, so that equal boxes, equal IoUs and empty boxes are common."""
    x, y = draw(st.integers(0, 7)), draw(st.integers(0, 7))
    w, h = draw(st.integers(min_size, 8)), draw(st.integers(min_size, 8))
    return (x / 8, y / 8, (x + w) / 8, (y + h) / 8)


def tensor(rows: list[Box], length: int | None = None) -> torch.Tensor:
    padded = rows + [(0.0, 0.0, 0.0, 0.0)] * ((length or len(rows)) - len(rows))
    return torch.tensor(padded, dtype=torch.float32).view(-1, 4)


@given(boxes(), boxes())
def test_iou_and_conversions_equal_the_reference(a: Box, b: Box) -> None:
    assert broadcast_iou(tensor([a]), tensor([b])).item() == reference.iou(a, b)
    assert torch.equal(cxcywh_to_xyxy(xyxy_to_cxcywh(tensor([a]))), tensor([a]))


@settings(max_examples=100)
@given(
    st.lists(boxes(min_size=1), min_size=1, max_size=12),
    st.lists(st.lists(boxes(), max_size=5), min_size=1, max_size=4),
    st.sampled_from([0.3, 0.5]),
)
def test_matching_equals_the_reference(anchors: list[Box], images: list[list[Box]], match_iou: float) -> None:
    padded = torch.stack([tensor(image, 6) for image in images])
    num_boxes = torch.tensor([len(image) for image in images])
    result = match_anchors(tensor(anchors), padded, num_boxes, match_iou)
    for i, image in enumerate(images):
        expected = reference.match_anchors(anchors, image, match_iou)
        assert result.positive[i].tolist() == [box is not None for box in expected]
        matched = [(j, box) for j, box in enumerate(expected) if box is not None]
        assert [(j, int(result.box_index[i, j])) for j, _ in matched] == matched


def test_padding_boxes_never_match() -> None:
    anchors = tensor([(0.0, 0.0, 0.5, 0.5), (0.5, 0.5, 1.0, 1.0)])
    result = match_anchors(anchors, anchors[None].clone(), torch.tensor([1]), 0.5)
    assert result.positive.tolist() == [[True, False]]


@given(boxes(min_size=1), boxes(min_size=1))
def test_encoding_follows_the_paper_and_decoding_inverts_it(box: Box, anchor: Box) -> None:
    x, y, w, h = xyxy_to_cxcywh(tensor([box]).double())[0].tolist()
    ax, ay, aw, ah = xyxy_to_cxcywh(tensor([anchor]).double())[0].tolist()
    expected = [10 * (x - ax) / aw, 10 * (y - ay) / ah, 5 * math.log(w / aw), 5 * math.log(h / ah)]
    deltas = encode_boxes(tensor([box]), xyxy_to_cxcywh(tensor([anchor])), VARIANCES)
    np.testing.assert_allclose(deltas[0].numpy(), expected, rtol=1e-5, atol=1e-5)
    decoded = decode_boxes(deltas, xyxy_to_cxcywh(tensor([anchor])), VARIANCES)
    np.testing.assert_allclose(decoded[0].numpy(), box, atol=1e-5)


@given(boxes(), boxes(min_size=1))
def test_deltas_are_finite_even_for_empty_boxes(box: Box, anchor: Box) -> None:
    assert encode_boxes(tensor([box]), xyxy_to_cxcywh(tensor([anchor])), VARIANCES).isfinite().all()


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=9, max_size=9), min_size=1, max_size=4),
    st.sampled_from([1.0, 2.5, 3.0]),
)
def test_hard_negatives_equal_the_reference(images: list[list[tuple[int, bool]]], negative_ratio: float) -> None:
    losses = torch.tensor([[float(loss) for loss, _ in image] for image in images])
    positive = torch.tensor([[is_positive for _, is_positive in image] for image in images])
    expected = [
        reference.hard_negatives(losses[i].tolist(), positive[i].tolist(), negative_ratio) for i in range(len(images))
    ]
    assert hard_negatives(losses, positive, negative_ratio).tolist() == expected


@settings(max_examples=100)
@given(st.lists(st.lists(boxes(), max_size=8), min_size=1, max_size=5), st.sampled_from([0.3, 0.5, 1.0]))
def test_nms_equals_the_reference(lists: list[list[Box]], iou_threshold: float) -> None:
    dense = torch.stack([tensor(row, 8) for row in lists])
    valid = torch.arange(8) < torch.tensor([len(row) for row in lists])[:, None]
    remains = batched_nms(dense, valid, iou_threshold)
    assert [row.nonzero().flatten().tolist() for row in remains] == [reference.nms(row, iou_threshold) for row in lists]


def test_nms_in_chunks_equals_nms_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    corners = torch.rand(20, 9, 2, generator=generator)
    dense = torch.cat([corners, corners + torch.rand(20, 9, 2, generator=generator)], dim=2)
    valid = torch.rand(20, 9, generator=generator) > 0.2
    at_once = batched_nms(dense, valid, 0.4)
    monkeypatch.setattr(nms_module, "MAX_PAIRS", 200)
    assert torch.equal(batched_nms(dense, valid, 0.4), at_once)
    assert 0 < at_once.sum() < valid.sum()


def postprocess_image(
    box_deltas: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor, config: PostprocessConfig
) -> list[tuple[float, int, list[float]]]:
    """(score, label, box) of one image, class by class and box by box."""
    scores, decoded = logits.softmax(dim=1), decode_boxes(box_deltas, anchors, VARIANCES)
    found = []
    for label in range(1, scores.shape[1]):
        candidates = [j for j in range(len(scores)) if scores[j, label] > config.score_threshold]
        best = sorted(candidates, key=lambda j: (-scores[j, label].item(), j))[: config.max_per_class]
        for i in reference.nms([tuple(decoded[j].tolist()) for j in best], config.nms_iou):
            found.append((-scores[best[i], label].item(), best[i], label))
    top = sorted(found)[: config.max_per_image]
    return [(-score, label, decoded[j].clamp(0, 1).tolist()) for score, j, label in top]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([(3, 4), (50, 7), (1, 200)]), st.booleans())
def test_postprocessing_equals_the_reference(seed: int, limits: tuple[int, int], has_ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, num_anchors, num_classes = 3, 14, 4
    anchors = torch.rand(num_anchors, 4, generator=generator) * 0.5 + 0.2
    box_deltas = torch.randn(n, num_anchors, 4, generator=generator)
    logits = torch.randn(n, num_anchors, num_classes, generator=generator) * 2
    logits = logits.round() if has_ties else logits
    logits[1, :, 0] = 30.0  # only background
    config = PostprocessConfig(0.05, 0.5, *limits)
    result = postprocess(box_deltas, logits, anchors, VARIANCES, config)
    assert result.boxes_xyxy.shape == (n, limits[1], 4)
    assert result.counts[1] == 0
    for i in range(n):
        expected = postprocess_image(box_deltas[i], logits[i], anchors, config)
        count = int(result.counts[i])
        assert result.labels[i, :count].tolist() == [label for _, label, _ in expected]
        np.testing.assert_allclose(result.scores[i, :count], [score for score, _, _ in expected], atol=1e-6)
        np.testing.assert_allclose(
            result.boxes_xyxy[i, :count].numpy().reshape(-1, 4),
            np.array([box for _, _, box in expected]).reshape(-1, 4),
            atol=1e-6,
        )
        assert not result.labels[i, count:].any() and not result.scores[i, count:].any()
