"""The Chromium of this machine, without a window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


@contextmanager
def open_chromium(*options: str) -> Iterator[Browser]:
    """A browser with these options."""
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.fail(
            f"pages are tested in a browser, and none of {', '.join(NAMES)} is on the PATH; install one, "
            "as in: apt-get install chromium"
        )
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=[*OPTIONS, *options])
        yield chromium
        chromium.close()
