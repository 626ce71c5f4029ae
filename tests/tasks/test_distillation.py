"""The distillation loss against its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.tasks.classification import ClassificationTask
from reconv.tasks.distillation import Teacher

NUM_CLASSES = 5


def batch_of(num: int) -> Batch:
    generator = torch.Generator().manual_seed(num)
    images = torch.randn(num, 3, 4, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(NUM_CLASSES, (num,), generator=generator)
    return Batch({"images": images, "targets": targets}, torch.arange(num), (num,))


def teacher_logits(images: Tensor) -> Tensor:
    return images.flatten(1)[:, :NUM_CLASSES] * 3


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> float:
    """KL(teacher || student) summed over samples, term by term."""
    total = 0.0
    for s, t in zip((student / temperature).softmax(1), (teacher / temperature).softmax(1), strict=True):
        total += sum(float(q * (q.log() - p.log())) for p, q in zip(s, t, strict=True))
    return total


def test_the_loss_is_the_weighted_sum_at_every_alpha_and_temperature() -> None:
    batch = batch_of(4)
    logits = torch.randn(4, NUM_CLASSES, dtype=torch.float64)
    plain = ClassificationTask(NUM_CLASSES, 0.1).loss(logits, batch).loss
    num_cases = 0
    for alpha in (0.0, 0.3, 1.0):
        for temperature in (0.5, 1.0, 4.0):
            task = ClassificationTask(NUM_CLASSES, 0.1, teacher=Teacher(teacher_logits, alpha, temperature))
            expected = (1 - alpha) * float(plain) + alpha * temperature**2 * divergence(
                logits, teacher_logits(batch["images"]), temperature
            )
            torch.testing.assert_close(task.loss(logits, batch).loss.item(), expected, rtol=1e-10, atol=1e-10)
            num_cases += 1
    assert num_cases == 9


def test_the_loss_is_a_sum_over_samples() -> None:
    batch = batch_of(6)
    logits = torch.randn(6, NUM_CLASSES, dtype=torch.float64)
    task = ClassificationTask(NUM_CLASSES, teacher=Teacher(teacher_logits, 0.5, 2.0))
    rows = [slice(0, 2), slice(2, 6)]
    parts = [
        task.loss(logits[r], Batch({k: t[r] for k, t in batch.tensors.items()}, batch.positions[r], (len(logits[r]),)))
        for r in rows
    ]
    torch.testing.assert_close(sum(p.loss for p in parts), task.loss(logits, batch).loss, rtol=1e-12, atol=0)


def test_the_teacher_gets_no_gradient_and_is_not_evaluated() -> None:
    weight = torch.ones(NUM_CLASSES, requires_grad=True)
    calls = 0

    def counted(images: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return teacher_logits(images) * weight

    task = ClassificationTask(NUM_CLASSES, teacher=Teacher(counted, 0.5, 2.0))
    logits = torch.randn(4, NUM_CLASSES, requires_grad=True)
    task.loss(logits, batch_of(4)).loss.backward()
    assert logits.grad is not None and weight.grad is None
    assert calls == 1
    task.metrics().update(
        logits.detach(), Batch({**batch_of(4).tensors, "indices": torch.arange(4)}, torch.arange(4), (4,))
    )
    assert calls == 1
