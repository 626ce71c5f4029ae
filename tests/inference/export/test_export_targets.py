"""Every target but ONNX: what its file is, that it loads where it should, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from export_examples import CLASSES, example_recipe, write_photographs, write_weights
from safetensors import safe_open

import reconv
from reconv.build.package_networks import find_package_network, timm_names
from reconv.core.errors import UsageError
from reconv.exporters.formats.weights import write_torchvision_pth
from reconv.exporters.metadata import ExportMetadata
from reconv.exporters.targets import ExportOptions
from reconv.inference.backends.exported import ExportClassifier, example_images, trace
from reconv.inference.predictor import Predictor
from reconv.models import build_model


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "weights.safetensors", example_recipe("resnet8_cifar"))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load of torch 2.11
def test_a_torch_export_program_has_its_metadata_and_takes_any_batch(weights: Path, tmp_path: Path) -> None:
    photos = write_photographs(tmp_path / "photos", 3)
    result = reconv.export(weights, to="torch-export", out=tmp_path / "out", images=photos)
    extra = {"preprocess.json": ""}
    program = torch.export.load(result.model, extra_files=extra).module()
    assert json.loads(extra["preprocess.json"])["classes"] == list(CLASSES)
    model = reconv.load(weights, device="cpu", backend="eager")
    images = example_images(model.recipe.data.preprocess, 5)
    with torch.no_grad():
        expected = model.backend(images.permute(0, 3, 1, 2))
        torch.testing.assert_close(program(images), expected)
        torch.testing.assert_close(program(images[:1]), expected[:1])


def test_a_fixed_batch_size_is_in_the_graph(weights: Path) -> None:
    predictor = Predictor.load(weights, device="cpu", backend="eager")
    preprocess = predictor.recipe.data.preprocess
    module = ExportClassifier(predictor.module, preprocess)
    program = trace(module, example_images(preprocess, 4), is_dynamic=False).module()
    assert program(example_images(preprocess, 4)).shape == (4, 10)
    with pytest.raises(AssertionError, match="Guard failed"):
        program(example_images(preprocess, 5))


def test_a_safetensors_file_is_a_weights_file_of_reconv_with_the_metadata_of_an_export(
    weights: Path, tmp_path: Path
) -> None:
    photos = write_photographs(tmp_path / "photos", 3)
    result = reconv.export(weights, to="safetensors", out=tmp_path / "out", images=photos)
    with safe_open(result.model, "pt") as file:
        header = file.metadata()
    assert json.loads(header["classes"]) == list(CLASSES) and header["recipe_digest"]
    ours, theirs = reconv.load(weights, device="cpu"), reconv.load(result.model, device="cpu")
    assert theirs.class_names == CLASSES
    for expected, found in zip(ours.predict([photos / "0.jpg"]), theirs.predict([photos / "0.jpg"]), strict=True):
        assert found == expected


def test_a_torchvision_checkpoint_holds_tensors_alone(weights: Path, tmp_path: Path) -> None:
    predictor = Predictor.load(weights, device="cpu")
    module = ExportClassifier(predictor.module, predictor.recipe.data.preprocess)
    images = example_images(predictor.recipe.data.preprocess, None)
    write_torchvision_pth(module, images, ExportMetadata.of(predictor), ExportOptions(), tmp_path)
    tensors = torch.load(tmp_path / "model.pth", weights_only=True)
    state = predictor.module.state_dict()
    assert list(tensors) == list(state) and all(torch.equal(tensors[name], state[name]) for name in state)


def test_a_torchvision_checkpoint_needs_no_torchvision(tmp_path: Path) -> None:
    weights = write_weights(tmp_path / "weights.safetensors", example_recipe("resnet10", options={"width": 8}))
    with pytest.raises(UsageError, match="torchvision has no model like"):
        reconv.export(weights, to="torchvision-pth", out=tmp_path / "out", images=tmp_path)
    weights = write_weights(tmp_path / "weights.safetensors", example_recipe("mobilenet_v2"))
    result = reconv.export(
        weights, to="torchvision-pth", out=tmp_path / "out", images=write_photographs(tmp_path / "photos", 3)
    )
    assert result.report["passed"]
    tensors = torch.load(result.model, weights_only=True)
    assert tensors["classifier.1.weight"].shape == (len(CLASSES), 1280)
    settings = json.loads((result.folder / "preprocess.json").read_text())
    assert settings["network_of"]["name"] == "mobilenet_v2"


def test_networks_that_torchvision_does_not_have_are_refused() -> None:
    found = {
        (name, package): find_package_network(example_recipe(name, options=options), 10, package)
        for name, options in {
            "resnet50": {"drop_path_rate": 0.1, "zero_gamma": "always"},
            "resnet18": {"version": "v2"},
            "resnet20_cifar": {},
            "mobilenet_v2": {"padding": "same", "norm_eps": 1e-3},
            "googlenet": {"aux_heads": False},
            "fastnet_cifar": {},
            "timm:vit_tiny_patch16_224": {"img_size": 32},
        }.items()
        for package in ("torchvision", "timm")
    }
    names = {key: network.name for key, network in found.items() if network is not None}
    assert names == {
        ("resnet50", "torchvision"): "resnet50",
        ("resnet50", "timm"): "resnet50",
        ("mobilenet_v2", "timm"): "mobilenetv2_100",
        ("googlenet", "torchvision"): "googlenet",
        ("timm:vit_tiny_patch16_224", "timm"): "vit_tiny_patch16_224",
    }
    googlenet, mobilenet = found["googlenet", "torchvision"], found["mobilenet_v2", "timm"]
    assert googlenet is not None and googlenet.options["aux_logits"] is False
    assert mobilenet is not None and (mobilenet.options["bn_eps"], mobilenet.options["pad_type"]) == (1e-3, "same")


@pytest.mark.parametrize(
    ("network", "some"),
    [
        (
            "mobilenet_v2",
            {
                "features.1.conv.2.weight": "blocks.0.0.bn2.weight",
                "features.4.conv.1.0.weight": "blocks.2.0.conv_dw.weight",
                "features.17.conv.3.running_var": "blocks.6.0.bn3.running_var",
                "features.18.1.bias": "bn2.bias",
            },
        ),
        (
            "efficientnet_b0",
            {
                "features.1.0.block.1.fc1.weight": "blocks.0.0.se.conv_reduce.weight",
                "features.2.1.block.3.0.weight": "blocks.1.1.conv_pwl.weight",
                "features.7.0.block.2.fc2.bias": "blocks.6.0.se.conv_expand.bias",
                "classifier.1.bias": "classifier.bias",
            },
        ),
    ],
)
def test_timm_names_are_one_to_one(network: str, some: dict[str, str]) -> None:
    with torch.device("meta"):
        state = build_model(network).state_dict()
    names = timm_names(network, state)
    assert len(set(names.values())) == len(state) and some.items() <= names.items()


def test_missing_packages_and_wrong_options_are_usage_errors(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no --opset"):
        reconv.export(weights, to="torch-export", opset=20)
    with pytest.raises(UsageError, match="no export target"):
        reconv.export(weights, to="tflite")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UsageError, match="needs onnxscript") as caught:
        reconv.export(weights, to="onnx")
    assert "reconv[onnx]" in caught.value.hint


@pytest.mark.slow
def test_an_aoti_package_gives_the_numbers_of_the_model(weights: Path, tmp_path: Path) -> None:
    photos = write_photographs(tmp_path / "photos", 3)
    result = reconv.export(weights, to="aoti", out=tmp_path / "out", images=photos)
    package = torch._inductor.aoti_load_package(str(result.model))
    assert json.loads(package.get_metadata()["classes"]) == list(CLASSES)
