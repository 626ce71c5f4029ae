"""A stand-in for the Hugging Face Hub: the HTTP interface that huggingface_hub 1.x and `reconv push` speak.

tests/external/test_huggingface_hub.py lets huggingface_hub itself upload to it and download from it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_stand_in_token"


@dataclass
class Hub:
    """The repositories of the hub, and what it was asked."""

    address: str = ""
    storage: str = ""  # of large files: another host, which must not see the token
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    objects: dict[str, bytes] = field(default_factory=dict)  # of Git LFS, by sha256
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)  # their summaries
    requests: list[tuple[str, str, bool]] = field(default_factory=list)  # method, path, whether it had a token
    chunk_bytes: int = 0  # 0: objects come in one part
    verifies_elsewhere: bool = False  # large files, on the host that stores them
    failures: int = 0  # of the next requests, with status 503


class HubHandler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = self._read_chunks()
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        path = unquote(parts.path)
        token = self.headers.get("Authorization")
        self.hub.requests.append((self.command, path, token is not None))
        if self.hub.failures:
            self.hub.failures -= 1
            return self._answer(503, {"error": "busy"})
        for pattern, method, needs_token in _ROUTES:
            found = re.fullmatch(pattern, path)
            if found is not None:
                if needs_token and token != f"Bearer {TOKEN}":
                    return self._answer(401, {"error": "Invalid username or password."})
                getattr(self, method)(*found.groups())
                return None
        return self._answer(404, {"error": "no such route"})

    def _read_chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _answer(self, status: int, content: Any, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if status >= 400 and isinstance(content, dict):
            self.send_header("X-Error-Message", content["error"])
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def whoami(self) -> None:
        self._answer(200, {"name": "me", "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.hub.repos:
            return self._answer(409, {"error": "You already created this model repo", "url": self._page(name)})
        self.hub.repos[name] = {".gitattributes": b"*.safetensors filter=lfs\n"}
        if asked.get("private") or asked.get("visibility") == "private":
            self.hub.private.add(name)
        self._answer(200, {"url": self._page(name), "name": name, "id": name})

    def info(self, name: str, revision: str | None = None) -> None:
        if name not in self.hub.repos:
            return self._answer(404, {"error": "Repository not found"})
        siblings = [{"rfilename": file} for file in self.hub.repos[name]]
        self._answer(200, {"id": name, "sha": "a" * 40, "siblings": siblings, "private": name in self.hub.private})

    def tree(self, name: str, revision: str) -> None:
        if name not in self.hub.repos:
            return self._answer(404, {"error": "Repository not found"})
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in self.hub.repos[name].items()
        ]
        self._answer(200, entries)

    def validate_yaml(self) -> None:
        self._answer(200, {"errors": [], "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        files = json.loads(self.body)["files"]
        for file in files:
            assert len(base64.b64decode(file["sample"])) == min(512, file["size"])
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in files
        ]
        self._answer(200, {"files": modes})

    def batch(self, name: str) -> None:
        asked = json.loads(self.body)
        assert self.headers["Content-Type"] == "application/vnd.git-lfs+json" and asked["hash_algo"] == "sha256"
        self._answer(200, {"transfer": "basic", "objects": [self._object(entry) for entry in asked["objects"]]})

    def _object(self, entry: dict[str, Any]) -> dict[str, Any]:
        oid, size = entry["oid"], entry["size"]
        if oid in self.hub.objects:
            return entry
        upload: dict[str, Any] = {"href": f"{self.hub.storage}/storage/{oid}"}
        if self.hub.chunk_bytes:
            numbers = range(1, -(-size // self.hub.chunk_bytes) + 1)
            links = {f"{number:05}": f"{self.hub.storage}/storage/{oid}/{number}" for number in numbers}
            upload = {
                "href": f"{self.hub.address}/complete/{oid}",
                "header": {"chunk_size": str(self.hub.chunk_bytes), **links},
            }
        verify = f"{self.hub.storage}/storage/verify" if self.hub.verifies_elsewhere else f"{self.hub.address}/verify"
        return {**entry, "actions": {"upload": upload, "verify": {"href": verify}}}

    def store(self, oid: str, number: str | None = None) -> None:
        assert self.headers.get("Authorization") is None, "the storage must not see the token"
        if number is not None:
            self.hub.parts[oid, int(number)] = self.body
            return self._answer(200, b"", ETag=f'"{number}"')
        self._keep(oid, self.body)
        self._answer(200, b"")

    def complete(self, oid: str) -> None:
        listed = json.loads(self.body)["parts"]
        assert [part["etag"] for part in listed] == [f'"{part["partNumber"]}"' for part in listed]
        self._keep(oid, b"".join(self.hub.parts[oid, part["partNumber"]] for part in listed))
        self._answer(200, {})

    def _keep(self, oid: str, content: bytes) -> None:
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.objects[oid] = content

    def verify(self) -> None:
        asked = json.loads(self.body)
        assert len(self.hub.objects[asked["oid"]]) == asked["size"]
        self._answer(200, {"message": "Success"})

    def commit(self, name: str, revision: str) -> None:
        if name not in self.hub.repos:
            return self._answer(404, {"error": "Repository not found"})
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        changed = dict(self.hub.repos[name])
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                changed[value["path"]] = self.hub.objects[value["oid"]]
        self.hub.repos[name] = changed
        self.hub.commits.append(header["value"]["summary"])
        url = f"{self._page(name)}/commit/{'b' * 40}"
        self._answer(200, {"success": True, "commitOid": "b" * 40, "commitUrl": url, "hookOutput": ""})

    def resolve(self, name: str, revision: str, file: str) -> None:
        content = self.hub.repos.get(name, {}).get(file)
        is_hidden = name in self.hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"
        if content is None or is_hidden:
            return self._answer(401 if is_hidden else 404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
        digest = hashlib.sha256(content).hexdigest()
        facts = {"X_Repo_Commit": "a" * 40, "ETag": f'"{digest}"', "Accept_Ranges": "bytes"}
        if file.endswith(".safetensors"):  # large files are elsewhere
            location = f"{self.hub.storage}/cdn/{name}/{file}"
            facts |= {"Location": location, "X_Linked_Size": str(len(content)), "X_Linked_ETag": f'"{digest}"'}
            return self._answer(302, b"", **facts)
        self._answer(200, content, **facts)

    def cdn(self, name: str, file: str) -> None:
        assert self.headers.get("Authorization") is None, "the storage must not see the token"
        self._answer(200, self.hub.repos[name][file])

    def _page(self, name: str) -> str:
        return f"{self.hub.address}/{name}"


_REPO = r"([\w.-]+/[\w.-]+)"
_ROUTES = (
    (r"/api/whoami-v2", "whoami", True),
    (r"/api/repos/create", "create", True),
    (r"/api/validate-yaml", "validate_yaml", False),
    (rf"/api/models/{_REPO}/tree/([^/]+)/?", "tree", True),
    (rf"/api/models/{_REPO}/preupload/([^/]+)", "preupload", True),
    (rf"/api/models/{_REPO}/commit/([^/]+)", "commit", True),
    (rf"/api/models/{_REPO}/revision/([^/]+)", "info", False),
    (rf"/api/models/{_REPO}", "info", False),
    (rf"/{_REPO}\.git/info/lfs/objects/batch", "batch", True),
    (r"/storage/([0-9a-f]{64})", "store", False),
    (r"/storage/([0-9a-f]{64})/(\d+)", "store", False),
    (r"/complete/([0-9a-f]{64})", "complete", True),
    (r"/verify", "verify", True),
    (r"/storage/verify", "verify", False),
    (rf"/{_REPO}/resolve/([^/]+)/(.+)", "resolve", False),
    (rf"/cdn/{_REPO}/(.+)", "cdn", False),
)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A hub on a port of the loopback interface."""
    hub = Hub()
    handler = type("Handler", (HubHandler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        hub.storage = f"http://localhost:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
