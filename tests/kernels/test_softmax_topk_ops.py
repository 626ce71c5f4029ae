"""The kernel finds the classes of torch's softmax and topk, with their scores."""

from __future__ import annotations

import pytest
import torch

from reconv.kernels.ops.softmax_topk import MAX_CLASSES, MAX_K, softmax_topk, supports


@pytest.mark.parametrize(("num_classes", "k"), [(1, 1), (7, 5), (1000, 5), (1024, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_best_classes_and_scores_are_those_of_torch(dtype, num_classes, k) -> None:
    logits = torch.randperm(3 * num_classes).view(3, num_classes).to(torch.float32) / 100
    logits = logits.to(dtype)
    assert supports(logits, k)
    scores, labels = softmax_topk(logits, k)
    expected = logits.float().softmax(1)
    torch.testing.assert_close(scores, expected.topk(k).values)
    torch.testing.assert_close(expected.gather(1, labels), scores)
    assert all(len(set(row)) == k for row in labels.tolist())


def test_of_equal_scores_the_first_label_comes_first() -> None:
    _, labels = softmax_topk(torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0] * 5]), 4)
    assert labels.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_rows_without_finite_scores_have_labels_of_classes() -> None:
    logits = torch.tensor([[0.0, float("nan"), 1.0], [float("-inf")] * 3, [float("-inf"), 2.0, float("-inf")]])
    scores, labels = softmax_topk(logits, 3)
    assert labels.tolist() == [[1, 2, 0], [0, 1, 2], [1, 0, 2]]
    assert scores[:2].isnan().all() and scores[2].tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("logits", "k"),
    [
        (torch.zeros(2, 5), 6),
        (torch.zeros(2, MAX_CLASSES + 1), 5),
        (torch.zeros(2, 50), MAX_K + 1),
        (torch.zeros(5, 2).T, 2),
        (torch.zeros(2, 5, dtype=torch.float64), 2),
    ],
)
def test_other_logits_are_left_to_torch(logits, k) -> None:
    assert not supports(logits, k)
