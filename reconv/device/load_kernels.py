"""Loading CUDA kernels before a run needs them.

CUDA loads a kernel from its library when it is first launched: 20 ms each for torch's, and 0.2 to 0.6 s for the first
convolution (H200). What most runs begin with is launched here, as small as possible. It affects speed only, and changes
neither random numbers nor settings.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Thread

import torch
import torch.nn.functional as F
from torch import Tensor


def load_cuda_kernels(index: int) -> None:
    """Load cuDNN and the kernels of most first steps and evaluations, each kind in a thread.

    Not cuBLAS, which reads its configuration when it is first used: `load_classifier_kernels` does.
    """
    if index < torch.cuda.device_count():
        for kind in (_run_convolution, _run_elementwise, _run_metrics):
            _start(kind, torch.device("cuda", index))


def load_classifier_kernels(device: torch.device) -> None:
    """Load cuBLAS and the kernels of a classifier's loss, in a thread; algorithms must be configured before."""
    _start(_run_classifier, device)


def _start(run: Callable[[torch.device], None], device: torch.device) -> None:
    def work() -> None:
        with suppress(RuntimeError):  # raised again by the first step
            run(device)

    Thread(target=work, name="reconv-kernels").start()


def _run_convolution(device: torch.device) -> None:
    images, filters = (_zeros(device, torch.half, 8, 8, 1, 1).requires_grad_() for _ in range(2))
    F.conv2d(images, filters).backward(_zeros(device, torch.half, 8, 8, 1, 1))


def _run_elementwise(device: torch.device) -> None:
    """The parts of a step between its convolutions: norm, activation, optimizer, random numbers."""
    features = _zeros(device, torch.half, 8, 8, 1, 1).requires_grad_()
    F.relu(F.batch_norm(features, None, None, training=True)).float().sum().backward()
    weights = _zeros(device, torch.float32, 8, 8)
    torch.linalg.vector_norm(torch.stack(torch._foreach_norm([weights, weights])))
    torch._foreach_add([weights], torch._foreach_mul([weights], 0.5))
    bits = torch.arange(8, device=device)
    bits = (bits ^ (bits >> 1)) * 3 & 7
    torch.where(bits[:, None] > 3, weights[bits].flip(1), weights.to(torch.bfloat16).float())


def _run_metrics(device: torch.device) -> None:
    """Loss, accuracy and the table of predictions of an evaluation."""
    logits, targets = _zeros(device, torch.float32, 8, 8), _zeros(device, torch.int64, 8)
    best = logits.topk(2, dim=1).indices
    columns = [targets[:, None], best, logits.softmax(dim=1).gather(1, best)]
    torch.cat([column.double() for column in columns], dim=1)
    losses = F.cross_entropy(logits, targets, reduction="none").double()
    torch.stack([losses.sum(), (best[:, 0] == targets).sum() + (best == targets[:, None]).any(dim=1).sum()])


def _run_classifier(device: torch.device) -> None:
    features, weight = (_zeros(device, torch.half, 8, 8).requires_grad_() for _ in range(2))
    targets = _zeros(device, torch.int64, 8)
    F.cross_entropy(F.linear(features, weight).float(), targets, label_smoothing=0.1).backward()


def _zeros(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
