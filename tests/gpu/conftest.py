"""Tests that need a CUDA GPU: run by `make gpu`, never by `make test`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.filterwarnings("default"))  # of whichever torch and Triton that machine has


@pytest.fixture(autouse=True)
def _seeded() -> None:
    if not torch.cuda.is_available():
        pytest.fail("the tests in tests/gpu need a CUDA GPU")
    torch.manual_seed(0)
