"""int8 on CPUs: quantized once, judged with held-out images, refused where it loses too much or cannot run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from reconv.core.errors import DataError, UsageError
from reconv.data.readers.digits import open_digits
from reconv.device import cpu_features
from reconv.inference.backends.int8 import check_amx, judge_classes
from reconv.inference.calibration import HeldOutImages
from reconv.inference.predictor import LoadOptions, Predictor


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of its own, and a CPU that is taken for one with int8 instructions: all can compute in int8."""
    patch = pytest.MonkeyPatch()
    patch.setenv("RECONV_CACHE", str(tmp_path_factory.mktemp("cache")))
    patch.setattr("reconv.inference.backends.precisions.has_int8", lambda: True)
    yield
    patch.undo()


def write_digits(folder: Path, num: int) -> Path:
    folder.mkdir()
    digits = open_digits("val")
    for index in range(num):
        Image.fromarray(np.asarray(digits[index].data).squeeze()).save(folder / f"{index}.png")
    return folder


def test_int8_is_quantized_with_the_runs_own_data_once_and_judged_by_accuracy(classifier: Path) -> None:
    said: list[str] = []
    predictor = Predictor.load(classifier, device="cpu", precision="int8", log=said.append)
    assert (predictor.backend.name, predictor.backend.precision) == ("onnxruntime", "int8")
    assert said[0].startswith("quantizing to int8 with 256 images, judged with ")
    assert "onnxruntime, int8: top-1 accuracy" in said[1] and len(said) == 2
    images = [sample.data for sample in (open_digits("val")[index] for index in range(64))]
    eager = Predictor.load(classifier, device="cpu", backend="eager")
    pairs = list(zip(predictor.predict(images), eager.predict(images), strict=True))
    assert sum(one.label == other.label for one, other in pairs) >= 60
    assert any(one.score != other.score for one, other in pairs)
    assert abs(predictor.evaluate().metrics["top1"] - eager.evaluate().metrics["top1"]) <= 0.03

    again: list[str] = []
    Predictor.load(classifier, device="cpu", precision="int8", backend="onnxruntime", log=again.append)
    assert again == said[1:]


def test_weights_without_data_are_calibrated_and_judged_with_images_of_a_folder(
    classifier: Path, tmp_path: Path
) -> None:
    weights, recipe = tmp_path / "weights.safetensors", tmp_path / "recipe.yaml"
    shutil.copyfile(max(classifier.rglob("ema.safetensors")), weights)
    recipe.write_text(f"extends: quickstart\ndata:\n  path: {tmp_path / 'missing'}\n  source: folder\n")
    options: LoadOptions = {"recipe": str(recipe), "device": "cpu", "precision": "int8"}
    with pytest.raises(DataError, match="int8 needs validation images") as caught:
        Predictor.load(weights, **options)
    assert "--calibration DIR" in caught.value.hint
    with pytest.raises(DataError, match="at least 32 images"):
        Predictor.load(weights, calibration=write_digits(tmp_path / "few", 20), **options)
    backend = Predictor.load(weights, calibration=write_digits(tmp_path / "enough", 60), **options).backend
    assert "the top-1 class of fp32 for " in backend.describe() and "of 30 held-out images" in backend.describe()


def test_int8_that_loses_accuracy_is_refused(classifier: Path, tmp_path: Path) -> None:
    (tmp_path / "black").mkdir()
    for index in range(40):
        Image.new("L", (8, 8)).save(tmp_path / "black" / f"{index}.png")
    with pytest.raises(UsageError, match="not as good as in fp32") as caught:
        Predictor.load(classifier, device="cpu", precision="int8", calibration=tmp_path / "black")
    assert "points may be lost" in caught.value.why


def test_what_is_lost_is_counted_on_held_out_images() -> None:
    fp32, pixels = {"logits": np.eye(10)[np.arange(400) % 10]}, torch.zeros(400, 1)
    known = HeldOutImages(pixels, list(np.arange(400) % 10), None)
    int8 = {"logits": fp32["logits"].copy()}
    int8["logits"][:4] = 0.0  # as many as may be lost, and one of them is right by chance
    assert judge_classes(fp32, int8, known) == (
        "top-1 accuracy 99.25% instead of 100.00% on 400 held-out images",
        "",
    )
    int8["logits"][:60] = 0.0  # 54 are wrong: more than two standard errors
    assert "at most 3.7 points may be lost" in judge_classes(fp32, int8, known)[1]
    text, failure = judge_classes(fp32, int8, HeldOutImages(pixels, None, None))
    assert "86.5% of 400" in text and "at least 90% are needed" in failure


def test_int8_is_refused_where_it_cannot_run(classifier: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="folded does not compute in int8"):
        Predictor.load(classifier, device="cpu", precision="int8", backend="folded")
    with pytest.raises(UsageError, match="calibration images are for int8"):
        Predictor.load(classifier, device="cpu", calibration=tmp_path)
    monkeypatch.setattr("reconv.inference.backends.precisions.has_int8", lambda: False)
    with pytest.raises(UsageError, match="no int8 instructions"):
        Predictor.load(classifier, device="cpu", precision="int8")
    monkeypatch.undo()
    monkeypatch.setattr("reconv.inference.backends.int8.reports_amx", lambda: True)
    monkeypatch.setattr("reconv.inference.backends.int8._TRY_INT8", "import os; os.kill(os.getpid(), 4)")
    with pytest.raises(UsageError, match="cannot compute in int8") as caught:
        Predictor.load(classifier, device="cpu", precision="int8")
    assert "AMX" in caught.value.why


def test_int8_is_tried_with_the_onnxruntime_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ImportError")  # the one of the environment, but not of sys.path
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("reconv.inference.backends.int8.reports_amx", lambda: True)
    monkeypatch.setattr("reconv.inference.backends.int8._TRY_INT8", "import onnxruntime")
    check_amx()


@pytest.mark.parametrize(("flags", "expected"), [("fma avx2 avx_vnni", True), ("fma avx2 avx512f", False)])
def test_the_flags_of_the_cpu_say_whether_it_has_int8(
    flags: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    monkeypatch.setattr(cpu_features, "_CPUINFO", tmp_path / "cpuinfo")
    cpu_features._flags.cache_clear()
    try:
        assert cpu_features.has_int8() is expected
    finally:
        cpu_features._flags.cache_clear()


@pytest.mark.slow
def test_a_detector_in_int8_is_judged_by_its_average_precision(detector: Path) -> None:
    backend = Predictor.load(detector, device="cpu", precision="int8").backend
    assert "instead of" in backend.describe() and "held-out images" in backend.describe()
