"""POST /predict: what it takes, and that its predictions are those of `reconv predict`, bit for bit."""

from __future__ import annotations

import base64
import io
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from server_process import Answer, ServerProcess, json_images, multipart, pixel_bomb

import reconv
from reconv.api import Predictor


def load(run: Path) -> Predictor:
    return reconv.load(run, device="cpu", backend="eager", log=lambda text: None)


@pytest.fixture(scope="module")
def predictor(classifier: Path) -> Predictor:
    return load(classifier)


def expected(predictor: Predictor, images: list[bytes], **options: Any) -> list[dict[str, Any]]:
    """The predictions of `Predictor.predict`, as the server gives them."""
    found = []
    for image, prediction in zip(images, predictor.predict(images, **options), strict=True):
        width, height = Image.open(io.BytesIO(image)).size
        found.append({**prediction.to_dict(), "width": width, "height": height})
        del found[-1]["path"]
    return found


def test_one_image_gives_the_bits_of_predict(server: ServerProcess, predictor: Predictor, images: list[bytes]) -> None:
    for image in images:
        answer = server.predict(image)
        assert answer.status == 200, answer.body
        assert answer.json["predictions"] == expected(predictor, [image])
        assert answer.json["model"] == "quickstart" and answer.json["step"] == 66
        assert set(answer.json["timings_ms"]) == {"read", "queue", "network", "total"}


def test_several_images_are_one_batch_with_its_bits(
    server: ServerProcess, predictor: Predictor, images: list[bytes]
) -> None:
    answer = server.predict(json_images(images), content_type="application/json")
    assert answer.json["predictions"] == expected(predictor, images)


def test_a_request_of_several_batches_keeps_the_order_of_its_images(
    server: ServerProcess, predictor: Predictor, images: list[bytes]
) -> None:
    several = (images * 5)[:37]  # batches of 16, 16 and 5
    answer = server.predict(json_images(several), content_type="application/json")
    expected_parts = [expected(predictor, several[at : at + 16]) for at in range(0, 37, 16)]
    assert answer.json["predictions"] == [found for part in expected_parts for found in part]


def test_requests_that_share_batches_are_not_mixed_up(
    server: ServerProcess, predictor: Predictor, images: list[bytes]
) -> None:
    alone = {image: expected(predictor, [image], top=10)[0]["classes"] for image in images}
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda image: server.predict(image, "?top=10"), images * 8))
    for image, answer in zip(images * 8, answers, strict=True):
        found = {item["name"]: item["score"] for item in answer.json["predictions"][0]["classes"]}
        assert found == pytest.approx({item["name"]: item["score"] for item in alone[image]}, abs=1e-6)


def test_bytes_multipart_and_json_give_the_same(server: ServerProcess, images: list[bytes]) -> None:
    body, kind = multipart(images[:1], ["/etc/passwd"])
    text = json.dumps({"image": base64.b64encode(images[0]).decode()}).encode()
    answers = [
        server.predict(images[0], "?top=2", "application/octet-stream"),
        server.predict(images[0], "?top=2", "image/png"),
        server.predict(body, "?top=2", kind),
        server.predict(text, "?top=2", "application/json"),
    ]
    found = [answer.json["predictions"] for answer in answers]
    assert all(each == found[0] for each in found) and len(found[0][0]["classes"]) == 2
    body, kind = multipart(images)
    several = server.predict(json_images(images), content_type="application/json").json["predictions"]
    assert server.predict(body, content_type=kind).json["predictions"] == several


def test_detectors_give_boxes_in_pixels_of_the_original_image(
    server: ServerProcess, detector: Path, images: list[bytes]
) -> None:
    body = json_images(images)
    answer = server.predict(body, "?model=boxes&min_score=0.01&top=7", "application/json")
    assert answer.json["predictions"] == expected(load(detector), images, min_score=0.01, top=7)
    assert any(found["boxes"] for found in answer.json["predictions"])
    assert all(
        found["boxes"] == [] for found in server.predict(images[0], "?model=boxes&min_score=1").json["predictions"]
    )


def test_multi_label_models_give_independent_scores(
    server: ServerProcess, multilabel: Path, images: list[bytes]
) -> None:
    answer = server.predict(json_images(images), "?model=labels&min_score=0", "application/json")
    assert answer.json["predictions"] == expected(load(multilabel), images, min_score=0)
    sums = [sum(item["score"] for item in found["classes"]) for found in answer.json["predictions"]]
    assert all(len(found["classes"]) == 3 for found in answer.json["predictions"])
    assert any(abs(total - 1) > 0.01 for total in sums)  # sigmoid, not softmax


def json_body(document: object) -> tuple[bytes, str]:
    return json.dumps(document).encode(), "application/json"


