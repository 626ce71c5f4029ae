"""The calibrated confidence of a run is that of its weights files, exports, predictions and later calibrations."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import reconv
from reconv.cli import main
from reconv.core.confidence import ConfidenceCalibration
from reconv.core.errors import CheckpointError, UsageError
from reconv.data.readers.digits import open_digits
from reconv.exporters.run import ExportResult
from reconv.inference.predictor import Predictor
from reconv.metrics.confidence import prediction_sets


@pytest.fixture
def digit_files(tmp_path: Path) -> list[Path]:
    """Digits, and images that are none."""
    folder, digits = tmp_path / "digits", open_digits("val")
    folder.mkdir()
    for number in range(30):
        Image.fromarray(digits[number].data[0]).save(folder / f"{number:02}.png")
    Image.effect_noise((8, 8), 90).save(folder / "noise.png")
    Image.new("L", (8, 8), 255).save(folder / "white.png")
    return sorted(folder.iterdir())


def test_a_run_ends_with_a_calibration_of_each_weights(classifier: Path) -> None:
    checkpoint = classifier / "checkpoints" / "step-000000066"
    found = {name: Predictor.load(classifier, weights=name, device="cpu").confidence for name in ("raw", "ema")}
    assert found["raw"] != found["ema"] and all(isinstance(c, ConfidenceCalibration) for c in found.values())
    assert reconv.load(checkpoint, device="cpu").confidence == found["ema"]
    for name, file in (("raw", "model.safetensors"), ("ema", "ema.safetensors")):
        assert reconv.load(checkpoint / file, device="cpu").confidence == found[name]
    assert found["ema"].coverage == 0.9 and found["ema"].num_temperature == found["ema"].num_conformal == 180
    assert reconv.load(classifier / "checkpoints" / "step-000000044", device="cpu").confidence is None


def test_predictions_have_the_set_of_their_logits(classifier: Path, digit_files: list[Path]) -> None:
    model = reconv.load(classifier, device="cpu", backend="eager")
    sure = replace(model, confidence=replace(model.confidence, coverage=None))
    ambiguous = replace(model, confidence=replace(model.confidence, threshold=0.1, temperature=1.5))
    sizes = set()
    for predictor in (model, ambiguous):
        predictions = predictor.predict(digit_files, top=1)
        expected = prediction_sets(predictor.logits([model.read(file) for file in digit_files]), predictor.confidence)
        for prediction, row in zip(predictions, expected, strict=True):
            names = {model.classes[index] for index in row.nonzero().flatten().tolist()}
            assert set(prediction.prediction_set) == names and len(prediction.classes) == 1
            assert prediction.unsure is (len(names) != 1)
            assert ("unsure" in str(prediction)) is prediction.unsure
            assert type(prediction).from_dict(json.loads(json.dumps(prediction.to_dict()))) == replace(
                prediction, image=None
            )
            sizes.add(len(names))
    assert len(sizes) >= 3
    [plain] = sure.predict(digit_files[:1])
    assert plain.unsure is None and "unsure" not in plain.to_dict()


def test_an_export_gives_the_sets_of_predict(
    classifier: Path, digit_files: list[Path], exported: ExportResult, tmp_path: Path
) -> None:
    model = reconv.load(classifier, device="cpu", backend="eager")
    assert json.loads((exported.folder / "preprocess.json").read_text())["confidence"] == model.confidence.to_dict()
    command = [sys.executable, str(exported.folder / "run.py"), "--json", *map(str, digit_files)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for prediction, other in zip(model.predict(digit_files), found, strict=True):
        expected = prediction.to_dict()
        assert (other["unsure"], other["prediction_set"]) == (expected["unsure"], expected["prediction_set"])
        assert other["classes"][0]["score"] == pytest.approx(expected["classes"][0]["score"], abs=1e-4)
    weights = reconv.export(classifier, to="safetensors", out=tmp_path / "out", samples=20)
    assert reconv.load(weights.model, device="cpu").confidence == model.confidence


def test_a_run_is_calibrated_later_with_another_promise(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(classifier, tmp_path / "run")
    before = Predictor.load(run, device="cpu").confidence
    with pytest.raises(SystemExit) as end:
        main(["eval", str(run), "--calibrate", "--coverage", "0.8", "--device", "cpu"])
    assert end.value.code == 0
    assert "80 % prediction sets hold" in capsys.readouterr().out
    after = Predictor.load(run, device="cpu").confidence
    assert after.coverage == 0.8 and after.threshold > before.threshold
    assert after.temperature == pytest.approx(before.temperature, rel=1e-3)
    assert Predictor.load(run, device="cpu", weights="raw").confidence.coverage == 0.9
    middle = run / "checkpoints" / "step-000000044"
    [result] = reconv.evaluate(middle, calibrate=True, device="cpu")
    assert result.confidence == Predictor.load(middle, device="cpu").confidence
    (run / "confidence.json").write_text("{broken")
    assert Predictor.load(run, device="cpu").confidence == before


def test_what_cannot_be_calibrated_is_refused(classifier: Path, detector: Path) -> None:
    weights = classifier / "checkpoints" / "step-000000066" / "model.safetensors"
    moved = shutil.copy(weights, "weights.safetensors")
    cases = {
        "needs a run": lambda: reconv.evaluate(moved, calibrate=True),
        "was not trained on": lambda: reconv.evaluate(classifier, calibrate=True, split="train"),
        "cannot be calibrated": lambda: reconv.evaluate(detector, calibrate=True),
        "coverage is 1": lambda: reconv.evaluate(classifier, calibrate=True, coverage=1.0),
        "--all and --calibrate": lambda: reconv.evaluate(classifier, calibrate=True, all=True),
    }
    for message, call in cases.items():
        with pytest.raises(UsageError, match=message):
            call()
    [few] = reconv.evaluate(classifier, calibrate=True, samples=150, device="cpu")
    assert few.confidence is None and "200 are needed" in few.confidence_note


def test_a_run_without_a_promise_predicts_as_before(digit_files: list[Path]) -> None:
    settings = {"length": "3ep", "evaluate.coverage": "off"}
    run = reconv.train("quickstart", out="run", overrides=[(k, v, "--set") for k, v in settings.items()]).folder
    model = reconv.load(run, device="cpu", backend="eager")
    assert model.confidence is None
    samples = [model.read(file) for file in digit_files]
    expected = model.logits(samples).softmax(dim=1).amax(dim=1)
    found = torch.tensor([prediction.score for prediction in model.predict_samples(samples)])
    torch.testing.assert_close(found, expected)


def test_an_impossible_calibration_in_a_weights_file_is_refused(classifier: Path, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    weights = classifier / "checkpoints" / "step-000000066" / "model.safetensors"
    with safe_open(weights, "pt") as file:
        header = file.metadata()
    content = json.loads(header["reconv"])
    content["confidence"]["temperature"] = 0
    save_file(load_file(weights), tmp_path / "w.safetensors", {**header, "reconv": json.dumps(content)})
    with pytest.raises(CheckpointError, match="temperature is not between"):
        reconv.load(tmp_path / "w.safetensors", device="cpu")
