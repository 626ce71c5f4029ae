"""Exported detectors: NMS by each runtime equals Reconv's, and the gate finds other boxes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import reconv
from reconv.detection.annotation import make_annotation
from reconv.detection.postprocess import PostprocessConfig, postprocess
from reconv.exporters.detector import ExportDetector, NMSOperation
from reconv.exporters.gate.boxes import BoxRules, compare_boxes, compare_detections
from reconv.exporters.gate.check import Reference
from reconv.exporters.gate.images import GateImage
from reconv.exporters.metadata import NMSRules
from reconv.exporters.run_script import run_script
from reconv.inference.backends.exported import quiet_exporter, trace
from reconv.models.architecture import SSDOutput
from reconv.recipe.parts.data import PreprocessConfig

SIZE, NUM_ANCHORS, NUM_CLASSES, VARIANCES = 4, 120, 3, (0.1, 0.2)
CONFIG = PostprocessConfig(score_threshold=0.2, nms_iou=0.4, max_per_class=30, max_per_image=25)
PREPROCESS = PreprocessConfig(size=SIZE, resize=None)
NAMES = ("boxes", "scores", "labels", "counts")


class PixelsToBoxes(nn.Module):
    """A linear layer as a detector: other pixels give other boxes, many of which overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * SIZE * SIZE, NUM_ANCHORS * (4 + 1 + NUM_CLASSES))
        nn.init.normal_(self.linear.weight, std=0.25, generator=torch.Generator().manual_seed(1))
        nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> SSDOutput:
        rows = self.linear(images.flatten(1)).unflatten(1, (NUM_ANCHORS, -1))
        return SSDOutput(rows[:, :, :4], rows[:, :, 4:])


