"""Class activation maps: how much each position of a classifier's last feature map adds to the logit of a class.

A map is the feature map times the gradient of the logit, summed over channels (HiResCAM, Draelos and Carin 2020). Where
the head is global average pooling and a linear layer it is the class activation map of Zhou et al. 2016: its mean plus
the bias is the logit. The gradient goes back to that feature map only: a map costs little more than a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from reconv.core.batch import Batch
from reconv.core.errors import UsageError
from reconv.tasks.evaluation import InferenceStep, eval_mode

_ATTENTION = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, F.scaled_dot_product_attention)
_ATTENTION_LAYER = (F.multi_head_attention_forward, torch._native_multi_head_attention)
# Red, green, blue, opacity: from nothing to light yellow, as in matplotlib's inferno.
_COLORS = (
    (0, 0, 4, 0),
    (66, 10, 104, 105),
    (147, 38, 103, 165),
    (221, 81, 58, 205),
    (252, 165, 10, 230),
    (252, 255, 164, 240),
)


@dataclass(frozen=True, slots=True)
class _FeatureMap:
    """A map of positions that the logits were computed from, as a leaf of the autograd graph."""

    features: Tensor  # [1, channels, rows, columns], or [1, rows, columns, channels]
    channel_dim: int
    number: int  # of the operation that found it


class _FindFeatureMap(TorchFunctionMode):
    """Finds the last map of positions before the logits: what global pooling takes, else the last convolution's output.

    Pooling is whatever turns a map into one vector per image, so networks of other packages need not be known. What
    follows a found map is recorded for the backward pass until another convolution replaces it. The output of a
    convolution is recorded only where `number` says that it is the last: most networks end in pooling.
    """

    def __init__(self, number: int | None = None) -> None:
        super().__init__()
        self.number = number
        self.found: _FeatureMap | None = None
        self.last_conv: int | None = None  # since the last pooling
        self._calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._calls += 1
        output = func(*args, **(kwargs or {}))
        if func in _ATTENTION_LAYER or (func in _ATTENTION and output.ndim > 2):
            self.found = self.last_conv = None  # positions are mixed from here on
        if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
            return output
        if func is F.conv2d and output.ndim == 4 and output.shape[2:].numel() > 1:
            self.found, self.last_conv = None, self._calls
            if self._calls == self.number:
                return self._leaf(output, 1)
            torch.set_grad_enabled(self.number is not None and self._calls > self.number)
        elif (channel_dim := _pooled_channel_dim(args[0], output)) is not None and self.number is None:
            self.last_conv = None
            return func(self._leaf(args[0], channel_dim), *args[1:], **(kwargs or {}))
        return output

    def _leaf(self, features: Tensor, channel_dim: int) -> Tensor:
        leaf = features.detach().clone()
        torch.set_grad_enabled(True)
        self.found = _FeatureMap(leaf.requires_grad_(), channel_dim, self._calls)
        return leaf.clone()  # activations may change it in place, which a leaf does not allow


def _pooled_channel_dim(features: Tensor, output: Tensor) -> int | None:
    """Dimension of a map's channels if `output` is one vector of it per image; None if it is not."""
    if features.ndim != 4:
        return None
    n, channels, rows, columns = features.shape
    if rows * columns > 1 and (output.shape == (n, channels) or output.shape[2:] == (1, 1)):
        return 1
    is_channels_last_pool = output.shape in ((n, columns), (n, 1, 1, columns))
    return 3 if channels * rows > 1 and is_channels_last_pool else None


def activation_maps(model: nn.Module, images: Tensor, labels: Sequence[int]) -> Tensor:
    """The maps [labels, rows, columns] in float32 for one preprocessed image [1, channels, height, width].

    The mean of a map is what all positions together add to the logit. The model must be in eval mode.
    """
    with torch.no_grad():
        search = _FindFeatureMap()
        with search:
            logits = model(images)
        if search.found is None and search.last_conv is not None:
            search = _FindFeatureMap(search.last_conv)
            with search:
                logits = model(images)
    found = search.found
    if found is None or not isinstance(logits, Tensor) or not logits.requires_grad:
        raise UsageError(
            "this model has no class activation map",
            why="its logits do not come from a map of positions, as those of convolutional networks do",
        )
    maps = []
    for label in labels:
        (gradient,) = torch.autograd.grad(logits[0, label], found.features, retain_graph=True)
        contributions = (gradient * found.features.detach()).float()[0].sum(found.channel_dim - 1)
        maps.append(contributions * contributions.numel())
    return torch.stack(maps).cpu()


def sample_activation_maps(step: InferenceStep, pixels: Tensor, labels: Sequence[int]) -> Tensor:
    """The maps of one image [channels, size, size] uint8 on the device, computed as its prediction is."""
    row = torch.zeros(1, dtype=torch.int64, device=pixels.device)
    batch = Batch({"images": pixels[None], "indices": row, "targets": row}, row, (1,))
    with torch.no_grad():
        images = step.preprocess(batch, 0)["images"]
    with eval_mode(step.model), step.precision.autocast():
        return activation_maps(step.model, images, labels)


def activation_image(values: Tensor, size: int) -> Image.Image:
    """A map [rows, columns] in colors, enlarged to size x size: transparent where nothing speaks for the class.

    The strongest position has the lightest color, whatever its value.
    """
    positive = values.clamp(min=0)
    scaled = (positive / positive.max().clamp(min=torch.finfo(torch.float32).tiny)).numpy()
    enlarged = Image.fromarray(scaled.astype(np.float32)).resize((size, size), Image.Resampling.BICUBIC)
    levels = np.asarray(enlarged).clip(0, 1) * 255
    image = Image.fromarray(levels.round().astype(np.uint8), mode="P")
    palette = _palette()
    image.putpalette(palette[:, :3].tobytes())
    image.info["transparency"] = palette[:, 3].tobytes()
    return image


def _palette() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """256 colors with opacity."""
    anchors, at = np.array(_COLORS, dtype=np.float64), np.linspace(0, 1, len(_COLORS))
    levels = [np.interp(np.linspace(0, 1, 256), at, anchors[:, part]) for part in range(4)]
    return np.stack(levels, axis=1).round().astype(np.uint8)
