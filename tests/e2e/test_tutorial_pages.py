"""The commands, recipes and Python of the pages for newcomers work as they stand, in order."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from code_blocks import code_blocks
from page_reader import ROOT, page_reader, write_flowers
from PIL import Image


def write_shapes() -> None:
    """A detection dataset in YOLO format: discs and squares, one or two per image."""
    Path("shapes/images").mkdir(parents=True)
    Path("shapes/labels").mkdir()
    Path("shapes/classes.txt").write_text("disc\nsquare\n")
    rows, columns = np.mgrid[:96, :96]
    for number in range(1, 41):
        random = np.random.default_rng(number)
        pixels = random.integers(0, 60, (96, 96, 3))
        lines = []
        for row, column in ((24, 24), (70, 70))[: 1 + number % 2]:
            label, radius = int(random.integers(2)), int(random.integers(9, 16))
            near = np.maximum(abs(rows - row), abs(columns - column))
            inside = (rows - row) ** 2 + (columns - column) ** 2 <= radius**2 if label == 0 else near <= radius
            pixels[inside] = (230, 120, 40) if label == 0 else (60, 160, 240)
            lines.append(f"{label} {column / 96} {row / 96} {2 * radius / 96} {2 * radius / 96}")
        Image.fromarray(pixels.astype(np.uint8)).save(f"shapes/images/{number:04}.jpg", quality=92)
        Path(f"shapes/labels/{number:04}.txt").write_text("\n".join(lines) + "\n")


def follow(page: str) -> list[str]:
    """Do what a page says: write its files, run its Python and its `sh` blocks. Returns the lines that were typed."""
    names: dict[str, object] = {}
    typed = []
    with page_reader() as reader:
        for block in code_blocks(ROOT / page):
            header = re.match(r"# ([\w-]+\.yaml)\n", block.text)
            if block.language == "yaml" and header:
                Path(header[1]).write_text(block.text)
            elif block.language == "python" and not block.not_run:
                exec(compile(block.text, block.place, "exec"), names)
            elif block.language == "sh":
                for line in block.text.splitlines():
                    reader.type(line)
                    typed.append(line)
    return typed


@pytest.mark.slow
def test_get_started_works() -> None:
    assert len(follow("docs/get-started.md")) == 7
    assert Path("runs/my/1/report.html").is_file() and Path("comparison.html").is_file()


@pytest.mark.slow
def test_the_tutorial_of_a_classifier_works() -> None:
    write_flowers()
    assert len(follow("docs/tutorials/classifier.md")) == 8
    assert Path("runs/second/report.html").is_file() and Path("photos.png").is_file()


@pytest.mark.slow
def test_the_tutorial_of_a_detector_works() -> None:
    write_shapes()
    assert len(follow("docs/tutorials/detector.md")) == 5
    assert list(Path("drawn").iterdir())


@pytest.mark.slow
def test_the_tutorial_of_several_devices_works() -> None:
    assert len(follow("docs/tutorials/several-gpus.md")) == 5


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/coming-from/ultralytics.md"])
def test_the_python_of_the_page_works(page: str) -> None:
    Image.fromarray(np.full((8, 8), 200, np.uint8)).save("digit.png")
    follow(page)
    assert os.listdir("runs/quickstart")
