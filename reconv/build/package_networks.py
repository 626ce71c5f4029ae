"""Counterparts of our networks in torchvision and timm, and the names of their tensors there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reconv.build.model import model_options
from reconv.models import model_spec
from reconv.models.architecture import Spec
from reconv.models.efficientnet import EfficientNetSpec
from reconv.models.external import PACKAGES
from reconv.models.googlenet import GoogLeNetSpec
from reconv.models.mobilenet import MobileNetV2Spec
from reconv.models.resnet import ResNetSpec
from reconv.recipe.schema import Recipe

_RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
_RESNEXTS = ("resnext50_32x4d", "resnext101_32x8d", "wide_resnet50_2", "wide_resnet101_2")
_EFFICIENTNETS = tuple(f"efficientnet_b{number}" for number in range(8))
_IN_TORCHVISION = (*_RESNETS, *_RESNEXTS, *_EFFICIENTNETS, "mobilenet_v2", "googlenet")
TIMM_NETWORKS: Mapping[str, str] = {
    **{name: name for name in (*_RESNETS, *_RESNEXTS, *_EFFICIENTNETS)},
    **{name: name for name in ("resnet26", "resnet200", "resnext101_32x4d")},
    "mobilenet_v2": "mobilenetv2_100",
}
# Options that change the training of a network alone; in evaluation they do nothing.
_TRAINING_ONLY = (
    *("bn_momentum", "conv_init", "linear_init", "zero_gamma"),
    *("dropout", "aux_dropout", "drop_path_rate", "drop_connect", "drop_connect_per"),
)
_MOBILENET_REPEATS = (1, 2, 3, 4, 3, 3, 1)  # blocks per stage, which torchvision numbers through


@dataclass(frozen=True, slots=True)
class PackageNetwork:
    """A network as a package builds it."""

    package: str  # timm, torchvision, or reconv for what neither has
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"package": self.package, "name": self.name, "options": dict(self.options)}


def find_package_network(recipe: Recipe, num_classes: int, package: str) -> PackageNetwork | None:
    """The network of a package that computes the same with the same weights; None if it has none."""
    own_package, _, own_name = recipe.model.name.partition(":")
    options = model_options(recipe, num_classes)
    if own_package in PACKAGES and own_name:
        if "in_channels" in options and package == "timm":
            options["in_chans"] = options.pop("in_channels")
        return PackageNetwork(package, own_name, options) if own_package == package else None
    if own_name or recipe.task == "detection":
        return None
    spec, default = model_spec(recipe.model.name, **options), model_spec(recipe.model.name)
    return (_in_timm if package == "timm" else _in_torchvision)(recipe.model.name, spec, default)


def _in_torchvision(name: str, spec: Spec, default: Spec) -> PackageNetwork | None:
    if name not in _IN_TORCHVISION:
        return None
    options: dict[str, Any] = {"num_classes": spec.num_classes}
    free: tuple[str, ...] = ()
    if isinstance(spec, GoogLeNetSpec):
        free = ("aux_heads", "transform_input")
        options |= {"aux_logits": spec.aux_heads, "transform_input": spec.transform_input, "init_weights": False}
    return PackageNetwork("torchvision", name, options) if _is_same(spec, default, free) else None


def _in_timm(name: str, spec: Spec, default: Spec) -> PackageNetwork | None:
    if name not in TIMM_NETWORKS:
        return None
    options: dict[str, Any] = {"num_classes": spec.num_classes, "in_chans": spec.in_channels}
    free: tuple[str, ...] = ("in_channels",)
    if isinstance(spec, MobileNetV2Spec | EfficientNetSpec):
        free = (*free, "norm_eps", "padding")
        options |= {"bn_eps": spec.norm_eps, "pad_type": "same" if spec.padding == "same" else ""}
    return PackageNetwork("timm", TIMM_NETWORKS[name], options) if _is_same(spec, default, free) else None


def _is_same(spec: Spec, default: Spec, free: Iterable[str]) -> bool:
    """True if two specs compute the same, but for the options that the package has too."""
    names = [name for name in (*_TRAINING_ONLY, *free, "num_classes") if hasattr(spec, name)]
    changes: dict[str, Any] = {name: getattr(default, name) for name in names}
    return replace(spec, **changes) == default


def timm_names(network: str, names: Iterable[str]) -> dict[str, str]:
    """timm's name of each tensor of a network, from ours, which are torchvision's."""
    spec = None if ":" in network else model_spec(network)
    if isinstance(spec, MobileNetV2Spec):
        return {name: _mobilenet_name(name) for name in names}
    if isinstance(spec, EfficientNetSpec):
        return {name: _efficientnet_name(name) for name in names}
    assert spec is None or isinstance(spec, ResNetSpec)
    return {name: name for name in names}


_STEM_AND_HEAD = {"features.0.0.": "conv_stem.", "features.0.1.": "bn1.", "classifier.1.": "classifier."}
# The layers of a block in order: the first block of a network has no expansion.
_SEPARABLE = ("conv_dw", "conv_pw")
_INVERTED = ("conv_pw", "conv_dw", "conv_pwl")


def _mobilenet_name(name: str) -> str:
    for old, new in {**_STEM_AND_HEAD, "features.18.0.": "conv_head.", "features.18.1.": "bn2."}.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    found = re.fullmatch(r"features\.(\d+)\.conv\.(.+)\.(\w+)", name)
    assert found is not None, name
    number, layer, tensor = int(found[1]) - 1, found[2], found[3]
    stage = 0
    while number >= _MOBILENET_REPEATS[stage]:
        number, stage = number - _MOBILENET_REPEATS[stage], stage + 1
    kinds = _SEPARABLE if stage == 0 else _INVERTED
    last = len(kinds) - 1  # convolution and norm of the last layer are not in a pair
    position, _, part = layer.partition(".")
    index = min(int(position), last)
    is_norm = part == "1" or (not part and int(position) == last + 1)
    return f"blocks.{stage}.{number}.{f'bn{index + 1}' if is_norm else kinds[index]}.{tensor}"


def _efficientnet_name(name: str) -> str:
    for old, new in {**_STEM_AND_HEAD, "features.8.0.": "conv_head.", "features.8.1.": "bn2."}.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    found = re.fullmatch(r"features\.(\d+)\.(\d+)\.block\.(\d+)\.(\w+)\.(\w+)", name)
    assert found is not None, name
    stage, number, position, part, tensor = int(found[1]) - 1, found[2], int(found[3]), found[4], found[5]
    kinds = _SEPARABLE if stage == 0 else _INVERTED
    squeeze = len(kinds) - 1  # squeeze and excitation comes before the last layer
    if part in ("fc1", "fc2"):
        layer = "se.conv_reduce" if part == "fc1" else "se.conv_expand"
    else:
        index = position - (position > squeeze)
        layer = f"bn{index + 1}" if part == "1" else kinds[index]
    return f"blocks.{stage}.{number}.{layer}.{tensor}"
