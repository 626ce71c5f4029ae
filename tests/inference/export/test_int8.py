"""Models quantized to int8: calibrated, judged by accuracy, and compared with fp32 in speed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from export_examples import example_recipe, write_weights
from PIL import Image
from torch import Tensor, nn

import reconv
from reconv.core.errors import ExportError, UsageError
from reconv.inference.backends.exported import quiet_exporter, trace
from reconv.inference.backends.quantize import quantize_onnx
from reconv.inference.calibration import CalibrationSource
from reconv.inference.predictor import Predictor


class Layers(nn.Module):
    """Normalization, two convolutions with a sum, and a softmax after the last layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv1(images.permute(0, 3, 1, 2).float() * 0.01 - 1).relu()
        x = x + self.conv2(x)
        return self.fc(x.mean((2, 3))).softmax(dim=1) * 2


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (32, 12, 12, 3), "u1")


@pytest.fixture(scope="module")
def quantized(images: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("int8")
    fp32, int8 = folder / "fp32.onnx", folder / "int8.onnx"
    program = trace(Layers(), torch.from_numpy(images[:2]), is_dynamic=True)
    with quiet_exporter():
        exported = torch.onnx.export(program, dynamo=True, opset_version=20, input_names=["images"], verbose=False)
    assert exported is not None
    exported.model.metadata_props["classes"] = "[]"
    exported.save(str(fp32))
    quantize_onnx(fp32, int8, [images[:16], images[16:]])
    return fp32, int8


def test_what_lies_between_layers_is_quantized_and_nothing_else(quantized: tuple[Path, Path]) -> None:
    model = onnx.load(quantized[1])
    made_by = {name: node.op_type for node in model.graph.node for name in node.output}
    inputs = {node.op_type: {made_by.get(name) for name in node.input} for node in model.graph.node}
    assert "DequantizeLinear" in inputs["Conv"] & inputs["Gemm"]
    [sum_node] = [node for node in model.graph.node if node.op_type == "Add" and made_by[node.input[0]] != "Mul"]
    assert {made_by[name] for name in sum_node.input} == {"DequantizeLinear"}
    assert inputs["Mul"] <= {"Cast", "Softmax", None}  # normalization, and what follows the softmax
    assert [item.value for item in model.metadata_props if item.key == "classes"] == ["[]"]


def test_int8_is_close_to_fp32_for_any_batch_size(quantized: tuple[Path, Path], images: np.ndarray) -> None:
    sessions = [onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in quantized]
    for rows in (images, images[:1]):
        fp32, int8 = (session.run(None, {"images": rows})[0] for session in sessions)
        assert fp32.shape == int8.shape == (len(rows), 5)
        assert 0 < np.abs(fp32 - int8).max() < 0.05 * fp32.max()


def test_an_int8_export_states_accuracy_and_speed(classifier: Path, tmp_path: Path) -> None:
    result = reconv.export(classifier, to="onnx", int8=True, out=tmp_path / "out", max_drop=0.05)
    report = json.loads((result.folder / "report.json").read_text())
    assert report["precision"] == "int8" and abs(report["top1_accuracy"]["drop"]) < 0.05
    assert [item["batch"] for item in report["speed"]["batches"]] == [1, 16]
    assert all(item["fp32_ms"] > 0 and item["int8_ms"] > 0 for item in report["speed"]["batches"])
    assert "as fast as fp32" in (result.folder / "README.md").read_text()
    types = {node.op_type for node in onnx.load(result.model).graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= types
    assert json.loads((result.folder / "preprocess.json").read_text())["precision"] == "int8"


def test_int8_with_unlike_calibration_images_is_refused(classifier: Path, tmp_path: Path) -> None:
    (tmp_path / "black").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "black" / "image.png")
    with pytest.raises(ExportError, match="was not written") as caught:
        reconv.export(classifier, to="onnx", int8=True, out=tmp_path / "out", calibration=tmp_path / "black")
    assert "points lost, more than 1 (--max-drop)" in caught.value.why
    assert not (tmp_path / "out").exists()


def calibration_source(predictor: Predictor, data: Path | None = None) -> CalibrationSource:
    return CalibrationSource(predictor.recipe, predictor.model_classes, predictor.read, data=data)


def test_calibration_draws_256_training_images_always_the_same(classifier: Path) -> None:
    predictor = Predictor.load(classifier, device="cpu")
    first, second = (calibration_source(predictor).batches() for _ in range(2))
    assert [batch.shape for batch in first] == [(16, 8, 8, 1)] * 16
    assert all(np.array_equal(*pair) for pair in zip(first, second, strict=True))
    assert {len(batch) for batch in calibration_source(predictor).batches(5)} == {5}


def test_int8_of_a_model_without_training_data_asks_for_calibration_images(classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="needs training images to calibrate") as caught:
        calibration_source(Predictor.load(classifier, device="cpu"), tmp_path / "missing").batches()
    assert "--calibration DIR" in getattr(caught.value, "hint", "")


def test_int8_that_cannot_be_judged_is_refused_at_once(classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="have no known classes") as caught:
        reconv.export(classifier, to="onnx", int8=True, images=tmp_path, out=tmp_path / "out")
    assert "--calibration DIR" in caught.value.hint
    weights = write_weights(tmp_path / "w.safetensors", example_recipe("resnet8_cifar", task="multilabel"))
    with pytest.raises(UsageError, match="multi-label models"):
        reconv.export(weights, to="onnx", int8=True, out=tmp_path / "out")