TRUNCATED = multipart([b"abc"])[0][:-10]
REFUSED: dict[str, tuple[tuple[bytes, str], str, int, str]] = {
    "no image": ((b"", "image/png"), "", 400, "no_image"),
    "not an image": ((b"hello", "image/png"), "", 400, "bad_image"),
    "a form": ((b"a=b", "application/x-www-form-urlencoded"), "", 415, "unsupported_media_type"),
    "a path": (json_body({"image": "/etc/passwd"}), "", 400, "bad_base64"),
    "a URL": (json_body({"image": "http://127.0.0.1/a.png"}), "", 400, "bad_base64"),
    "a data URL": (json_body({"image": "data:image/png;base64,AAAA"}), "", 400, "bad_base64"),
    "a number": (json_body({"image": 1}), "", 400, "bad_base64"),
    "an option in the body": (json_body({"image": "AAAA", "top": 1}), "", 400, "bad_json"),
    "no object": (json_body([]), "", 400, "bad_json"),
    "an empty list": (json_body({"images": []}), "", 400, "no_image"),
    "deep JSON": ((b"[" * 10_000, "application/json"), "", 400, "bad_json"),
    "JSON of many lists": ((b"[" * 100_000, "application/json"), "", 413, "json_too_large"),
    "a long JSON": ((b" " * 8_000_001, "application/json"), "", 413, "body_too_large"),
    "a long line of pixels": ((pixel_bomb(89_000_000, 1), "image/png"), "", 413, "image_too_large"),
    "a long column of pixels": ((pixel_bomb(1, 89_000_000), "image/png"), "", 413, "image_too_large"),
    "many pixels": ((pixel_bomb(8000, 8000), "image/png"), "", 413, "image_too_large"),
    "not JSON": ((b"{", "application/json"), "", 400, "bad_json"),
    "too many images": (json_body({"images": ["AAAA"] * 65}), "", 413, "too_many_images"),
    "too many parts": (multipart([b"x"] * 65), "", 413, "too_many_images"),
    "a truncated multipart": ((TRUNCATED, multipart([])[1]), "", 400, "bad_multipart"),
    "no boundary": ((b"abc", "multipart/form-data"), "", 400, "bad_multipart"),
    "no such model": ((b"x", "image/png"), "?model=other", 404, "no_such_model"),
    "an unknown parameter": ((b"x", "image/png"), "?topp=1", 400, "bad_parameter"),
    "top of zero": ((b"x", "image/png"), "?top=0", 400, "bad_parameter"),
    "top in words": ((b"x", "image/png"), "?top=two", 400, "bad_parameter"),
    "a score above one": ((b"x", "image/png"), "?min_score=2&model=boxes", 400, "bad_parameter"),
    "a score for a classifier": ((b"x", "image/png"), "?min_score=0.5", 400, "bad_parameter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_with_a_code(server: ServerProcess, name: str) -> None:
    (body, kind), query, status, code = REFUSED[name]
    answer = server.predict(body, query, kind)
    assert (answer.status, answer.json["error"]["code"]) == (status, code), answer.body
    assert len(answer.json["error"]["message"]) > 10


def test_a_bad_image_among_good_ones_is_named(server: ServerProcess, images: list[bytes]) -> None:
    answer = server.predict(json_images([images[0], images[1][:-30], images[2]]), content_type="application/json")
    assert answer.status == 400 and answer.json["error"]["message"].startswith("image 1: ")
    deadline_s = time.monotonic() + 30
    while pending(server) > 0:  # the other images may still be being read
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_pixel_bomb_is_refused_before_it_is_decoded(server: ServerProcess, images: list[bytes]) -> None:
    before = server.memory_kib()
    answer = server.predict(pixel_bomb())
    assert answer.status == 413 and "pixels" in answer.json["error"]["message"]
    assert server.memory_kib() - before < 100_000
    assert server.predict(images[0]).status == 200


def test_a_request_of_many_large_images_is_refused_and_small_ones_are_answered_meanwhile(
    server: ServerProcess, images: list[bytes]
) -> None:
    file = io.BytesIO()
    Image.new("L", (7000, 7000)).save(file, "PNG")
    large = file.getvalue()
    body, kind = multipart([large] * 5)
    answer = server.predict(body, content_type=kind)
    assert (answer.status, answer.json["error"]["code"]) == (413, "too_many_pixels")
    body, kind = multipart([large] * 4)
    with ThreadPoolExecutor(1) as thread:
        pending_answer = thread.submit(server.predict, body, content_type=kind)
        while pending(server) < 4 and not pending_answer.done():
            time.sleep(0.005)
        small = [server.predict(image).status for image in images[:3]]
        was_waiting = not pending_answer.done()
        assert pending_answer.result().status == 200
    assert small == [200] * 3 and was_waiting


def test_memory_of_large_requests_is_given_back(server: ServerProcess) -> None:
    body = b'{"images": [' + b"[]," * 60_000 + b"[]]}"
    text = json.dumps({"images": ["A" * 7_900_000]}).encode()
    server.predict(body, content_type="application/json")
    before = server.memory_kib()
    for content in [body, text] * 6:
        assert server.predict(content, content_type="application/json").status in (400, 413)
    deadline_s = time.monotonic() + 20
    while server.memory_kib() - before > 60_000:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def pending(server: ServerProcess) -> float:
    text = server.request("GET", "/metrics").body.decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("reconv_pending_images{"))


def test_other_methods_and_paths_get_json_errors(server: ServerProcess) -> None:
    answers: list[Answer] = [server.request("GET", "/predict"), server.request("GET", "/no/such/path")]
    assert [(each.status, each.json["error"]["code"]) for each in answers] == [
        (405, "method_not_allowed"),
        (404, "not_found"),
    ]
