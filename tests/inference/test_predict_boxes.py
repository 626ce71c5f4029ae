"""Predictions of a detector: boxes in pixels of the image, told as a table, as JSON and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from detector_example import write_recipe
from PIL import Image

import reconv
from reconv.cli import main
from reconv.detection.postprocess import Detections
from reconv.errors import ResourceError, UsageError
from reconv.inference.evaluate import InferenceStep, evaluate
from reconv.inference.predict_files import FoundBox, Opened, found_boxes
from reconv.inference.predictor import find_model, open_model
from reconv.tasks.detection import DetectionTask
from reconv.trainer.build import loaders as parts
from reconv.trainer.build.datasets import open_datasets


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detector")
    return reconv.train(write_recipe(folder), out=folder / "run").folder


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    Image.fromarray(draw.integers(0, 255, (90, 120, 3), dtype=np.uint8)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_boxes_are_in_pixels_of_the_picture_best_first(run: Path, photo: Path) -> None:
    [answer] = reconv.predict(run, [photo], min_score=0.0)
    assert answer.boxes
    assert answer.labels == ()
    scores = [box.score for box in answer.boxes]
    assert scores == sorted(scores, reverse=True)
    edges = np.array([box.box_xyxy for box in answer.boxes])
    assert (edges >= 0).all()
    assert edges[:, 2].max() > 64 and edges[:, 2].max() <= 120 + 1e-4  # wider than what the network saw
    assert edges[:, 3].max() <= 90 + 1e-4
    [some] = reconv.predict(run, [photo], min_score=scores[3], top=2)
    assert some.boxes == answer.boxes[:2]
    [none] = reconv.predict(run, [photo], min_score=1.0)
    assert none.boxes == ()


def test_a_found_box_has_the_name_and_the_place_of_the_detection() -> None:
    found = Detections(
        torch.tensor([[[0.25, 0.5, 0.5, 1.0], [0, 0, 0, 0]]]),
        torch.tensor([[0.75, 0.0]]),
        torch.tensor([[2, 0]]),
        torch.tensor([1]),
    )
    opened = Opened(torch.zeros(1), width=200, height=100)
    assert list(found_boxes(found, 0, opened, ("cat", "dog"))) == [FoundBox("dog", 0.75, (50.0, 50.0, 100.0, 100.0), 1)]


def test_the_drawing_has_the_size_of_the_picture_and_its_boxes(run: Path, photo: Path, tmp_path: Path) -> None:
    Image.open(photo).save(tmp_path / "photo.jpg")
    answers = reconv.predict(run, [photo, tmp_path / "photo.jpg"], min_score=0.0, top=3, pictures=tmp_path / "drawn")
    assert [answer.drawn.name for answer in answers if answer.drawn] == ["photo.png", "photo-2.png"]
    with Image.open(tmp_path / "drawn" / "photo.png") as drawn, Image.open(photo) as before:
        assert drawn.size == before.size
        assert np.any(np.asarray(drawn) != np.asarray(before))
    [plain] = reconv.predict(run, [photo], min_score=1.0, pictures=tmp_path / "empty")
    assert plain.drawn is not None
    with Image.open(plain.drawn) as drawn, Image.open(photo) as before:
        assert np.array_equal(np.asarray(drawn), np.asarray(before))


def test_a_drawing_does_not_take_the_place_of_its_picture(run: Path, photo: Path) -> None:
    before = photo.read_bytes()
    with pytest.raises(UsageError, match="overwritten"):
        reconv.predict(run, [photo], pictures=photo.parent)
    with pytest.raises(ResourceError, match="a file is where a folder should be") as caught:
        reconv.predict(run, [photo], pictures=photo)
    assert "--images DIR" in caught.value.then
    assert photo.read_bytes() == before


def test_the_verb_prints_a_row_a_box_and_json_has_the_corners(
    run: Path, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.json"
    for options in (["--score", "0", "--top", "2"], ["--score", "1"], ["--score", "0", "--json", str(out)]):
        with pytest.raises(SystemExit) as end:
            main(["predict", str(run), str(photo), *options])
        assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["image", "name", "score", "left", "top", "right", "bottom"]
    assert len(lines) == 3 + 2
    assert lines[4].split()[1:] == ["nothing"]
    [answer] = json.loads(out.read_text())
    assert "labels" not in answer
    assert len(answer["boxes"][0]["box_xyxy"]) == 4


def test_a_run_that_names_pictures_has_no_boxes_to_draw(tmp_path: Path, photo: Path) -> None:
    given = [("length", "1step", "--set"), ("schedule.warmup", "0ep", "--set"), ("evaluate.every", "off", "--set")]
    run = reconv.train("quickstart", out=tmp_path / "run", overrides=given).folder
    for options in ({"min_score": 0.5}, {"images": tmp_path / "drawn"}):
        with pytest.raises(UsageError, match="detectors"):
            reconv.predict(run, [photo], **options)
    assert not (tmp_path / "drawn").exists()


def test_a_picture_of_the_validation_set_gets_the_boxes_that_evaluation_found(run: Path, tmp_path: Path) -> None:
    model = open_model(find_model(run, False, print), device="cpu", weights="auto", recipe=None)
    source = open_datasets(model.recipe).val
    task = parts.build_task(model.recipe, source, model.device)
    assert isinstance(task, DetectionTask)
    loader = parts.eval_loader(model.recipe, source, model.device, 3)
    prepare, network = parts.eval_prepare(model.recipe, model.network), model.network
    step = InferenceStep(network.model, prepare, network.precision)
    evaluated = evaluate(step, task.metrics(), loader).images()
    assert len(evaluated) == 8
    for image in evaluated:
        pixels = source[image.index].data
        assert isinstance(pixels, np.ndarray)
        Image.fromarray(pixels).save(tmp_path / f"{image.index}.png")
    answers = reconv.predict(run, [tmp_path / f"{image.index}.png" for image in evaluated], min_score=0.0)
    for image, answer in zip(evaluated, answers, strict=True):
        assert answer.boxes
        np.testing.assert_allclose([box.score for box in answer.boxes], image.scores, atol=1e-5)
        np.testing.assert_allclose([box.box_xyxy for box in answer.boxes], image.boxes_xyxy, atol=1e-2)
        assert [box.label for box in answer.boxes] == image.labels.tolist()
