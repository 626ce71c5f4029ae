"""A small model with everything that a training step needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reconv.core.batch import Batch
from reconv.distributed.strategy import ParallelStrategy
from reconv.models import build_model, init_weights
from reconv.models.layers.batch_norm import LayerState
from reconv.models.layers.dropout import Dropout
from reconv.optim import ModelEma, build_clip_grad, build_optimizer
from reconv.precision import build_precision
from reconv.recipe.parts.optimizer import OptimizerConfig
from reconv.recipe.parts.precision import PrecisionConfig
from reconv.tasks.classification import ClassificationTask
from reconv.trainer.step import TrainStep


class Parts:
    """A small model with everything that a training step needs."""

    def __init__(self, precision: str = "fp32", optimizer: OptimizerConfig | None = None, dropout: float = 0) -> None:
        self.model = build_model("resnet8_cifar", num_classes=10, in_channels=1)
        init_weights(self.model, 0)
        self.model.fc = nn.Sequential(Dropout(dropout), self.model.fc)
        self.precision = build_precision(PrecisionConfig(mode=precision), "cpu")
        self.model = self.precision.cast_model(self.model).train()
        self.ema = ModelEma(self.model, 0.9)
        section = optimizer or OptimizerConfig()
        self.optimizer = build_optimizer(section, self.model)
        self.step = TrainStep(
            model=self.model,
            task=ClassificationTask(10),
            preprocess=lambda batch, step: batch,
            layer_state=LayerState(self.model),
            precision=self.precision,
            optimizer=self.optimizer,
            ema=self.ema,
            strategy=ParallelStrategy(),
            lr_schedule=lambda step: 0.1 / (1 + step),
            ordered_reduction=False,
            clip_grad=build_clip_grad(section, self.model),
        )

    def tensors(self) -> dict[str, Tensor]:
        found = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        found |= {f"average.{k}": v for k, v in self.ema.state_dict().items()}
        return {k: v.clone() for k, v in (found | self.optimizer.state_dict()).items()}


def batch(rows: int = 8, first: int = 0, poison: float | None = None, dtype: torch.dtype = torch.float32) -> Batch:
    draw = torch.Generator().manual_seed(first)
    images = torch.randn(rows, 1, 8, 8, generator=draw).to(dtype)
    if poison is not None:
        images[0, 0, 0, 0] = poison
    positions = torch.arange(first, first + rows)
    tensors = {"images": images, "targets": positions % 10, "indices": positions}
    return Batch(tensors, positions, (rows,))
