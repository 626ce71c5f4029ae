"""A folder with its index on a web server, and a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from data_examples import write_image_tree
from web_folder import WebFolder, web_folder

from reconv.storage.object_stores import errors as store_errors


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store_errors, "RETRY_DELAYS_S", (0.01, 0.01, 0.01))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An image tree: 3 classes, 11 training and 5 validation images."""
    return write_image_tree(tmp_path / "tree")


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebFolder]:
    """An empty folder on a web server."""
    with web_folder(tmp_path / "web") as server:
        yield server
