"""Images of a run in its report: only pictures inside the run directory, whatever the events say about them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from reconv.logging.events import ImageLogged
from reconv.report.images import embed

BUDGET = 1 << 20


def grid(folder: Path, kind: str = "PNG") -> Path:
    pixels = np.arange(66 * 66 * 3, dtype=np.uint8).reshape(66, 66, 3)
    Image.fromarray(pixels).save(folder / "grid", kind)
    return folder


@pytest.mark.parametrize("gap_px", [2, 2**62, -(2**62), -1])
def test_a_grid_is_cut_into_tiles_whatever_its_gap(tmp_path: Path, gap_px: int) -> None:
    tiles = embed(grid(tmp_path), ImageLogged("title", "grid", ("a", "b", "c", "d"), 1, 2, gap_px), BUDGET)
    assert tiles is not None and len(tiles) == 4


@pytest.mark.parametrize("columns", [0, 2, 2**62, -(2**62)])
def test_a_grid_may_have_any_number_of_columns(tmp_path: Path, columns: int) -> None:
    assert embed(grid(tmp_path), ImageLogged("title", "grid", ("a", "b"), 1, columns), BUDGET)


@pytest.mark.parametrize("kind", ["PPM", "EPS"])
def test_formats_that_no_run_writes_are_not_opened(tmp_path: Path, kind: str) -> None:
    """Pillow starts Ghostscript to read EPS."""
    assert embed(grid(tmp_path), ImageLogged("title", "grid"), BUDGET)
    assert embed(grid(tmp_path, kind), ImageLogged("title", "grid"), BUDGET) is None


def test_an_image_outside_the_run_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    grid(tmp_path)
    for path in ("../grid", str(tmp_path / "grid")):
        assert embed(tmp_path / "run", ImageLogged("title", path), BUDGET) is None
        with pytest.raises(FileNotFoundError):
            ImageLogged("title", path).file(tmp_path / "run")


def test_an_image_with_too_many_pixels_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert embed(grid(tmp_path), ImageLogged("title", "grid"), BUDGET) is None
