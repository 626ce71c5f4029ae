"""The section of a detector's report: what it says, what it leaves out, and that names cannot break the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reconv.report.findings import FILE_NAME, write_findings
from reconv.report.html import render

KINDS = {"right": "is right", "background": "is nothing", "missed": "was overlooked"}


def _findings(num_classes: int = 3, **changed: Any) -> dict[str, Any]:
    classes = [
        {"name": f"class {n}", "num_objects": 10 * n, "num_detections": 7, "voc10": 0.5 if n else None, "recall": 0.25}
        for n in range(num_classes)
    ]
    return {
        "step": 440,
        "weights": "raw",
        "partial": False,
        "kinds": KINDS,
        "num_images": 360,
        "numbers": {"voc10": 0.5, "ap_small": 0.125},
        "classes": classes,
        "curves": [{"name": "mean over the classes", "precision": [1.0, 0.5, 0.0]}],
        "sizes": [
            {"name": "small", "num_objects": 20, "num_found": 5},
            {"name": "large", "num_objects": 0, "num_found": 0},
        ],
        "errors": {"right": 3, "background": 1, "missed": 6},
        **changed,
    }


@pytest.fixture
def run(tmp_path: Path, fake_run: Callable[..., Path]) -> Path:
    return fake_run(tmp_path / "ssd" / "1", epochs=1)


def test_a_run_without_findings_has_no_section(run: Path) -> None:
    assert "What was found" not in render([run])


def test_the_section_tells_errors_sizes_and_classes(run: Path) -> None:
    write_findings(run, _findings())
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
    write_findings(run, _findings(partial=True))
    assert "a part of the validation set" in render([run])


def test_a_long_table_of_classes_opens_on_demand(run: Path) -> None:
    write_findings(run, _findings(num_classes=80))
    assert "<details><summary>Classes: 80" in render([run])
    write_findings(run, _findings(num_classes=20))
    assert "<details open><summary>Classes: 20" in render([run])


def test_a_class_whose_name_is_markup_stays_text(run: Path) -> None:
    findings = _findings()
    findings["classes"][1]["name"] = "<script>alert(1)</script>"
    write_findings(run, findings)
    assert "<script>alert" not in render([run])


def test_findings_of_another_form_are_left_alone(run: Path) -> None:
    (run / FILE_NAME).write_text(json.dumps({"form": 99}))
    assert "What was found" not in render([run])
