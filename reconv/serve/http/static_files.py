"""The files of the server's pages: read once from the package, served by exact name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "playground"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file in memory."""

    content: bytes
    media_type: str
    etag: str


def load() -> dict[str, StaticFile]:
    """All files of the pages, by name."""
    files = (file for file in sorted(FOLDER.glob("*")) if file.suffix in _TYPES)
    return {file.name: _read(file) for file in files}


def _read(file: Path) -> StaticFile:
    content = file.read_bytes()
    return StaticFile(content, _TYPES[file.suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')


def respond(request: Request, file: StaticFile) -> Response:
    """The file, or 304 where the browser has it."""
    headers = {"ETag": file.etag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
