"""The network as it is exported: uint8 images in, normalization inside."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reconv.data.transforms.device_transforms import Normalize, standardize
from reconv.recipe.parts.data import PreprocessConfig
from reconv.tasks.tta import average_views


class ExportNormalize(nn.Module):
    """uint8 images [n, height, width, channels] to what the network takes, float32 [n, channels, height, width]."""

    factor: Tensor
    shift: Tensor

    def __init__(self, preprocess: PreprocessConfig) -> None:
        super().__init__()
        self._per_image = preprocess.per_image_standardization
        factor, shift = Normalize(preprocess, torch.float32).affine(torch.device("cpu"))
        self.register_buffer("factor", factor.clone())
        self.register_buffer("shift", shift.clone())

    def forward(self, images: Tensor) -> Tensor:
        images = images.permute(0, 3, 1, 2)
        if self._per_image:
            return standardize(images, torch.float32)
        return images.to(torch.float32) * self.factor + self.shift


class ExportClassifier(nn.Module):
    """uint8 images [n, height, width, channels] to logits [n, classes] in float32, averaged over the views of `tta`."""

    def __init__(self, model: nn.Module, preprocess: PreprocessConfig, tta: str = "none") -> None:
        super().__init__()
        self.normalize = ExportNormalize(preprocess)
        self.model = model
        self._tta = tta

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = average_views(self.model, self._tta)(self.normalize(images))
        return logits.to(torch.float32)


def example_images(preprocess: PreprocessConfig, batch: int | None) -> Tensor:
    """Images to trace a network with; two where the batch size is dynamic, as 1 would become a constant."""
    shape = (batch or 2, preprocess.size, preprocess.size, preprocess.channels)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
