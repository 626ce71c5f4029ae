"""Repositories of the Hugging Face Hub: addresses, the user's token, and uploads in one commit.

It speaks the Hub's HTTP interface with the standard library: repositories, pre-upload, Git LFS's batch interface and
commits. HF_ENDPOINT names another hub. The token goes to that address alone, never along a redirect, and into no
message.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from reconv.core.errors import ResourceError, UsageError
from reconv.storage.bounded import parse_shallow_json
from reconv.storage.download import require_https

SCHEME = "hf://"
ENDPOINT_ENV, TOKEN_ENV = "HF_ENDPOINT", "HF_TOKEN"
WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
_PUBLIC = "https://huggingface.co"
_ADDRESS = re.compile(r"hf:/{1,2}([\w.-]+/[\w.-]+)(?:@([\w.-]+))?/*", re.ASCII)  # a Path has lost a slash
_LFS_JSON = "application/vnd.git-lfs+json"
_SAMPLE_BYTES = 512  # of a file, from which the hub tells text from binary files
_MAX_ANSWER_BYTES = 8 << 20
_TRIES, _TRANSIENT = 3, (429, 500, 502, 503, 504)
_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A model's repository and revision, as in hf://timm/resnet18.a1_in1k@main."""

    name: str  # owner/model
    revision: str = "main"

    @classmethod
    def parse(cls, address: str) -> HubRepo:
        """The repository of an hf:// address; raises `UsageError` if it is none."""
        found = _ADDRESS.fullmatch(address)
        if found is None or ".." in address:
            raise UsageError(
                f"not the address of a model on the Hugging Face Hub: {address}",
                hint="use hf://OWNER/MODEL or hf://OWNER/MODEL@REVISION, as in hf://timm/resnet18.a1_in1k",
            )
        return cls(found[1], found[2] or "main")

    def __str__(self) -> str:
        return f"{SCHEME}{self.name}" + ("" if self.revision == "main" else f"@{self.revision}")

    def url(self, file: str) -> str:
        """The address that a file is downloaded from."""
        return f"{endpoint()}/{self.name}/resolve/{quote(self.revision, safe='')}/{quote(file)}"

    @property
    def page(self) -> str:
        return f"{endpoint()}/{self.name}"


def endpoint() -> str:
    """The hub's address, without a slash at its end."""
    address = (os.environ.get(ENDPOINT_ENV) or _PUBLIC).rstrip("/")
    require_https(address)
    return address


def read_token() -> str | None:
    """The user's token: $HF_TOKEN, or what `hf auth login` has stored; None without one."""
    token = os.environ.get(TOKEN_ENV, "").strip()
    if token:
        return token
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    try:
        return Path(os.environ.get("HF_TOKEN_PATH") or home / "token").read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def authorization() -> dict[str, str]:
    """The header that proves who asks; empty without a token."""
    token = read_token()
    return {} if token is None else {"Authorization": f"Bearer {token}"}


