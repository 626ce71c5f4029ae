"""A small network for CIFAR-10 whose first layer is not trained: it whitens 2x2 patches of the training images.

The filters are computed from the images given to `whiten`, and saved in checkpoints like other weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.core.errors import UsageError
from reconv.models.architecture import ConvInit, InitScheme, ReconvModel, Spec

_PATCH = 2  # pixels on a side of what is whitened
_MIN_VARIANCE = 5e-4  # added to each, of normalized pixels: directions that hardly vary are noise


@dataclass(frozen=True, kw_only=True)
class FastNetSpec(Spec):
    """The options of FastNet."""

    widths: tuple[int, ...] = (64, 256, 256)
    """Channels of each group of two convolutions."""
    head_scale: float = 1 / 9
    """Factor of the logits: a small one keeps the first updates small."""
    whiten_bias: bool = True
    """Let the whitening layer learn a bias."""
    norm_eps: float = 1e-12
    """Epsilon of the norms."""
    bn_momentum: float = 0.4
    """Weight of the new value in running statistics; large, as a run has few steps."""
    conv_init: ConvInit = "dirac"
    """Initialization of convolutions; tf_ is TensorFlow's variance scaling."""

    def build(self) -> FastNet:
        """The model, with torch's default initialization."""
        return FastNet(self)


class FastNetBlock(nn.Module):
    """Two 3x3 convolutions with norms that have a bias but no scale, and a max-pool as early as possible."""

    def __init__(self, spec: Spec, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = spec.make_conv(in_channels, out_channels, 3)
        self.pool = nn.MaxPool2d(2)
        self.norm1, self.act1 = _shift_only(*spec.make_norm_act(out_channels, nn.GELU()))
        self.conv2 = spec.make_conv(out_channels, out_channels, 3)
        self.norm2, self.act2 = _shift_only(*spec.make_norm_act(out_channels, nn.GELU()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.norm1(self.pool(self.conv1(x))))
        out: Tensor = self.act2(self.norm2(self.conv2(x)))
        return out


class Whitening(nn.Conv2d):
    """A convolution with frozen filters, two for each direction of a patch: one and its negative."""

    def __init__(self, in_channels: int, learns_bias: bool) -> None:
        super().__init__(in_channels, 2 * in_channels * _PATCH**2, _PATCH, bias=True)
        self.weight.requires_grad_(False)
        if self.bias is not None:
            self.bias.requires_grad_(learns_bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(super().forward(x))


class FastNetHead(nn.Module):
    """Global max-pooling and a linear layer."""

    def __init__(self, channels: int, num_classes: int, scale: float) -> None:
        super().__init__()
        self.fc = nn.Linear(channels, num_classes, bias=False)
        self._scale = scale

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.max_pool2d(x, (x.shape[2], x.shape[3])).flatten(1)
        logits: Tensor = self.fc(pooled) * self._scale
        return logits


class FastNet(ReconvModel):
    """Whitening, groups of two convolutions that halve the image size, and a head."""

    def __init__(self, spec: FastNetSpec) -> None:
        super().__init__()
        if not spec.widths:
            raise UsageError("model option widths needs at least one group")
        self.whitening = Whitening(spec.in_channels, spec.whiten_bias)
        widths = (self.whitening.out_channels, *spec.widths)
        self.groups = nn.Sequential(*(FastNetBlock(spec, before, after) for before, after in pairwise(widths)))
        self.head = FastNetHead(widths[-1], spec.num_classes, spec.head_scale)
        self.init_scheme = InitScheme(spec.conv_init, spec.linear_init)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, classes] of images [n, channels, height, width]."""
        logits: Tensor = self.head(self.groups(self.whitening(images)))
        return logits

    def stages(self) -> list[tuple[str, nn.Module]]:
        """The whitening, every group, and the head."""
        groups = [(f"groups.{index}", group) for index, group in self.groups.named_children()]
        return [("whitening", self.whitening), *groups, ("head", self.head)]

    def set_whitening(self, filters: Tensor) -> None:
        """Set the first layer's filters to these and their negatives."""
        with torch.no_grad():
            self.whitening.weight.copy_(torch.cat([filters, -filters]))


def whitening_filters(images: Tensor, smallest: float = _MIN_VARIANCE) -> Tensor:
    """Filters [d, channels, 2, 2] whose outputs on patches of normalized images are uncorrelated with variance 1."""
    num_images, channels, height, width = images.shape
    rows, columns = height - _PATCH + 1, width - _PATCH + 1
    patches = images.new_empty(num_images, rows, columns, channels, _PATCH, _PATCH, dtype=torch.float64)
    for i, j in product(range(_PATCH), repeat=2):  # half the time of Tensor.unfold, which copies runs of two pixels
        patches[..., i, j] = images[:, :, i : i + rows, j : j + columns].permute(0, 2, 3, 1)
    flat = patches.view(-1, channels * _PATCH**2)
    mean = flat.mean(0)
    variances, directions = torch.linalg.eigh(flat.T @ flat / len(flat) - torch.outer(mean, mean))
    filters: Tensor = directions.T / (variances[:, None] + smallest).sqrt()
    return filters.flip(0).reshape(-1, channels, _PATCH, _PATCH)


def _shift_only(norm: nn.Module, act: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The norm, its scale frozen at 1, and its activation."""
    norm.get_parameter("weight").requires_grad_(False)
    return norm, act


SPECS: Mapping[str, FastNetSpec] = {"fastnet_cifar": FastNetSpec()}