@pytest.fixture(scope="module")
def anchors() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    center, size = torch.rand(NUM_ANCHORS, 2, generator=generator), torch.rand(NUM_ANCHORS, 2, generator=generator)
    return torch.cat([center, 0.1 + 0.5 * size], dim=1)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randint(0, 256, (6, SIZE, SIZE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def module(anchors: Tensor, nms: NMSOperation | None) -> ExportDetector:
    return ExportDetector(PixelsToBoxes(), PREPROCESS, anchors, VARIANCES, CONFIG, nms).eval()


@pytest.fixture(scope="module")
def expected(anchors: Tensor, images: Tensor) -> dict[str, Any]:
    """What Reconv's own post-processing finds."""
    exported = module(anchors, None)
    with torch.no_grad():
        outputs = exported.model(exported.normalize(images))
    found = postprocess(outputs.box_deltas, outputs.logits, anchors, VARIANCES, CONFIG)
    assert found.counts.min() > 5 and found.counts.max() == CONFIG.max_per_image
    values = (found.boxes_xyxy * SIZE, found.scores, (found.labels - 1).clamp(min=0), found.counts)
    return {name: value.numpy() for name, value in zip(NAMES, values, strict=True)}


def assert_equal(found: Any, expected: dict[str, Any], rows: slice = slice(None)) -> None:
    for name, value in zip(NAMES, found, strict=True):
        np.testing.assert_allclose(np.asarray(value), expected[name][rows], atol=2e-6, err_msg=name)


def test_the_torch_loop_finds_the_boxes_of_postprocess(
    anchors: Tensor, images: Tensor, expected: dict[str, Any]
) -> None:
    with torch.no_grad():
        assert_equal(module(anchors, "torch")(images), expected)


def test_a_traced_torch_loop_finds_them_for_any_batch_size(
    anchors: Tensor, images: Tensor, expected: dict[str, Any]
) -> None:
    program = trace(module(anchors, "torch"), images[:2], is_dynamic=True).module()
    with torch.no_grad():
        assert_equal(program(images), expected)
        assert_equal(program(images[:1]), expected, slice(1))


def test_onnxruntime_finds_them_for_any_batch_size(
    anchors: Tensor, images: Tensor, expected: dict[str, Any], tmp_path: Path
) -> None:
    with quiet_exporter():
        program = trace(module(anchors, "onnx"), images[:2], is_dynamic=True)
        exported = torch.onnx.export(program, dynamo=True, opset_version=20, input_names=["images"], verbose=False)
    assert exported is not None
    exported.save(str(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert_equal(session.run(None, {"images": images.numpy()}), expected)
    assert_equal(session.run(None, {"images": images[:1].numpy()}), expected, slice(1))


def test_run_py_finds_them_where_the_model_has_no_nms(
    anchors: Tensor, images: Tensor, expected: dict[str, Any]
) -> None:
    script = ModuleType("run")
    script.__dict__["__file__"] = "run.py"
    exec(run_script("onnxruntime"), script.__dict__)
    with torch.no_grad():
        boxes, scores = (output.numpy() for output in module(anchors, None)(images))
    rules = {name: getattr(NMSRules.of(CONFIG, False), name) for name in NMSRules.__dataclass_fields__}
    found = script.suppress({"boxes": boxes, "scores": scores}, {"size": SIZE, "nms": rules})
    assert_equal([found[name] for name in NAMES], expected)


@pytest.mark.parametrize("nms", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_detector_is_exported_with_and_without_nms(detector: Path, tmp_path: Path, nms: bool) -> None:
    result = reconv.export(detector, to="onnx", out=tmp_path / "out", samples=8, nms=nms)
    session = onnxruntime.InferenceSession(result.model, providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == list(NAMES if nms else NAMES[:2])
    boxes = result.report["boxes"]
    assert boxes["num_boxes"] > 50 and boxes["num_different"] == 0
    assert result.report["average_precision"]["metric"] == "voc10"

    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 90, 3), "u1")).save(tmp_path / "image.png")
    command = [sys.executable, "-I", str(result.folder / "run.py"), "image.png", "--json", "--min-score", "0.2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    [theirs] = json.loads(done.stdout)
    [ours] = reconv.predict(detector, [tmp_path / "image.png"], min_score=0.2)
    assert len(theirs["boxes"]) == len(ours.boxes) > 0
    for found, box in zip(theirs["boxes"], ours.boxes, strict=True):
        assert (found["name"], found["score"]) == (box.name, pytest.approx(box.score, abs=1e-5))
        assert found["box_xyxy"] == pytest.approx(box.box_xyxy, abs=1e-3)


def detections(num_images: int = 3, k: int = 4) -> dict[str, Any]:
    """Boxes far from each other, all of class 1 and with different scores."""
    boxes = np.arange(k)[None, :, None] * 20.0 + np.array([0.0, 0.0, 10.0, 10.0])
    scores = np.linspace(0.9, 0.5, k)[None].repeat(num_images, 0)
    labels, counts = np.ones((num_images, k), np.int64), np.full(num_images, k)
    return {"boxes": boxes.repeat(num_images, 0), "scores": scores, "labels": labels, "counts": counts}


def test_boxes_are_matched_whatever_their_order() -> None:
    ours, theirs = detections(), detections()
    for name in NAMES[:3]:
        theirs[name] = theirs[name][:, ::-1] + (5e-5 if name == "scores" else 0)
    found = compare_boxes(ours, theirs, size=100)
    assert found.num_boxes == 12 and not found.num_unmatched.any()
    assert (found.score, found.corner) == (pytest.approx(5e-5), 0)


@pytest.mark.parametrize(("name", "change"), [("boxes", 0.02), ("scores", 0.001), ("labels", 1)])
def test_another_corner_score_or_class_is_another_box(name: str, change: float) -> None:
    theirs = detections()
    theirs[name][1, 2] += type(theirs[name].flat[0])(change)
    assert compare_boxes(detections(), theirs, size=100).num_unmatched.tolist() == [0, 2, 0]


def test_missing_and_additional_boxes_are_counted() -> None:
    theirs = detections()
    theirs["counts"] = np.array([4, 3, 0])
    assert compare_boxes(detections(), theirs, size=100).num_unmatched.tolist() == [0, 1, 4]
    assert compare_boxes(theirs, detections(), size=100).num_unmatched.tolist() == [0, 1, 4]


@pytest.mark.parametrize(("max_drop", "passes"), [(0.3, True), (0.1, False)])
def test_int8_is_judged_by_average_precision(max_drop: float, passes: bool) -> None:
    ours, theirs = detections(), detections()
    theirs["boxes"][:, 3] += 15
    truth = make_annotation(ours["boxes"][0], [1] * 4, image_id=0, height=100, width=100)
    images = [GateImage(str(row), Path(), annotation=truth) for row in range(3)]
    crcs = np.zeros(3, np.uint32)
    rules = BoxRules(100, ("a", "b"), "voc10", "int8", max_drop)
    result = compare_detections(Reference(images, crcs, ours, 0), {**theirs, "pixels_crc32": crcs}, rules, 0)
    assert result.passed == passes
    assert result.facts["average_precision"]["model"] == 1 and result.facts["average_precision"]["drop"] > 0.1
    exact = compare_detections(
        Reference(images, crcs, ours, 0), {**theirs, "pixels_crc32": crcs}, replace(rules, precision="fp32"), 0
    )
    assert len(exact.failures) == 2
    without = [GateImage(str(row), Path()) for row in range(3)]
    unknown = compare_detections(Reference(without, crcs, ours, 0), {**ours, "pixels_crc32": crcs}, rules, 0)
    assert "no known boxes" in unknown.failures[0]
