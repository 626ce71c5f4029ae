"""Every network family as ONNX, in the real onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from export_examples import example_recipe, write_photographs, write_weights

import reconv

NETWORKS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ResNet v1.5, basic": ("resnet10", 64, {}),
    "ResNet v1.5, bottleneck": ("resnet14", 64, {}),
    "ResNet v1": ("resnet14", 64, {"version": "v1", "stem": "deep"}),
    "ResNet v2": ("resnet14", 64, {"version": "v2"}),
    "ResNet, TensorFlow's padding": ("resnet14", 64, {"padding": "same", "project_first": True}),
    "CIFAR ResNet": ("resnet20_cifar", 32, {"shortcut": "A"}),
    "ResNeXt": ("resnext14_32x4d", 64, {}),
    "SE-ResNeXt": ("resnext14_32x4d", 64, {"se_units": 16}),
    "wide ResNet": ("resnet14", 64, {"width_per_group": 128}),
    "MobileNetV2": ("mobilenet_v2", 64, {}),
    "EfficientNet": ("efficientnet_cifar", 32, {}),
    "EfficientNet, TensorFlow's": ("efficientnet_b0", 64, {"padding": "same", "norm_eps": 1e-3}),
    "GoogLeNet": ("googlenet", 64, {}),
    "fastnet": ("fastnet_cifar", 32, {}),
    "group norm": ("resnet8_cifar", 32, {"norm": "group"}),
    "layer norm": ("resnet8_cifar", 32, {"norm": "layer"}),
    "proxy norm": ("resnet8_cifar", 32, {"norm": "proxy"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", NETWORKS)
def test_a_network_of_each_family_gives_its_numbers_in_onnxruntime(tmp_path: Path, family: str) -> None:
    network, size, options = NETWORKS[family]
    weights = write_weights(tmp_path / "weights.safetensors", example_recipe(network, size=size, options=options))
    photos = write_photographs(tmp_path / "photos")
    report = reconv.export(weights, to="onnx", out=tmp_path / "out", images=photos).report
    assert report["logits"]["unit"] > 1e-3, "logits of almost zero prove nothing"
    assert report["decisions"]["num_different"] == 0
    print(f"{family}: {report['logits']['largest_difference']:.1e} of {report['logits']['unit']:.2g}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"preprocess": {"per_image_standardization": True}},
        {
            "preprocess": {"divide_by": 1, "mean": (120, 110, 100), "std": (1, 1, 1)},
            "evaluate": {"tta": "flip-translate"},
        },
        {"preprocess": {"resize": None, "interpolation": "bicubic"}, "task": "multilabel"},
    ],
)
@pytest.mark.parametrize("target", ["onnx", "safetensors"])
def test_every_kind_of_normalization_is_exported(tmp_path: Path, fields: dict[str, Any], target: str) -> None:
    weights = write_weights(tmp_path / "weights.safetensors", example_recipe("resnet8_cifar", **fields))
    photos = write_photographs(tmp_path / "photos")
    report = reconv.export(weights, to=target, out=tmp_path / "out", images=photos).report
    assert report["passed"] and report["logits"]["unit"] > 1e-3
