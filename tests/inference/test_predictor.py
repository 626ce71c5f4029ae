"""`Predictor` gives what evaluation computed, for every kind of image input, and boxes in pixels of the image."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import reconv
from reconv.build.data import build_eval_loader, open_datasets
from reconv.build.task import build_task
from reconv.core.errors import CheckpointError, DataError, UsageError
from reconv.data.readers.digits import open_digits
from reconv.detection.postprocess import Detections
from reconv.inference.image_input import ImageInput, to_pil
from reconv.inference.outputs import boxes_in_pixels
from reconv.inference.predictions import DetectedBox, Prediction, PredictionList
from reconv.inference.predictor import Predictor
from reconv.tasks.detection import DetectionTask
from reconv.tasks.evaluation import evaluate


def test_predictions_agree_with_the_metrics_of_evaluation(classifier: Path) -> None:
    predictor = Predictor.load(classifier)
    digits = open_digits("val")
    images = [digits[index].data for index in range(len(digits))]
    targets = [digits[index].target for index in range(len(digits))]
    assert isinstance(images[0], np.ndarray)
    predictions = predictor.predict(images, top=10, batch_size=100)
    result = predictor.evaluate()
    correct = [p.classes[0].index == target for p, target in zip(predictions, targets, strict=True)]
    assert np.mean(correct) == pytest.approx(result.metrics["top1"], abs=1e-12)
    scores = [
        next(c.score for c in p.classes if c.index == target) for p, target in zip(predictions, targets, strict=True)
    ]
    assert predictor.confidence is not None  # its scores are those of logits / temperature
    plain = replace(predictor, confidence=None).predict(images, top=10, batch_size=100)
    assert [p.classes[0].index for p in plain] == [p.classes[0].index for p in predictions]
    right = [next(c.score for c in p.classes if c.index == target) for p, target in zip(plain, targets, strict=True)]
    assert -np.log(right).mean() == pytest.approx(result.metrics["loss"], abs=1e-5)
    assert -np.log(scores).mean() < -np.log(right).mean()
    covered = [predictor.class_names[t] in p.prediction_set for p, t in zip(predictions, targets, strict=True)]
    assert np.mean(covered) > 0.85
    for prediction in predictions[:20]:
        assert sum(found.score for found in prediction.classes) == pytest.approx(1)
        assert [found.score for found in prediction.classes] == sorted(c.score for c in prediction.classes)[::-1]
        assert all(predictor.class_names[found.index] == found.name for found in prediction.classes)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P"])
def test_every_kind_of_input_gives_the_same_prediction(classifier: Path, tmp_path: Path, mode: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).convert(mode)
    image.save(tmp_path / "image.png")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    inputs: list[ImageInput] = [tmp_path / "image.png", str(tmp_path / "image.png"), buffer.getvalue(), image]
    inputs += [io.BytesIO(buffer.getvalue()), bytearray(buffer.getvalue())]
    if mode == "L":
        array = np.asarray(image)
        inputs += [array, array[:, :, None], torch.tensor(array)[None], torch.tensor(array), array / 255.0]
    if mode == "RGB":
        tensor = torch.tensor(pixels).permute(2, 0, 1)
        inputs += [pixels, tensor, tensor / 255.0, tensor.long(), pixels.astype(np.float32) / 255]
    if mode == "RGBA":
        inputs += [np.asarray(image), torch.tensor(np.asarray(image)).permute(2, 0, 1)]
    first, *others = Predictor.load(classifier).predict(inputs, batch_size=1)
    assert first.path == tmp_path / "image.png" and len(first.classes) == 5
    assert all(other.classes == first.classes for other in others)


def test_exif_orientation_is_applied_to_pil_images_and_files(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    Image.fromarray(np.arange(60, dtype=np.uint8).reshape(6, 10)).save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as opened:
        assert to_pil(opened, 1).size == (6, 10)
        assert to_pil(opened, 1).tobytes() == to_pil(tmp_path / "turned.png", 1).tobytes()


@pytest.mark.parametrize(
    ("image", "text"),
    [
        (np.zeros((4, 4, 2), np.uint8), "shape"),
        (np.zeros((3, 40, 40), np.uint8), "shape"),
        (np.zeros((2, 4, 4, 3), np.uint8), "shape"),
        (np.zeros((0, 4), np.uint8), "shape"),
        (np.zeros((4, 4), np.complex64), "dtype"),
        (np.full((4, 4, 3), 1.5), "values from 1.5 to 1.5"),
        (torch.full((3, 4, 4), -0.5), "values from -0.5"),
        (torch.full((3, 4, 4), float("nan")), "values from nan"),
        (np.full((4, 4), 300, np.uint16), "not from 0 to 255"),
        (3, "int is not an image"),
        (None, "NoneType is not an image"),
    ],
)
def test_what_is_no_image_is_refused_with_what_to_pass(image: ImageInput, text: str) -> None:
    with pytest.raises((UsageError, DataError), match=text) as caught:
        to_pil(image, 3)
    assert caught.value.hint


def test_a_model_is_called_with_one_image_or_many(classifier: Path) -> None:
    model = reconv.load(classifier)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 20, 30), dtype=np.uint8)
    one = model(pixels[0], top=3)
    assert isinstance(one, Prediction) and len(one.classes) == 3
    assert (one.label, one.score) == (one.classes[0].name, one.classes[0].score)
    for many in (model(list(pixels)), model(tuple(pixels)), model(iter(pixels)), model(torch.tensor(pixels)[:, None])):
        assert isinstance(many, PredictionList)
        assert [p.label for p in many] == [p.label for p in model.predict(list(pixels))]
    assert model(pixels[..., None]) == model(list(pixels)), "an array [n, H, W, 1] is a batch"
    assert model([]) == []


def test_module_and_preprocess_give_the_scores_of_the_model(classifier: Path) -> None:
    model = reconv.load(classifier, device="cpu")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30), dtype=np.uint8))
    batch = model.preprocess(image)
    assert batch.shape == (1, 1, 8, 8) and not model.module.training
    with torch.no_grad():
        scores = (model.module(batch) / model.confidence.temperature).softmax(1)[0]
    best = model(image).classes[0]
    assert model.classes == model.class_names == tuple("0123456789")
    assert model.classes[int(scores.argmax())] == best.name
    assert float(scores.max()) == pytest.approx(best.score, abs=1e-6)
    assert model.preprocess([image, image]).shape == (2, 1, 8, 8)
    assert "10 classes" in repr(model)


def test_an_unreadable_image_raises_or_returns_an_error(classifier: Path) -> None:
    gray = np.full((8, 8), 90, np.uint8)
    predictor = Predictor.load(classifier)
    good, bad, last = predictor.predict([gray, b"no image", gray], skip_bad=True)
    assert good == last and good.classes and not good.error
    assert bad.error and not bad.classes
    with pytest.raises(DataError):
        predictor.predict([gray, b"no image"])


def test_an_image_is_not_loaded_as_weights(tmp_path: Path) -> None:
    Image.new("L", (8, 8), 90).save(tmp_path / "a.png")
    with pytest.raises(CheckpointError) as caught:
        Predictor.load(tmp_path / "a.png")
    assert caught.value.where == str(tmp_path / "a.png")


def test_boxes_are_in_pixels_of_the_image_best_first(detector: Path) -> None:
    photo = np.random.default_rng(0).integers(0, 255, (90, 120, 3), dtype=np.uint8)
    predictor = Predictor.load(detector)
    [prediction] = predictor.predict([photo], min_score=0.0)
    assert prediction.boxes and prediction.classes == ()
    scores = [box.score for box in prediction.boxes]
    assert scores == sorted(scores, reverse=True)
    edges = np.array([box.box_xyxy for box in prediction.boxes])
    assert (edges >= 0).all()
    assert edges[:, 2].max() > 64 and edges[:, 2].max() <= 120 + 1e-4  # wider than the network's input
    assert edges[:, 3].max() <= 90 + 1e-4
    [best] = predictor.predict([photo], min_score=scores[3], top=2)
    assert best.boxes == prediction.boxes[:2]
    [none] = predictor.predict([photo], min_score=1.0)
    assert none.boxes == ()


def test_a_detected_box_has_name_category_and_scaled_corners() -> None:
    detections = Detections(
        torch.tensor([[[0.25, 0.5, 0.5, 1.0], [0, 0, 0, 0]]]),
        torch.tensor([[0.75, 0.0]]),
        torch.tensor([[2, 0]]),
        torch.tensor([1]),
    )
    corners = (50.0, 50.0, 100.0, 100.0)
    for class_ids, class_id in (((), None), ((17, 18), 18)):
        boxes = list(boxes_in_pixels(detections, 0, 200, 100, ("cat", "dog"), class_ids))
        assert boxes == [DetectedBox("dog", 0.75, corners, 1, class_id)]


def test_a_validation_image_gets_the_boxes_that_evaluation_found(detector: Path) -> None:
    predictor = Predictor.load(detector, device="cpu")
    dataset = open_datasets(predictor.recipe).val
    task = build_task(predictor.recipe, dataset, predictor.device)
    assert isinstance(task, DetectionTask)
    loader = build_eval_loader(predictor.recipe, dataset, predictor.device, 3)
    evaluated = evaluate(predictor.inference_step, task.metrics(), loader).images()
    assert len(evaluated) == 8
    pixels = [dataset[image.index].data for image in evaluated]
    predictions = predictor.predict(pixels, min_score=0.0)
    for image, prediction in zip(evaluated, predictions, strict=True):
        assert prediction.boxes
        np.testing.assert_allclose([box.score for box in prediction.boxes], image.scores, atol=1e-5)
        np.testing.assert_allclose([box.box_xyxy for box in prediction.boxes], image.boxes_xyxy, atol=1e-2)
        assert [box.index for box in prediction.boxes] == image.labels.tolist()


# Three classes that only the order of the channels and the mean of each tell apart.
COLORS = {"red": (180, 60, 20), "green": (20, 180, 60), "blue": (60, 20, 180)}
COLOR_FIELDS = {
    "data.source": "folder",
    "data.preprocess.channels": "3",
    "data.preprocess.size": "16",
    "data.preprocess.resize": "20",
    "data.preprocess.mean": "[0.6, 0.3, 0.1]",
    "data.preprocess.std": "[0.2, 0.3, 0.4]",
    "batch.size": "12",
    "length": "8ep",
    "ema.decay": "0",
}


def test_prediction_preprocesses_colors_as_in_training(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split, num in (("train", 12), ("val", 6)):
        for name, color in COLORS.items():
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for number in range(num):
                pixels = np.array(color) + rng.integers(-20, 21, (24, 30, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")
    overrides = [(name, value, "--set") for name, value in COLOR_FIELDS.items()]
    overrides.append(("data.path", str(tmp_path / "data"), "--data"))
    run = reconv.train("quickstart", out=tmp_path / "run", overrides=overrides).folder
    [result] = reconv.evaluate(run)
    assert result.metrics["top1"] == 1
    predictions = reconv.predict(run, [tmp_path / "data" / "val"], top=3)
    assert len(predictions) == result.num_samples == 18
    losses = []
    for prediction in predictions:
        assert prediction.path is not None
        assert prediction.classes[0].name == prediction.path.parent.name
        losses.append(-np.log(prediction.classes[0].score))
    assert abs(float(np.mean(losses)) - result.metrics["loss"]) < 1e-5
