"""Predictions print, display themselves in a notebook and become plain data."""

from __future__ import annotations

import io
import json
import re
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from reconv.inference.predictions import ClassScore, DetectedBox, Prediction, PredictionList

EVIL = "<script>alert('x')</script>"
RED = np.full((50, 80, 3), (200, 0, 0), np.uint8)


def embedded_images(html: str) -> list[Image.Image]:

    return [
        Image.open(io.BytesIO(b64decode(data))) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    ]


def test_a_classification_shows_its_image_and_escaped_class_names() -> None:
    prediction = Prediction(Path(EVIL), (ClassScore(EVIL, 0.75, 0), ClassScore("dog", 0.25, 1)), image=RED)
    html = prediction._repr_html_()
    assert "<script" not in html and html.count("&lt;script&gt;") == 2
    assert "75.0%" in html and "width:25.0%" in html
    [shown] = embedded_images(html)
    assert shown.size == (80, 50) and shown.convert("RGB").getpixel((5, 5)) == (200, 0, 0)


def test_a_detection_shows_its_boxes_on_a_small_copy_of_the_image() -> None:
    large = np.full((1000, 2000, 3), 255, np.uint8)
    boxes = (DetectedBox("cat", 0.9, (400.0, 200.0, 1600.0, 800.0), 0), DetectedBox(EVIL, 0.4, (0, 0, 9, 9), 1))
    html = Prediction(None, boxes=boxes, image=large)._repr_html_()
    assert "<script" not in html and "cat 90.0% at (400, 200, 1600, 800)" in html
    [shown] = embedded_images(html)
    assert shown.size == (480, 240)
    left_edge = np.asarray(shown.convert("RGB"))[120, 90:102]
    assert (left_edge < 250).any(), "the box is drawn"
    assert "nothing found" in Prediction(None, boxes=(), image=large)._repr_html_()


def test_an_image_that_is_gone_leaves_the_scores(tmp_path: Path) -> None:
    html = Prediction(tmp_path / "gone.png", (ClassScore("dog", 1.0, 0),), image=tmp_path / "gone.png")._repr_html_()
    assert embedded_images(html) == [] and "dog" in html


def test_a_long_list_shows_its_first_predictions() -> None:
    html = PredictionList([Prediction(None, (ClassScore(f"class{i}", 1.0, 0),)) for i in range(30)])._repr_html_()
    assert "class23" in html and "class24" not in html and "and 6 more" in html


@pytest.mark.parametrize(
    ("prediction", "text", "label", "score"),
    [
        (Prediction(Path("a.jpg"), (ClassScore("dog", 0.5, 1),)), "a.jpg: dog 50.0%", "dog", 0.5),
        (
            Prediction(None, boxes=(DetectedBox("cat", 0.25, (1, 2, 3, 4), 0),)),
            "cat 25.0% at (1, 2, 3, 4)",
            "cat",
            0.25,
        ),
        (Prediction(None, boxes=()), "nothing found", None, 0.0),
        (Prediction(Path("a.jpg"), error="no such file"), "a.jpg: no such file", None, 0.0),
    ],
)
def test_a_prediction_has_a_text_its_best_label_and_score(
    prediction: Prediction, text: str, label: str | None, score: float
) -> None:
    assert (str(prediction), repr(prediction)) == (text, f"<Prediction {text}>")
    assert (prediction.label, prediction.score) == (label, score)
    assert "error" not in prediction.to_dict() or prediction.error


def test_a_prediction_becomes_plain_data_without_its_image() -> None:
    boxes = (DetectedBox("cat", 0.25, (1.0, 2.0, 3.0, 4.0), 0, 17),)
    found = json.loads(json.dumps(Prediction(Path("a.jpg"), boxes=boxes, image=RED).to_dict()))
    box = {"index": 0, "name": "cat", "class_id": 17, "score": 0.25, "box_xyxy": [1.0, 2.0, 3.0, 4.0]}
    assert found == {"path": "a.jpg", "boxes": [box]}
    assert Prediction(None, (ClassScore("dog", 1.0, 0),)).to_dict() == {
        "path": None,
        "classes": [{"index": 0, "name": "dog", "score": 1.0}],
    }
