"""Triton kernel that finds the best classes of each row of logits.

Shapes: logits [rows, classes]; scores and labels [rows, K].

Hazards: a program holds a whole row, so the number of classes is limited by registers.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_classes"])
def best_classes(logits, scores, labels, num_classes, K: tl.constexpr, BLOCK: tl.constexpr):
    """scores[n] = the K largest of softmax(logits[n]), labels[n] = where they are."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.arange(0, BLOCK)
    exists = label < num_classes
    values = tl.load(logits + row * num_classes + label, mask=exists, other=float("-inf")).to(tl.float32)
    largest = tl.max(values, axis=0)
    total = tl.sum(tl.where(exists, tl.exp(values - largest), 0.0), axis=0)
    values = tl.where(values == values, values, float("inf"))  # a NaN counts as the largest, as in torch
    for rank in tl.static_range(K):
        best = tl.max(tl.where(exists, values, float("-inf")), axis=0)
        at = tl.min(tl.where(exists & (values == best), label, BLOCK - 1), axis=0)
        tl.store(scores + row * K + rank, tl.exp(best - largest) / total)
        tl.store(labels + row * K + rank, at.to(tl.int64))
        exists = exists & (label != at)
