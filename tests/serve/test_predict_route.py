"""POST /predict: what it takes, and that its predictions are those of `reconv predict`, bit for bit."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image
from server_process import ServerProcess, json_images, multipart

import reconv
from reconv.api import Predictor


@pytest.fixture(scope="module")
def predictor(classifier: Path) -> Predictor:
    return reconv.load(classifier, device="cpu", log=lambda text: None)


def expected(predictor: Predictor, images: list[bytes], top: int | None = None) -> list[list[dict[str, object]]]:
    return [prediction.to_dict()["classes"] for prediction in predictor.predict(images, top=top)]


def classes(answer: object) -> list[list[dict[str, object]]]:
    assert isinstance(answer, dict)
    return [prediction["classes"] for prediction in answer["predictions"]]


def test_one_image_gives_the_bits_of_predict(server: ServerProcess, predictor: Predictor, images: list[bytes]) -> None:
    for image in images:
        answer = server.predict(image)
        assert answer.status == 200, answer.body
        assert classes(answer.json) == expected(predictor, [image])
        assert answer.json["model"] == "quickstart" and answer.json["step"] == 66
        assert set(answer.json["timings_ms"]) == {"read", "queue", "network", "total"}


def test_several_images_are_one_batch_with_its_bits(
    server: ServerProcess, predictor: Predictor, images: list[bytes]
) -> None:
    answer = server.predict(json_images(images), content_type="application/json")
    assert classes(answer.json) == expected(predictor, images)
    sizes = [(found["width"], found["height"]) for found in answer.json["predictions"]]
    assert sizes == [Image.open(io.BytesIO(image)).size for image in images]


def test_bytes_multipart_and_json_give_the_same(server: ServerProcess, images: list[bytes]) -> None:
    body, kind = multipart(images[:1])
    text = json.dumps({"image": base64.b64encode(images[0]).decode()}).encode()
    answers = [
        server.predict(images[0], "?top=2", "application/octet-stream"),
        server.predict(images[0], "?top=2", "image/png"),
        server.predict(body, "?top=2", kind),
        server.predict(text, "?top=2", "application/json"),
    ]
    found = [classes(answer.json) for answer in answers]
    assert all(each == found[0] for each in found) and len(found[0][0]) == 2
