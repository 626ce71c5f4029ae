"""Limits and tokens of a server, with clients that are slow, gone, too many or not allowed."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server_process import Answer, ServerProcess, ask, json_images

import reconv

TOKEN = "correct-horse-battery"
LIMITS = (
    "--max-body-mb",
    "0.2",
    "--timeout-s",
    "1",
    "--max-connections",
    "12",
    "--max-queue",
    "8",
    "--max-images",
    "8",
)


@pytest.fixture(scope="module")
def limited(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a token and small limits."""
    folder = tmp_path_factory.mktemp("limited")
    (folder / "token.txt").write_text(f"{TOKEN}\nanother-token\n")
    with ServerProcess(folder / "log.txt", classifier, "--token-file", folder / "token.txt", *LIMITS) as process:
        yield process


def authorized(server: ServerProcess, body: bytes, token: str = TOKEN, content_type: str = "image/png") -> Answer:
    return server.request("POST", "/predict", body, content_type, {"Authorization": f"Bearer {token}"})


def test_the_fastest_backend_gives_the_bits_of_predict_too(
    limited: ServerProcess, classifier: Path, images: list[bytes]
) -> None:
    predictor = reconv.load(classifier, device="cpu", log=lambda text: None)
    described = limited.request("GET", "/models", headers={"Authorization": f"Bearer {TOKEN}"}).json["models"][0]
    assert described["backend"] == predictor.backend.name
    alone, several = (predictor.predict(some) for some in (images[:1], images))
    found = authorized(limited, images[0]).json["predictions"]
    assert [each["classes"] for each in found] == [each.to_dict()["classes"] for each in alone]
    found = authorized(limited, json_images(images), content_type="application/json").json["predictions"]
    assert [each["classes"] for each in found] == [each.to_dict()["classes"] for each in several]


def receive_all(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    connection.settimeout(20)
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


def test_a_token_is_needed_except_for_probes_and_pages(limited: ServerProcess, images: list[bytes]) -> None:
    assert authorized(limited, images[0]).status == 200
    assert authorized(limited, images[0], "another-token").status == 200
    for path in ("/models", "/metrics", "/v2", "/v2/models/quickstart"):
        answer = limited.request("GET", path)
        assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer", path
        assert limited.request("GET", path, headers={"Authorization": f"bearer {TOKEN}"}).status == 200
    for path in ("/v2/health/live", "/v2/health/ready", "/docs", "/openapi.json", "/static/docs.css"):
        assert limited.request("GET", path).status == 200, path


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", "Ünïcode"])
def test_wrong_tokens_are_refused(limited: ServerProcess, images: list[bytes], token: str) -> None:
    assert authorized(limited, images[0], token.encode().decode("latin-1")).status == 401
    basic = {"Authorization": f"Basic {TOKEN}"}
    assert limited.request("POST", "/predict", images[0], headers=basic).status == 401


def test_a_large_body_is_refused_while_it_arrives(limited: ServerProcess, images: list[bytes]) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Transfer-Encoding": "chunked"}
    for body in (bytes(300_000), iter([bytes(100_000)] * 3)):  # with its length, and without
        connection = limited.connect()
        more = headers if not isinstance(body, bytes) else {"Authorization": headers["Authorization"]}
        connection.request("POST", "/predict", body, more, encode_chunked=not isinstance(body, bytes))
        response = connection.getresponse()
        assert response.status == 413 and json.loads(response.read())["error"]["code"] == "body_too_large"
        connection.close()
    assert authorized(limited, images[0]).status == 200


def test_a_body_without_end_is_cut(limited: ServerProcess) -> None:
    connection = limited.connect()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    endless = (bytes(50_000) for _ in range(10_000))
    with pytest.raises((ConnectionError, http.client.HTTPException, AssertionError)):
        connection.request("POST", "/predict", endless, headers, encode_chunked=True)
        assert connection.getresponse().status == 413
        raise ConnectionError  # the answer arrived before the connection was cut
    connection.close()
    assert limited.request("GET", "/v2/health/live").status == 200


def test_slow_clients_are_cut(limited: ServerProcess, images: list[bytes]) -> None:
    address = (limited.host, limited.port)
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    with socket.create_connection(address) as silent, socket.create_connection(address) as slow_header:
        slow_header.sendall(head.encode())
        with socket.create_connection(address) as slow_body:
            slow_body.sendall(f"{head}Content-Type: image/png\r\nContent-Length: 1000\r\n\r\nabc".encode())
            received = receive_all(slow_body)
            assert b" 408 " in received.split(b"\r\n")[0] and b"body_timeout" in received
        assert receive_all(silent) == b"" and receive_all(slow_header) == b""
    assert authorized(limited, images[0]).status == 200


def test_a_second_request_of_a_connection_must_also_arrive_in_time(limited: ServerProcess) -> None:
    with socket.create_connection((limited.host, limited.port)) as connection:
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.settimeout(20)
        received = b""
        while not received.endswith(b"}"):
            received += connection.recv(65536)
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHo")
        assert receive_all(connection) == b""


def test_what_is_not_http_is_refused(limited: ServerProcess) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"\x00" * 1000):
        with socket.create_connection((limited.host, limited.port)) as connection:
            connection.sendall(garbage)
            assert b" 400 " in receive_all(connection).split(b"\r\n")[0]
    huge_header = b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 100_000
    with socket.create_connection((limited.host, limited.port)) as connection:
        connection.sendall(huge_header)
        assert b" 200 " not in receive_all(connection)
    assert limited.request("GET", "/v2/health/live").status == 200


