"""Wrong labels are found from probabilities: confident learning, by its definition, and the score of each label."""

from __future__ import annotations

import numpy as np
import pytest

from reconv.data.dataset import F64, I64
from reconv.review.labels import confident_joint, judge_labels, normalized_margin, self_confidence
from reconv.review.network import head_probabilities


def noisy_labels(n: int, num_classes: int, flipped: float, sharpness: float, seed: int = 0) -> tuple[I64, I64, F64]:
    """True classes, labels of which a share is wrong, and calibrated probabilities of the true classes."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, num_classes)) * sharpness
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    true = (rng.random((n, 1)) < probs.cumsum(axis=1)).argmax(axis=1)
    wrong = rng.random(n) < flipped
    labels = np.where(wrong, (true + rng.integers(1, num_classes, n)) % num_classes, true)
    return true, labels, probs


def test_the_joint_counts_confident_images_by_their_definition() -> None:
    labels = np.array([0, 0, 0, 1, 1, 2])
    probs = np.array(
        [[0.9, 0.1, 0], [0.7, 0.3, 0], [0.1, 0.9, 0], [0.2, 0.8, 0], [0.4, 0.5, 0.1], [0.1, 0.0, 0.9]], np.float64
    )
    # Thresholds are 1.7 / 3, 0.65 and 0.9: two images labeled 0 are confidently 0 and one 1, the fifth is neither.
    expected = [[2, 1, 0], [0, 2, 0], [0, 0, 1]]  # rows sum to the labels' counts
    assert np.allclose(confident_joint(labels, probs), expected)


def test_scores_are_probabilities_that_the_label_is_wrong() -> None:
    true, labels, probs = noisy_labels(20_000, 5, flipped=0.2, sharpness=4)
    scores = judge_labels(labels, probs)
    wrong = labels != true
    assert scores.num_wrong == pytest.approx(wrong.sum(), rel=0.15)
    for low, high in ((0.2, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 1.01)):
        chosen = (scores.wrong >= low) & (scores.wrong < high)
        assert chosen.sum() > 100
        assert wrong[chosen].mean() == pytest.approx(scores.wrong[chosen].mean(), abs=0.08)
    likely = scores.wrong >= 0.5
    assert (scores.best[likely & wrong] == true[likely & wrong]).mean() > 0.8


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_networks_that_are_too_sure_or_too_little_give_nearly_the_same_scores(factor: float) -> None:
    _, labels, probs = noisy_labels(5_000, 5, flipped=0.2, sharpness=4)
    plain = judge_labels(labels, probs)
    bent = probs**factor / (probs**factor).sum(axis=1, keepdims=True)
    other = judge_labels(labels, bent)
    assert other.temperature == pytest.approx(plain.temperature * factor, rel=0.15)
    assert np.mean(np.abs(other.wrong - plain.wrong)) < 0.03


def test_qualities_of_labels_are_those_of_the_paper() -> None:
    labels, probs = np.array([1, 0]), np.array([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]])
    assert self_confidence(labels, probs).tolist() == [0.2, 0.6]
    assert normalized_margin(labels, probs) == pytest.approx([0.25, 0.65])


def test_a_class_without_labels_and_certain_probabilities_do_no_harm() -> None:
    probs = np.eye(3)[[0, 0, 1, 1, 0]]
    scores = judge_labels(np.array([0, 0, 1, 1, 1]), probs)
    assert np.isfinite(scores.wrong).all() and np.argmax(scores.wrong) == 4
    assert scores.joint.shape == (3, 3) and scores.joint[2].sum() == 0


def test_heads_are_judged_on_folds_they_have_not_seen() -> None:
    rng = np.random.default_rng(0)
    labels, folds = rng.integers(0, 3, 240), np.arange(240) % 4
    folds[200:] = -1
    features = (np.eye(3)[labels] * 3 + rng.normal(size=(240, 3))).astype(np.float32)
    probs = head_probabilities(features, labels, folds, 3)
    assert probs.sum(axis=1) == pytest.approx(np.ones(240))
    assert (probs.argmax(axis=1) == labels).mean() > 0.85
    noise = head_probabilities(rng.normal(size=(240, 150)).astype(np.float32), labels, folds, 3)
    assert (noise.argmax(axis=1) == labels)[
        :200
    ].mean() < 0.5  # features that say nothing: heads on seen images had 1.0
