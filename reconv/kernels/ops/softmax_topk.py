"""The best classes of each image and their probabilities in one kernel; torch's softmax and topk take eight."""

from __future__ import annotations

import torch
from torch import Tensor

from reconv.kernels.dispatch import DTYPES, supports_device
from reconv.kernels.jit.launch import launch

MAX_CLASSES = 16384  # of one block
MAX_K = 16  # each takes one pass over the block


def supports(logits: Tensor, k: int) -> bool:
    """True if the kernel supports these logits [n, classes]."""
    num_classes = logits.shape[-1]
    return (
        supports_device(logits)
        and logits.dim() == 2
        and logits.dtype in DTYPES
        and logits.is_contiguous()
        and 0 < k <= min(MAX_K, num_classes)
        and num_classes <= MAX_CLASSES
    )


def softmax_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """logits.softmax(1).topk(k) in float32: scores and labels [n, k]; of equal scores the first label comes first."""
    from reconv.kernels.triton.softmax_topk import best_classes

    num_images, num_classes = logits.shape
    scores = torch.empty(num_images, k, dtype=torch.float32, device=logits.device)
    labels = torch.empty(num_images, k, dtype=torch.int64, device=logits.device)
    block = 1 << (num_classes - 1).bit_length()
    launch(best_classes, (num_images,), logits, scores, labels, num_classes, K=k, BLOCK=block)
    return scores, labels
