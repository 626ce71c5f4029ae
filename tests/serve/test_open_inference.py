"""The Open Inference Protocol: metadata, tensors in JSON and binary, and its form of errors."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_process import Answer, ServerProcess

import reconv
from reconv.api import Predictor

INFER = "/v2/models/quickstart/infer"


@pytest.fixture(scope="module")
def predictor(classifier: Path) -> Predictor:
    return reconv.load(classifier, device="cpu", backend="eager", log=lambda text: None)


def infer(server: ServerProcess, tensor: dict[str, Any], path: str = INFER, **more: Any) -> Answer:
    body = json.dumps({"inputs": [{"name": "images", **tensor}], **more}).encode()
    return server.request("POST", path, body, "application/json")


def encoded(images: list[bytes]) -> dict[str, Any]:
    return {"datatype": "BYTES", "shape": [len(images)], "data": [base64.b64encode(image).decode() for image in images]}


def outputs(answer: Answer) -> dict[str, dict[str, Any]]:
    assert answer.status == 200, answer.body
    return {output["name"]: output for output in answer.json["outputs"]}


def test_metadata_of_the_server_and_the_models(server: ServerProcess) -> None:
    assert server.request("GET", "/v2").json["name"] == "reconv"
    assert server.request("GET", "/v2/health/live").json == {"live": True}
    assert server.request("GET", "/v2/health/ready").json == {"ready": True}
    assert server.request("GET", "/v2/models/quickstart/ready").json == {"name": "quickstart", "ready": True}
    found = server.request("GET", "/v2/models/quickstart").json
    assert found["versions"] == ["66"] and found == server.request("GET", "/v2/models/quickstart/versions/66").json
    assert found["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, 8, 8, 1]}]
    assert [output["name"] for output in found["outputs"]] == ["logits", "probabilities", "labels"]


def test_encoded_images_give_the_tensors_of_the_model(
    server: ServerProcess, predictor: Predictor, images: list[bytes]
) -> None:
    answer = infer(server, encoded(images), id="a1")
    found = outputs(answer)
    logits = predictor.logits([predictor.read(image) for image in images])
    assert (answer.json["model_name"], answer.json["model_version"], answer.json["id"]) == ("quickstart", "66", "a1")
    assert (found["logits"]["datatype"], found["logits"]["shape"]) == ("FP32", [len(images), 10])
    assert np.float32(found["logits"]["data"]).tolist() == logits.flatten().tolist()
    assert predictor.confidence is not None
    probabilities = (logits.double() / predictor.confidence.temperature).softmax(dim=1).float()
    assert np.float32(found["probabilities"]["data"]).tolist() == probabilities.flatten().tolist()
    assert found["labels"]["datatype"] == "BYTES"
    assert found["labels"]["data"] == [predictor.classes[index] for index in logits.argmax(dim=1)]


@pytest.mark.parametrize("form", ["flat", "nested", "binary"])
def test_pixels_are_what_the_network_sees(
    server: ServerProcess, predictor: Predictor, images: list[bytes], form: str
) -> None:
    samples = [predictor.read(image) for image in images]
    pixels = np.stack([sample.pixels.numpy().transpose(1, 2, 0) for sample in samples])
    tensor: dict[str, Any] = {"name": "images", "datatype": "UINT8", "shape": list(pixels.shape)}
    rest, headers = b"", {}
    if form == "binary":
        tensor["parameters"], rest = {"binary_data_size": pixels.nbytes}, pixels.tobytes()
    else:
        tensor["data"] = pixels.tolist() if form == "nested" else pixels.flatten().tolist()
    head = json.dumps({"inputs": [tensor], "outputs": [{"name": "logits"}]}).encode()
    if rest:
        headers = {"Inference-Header-Content-Length": str(len(head))}
    found = outputs(server.request("POST", INFER, head + rest, "application/octet-stream", headers))
    assert list(found) == ["logits"]
    assert np.float32(found["logits"]["data"]).tolist() == predictor.logits(samples).flatten().tolist()


def test_outputs_can_be_binary(server: ServerProcess, predictor: Predictor, images: list[bytes]) -> None:
    wanted = [{"name": "labels", "parameters": {"binary_data": True}}, {"name": "logits"}]
    wanted[1]["parameters"] = {"binary_data": True}
    data = b"".join(struct.pack("<I", len(image)) + image for image in images)
    tensor = {
        "name": "images",
        "datatype": "BYTES",
        "shape": [len(images)],
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"inputs": [tensor], "outputs": wanted}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = server.request("POST", INFER, head + data, "application/octet-stream", headers)
    length = int(answer.headers["inference-header-content-length"])
    described = {output["name"]: output for output in json.loads(answer.body[:length])["outputs"]}
    size = described["labels"]["parameters"]["binary_data_size"]
    labels, logits = answer.body[length : length + size], answer.body[length + size :]
    expected = predictor.logits([predictor.read(image) for image in images])
    assert np.frombuffer(logits, np.float32).tolist() == expected.flatten().tolist()
    names = [predictor.classes[index].encode() for index in expected.argmax(dim=1)]
    assert labels == b"".join(struct.pack("<I", len(name)) + name for name in names)


def test_boxes_are_padded_tensors_with_counts(server: ServerProcess, detector: Path, images: list[bytes]) -> None:
    predictions = reconv.load(detector, device="cpu", backend="eager", log=lambda text: None).predict(
        images, min_score=0.2
    )
    found = outputs(infer(server, encoded(images), "/v2/models/boxes/infer", parameters={"min_score": 0.2}))
    counts = [len(prediction.boxes or ()) for prediction in predictions]
    assert found["counts"] == {"name": "counts", "datatype": "INT64", "shape": [8], "data": counts}
    k = max(counts)
    assert k > 0 and found["boxes"]["shape"] == [8, k, 4] and found["labels"]["shape"] == [8, k]
    boxes = np.float32(found["boxes"]["data"]).reshape(8, k, 4)
    for row, prediction in enumerate(predictions):
        expected = np.float32([box.box_xyxy for box in prediction.boxes or ()]).reshape(-1, 4)
        assert boxes[row, : counts[row]].tolist() == expected.tolist() and not boxes[row, counts[row] :].any()


def test_multi_label_models_say_which_labels_hold(server: ServerProcess, images: list[bytes]) -> None:
    found = outputs(infer(server, encoded(images), "/v2/models/labels/infer"))
    probabilities = np.float32(found["probabilities"]["data"])
    assert found["labels"]["datatype"] == "BOOL" and found["labels"]["shape"] == [8, 3]
    assert found["labels"]["data"] == (probabilities >= 0.5).tolist()


PIXELS = {"datatype": "UINT8", "shape": [1, 8, 8, 1], "data": [0] * 64}
REFUSED: dict[str, dict[str, Any]] = {
    "another name": {"inputs": [{"name": "pictures", **PIXELS}]},
    "two inputs": {"inputs": [{"name": "images", **PIXELS}] * 2},
    "no input": {},
    "another datatype": {"inputs": [{"name": "images", **PIXELS, "datatype": "FP32"}]},
    "another shape": {"inputs": [{"name": "images", **PIXELS, "shape": [1, 3, 8, 8]}]},
    "a negative shape": {"inputs": [{"name": "images", **PIXELS, "shape": [-1, 8, 8, 1]}]},
    "no images": {"inputs": [{"name": "images", **PIXELS, "shape": [0, 8, 8, 1], "data": []}]},
    "too few values": {"inputs": [{"name": "images", **PIXELS, "data": [0] * 63}]},
    "values above 255": {"inputs": [{"name": "images", **PIXELS, "data": [256] * 64}]},
    "floats": {"inputs": [{"name": "images", **PIXELS, "data": [0.5] * 64}]},
    "text": {"inputs": [{"name": "images", **PIXELS, "data": "AAAA"}]},
    "ragged rows": {"inputs": [{"name": "images", **PIXELS, "data": [[0], [0, 1]]}]},
    "a path": {"inputs": [{"name": "images", "datatype": "BYTES", "shape": [1], "data": ["/etc/passwd"]}]},
    "another output": {"inputs": [{"name": "images", **PIXELS}], "outputs": [{"name": "boxes"}]},
    "a min_score for a classifier": {"inputs": [{"name": "images", **PIXELS}], "parameters": {"min_score": 0.5}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_strings(server: ServerProcess, name: str) -> None:
    answer = server.request("POST", INFER, json.dumps(REFUSED[name]).encode(), "application/json")
    assert answer.status == 400 and isinstance(answer.json["error"], str), answer.body


def test_unknown_models_and_versions_are_not_found(server: ServerProcess) -> None:
    for path in ("/v2/models/other", "/v2/models/other/ready", "/v2/models/quickstart/versions/65"):
        answer = server.request("GET", path)
        assert answer.status == 404 and isinstance(answer.json["error"], str)
    assert infer(server, PIXELS, "/v2/models/quickstart/versions/65/infer").status == 404
    assert infer(server, PIXELS, "/v2/models/quickstart/versions/66/infer").status == 200


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "1e3", "٣"])
def test_a_header_length_that_is_none_is_refused(server: ServerProcess, length: str) -> None:
    headers = {"Inference-Header-Content-Length": length.encode().decode("latin-1")}
    answer = server.request("POST", "/v2/models/quickstart/infer", b"{}", "application/octet-stream", headers)
    assert answer.status == 400 and "not a length within the body" in answer.json["error"]
