"""A folder with its index on a web server, and a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from web_folder import WebFolder, web_folder

from reconv.io.object_store import store_errors


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store_errors, "RETRY_DELAYS_S", (0.01, 0.01, 0.01))


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebFolder]:
    """An empty folder on a web server."""
    with web_folder(tmp_path / "web") as server:
        yield server
