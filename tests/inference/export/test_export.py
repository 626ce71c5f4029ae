"""A trained model, exported: what the folder holds, and that it runs elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from export_examples import example_recipe, write_weights
from PIL import Image

import reconv
from reconv.checkpoint.run_identity import read_identity
from reconv.core.errors import DataError, ExitCode, ExportError, RunLockedError, UsageError
from reconv.exporters import run as export_run
from reconv.exporters.folder import ExportFolder
from reconv.exporters.run import ExportResult
from reconv.logging.run_dir import RunDir


def test_the_folder_has_the_model_its_card_and_a_script(exported: ExportResult, classifier: Path) -> None:
    names = {path.name for path in exported.folder.iterdir()}
    assert names == {"model.onnx", "preprocess.json", "README.md", "run.py", "report.json"}
    assert [path.name for path in exported.folder.parent.iterdir()] == ["digits"]
    card = (exported.folder / "README.md").read_text()
    assert "python run.py" in card and "top-1 accuracy" in card and "ema weights of step 66" in card
    report = json.loads((exported.folder / "report.json").read_text())
    assert report == exported.report and report["passed"] and report["num_images"] == 40
    assert 0 < report["logits"]["largest_difference"] < report["logits"]["bound"]
    assert report["top1_accuracy"]["model"] == report["top1_accuracy"]["exported"] > 0.5


def test_the_file_has_classes_preprocessing_and_recipe_digest(exported: ExportResult, classifier: Path) -> None:
    properties = {item.key: item.value for item in onnx.load(exported.model).metadata_props}
    settings = json.loads((exported.folder / "preprocess.json").read_text())
    assert json.loads(properties["classes"]) == settings["classes"] == list("0123456789")
    assert (properties["task"], properties["size"], properties["interpolation"]) == ("classification", "8", "bilinear")
    assert properties["recipe_digest"] in read_identity(RunDir(classifier)).recipe_digests


def test_the_model_takes_uint8_images_in_batches_of_any_size(exported: ExportResult, classifier: Path) -> None:
    session = onnxruntime.InferenceSession(exported.model, providers=["CPUExecutionProvider"])
    [images], [logits] = session.get_inputs(), session.get_outputs()
    assert (images.name, images.type, images.shape) == ("images", "tensor(uint8)", ["batch", 8, 8, 1])
    assert (logits.name, logits.shape) == ("logits", ["batch", 10])
    model, pixels = reconv.load(classifier, device="cpu"), np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), "u1")
    with torch.no_grad():
        expected = model.module(model.preprocess(list(pixels))).numpy()
    for rows in (slice(0, 1), slice(0, 5)):
        found = session.run(None, {"images": pixels[rows]})[0]
        np.testing.assert_allclose(found, expected[rows], atol=1e-5)


def test_run_py_predicts_as_reconv_does(exported: ExportResult, classifier: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for number, file in enumerate(files):
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (9, 12), "u1")).save(file)
    (tmp_path / "broken.png").write_bytes(b"x")
    command = [sys.executable, "-I", str(exported.folder / "run.py"), "--json", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ours = [prediction.to_dict() for prediction in reconv.predict(classifier, files)]
    theirs = json.loads(done.stdout)
    for expected, found in zip(ours, theirs, strict=True):
        assert found["path"] == expected["path"]
        assert [item["name"] for item in found["classes"]] == [item["name"] for item in expected["classes"]]
        scores = [[item["score"] for item in prediction["classes"]] for prediction in (found, expected)]
        np.testing.assert_allclose(*scores, atol=1e-5)
    broken = subprocess.run([*command[:3], str(tmp_path / "broken.png"), str(files[0])], capture_output=True, text=True)
    assert broken.returncode == 1 and "broken.png" in broken.stderr and files[0].name in broken.stdout


def test_an_existing_folder_is_replaced_only_if_it_is_an_export_and_force_is_given(
    exported: ExportResult, classifier: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="already exists"):
        reconv.export(classifier, out=exported.folder)
    other = tmp_path / "mine"
    other.mkdir()
    (other / "notes.txt").write_text("keep")
    with pytest.raises(UsageError, match="already exists"):
        reconv.export(classifier, out=other, force=True)
    assert (other / "notes.txt").read_text() == "keep"


def test_a_weights_file_needs_images_to_be_checked_with(tmp_path: Path) -> None:
    weights = write_weights(tmp_path / "weights.safetensors", example_recipe("resnet8_cifar"))
    with pytest.raises((DataError, UsageError), match="cannot be checked") as caught:
        reconv.export(weights, out=tmp_path / "out")
    assert "--images DIR" in caught.value.hint


def test_a_model_that_differs_is_not_written(classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = export_run.run_script("weights").replace("resampling, box=", "Image.Resampling.NEAREST, box=")
    monkeypatch.setattr(export_run, "run_script", lambda runtime: script)
    with pytest.raises(ExportError, match="was not written") as caught:
        reconv.export(classifier, to="safetensors", out=tmp_path / "out", samples=20)
    assert caught.value.code == ExitCode.EXPORT == 9
    assert "prepares" in caught.value.why and "test image" in caught.value.why
    assert [path.name for path in tmp_path.iterdir()] == ["out.refused.json"]
    assert not json.loads((tmp_path / "out.refused.json").read_text())["passed"]


def test_an_export_that_is_being_written_is_not_written_by_another(classifier: Path, tmp_path: Path) -> None:
    folder = ExportFolder(tmp_path / "out", replace=False)
    with folder.staged(), pytest.raises(RunLockedError, match="written by another process"):
        reconv.export(classifier, to="safetensors", out=tmp_path / "out", samples=10)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_export_survives_a_kill_while_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".out.replaced").mkdir()
    (tmp_path / ".out.replaced" / "model.onnx").write_text("earlier")
    with pytest.raises(KeyboardInterrupt), ExportFolder(tmp_path / "out", replace=True).staged():
        raise KeyboardInterrupt
    assert (tmp_path / "out" / "model.onnx").read_text() == "earlier"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_killed_export_leaves_no_folder_and_the_next_one_removes_its_remains(
    classifier: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "reconv", "export", str(classifier), "--to", "safetensors", "--out", "out"]
    staging = tmp_path / ".out.exporting"
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(reconv.__file__).parents[1])}
    )
    while not staging.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert staging.exists() and not (tmp_path / "out").exists()
    (staging / "half").write_text("")
    (staging / "folder").mkdir()
    folder = ExportFolder(tmp_path / "out", replace=False)
    with folder.staged() as empty:
        assert list(empty.iterdir()) == []
        (empty / "model").write_text("complete")
        folder.publish()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["out", "out/model"]
