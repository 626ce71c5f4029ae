"""Code as users write it: a network, a dataset, a loss, transforms, a metric and a callback."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter
from torch import Tensor, nn

import reconv


class Net(nn.Module):
    def __init__(self, num_classes: int, in_channels: int = 3, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(width * 4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(self.bn(self.conv(x))), 4)  # its gradient is deterministic on a GPU, too
        logits: Tensor = self.fc(self.drop(x.flatten(1)))
        return logits


class Squares:
    """Gray squares of random brightness in one of four corners, which are the classes."""

    classes = ("top left", "top right", "bottom left", "bottom right")

    def __init__(self, split: str, num_samples: int = 192) -> None:
        self.seed, self.num_samples = {"train": 1, "val": 2}[split], num_samples

    def __len__(self) -> int:
        return self.num_samples if self.seed == 1 else self.num_samples // 4

    def __getitem__(self, index: int) -> tuple[Any, int]:
        rng = np.random.default_rng([self.seed, index])
        target = int(rng.integers(4))
        pixels = rng.integers(0, 90, (10, 10), dtype=np.uint8)
        top, left = 5 * (target // 2), 5 * (target % 2)
        pixels[top : top + 5, left : left + 5] += np.uint8(rng.integers(60, 160))
        return Image.fromarray(pixels), target


def focal(logits: Tensor, targets: Tensor, gamma: float = 1.0) -> Tensor:
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (1 - torch.exp(-losses)) ** gamma * losses


class Tempered(nn.Module):
    """A focal loss of logits that are shifted and scaled by parameters of the loss, and a buffer that changes."""

    calls: Tensor

    def __init__(self, gamma: float = 1.0, num_classes: int = 4) -> None:
        super().__init__()
        self.gamma = gamma
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.shift = nn.Parameter(0.1 * torch.randn(1, num_classes))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return focal(self.log_scale.exp() * logits + self.shift, targets, self.gamma)


class LazyNet(nn.Sequential):
    """A network whose layers take their sizes from the first images."""

    def __init__(self, num_classes: int, in_channels: int = 3) -> None:
        super().__init__(
            nn.LazyConv2d(6, 3),
            nn.LazyBatchNorm2d(),
            nn.ReLU(),
            nn.Flatten(),
            nn.LazyLinear(num_classes),
        )


class Blur:
    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(rng.random()))


class Brighten:
    num_uniforms = 2

    def __init__(self, amount: float = 0.1) -> None:
        self.amount = amount

    def __call__(self, images: Tensor, uniforms: Tensor) -> Tensor:
        factor, shift = (1 + self.amount * (uniforms - 0.5)).unbind(dim=1)
        return images * factor.view(-1, 1, 1, 1) + shift.view(-1, 1, 1, 1) - 1


class MacroRecall:
    def __init__(self) -> None:
        self.found, self.total = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        is_correct = outputs.argmax(dim=1) == targets
        self.found += torch.bincount(targets[is_correct], minlength=4)
        self.total += torch.bincount(targets, minlength=4)

    def compute(self) -> dict[str, float]:
        return {"macro_recall": float((self.found / self.total.clamp(min=1)).mean())}


class Count(reconv.Callback):
    """Logs how often each hook was called, also before a resume."""

    def __init__(self, stop_at: int = 0) -> None:
        self.counts = {"steps": 0, "evaluations": 0}
        self.stop_at = stop_at

    def on_step_end(self, run: reconv.RunInfo) -> None:
        self.counts["steps"] += 1
        run.log("count/steps", self.counts["steps"])
        if self.counts["steps"] == self.stop_at:
            run.request_stop(f"{self.stop_at} steps are enough")

    def on_evaluate(self, run: reconv.RunInfo) -> None:
        self.counts["evaluations"] += 1
        run.log("count/recall", run.metrics.get("macro_recall", -1.0))

    def state_dict(self) -> dict[str, Any]:
        return self.counts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state


class Broken(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise ValueError("not today")
        return super().forward(x)
