"""The report's section about a classifier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from classification_analysis_example import classification_example
from run_example import write_run

from reconv.report.evaluation_files import (
    CLASSIFICATION_FILE,
    read_classification_analysis,
    write_classification_analysis,
)
from reconv.report.html import render


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "photos" / "1", epochs=1)


def test_a_run_without_an_analysis_has_no_section(run: Path) -> None:
    assert "Classification analysis" not in render([run])


def test_the_section_shows_matrix_pairs_calibration_and_classes(run: Path) -> None:
    write_classification_analysis(run, classification_example())
    page = render([run])
    assert "<title>class 3: 3 of 10 predicted as class 0 (30.0 %)</title>" in page
    assert "<td>class 3</td><td>class 0</td>" in page  # the most confused pair
    # 34 images are right at 95 %, and 6 are wrong at 55 %.
    assert "Expected calibration error 12.50 %" in page
    # Class 3: 7 of 10 are found, and 2 of class 2 are taken for it.
    cells = "".join(f'<td class="num">{cell}</td>' for cell in ("10", "9", "77.78 %", "70.00 %", "73.68 %"))
    assert f"<td>class 3</td>{cells}<td>class 0 (3)</td>" in page
    assert "a part of the validation set" not in page
    write_classification_analysis(run, classification_example(partial=True))
    assert "a part of the validation set" in render([run])


def test_many_classes_have_pairs_and_a_collapsed_table_but_no_matrix(run: Path) -> None:
    write_classification_analysis(run, classification_example(30))
    page = render([run])
    assert page.count("Confusion matrix</h3>") == 1
    write_classification_analysis(run, classification_example(31))
    page = render([run])
    assert "Confusion matrix</h3>" not in page
    assert "Most confused classes</h3>" in page
    assert "<details><summary>Classes: 31" in page


def test_a_classifier_without_mistakes_has_no_pairs(run: Path) -> None:
    write_classification_analysis(run, classification_example(1))
    assert "Every image is classified correctly." in render([run])


def test_several_labels_per_image_have_a_table_only(run: Path) -> None:
    analysis = classification_example()
    for name in ("confusion", "most_confused", "calibration"):
        del analysis[name]
    analysis["classes"] = [{**row, "ap": 0.125} for row in analysis["classes"]]
    write_classification_analysis(run, analysis)
    page = render([run])
    assert "Confusion matrix</h3>" not in page and "Reliability</h3>" not in page
    assert '<th class="num" scope="col">AP</th></tr>' in page and "12.50 %" in page


def test_a_class_whose_name_is_markup_stays_text(run: Path) -> None:
    write_classification_analysis(run, classification_example(first="<script>alert(1)</script>"))
    page = render([run])
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script>alert" not in page


def test_a_class_whose_name_is_not_utf8_is_shown_escaped(run: Path) -> None:
    write_classification_analysis(run, classification_example(first="caf\udce9"))
    assert "caf\udce9" in render([run])


def test_an_analysis_of_another_version_is_ignored(run: Path) -> None:
    (run / CLASSIFICATION_FILE).write_text(json.dumps({"version": 99}))
    assert "Classification analysis" not in render([run])


def test_a_damaged_analysis_is_left_out(tmp_path: Path) -> None:
    analysis = {"step": 3, "rows": [{"name": "é", "num_images": 4}]}
    write_classification_analysis(tmp_path, analysis)
    assert read_classification_analysis(tmp_path) == {"version": 1, **analysis}
    file = tmp_path / "classification.json"
    content = file.read_bytes()
    for damaged in (content.replace(b"num_images", b"num_imagas"), content[:20], b"", b'{"a":' * 20_000, b"\xff\xfe"):
        file.write_bytes(damaged)
        assert read_classification_analysis(tmp_path) is None
