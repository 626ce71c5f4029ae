"""Tests against real third-party programs: run by `make external`, never by `make test`.

A test whose package or program is missing is skipped, and its reason names what to install.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.external)
