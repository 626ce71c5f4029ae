"""Matching, coding, mining and suppression of batches equal one box at a time, ties included."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from brute import Box, hard_negatives, match, overlap, suppress
from hypothesis import given, settings
from hypothesis import strategies as st

from reconv.detection import hard_negatives as mine
from reconv.detection import matcher as matching
from reconv.detection import nms as suppressing
from reconv.detection import postprocess
from reconv.detection.box_coder import decode, encode
from reconv.detection.box_ops import iou, to_cxcywh, to_xyxy

# A coarse grid makes equal overlaps and equal boxes common; sides may be 0.


@st.composite
def boxes(draw: Any, min_side: int = 0) -> Box:
    x, y = draw(st.integers(0, 7)), draw(st.integers(0, 7))
    w, h = draw(st.integers(min_side, 8)), draw(st.integers(min_side, 8))
    return (x / 8, y / 8, (x + w) / 8, (y + h) / 8)


def tensor(rows: list[Box], length: int | None = None) -> torch.Tensor:
    padded = rows + [(0.0, 0.0, 0.0, 0.0)] * ((length or len(rows)) - len(rows))
    return torch.tensor(padded, dtype=torch.float32).view(-1, 4)


@given(boxes(), boxes())
def test_overlap_is_that_of_two_boxes(a: Box, b: Box) -> None:
    assert iou(tensor([a]), tensor([b])).item() == overlap(a, b)


@given(boxes())
def test_corners_and_centres_are_two_forms_of_one_box(box: Box) -> None:
    assert torch.equal(to_xyxy(to_cxcywh(tensor([box]))), tensor([box]))


@settings(max_examples=200)
@given(
    st.lists(boxes(min_side=1), min_size=1, max_size=12),
    st.lists(st.lists(boxes(), max_size=5), min_size=1, max_size=4),
    st.sampled_from([0.3, 0.5]),
)
def test_matching_equals_brute_force(anchors: list[Box], images: list[list[Box]], threshold: float) -> None:
    rows = torch.stack([tensor(image, 6) for image in images])
    counts = torch.tensor([len(image) for image in images])
    found = matching.match(tensor(anchors), rows, counts, threshold)
    for i, image in enumerate(images):
        owner = match(anchors, image, threshold)
        assert found.positive[i].tolist() == [o is not None for o in owner]
        assert [found.row[i, j].item() for j, o in enumerate(owner) if o is not None] == [
            o for o in owner if o is not None
        ]


def test_rows_beyond_the_count_never_match() -> None:
    anchors = tensor([(0.0, 0.0, 0.5, 0.5), (0.5, 0.5, 1.0, 1.0)])
    rows = anchors[None].clone()
    found = matching.match(anchors, rows, torch.tensor([1]), 0.5)
    assert found.positive.tolist() == [[True, False]]


@given(boxes(min_side=1), boxes(min_side=1))
def test_a_code_is_the_published_formula_and_decodes_to_its_box(box: Box, anchor: Box) -> None:
    x, y, w, h = to_cxcywh(tensor([box]).double())[0].tolist()
    ax, ay, aw, ah = to_cxcywh(tensor([anchor]).double())[0].tolist()
    by_hand = [10 * (x - ax) / aw, 10 * (y - ay) / ah, 5 * math.log(w / aw), 5 * math.log(h / ah)]
    code = encode(tensor([box]), to_cxcywh(tensor([anchor])), (0.1, 0.2))
    np.testing.assert_allclose(code[0].numpy(), by_hand, rtol=1e-5, atol=1e-5)
    back = decode(code, to_cxcywh(tensor([anchor])), (0.1, 0.2))
    np.testing.assert_allclose(back[0].numpy(), box, atol=1e-5)


@given(boxes(), boxes(min_side=1))
def test_the_code_of_any_box_is_finite(box: Box, anchor: Box) -> None:
    assert encode(tensor([box]), to_cxcywh(tensor([anchor])), (0.1, 0.2)).isfinite().all()


@settings(max_examples=200)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=9, max_size=9),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([1.0, 2.5, 3.0]),
)
def test_mining_equals_brute_force(images: list[list[tuple[int, bool]]], ratio: float) -> None:
    losses = torch.tensor([[float(loss) for loss, _ in image] for image in images])
    positive = torch.tensor([[is_positive for _, is_positive in image] for image in images])
    chosen = mine.hard_negatives(losses, positive, ratio)
    assert chosen.tolist() == [
        hard_negatives(losses[i].tolist(), positive[i].tolist(), ratio) for i in range(len(images))
    ]


@settings(max_examples=200)
@given(st.lists(st.lists(boxes(), max_size=8), min_size=1, max_size=5), st.sampled_from([0.3, 0.5, 1.0]))
def test_suppression_equals_brute_force(rows: list[list[Box]], threshold: float) -> None:
    dense = torch.stack([tensor(row, 8) for row in rows])
    valid = torch.arange(8) < torch.tensor([len(row) for row in rows])[:, None]
    stays = suppressing.suppress(dense, valid, threshold)
    assert [row.nonzero().flatten().tolist() for row in stays] == [suppress(row, threshold) for row in rows]


def detections_by_hand(
    codes: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor, keep: postprocess.PostprocessConfig
) -> list[tuple[float, int, list[float]]]:
    """One image: class by class, box by box."""
    scores, decoded = logits.softmax(dim=1), decode(codes, anchors, (0.1, 0.2))
    found = []
    for label in range(1, scores.shape[1]):
        likely = [j for j in range(len(scores)) if scores[j, label] > keep.score]
        best = sorted(likely, key=lambda j: (-scores[j, label].item(), j))[: keep.max_per_class]
        for i in suppress([tuple(decoded[j].tolist()) for j in best], keep.suppress):
            found.append((-scores[best[i], label].item(), best[i], label))
    return [(-score, label, decoded[j].clamp(0, 1).tolist()) for score, j, label in sorted(found)[: keep.max_per_image]]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([(3, 4), (50, 7), (1, 200)]), st.booleans())
def test_postprocessing_equals_one_image_and_class_at_a_time(seed: int, most: tuple[int, int], coarse: bool) -> None:
    random = torch.Generator().manual_seed(seed)
    n, num_anchors, num_classes = 3, 14, 4
    anchors = torch.rand(num_anchors, 4, generator=random) * 0.5 + 0.2
    codes = torch.randn(n, num_anchors, 4, generator=random)
    logits = torch.randn(n, num_anchors, num_classes, generator=random) * 2
    logits = logits.round() if coarse else logits  # equal scores
    logits[1, :, 0] = 30.0  # nothing but background
    keep = postprocess.PostprocessConfig(0.05, 0.5, *most)
    found = postprocess.postprocess(codes, logits, anchors, (0.1, 0.2), keep)
    assert found.boxes_xyxy.shape == (n, most[1], 4)
    assert found.counts[1] == 0
    for i in range(n):
        expected = detections_by_hand(codes[i], logits[i], anchors, keep)
        count = int(found.counts[i])
        assert found.labels[i, :count].tolist() == [label for _, label, _ in expected]
        np.testing.assert_allclose(found.scores[i, :count], [score for score, _, _ in expected], atol=1e-6)
        np.testing.assert_allclose(
            found.boxes_xyxy[i, :count].numpy().reshape(-1, 4),
            np.array([box for _, _, box in expected]).reshape(-1, 4),
            atol=1e-6,
        )
        assert not found.labels[i, count:].any() and not found.scores[i, count:].any()


def test_suppression_in_pieces_equals_suppression_at_once(monkeypatch: Any) -> None:
    random = torch.Generator().manual_seed(3)
    corners = torch.rand(20, 9, 2, generator=random)
    dense = torch.cat([corners, corners + torch.rand(20, 9, 2, generator=random)], dim=2)
    valid = torch.rand(20, 9, generator=random) > 0.2
    at_once = suppressing.suppress(dense, valid, 0.4)
    monkeypatch.setattr(suppressing, "MOST_PAIRS", 200)
    assert torch.equal(suppressing.suppress(dense, valid, 0.4), at_once)
    assert 0 < at_once.sum() < valid.sum()