def test_clients_that_go_away_leave_nothing_behind(limited: ServerProcess, images: list[bytes]) -> None:
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: image/png\r\n"
    for sent in (b"abc", images[0]):  # in the middle of the body, and before the answer
        for _ in range(20):
            with socket.create_connection((limited.host, limited.port)) as connection:
                connection.sendall(f"{head}Content-Length: {len(images[0])}\r\n\r\n".encode() + sent)
    deadline = time.monotonic() + 20
    while not is_idle(limited):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert authorized(limited, images[0]).status == 200


def is_idle(server: ServerProcess) -> bool:
    answer = server.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    if answer.status != 200:  # too many connections are still open
        return False
    text = answer.body.decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    pending = float(values['reconv_pending_images{model="quickstart"}'])
    return pending == 0 and float(values["reconv_in_flight_requests"]) == 1  # this one


def test_a_full_queue_answers_when_to_come_back(limited: ServerProcess, images: list[bytes]) -> None:
    body = json_images(images)
    with ThreadPoolExecutor(10) as clients:
        send = lambda _: authorized(limited, body, content_type="application/json")  # noqa: E731
        answers = list(clients.map(send, range(60)))
    statuses = {answer.status for answer in answers}
    assert statuses == {200, 503}
    refused = next(answer for answer in answers if answer.status == 503)
    assert refused.json["error"]["code"] == "overloaded" and int(refused.headers["retry-after"]) >= 1
    assert authorized(limited, body, content_type="application/json").status == 200


def test_more_connections_than_allowed_are_refused(limited: ServerProcess) -> None:
    opened = [socket.create_connection((limited.host, limited.port)) for _ in range(20)]
    try:
        received = [receive_all(connection) for connection in reversed(opened)]
    finally:
        for connection in opened:
            connection.close()
    refused = [data for data in received if b" 503 " in data and b"Retry-After: 1" in data]
    assert len(refused) >= 8 and received.count(b"") == len(received) - len(refused)
    assert limited.request("GET", "/v2/health/live").status == 200


def test_names_of_other_sites_are_refused_on_the_loopback_interface(limited: ServerProcess) -> None:
    connection = limited.connect()
    answer = ask(connection, "GET", "/v2/health/live", headers={"Host": "evil.example:8000"})
    assert answer.status == 421
    assert ask(connection, "GET", "/v2/health/live", headers={"Host": "localhost:1"}).status == 200
    connection.close()


def test_answers_have_security_headers(limited: ServerProcess) -> None:
    headers = limited.request("GET", "/docs").headers
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    assert "access-control-allow-origin" not in headers and "server" not in headers
