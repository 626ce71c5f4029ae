"""The section of a detector's report: what it says, what it leaves out, and that names cannot break the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from findings_example import example_findings

from reconv.report.detection_json import FILE_NAME, write_findings
from reconv.report.html import render


@pytest.fixture
def run(tmp_path: Path, fake_run: Callable[..., Path]) -> Path:
    return fake_run(tmp_path / "ssd" / "1", epochs=1)


def test_a_run_without_findings_has_no_section(run: Path) -> None:
    assert "What was found" not in render([run])


def test_the_section_tells_errors_sizes_and_classes(run: Path) -> None:
    write_findings(run, example_findings())
    page = render([run])
    assert "What was found" in page
    assert "Precision over recall" in page and "by recall" in page
    assert "is nothing" in page and "was overlooked" in page
    assert "75.0 %" in page  # three of four looked at are right
    assert "20.0 %" in page  # six of thirty objects were missed
    assert "12.50 %" in page  # the precision of small objects
    assert "no objects" in page
    assert page.index("class 2") < page.index("class 1")  # the most objects first
    assert "a part of the validation set" not in page
    write_findings(run, example_findings(partial=True))
    assert "a part of the validation set" in render([run])


def test_a_long_table_of_classes_opens_on_demand(run: Path) -> None:
    write_findings(run, example_findings(num_classes=80))
    assert "<details><summary>Classes: 80" in render([run])
    write_findings(run, example_findings(num_classes=20))
    assert "<details open><summary>Classes: 20" in render([run])


def test_a_class_whose_name_is_markup_stays_text(run: Path) -> None:
    findings = example_findings()
    findings["classes"][1]["name"] = "<script>alert(1)</script>"
    write_findings(run, findings)
    assert "<script>alert" not in render([run])


def test_findings_of_another_form_are_left_alone(run: Path) -> None:
    (run / FILE_NAME).write_text(json.dumps({"form": 99}))
    assert "What was found" not in render([run])
