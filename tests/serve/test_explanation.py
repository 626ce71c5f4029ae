"""`/predict?explain=true`: the image as the network saw it, and where a classifier looked."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
from PIL import Image
from server_process import ServerProcess, json_images

import reconv
from reconv.inference.activation_map import activation_image


def decode(url: str) -> Image.Image:
    head, _, content = url.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(content)))


def test_the_input_is_what_the_network_saw_and_each_class_has_its_map(
    server: ServerProcess, classifier: Path, images: list[bytes]
) -> None:
    plain, answer = server.predict(images[3]).json, server.predict(images[3], "?explain=true").json
    predictor = reconv.load(classifier, device="cpu", backend="eager", log=lambda text: None)
    sample = predictor.read(images[3])
    assert answer["predictions"] == plain["predictions"]
    assert np.array_equal(np.asarray(decode(answer["input"])), sample.pixels[0].numpy())
    classes = answer["predictions"][0]["classes"]
    assert [(found["index"], found["name"]) for found in answer["activation_maps"]] == [
        (item["index"], item["name"]) for item in classes
    ]
    maps = predictor.activation_maps(sample, [item["index"] for item in classes])
    for values, found in zip(maps, answer["activation_maps"], strict=True):
        picture = decode(found["image"]).convert("RGBA")
        expected = activation_image(values, sample.pixels.shape[1]).convert("RGBA")
        assert np.array_equal(np.asarray(picture), np.asarray(expected))
    assert set(answer["timings_ms"]) == {"read", "queue", "network", "explain", "total"}
    assert "seconds" not in answer


def test_several_images_are_not_explained(server: ServerProcess, images: list[bytes]) -> None:
    answer = server.request("POST", "/predict?explain=true", json_images(images[:2]), "application/json")
    assert (answer.status, answer.json["error"]["code"]) == (400, "bad_parameter")
