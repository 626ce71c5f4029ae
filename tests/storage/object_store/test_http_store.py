"""Web servers that do not what they are asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from reconv.storage.object_stores.errors import ChangedObjectError, StoreError, StoreUnavailableError
from reconv.storage.object_stores.http import HttpStore

CONTENT = bytes(range(200))
HEADERS = {"ETag": '"1"', "Content-Length": "200"}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.headers: dict[str, str] = {}
        self.body = b""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.server.body)

    def do_HEAD(self) -> None:
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def store(server: _Server) -> HttpStore:
    return HttpStore(f"http://127.0.0.1:{server.server_address[1]}/my data")


@pytest.mark.parametrize("length", ["", "\u00b2", "-5", "9" * 5000, "99999999999999"])
def test_a_size_that_is_none_is_refused(server: _Server, store: HttpStore, length: str) -> None:
    server.headers = {**HEADERS, "Content-Length": length}
    with pytest.raises(StoreError, match="no usable Content-Length"):
        store.info("a.tar")


def _item(server: _Server, store: HttpStore) -> object:
    server.headers = HEADERS
    return store.info("a.tar")


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind", "text"),
    [
        (200, {}, CONTENT, StoreError, "whole files only"),
        (206, {"Content-Range": "bytes 10-19/200"}, CONTENT[10:40], StoreUnavailableError, "more bytes than asked for"),
        (206, {"Content-Range": "bytes 11-20/200"}, CONTENT[11:21], StoreUnavailableError, "another range"),
        (206, {}, CONTENT[10:20], StoreUnavailableError, "another range"),
        (206, {"Content-Range": "bytes 10-19/300"}, CONTENT[10:20], ChangedObjectError, "it has 300 bytes"),
        (206, {"Content-Range": "bytes 10-19/200", "ETag": '"2"'}, CONTENT[10:20], ChangedObjectError, "it is now"),
        (206, {"Content-Range": "bytes 10-19/200", "Content-Length": "10"}, b"short", StoreUnavailableError, "5 of 10"),
        (302, {"Location": "ftp://127.0.0.1/x"}, b"", StoreError, "redirects to ftp://127.0.0.1/x"),
        (302, {"Location": "http://example.org/x"}, b"", StoreError, "which is not https"),
        (302, {"Location": "file:///etc/passwd"}, b"", StoreError, "302|redirects"),
        (503, {"Retry-After": "\u00b2"}, b"", StoreUnavailableError, "503"),
    ],
)
def test_a_wrong_response_is_an_error_and_never_data(
    server: _Server, store: HttpStore, status: int, headers: dict[str, str], body: bytes, kind: type, text: str
) -> None:
    item = _item(server, store)
    server.status, server.body = status, body
    server.headers = {"ETag": '"1"', "Content-Length": str(len(body)), **headers}
    with pytest.raises(kind, match=text) as error:
        store.read(item, 10, 10)  # type: ignore[arg-type]
    assert type(error.value) is kind


def test_a_redirect_within_this_machine_is_followed(server: _Server, store: HttpStore) -> None:
    with _Server() as other:
        thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        other.headers = HEADERS
        server.status = 307
        server.headers = {"Location": f"http://127.0.0.1:{other.server_address[1]}/b", "Content-Length": "0"}
        assert store.info("a.tar").num_bytes == 200
        other.shutdown()
        thread.join()
