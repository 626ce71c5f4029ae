"""An export that several tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

import reconv
from reconv.exporters.run import ExportResult


@pytest.fixture(scope="session")
def exported(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    """The classifier as ONNX."""
    return reconv.export(classifier, to="onnx", out=tmp_path_factory.mktemp("exports") / "digits", samples=40)
