"""`predict` for files and folders: which files are read, and the copies with boxes that it writes."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import reconv
from reconv.cli import main
from reconv.core.errors import DataError, ExitCode, ResourceError, UsageError


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (90, 120, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.mark.usefixtures("no_blocking_pipe")
def test_a_pipe_is_read_only_if_named(classifier: Path, tmp_path: Path) -> None:
    Image.new("L", (8, 8), 90).save(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    (tmp_path / "c.png").symlink_to(tmp_path / "not-mounted.png")
    good, *bad = reconv.predict(classifier, [tmp_path, tmp_path / "a.png"], skip_bad=True)
    assert good.classes
    assert [(p.path and p.path.name, bool(p.error)) for p in bad] == [("b.png", True), ("c.png", True)]
    with pytest.raises(DataError, match=r"b\.png"):
        reconv.predict(classifier, [tmp_path])
    writer = threading.Thread(target=(tmp_path / "b.png").write_bytes, args=[(tmp_path / "a.png").read_bytes()])
    writer.start()
    [named] = reconv.predict(classifier, [tmp_path / "b.png"])
    writer.join()
    assert named.classes == good.classes


def test_missing_images_are_an_error(classifier: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "none.png", tmp_path):
        with pytest.raises(DataError):
            reconv.predict(classifier, [path])


def test_the_command_prints_good_images_and_fails_for_bad_ones(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.png").touch()
    Image.new("L", (8, 8), 90).save(tmp_path / "good.png")
    for names, num_rows in ((["bad.png"], 0), (["bad.png", "good.png"], 6)):
        with pytest.raises(SystemExit) as ended:
            main(["predict", str(classifier), *(str(tmp_path / name) for name in names)])
        assert ended.value.code == ExitCode.DATA
        out, err = capsys.readouterr()
        assert len(out.splitlines()) == num_rows
        assert f"1 of {len(names)} images" in err and "bad.png" in err


def test_saved_images_have_the_size_of_the_original_and_its_boxes(detector: Path, photo: Path, tmp_path: Path) -> None:
    Image.open(photo).save(tmp_path / "photo.jpg")
    paths = [photo, tmp_path / "photo.jpg"]
    predictions = reconv.predict(detector, paths, min_score=0.0, top=3, save_images=tmp_path / "saved")
    assert [p.saved_image.name for p in predictions if p.saved_image] == ["photo.png", "photo-2.png"]
    with Image.open(tmp_path / "saved" / "photo.png") as saved, Image.open(photo) as original:
        assert saved.size == original.size
        assert np.any(np.asarray(saved) != np.asarray(original))
    [plain] = reconv.predict(detector, [photo], min_score=1.0, save_images=tmp_path / "empty")
    assert plain.saved_image is not None
    with Image.open(plain.saved_image) as saved, Image.open(photo) as original:
        assert np.array_equal(np.asarray(saved), np.asarray(original))


def test_saving_never_overwrites_an_original(detector: Path, photo: Path) -> None:
    before = photo.read_bytes()
    with pytest.raises(UsageError, match="overwrite"):
        reconv.predict(detector, [photo], save_images=photo.parent)
    with pytest.raises(ResourceError) as caught:
        reconv.predict(detector, [photo], save_images=photo)
    assert "--save-images" in caught.value.hint
    assert photo.read_bytes() == before


def test_the_command_prints_a_row_per_box_and_json_has_the_corners(
    detector: Path, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "predictions.json"
    for options in (["--min-score", "0", "--top", "2"], ["--min-score", "1"], ["--min-score", "0", "--json", str(out)]):
        with pytest.raises(SystemExit) as end:
            main(["predict", str(detector), str(photo), *options])
        assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["image", "class", "score", "left", "top", "right", "bottom"]
    assert len(lines) == 3 + 2
    assert lines[4].split()[1:] == ["none"]
    [prediction] = json.loads(out.read_text())
    assert "classes" not in prediction
    assert len(prediction["boxes"][0]["box_xyxy"]) == 4


def test_box_options_are_rejected_for_a_classifier(classifier: Path, photo: Path, tmp_path: Path) -> None:
    for options in ({"min_score": 0.5}, {"save_images": tmp_path / "saved"}):
        with pytest.raises(UsageError, match="detectors"):
            reconv.predict(classifier, [photo], **options)
    assert not (tmp_path / "saved").exists()


def test_a_detector_mentions_the_threshold_with_the_highest_f1(detector: Path, tmp_path: Path) -> None:
    image = tmp_path / "gray.png"
    Image.new("RGB", (64, 64)).save(image)
    run = tmp_path / "run"
    shutil.copytree(detector, run)
    analysis = json.loads((run / "detection.json").read_text())
    analysis["best_threshold"] = {"score": 0.42, "precision": 0.9, "recall": 0.8, "f1": 0.85}
    (run / "detection.json").write_text(json.dumps(analysis))
    notes: list[str] = []
    reconv.predict(run, [image], log=notes.append)
    assert any("85.0%" in note and "--min-score 0.42" in note for note in notes)
    notes.clear()
    reconv.predict(run, [image], min_score=0.5, log=notes.append)
    assert not any("--min-score" in note for note in notes)