class HubClient:
    """Changes a repository; needs a token that may write."""

    def __init__(self, repo: HubRepo) -> None:
        self.repo = repo
        self._api = f"{endpoint()}/api/models/{repo.name}"
        self._headers = authorization()
        if not self._headers:
            raise UsageError(
                f"no token for {endpoint()}",
                why=f"neither ${TOKEN_ENV} nor the token file of the hub's own programs has one",
                hint=f"set {TOKEN_ENV}, or log in once: hf auth login",
            )

    def files(self) -> list[str] | None:
        """The files of the repository; None if there is no such repository or revision."""
        answer = self._json(
            "GET", f"{self._api}/tree/{quote(self.repo.revision, safe='')}?recursive=true", missing=True
        )
        if not isinstance(answer, list):
            return None
        return [str(entry["path"]) for entry in answer if isinstance(entry, dict) and entry.get("type") == "file"]

    def create(self, *, private: bool) -> None:
        """Create the repository; raises if it is not private and should be."""
        owner, _, name = self.repo.name.partition("/")
        body = {"name": name, "organization": owner, "type": "model", "visibility": "private" if private else "public"}
        self._json("POST", f"{endpoint()}/api/repos/create", body, ignored=(409,))
        if private:
            facts = self._json("GET", self._api)
            if not (isinstance(facts, dict) and facts.get("private") is True):
                raise UsageError(
                    f"{self.repo} is not private, and nothing was uploaded",
                    where=self.repo.page,
                    hint="make it private on its page, or leave out --private",
                )

    def upload(self, files: Mapping[str, bytes], summary: str) -> str:
        """Upload files in one commit, which appears whole or not at all; returns its address."""
        modes = self._upload_modes(files)
        large = [name for name in files if modes.get(name) == "lfs"]
        objects = {name: hashlib.sha256(files[name]).hexdigest() for name in large}
        if objects:
            self._upload_objects({objects[name]: files[name] for name in large})
        lines: list[dict[str, Any]] = [{"key": "header", "value": {"summary": summary, "description": ""}}]
        for name, content in files.items():
            if name in objects:
                value = {"path": name, "algo": "sha256", "oid": objects[name], "size": len(content)}
                lines.append({"key": "lfsFile", "value": value})
            else:
                encoded = base64.b64encode(content).decode()
                lines.append({"key": "file", "value": {"path": name, "content": encoded, "encoding": "base64"}})
        body = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        url = f"{self._api}/commit/{quote(self.repo.revision, safe='')}"
        answer = self._json("POST", url, body, content_type="application/x-ndjson")
        return str(answer.get("commitUrl") or self.repo.page) if isinstance(answer, dict) else self.repo.page

    def _upload_modes(self, files: Mapping[str, bytes]) -> dict[str, str]:
        """Upload mode of each file: `regular`, in the commit, or `lfs`, as an object of its own."""
        listed = [
            {"path": name, "size": len(content), "sample": base64.b64encode(content[:_SAMPLE_BYTES]).decode()}
            for name, content in files.items()
        ]
        url = f"{self._api}/preupload/{quote(self.repo.revision, safe='')}"
        answer = self._json("POST", url, {"files": listed})
        found = answer.get("files", []) if isinstance(answer, dict) else []
        return {str(entry["path"]): str(entry["uploadMode"]) for entry in found}

    def _upload_objects(self, objects: Mapping[str, bytes]) -> None:
        """Upload large files where the hub says, unless it has them."""
        body = {
            "operation": "upload",
            "transfers": ["basic", "multipart"],
            "hash_algo": "sha256",
            "ref": {"name": self.repo.revision},
            "objects": [{"oid": oid, "size": len(content)} for oid, content in objects.items()],
        }
        url = f"{endpoint()}/{self.repo.name}.git/info/lfs/objects/batch"
        answer = self._json("POST", url, body, content_type=_LFS_JSON)
        for entry in answer.get("objects", []) if isinstance(answer, dict) else []:
            oid, actions = str(entry.get("oid")), entry.get("actions") or {}
            if entry.get("error"):
                raise ResourceError(f"{self.repo} refuses a file", where=self.repo.page, why=str(entry["error"])[:200])
            if "upload" in actions:
                self._upload_object(actions["upload"], oid, objects[oid])
            if "verify" in actions:
                self._json("POST", str(actions["verify"]["href"]), {"oid": oid, "size": len(objects[oid])})

    def _upload_object(self, action: Mapping[str, Any], oid: str, content: bytes) -> None:
        """Upload one object, in the parts that the hub names if it is large."""
        url, header = str(action["href"]), dict(action.get("header") or {})
        if "chunk_size" not in header:
            self._send("PUT", url, content, {str(name): str(value) for name, value in header.items()})
            return
        size = int(header.pop("chunk_size"))
        parts = []
        for number, (_, address) in enumerate(sorted((int(name), str(part)) for name, part in header.items()), 1):
            _, headers = self._send("PUT", address, content[(number - 1) * size : number * size], {})
            parts.append({"partNumber": number, "etag": headers.get("ETag", "")})
        self._json("POST", url, {"oid": oid, "parts": parts}, content_type=_LFS_JSON)

    def _json(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | bytes | None = None,
        *,
        content_type: str = "application/json",
        ignored: Sequence[int] = (),
        missing: bool = False,
    ) -> Any:
        """The answer of the hub's interface; None for a status that is `ignored`, or 404 where it may be `missing`."""
        is_hub = url.startswith(f"{endpoint()}/")  # the token goes nowhere else
        headers = {"Accept": content_type if content_type == _LFS_JSON else "application/json"}
        headers |= self._headers if is_hub else {}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers |= {} if data is None else {"Content-Type": content_type}
        content, _ = self._send(method, url, data, headers, (*ignored, *([404] if missing else [])))
        try:
            return parse_shallow_json(content.decode()) if content else None
        except ValueError as error:
            raise ResourceError("the hub's answer is not JSON", where=url, why=str(error)[:200]) from error

    def _send(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], ignored: Sequence[int] = ()
    ) -> tuple[bytes, Mapping[str, str]]:
        """Body and headers of an answer; raises for a status that is an error and not `ignored`."""
        require_https(url)
        for attempt in range(1, _TRIES + 1):
            request = urllib.request.Request(url, data=body, method=method)
            for name, value in headers.items():
                request.add_unredirected_header(name, value)
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                    return response.read(_MAX_ANSWER_BYTES), dict(response.headers)
            except urllib.error.HTTPError as error:
                if error.code in ignored:
                    return b"", {}
                if error.code not in _TRANSIENT or attempt == _TRIES:
                    raise self._refused(error, url) from None  # the request has the token
            except OSError as error:
                if attempt == _TRIES:
                    raise ResourceError(f"{endpoint()} cannot be reached", where=url, why=str(error)) from error
            time.sleep(attempt / 2)
        raise AssertionError("the last try returns or raises")

    def _refused(self, error: urllib.error.HTTPError, url: str) -> UsageError | ResourceError:
        detail = error.headers.get("X-Error-Message") or str(error.reason)
        where = url.partition("?")[0]
        if error.code in (401, 403, 404):
            return UsageError(
                f"the hub does not let you write to {self.repo}",
                where=where,
                why=f"status {error.code}: {detail[:200]}",
                hint=f"use a token that may write there: {TOKEN_ENV}, or hf auth login",
            )
        return ResourceError(f"the hub failed for {self.repo}", where=where, why=f"status {error.code}: {detail[:200]}")
