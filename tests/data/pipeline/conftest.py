"""Worker processes that the pipeline tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reconv.data.pipeline.workers.process_pool import ProcessPool


@pytest.fixture(scope="session")
def processes() -> Iterator[ProcessPool]:
    """Two workers for all tests that leave them alive; they take two seconds to start."""
    workers = ProcessPool(2)
    yield workers
    workers.close()
