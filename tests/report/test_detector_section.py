"""The report's section about a detector."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from detection_analysis_example import example_analysis
from run_example import write_run

from reconv.report.evaluation_files import DETECTION_FILE, write_detection_analysis
from reconv.report.html import render


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "ssd" / "1", epochs=1)


def test_a_run_without_an_analysis_has_no_section(run: Path) -> None:
    assert "Detection analysis" not in render([run])


def test_the_section_shows_errors_sizes_and_classes(run: Path) -> None:
    write_detection_analysis(run, example_analysis())
    page = render([run])
    assert "Detection analysis" in page
    assert "Precision-recall" in page and "by recall" in page
    assert "is nothing" in page and "was overlooked" in page
    assert "75.0 %" in page  # three of four examined are correct
    assert "20.0 %" in page  # six of thirty objects were missed
    assert "12.50 %" in page  # the precision of small objects
    assert "no objects" in page
    assert page.index("class 2") < page.index("class 1")  # the most objects first
    assert "a part of the validation set" not in page
    write_detection_analysis(run, example_analysis(partial=True))
    assert "a part of the validation set" in render([run])


def test_a_long_table_of_classes_is_collapsed(run: Path) -> None:
    write_detection_analysis(run, example_analysis(num_classes=80))
    assert "<details><summary>Classes: 80" in render([run])
    write_detection_analysis(run, example_analysis(num_classes=20))
    assert "<details open><summary>Classes: 20" in render([run])


def test_a_class_whose_name_is_markup_stays_text(run: Path) -> None:
    analysis = example_analysis()
    analysis["classes"][1]["name"] = "<script>alert(1)</script>"
    write_detection_analysis(run, analysis)
    assert "<script>alert" not in render([run])


def test_an_analysis_of_another_version_is_ignored(run: Path) -> None:
    (run / DETECTION_FILE).write_text(json.dumps({"version": 99}))
    assert "Detection analysis" not in render([run])
