"""Wrong labels from out-of-sample probabilities: confident learning, and the probability that a label is wrong.

Confident learning (Northcutt, Jiang and Chuang 2021) counts how often images labeled i are confidently of class j. From
these counts follows how labels go wrong, and from that and the probabilities of an image, by Bayes' rule, how likely
its own label is. Networks are too sure of themselves or, with label smoothing, too little: the temperature that
explains the labels best corrects that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reconv.data.dataset import F64, I64

_TINY = 1e-12
_TEMPERATURES = np.exp(np.linspace(np.log(0.1), np.log(5.0), 60))
_ROUNDS, _ROUNDS_PER_TEMPERATURE = 12, 4
_PRIOR = 1.0  # image per class
_TOLERANCE = 1e-6  # of a probability that equals its threshold but for rounding


@dataclass(frozen=True, slots=True, eq=False)
class LabelScores:
    """The labels of n images, judged."""

    wrong: F64  # [n] probability that the label is wrong
    best: I64  # [n] the most likely class
    best_score: F64  # [n] its probability
    joint: F64  # [classes, classes] number of images by label and true class, as confident learning counts them
    temperature: float

    @property
    def num_wrong(self) -> int:
        """The estimated number of wrong labels."""
        return round(float(self.wrong.sum()))


def self_confidence(labels: I64, probs: F64) -> F64:
    """The probability of each label [n]."""
    own: F64 = probs[np.arange(len(labels)), labels]
    return own


def normalized_margin(labels: I64, probs: F64) -> F64:
    """The probability of the label less that of the best other class, scaled from -1..1 to 0..1 [n]."""
    others = probs.copy()
    others[np.arange(len(labels)), labels] = -np.inf
    margin: F64 = (self_confidence(labels, probs) - others.max(axis=1) + 1) / 2
    return margin


def confident_joint(labels: I64, probs: F64) -> F64:
    """Estimated numbers of images by label and true class [classes, classes], with rows that sum to the labels' counts.

    An image counts for the most likely class whose probability is at least the mean of the images with that label.
    """
    num_classes = probs.shape[1]
    counts = np.bincount(labels, minlength=num_classes)
    sums = np.bincount(labels, self_confidence(labels, probs), num_classes)
    thresholds = np.where(counts > 0, sums / np.maximum(counts, 1), 2.0)  # a class without labels is never confident
    is_confident = probs >= thresholds - _TOLERANCE
    chosen = np.where(is_confident, probs, -1.0).argmax(axis=1)
    rows = np.flatnonzero(is_confident.any(axis=1))
    joint = np.zeros((num_classes, num_classes))
    np.add.at(joint, (labels[rows], chosen[rows]), 1.0)
    np.fill_diagonal(joint, np.maximum(np.diagonal(joint), 1))
    scaled: F64 = joint * (counts / joint.sum(axis=1))[:, None]
    return scaled


def judge_labels(labels: I64, probs: F64) -> LabelScores:
    """The probability of each label to be wrong, from probabilities [n, classes] by networks that did not see it.

    Confident learning starts the estimate of how classes are mislabeled, and expectation maximization refines it:
    counts alone take ambiguous images for wrong ones.
    """
    joint = confident_joint(labels, probs)
    transition = _normalized(joint.T)
    logits = np.log(np.maximum(probs, _TINY))
    for round_number in range(_ROUNDS):
        if round_number % _ROUNDS_PER_TEMPERATURE == 0:
            temperature = min(_TEMPERATURES, key=lambda value: _label_loss(logits / value, transition, labels))
            clean = _softmax(logits / temperature)
        posterior = clean * transition[:, labels].T
        posterior /= np.maximum(posterior.sum(axis=1, keepdims=True), _TINY)
        counts = np.zeros_like(joint)  # by label and true class
        np.add.at(counts, labels, posterior)
        transition = _normalized(counts.T)
    return LabelScores(
        wrong=1 - self_confidence(labels, posterior),
        best=posterior.argmax(axis=1),
        best_score=posterior.max(axis=1),
        joint=joint,
        temperature=float(temperature),
    )


def _normalized(counts: F64) -> F64:
    """Probabilities of labels by true class [true, label]; confusions that were not seen are rare, not impossible."""
    smoothed = counts + _PRIOR / len(counts)
    rows: F64 = smoothed / smoothed.sum(axis=1, keepdims=True)
    return rows


def _label_loss(logits: F64, transition: F64, labels: I64) -> float:
    """The mean cross-entropy of the labels under the probabilities of true classes and how these are labeled."""
    likelihood = (_softmax(logits) * transition[:, labels].T).sum(axis=1)
    return float(-np.log(np.maximum(likelihood, _TINY)).mean())


def _softmax(logits: F64) -> F64:
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs: F64 = exponents / exponents.sum(axis=1, keepdims=True)
    return probs
