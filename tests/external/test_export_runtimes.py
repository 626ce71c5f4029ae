"""Every family of networks gives the numbers of the model in the real OpenVINO; int8 there and in onnxruntime.

Needs pip install 'reconv[onnx,openvino,detection]'. Networks have random statistics. The families in onnxruntime are in
tests/inference/export. With RECONV_EXPORT_TABLE=FILE, each report is appended there. Takes about ten minutes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from detector_example import write_recipe
from export_examples import example_recipe, write_photographs, write_weights

import reconv
from reconv.exporters.run import ExportResult

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'reconv[onnx]'")
openvino = pytest.importorskip("openvino", reason="pip install 'reconv[openvino]'")

pytestmark = pytest.mark.filterwarnings("default")

RUNTIMES = ("onnx", "openvino")
NETWORKS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "fastnet": ("fastnet_cifar", 32, {}),
    "CIFAR ResNet": ("resnet20_cifar", 32, {"shortcut": "A"}),
    "group norm": ("resnet8_cifar", 32, {"norm": "group"}),
    "layer norm": ("resnet8_cifar", 32, {"norm": "layer"}),
    "proxy norm": ("resnet8_cifar", 32, {"norm": "proxy"}),
    "ResNet, basic": ("resnet10", 64, {}),
    "ResNet, bottleneck": ("resnet14", 64, {}),
    "ResNet v2": ("resnet14", 64, {"version": "v2"}),
    "ResNet, TensorFlow's padding": ("resnet14", 64, {"padding": "same"}),
    "ResNeXt": ("resnext14_32x4d", 64, {}),
    "SE-ResNeXt": ("resnext14_32x4d", 64, {"se_units": 16}),
    "EfficientNet": ("efficientnet_cifar", 32, {}),
    "MobileNetV2": ("mobilenet_v2", 64, {}),
    "GoogLeNet": ("googlenet", 64, {}),
    "EfficientNet-B0": ("efficientnet_b0", 64, {"padding": "same", "norm_eps": 1e-3}),
    "ResNet-50": ("resnet50", 64, {}),
}


def record(name: str, result: ExportResult) -> None:
    """Append a line of the table in docs/results/export.md to the file that the environment names."""
    if "RECONV_EXPORT_TABLE" in os.environ:
        line = {"network": name, "runtime": result.target, **result.report}
        with open(os.environ["RECONV_EXPORT_TABLE"], "a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_gives_its_numbers_in_openvino(tmp_path: Path, name: str) -> None:
    network, size, options = NETWORKS[name]
    weights = write_weights(tmp_path / "w.safetensors", example_recipe(network, size=size, options=options))
    photos = write_photographs(tmp_path / "photos", count=12)
    result = reconv.export(weights, to="openvino", out=tmp_path / "out", images=photos)
    record(name, result)
    logits, decisions = result.report["logits"], result.report["decisions"]
    assert logits["unit"] > 1e-3 and 0 < logits["largest_difference"] < logits["bound"]
    assert decisions["num_different"] == 0


@pytest.mark.parametrize("nms", [True, False])
def test_a_detector_gives_its_boxes_in_openvino(tmp_path: Path, detector: Path, nms: bool) -> None:
    result = reconv.export(detector, to="openvino", out=tmp_path / "out", nms=nms)
    record(f"ssd_resnet34, {'with' if nms else 'without'} NMS", result)
    boxes, precision = result.report["boxes"], result.report["average_precision"]
    assert boxes["num_boxes"] > 100 and boxes["num_different"] <= boxes["num_ties_allowed"]
    assert precision["exported"] == pytest.approx(precision["model"], abs=1e-3)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_int8_keeps_the_accuracy_of_quickstart(tmp_path: Path, classifier: Path, runtime: str) -> None:
    result = reconv.export(classifier, to=runtime, out=tmp_path / "out", int8=True, max_drop=0.02)
    record("quickstart, int8", result)
    assert result.report["top1_accuracy"]["drop"] <= 0.02


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_int8_of_a_detector_is_judged_by_its_average_precision(tmp_path: Path, detector: Path, runtime: str) -> None:
    result = reconv.export(detector, to=runtime, out=tmp_path / "out", int8=True, max_drop=1.0)
    assert set(result.report["average_precision"]) == {"metric", "model", "exported", "drop"}


def test_openvino_keeps_float32_weights_and_metadata(tmp_path: Path, classifier: Path) -> None:
    result = reconv.export(classifier, to="openvino", out=tmp_path / "out", samples=20)
    model = openvino.Core().read_model(result.model)
    types = {op.get_element_type().get_type_name() for op in model.get_ops() if op.get_type_name() == "Constant"}
    assert "f32" in types and not types & {"f16", "bf16"}
    assert json.loads(model.get_rt_info(["reconv", "classes"]).astype(str)) == list("0123456789")
    assert model.input(0).get_element_type().get_type_name() == "u8" and model.input(0).partial_shape[0].is_dynamic


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quickstart of three epochs."""
    return reconv.train(
        "quickstart", out=tmp_path_factory.mktemp("runs") / "run", overrides=[("length", "3ep", "--set")]
    ).folder


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector of a few steps, whose boxes are many and not good."""
    folder = tmp_path_factory.mktemp("detector")
    return reconv.train(write_recipe(folder), out=folder / "run").folder
