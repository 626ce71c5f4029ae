"""What the server says about itself: /models, /metrics, /openapi.json, /docs and static files."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, json_images

from reconv.serve.http import openapi


def test_models_describe_their_checkpoint(server: ServerProcess) -> None:
    first, boxes, labels = server.request("GET", "/models").json["models"]
    assert (first["name"], first["task"], first["step"], first["weights"]) == (
        "quickstart",
        "classification",
        66,
        "ema",
    )
    assert first["classes"] == [str(digit) for digit in range(10)] and first["size"] == 8 and first["channels"] == 1
    assert 0.5 < first["metrics"]["top1"] <= 1 and "resnet8_cifar" in first["card"]
    assert (boxes["name"], boxes["task"]) == ("boxes", "detection")
    assert (labels["name"], labels["task"], labels["classes"]) == ("labels", "multilabel", ["cat", "dog", "emu"])
    assert set(first) == set(openapi.SCHEMAS["Model"]["properties"])


def samples(server: ServerProcess) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = server.request("GET", "/metrics").body.decode()
    families = list(text_string_to_metric_families(text))
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_metrics_count_requests_images_and_times(server: ServerProcess, images: list[bytes]) -> None:
    before = samples(server)
    assert server.predict(json_images(images), content_type="application/json").status == 200
    assert server.predict(b"no image").status == 400
    assert server.predict(json_images([b"x"] * 65), content_type="application/json").status == 413
    after = samples(server)

    def gained(name: str, **labels: str) -> float:
        key = name, tuple(sorted(labels.items()))
        return after[key] - before.get(key, 0)

    assert gained("reconv_requests_total", route="/predict", status="200") == 1
    assert gained("reconv_requests_total", route="/predict", status="400") == 1
    assert gained("reconv_rejected_requests_total", reason="too_many_images") == 1
    assert gained("reconv_batch_images_count", model="quickstart") == 1
    assert gained("reconv_batch_images_sum", model="quickstart") == len(images)
    for stage in ("body", "read", "queue", "network", "total"):
        assert gained("reconv_stage_seconds_count", model="quickstart", stage=stage) == 1
    assert after[("reconv_pending_images", (("model", "quickstart"),))] == 0
    assert after[("reconv_in_flight_requests", ())] == 1
    assert after[("process_resident_memory_bytes", ())] > 0


def test_paths_of_clients_are_not_labels_of_metrics(server: ServerProcess) -> None:
    server.request("GET", "/some/unknown/path")
    routes = {dict(labels).get("route") for name, labels in samples(server) if name == "reconv_requests_total"}
    assert "other" in routes and not any(route and "unknown" in route for route in routes)


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if "$ref" in value else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_the_openapi_document_describes_what_exists(server: ServerProcess) -> None:
    document = server.request("GET", "/openapi.json").json
    assert document["openapi"].startswith("3.1")
    for path, methods in document["paths"].items():
        for method in methods:
            answer = server.request(
                method.upper(), path.replace("{name}", "quickstart"), b"" if method == "post" else None
            )
            assert answer.status in (200, 400), path
            assert str(answer.status) in methods[method]["responses"]
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references(document) <= known


def test_the_pages_ask_nothing_of_other_hosts(server: ServerProcess) -> None:
    page = server.request("GET", "/docs").body.decode()
    assert "/predict" in page and "<script" not in page
    sources = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert sources and all(source.startswith(("/", "#")) for source in sources)


@pytest.mark.parametrize("name", ["..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", "missing.js"])
def test_static_files_are_served_by_exact_name_only(server: ServerProcess, name: str) -> None:
    assert server.request("GET", f"/static/{name}").status == 404


def test_static_files_are_cached_by_their_content(server: ServerProcess) -> None:
    first = server.request("GET", "/static/docs.css")
    assert first.status == 200 and first.headers["content-type"].startswith("text/css")
    assert server.request("GET", "/static/docs.css", headers={"If-None-Match": first.headers["etag"]}).status == 304


def test_health_is_found_where_probes_of_others_look(server: ServerProcess) -> None:
    answer = server.request("GET", "/health")
    assert (answer.status, answer.json) == (200, {"status": "ok"})
