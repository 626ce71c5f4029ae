"""Each kind of wrong box is found where a detector contradicts it, and boxes that it confirms are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import reconv
from reconv.data.dataset import Dataset
from reconv.detection.annotation import make_annotation
from reconv.metrics.detection_matches import ImageDetections
from reconv.review.boxes import box_findings
from reconv.review.findings import ReviewFinding
from reconv.review.images import ReviewedImages
from reconv.review.page import render
from reconv.review.run import ReviewOptions, review

TRUTH = [(10, 10, 50, 50), (60, 60, 90, 90)]


def found_in(
    detections: list[tuple[tuple[int, int, int, int], float, int]], **flags: list[bool]
) -> list[ReviewFinding]:
    truth = make_annotation(TRUTH, [0, 1], "a.jpg", 100, 100, **flags)
    boxes, scores, labels = zip(*detections, strict=True)
    image = ImageDetections(0, truth, np.array(boxes, float), np.array(scores), np.array(labels))
    datasets: dict[str, Dataset] = {}
    images = ReviewedImages(datasets, ("car", "bus"), ["a.jpg"], ["/a.jpg"], np.array([-1]))  # type: ignore[arg-type]
    return box_findings(images, [(0, image)])


CONFIRMED = ((60, 60, 90, 90), 0.9, 1)


@pytest.mark.parametrize(
    ("detections", "problem", "given", "proposed"),
    [
        ([((10, 10, 50, 50), 0.9, 0), CONFIRMED, ((10, 60, 40, 95), 0.8, 0)], "missing", "", "car"),
        ([CONFIRMED], "extra", "car", ""),
        ([((22, 22, 62, 62), 0.9, 0), CONFIRMED], "shifted", "car", "car"),
        ([((10, 10, 50, 50), 0.9, 1), CONFIRMED], "wrong class", "car", "bus"),
    ],
)
def test_each_problem_is_found_alone(
    detections: list[tuple[tuple[int, int, int, int], float, int]], problem: str, given: str, proposed: str
) -> None:
    [finding] = found_in(detections)
    assert finding.box is not None
    assert (finding.box.problem, finding.given, finding.label) == (problem, given, proposed)
    assert finding.note.startswith(problem) and 0 < finding.score <= 1


def test_confirmed_difficult_and_crowded_boxes_are_left_alone() -> None:
    confirmed = [((11, 9, 50, 51), 0.9, 0), CONFIRMED]
    assert found_in(confirmed) == []
    assert found_in([CONFIRMED], difficult=[True, False]) == []
    assert found_in([CONFIRMED], is_crowd=[True, False]) == []


def test_duplicate_detections_of_a_missing_object_are_one_finding() -> None:
    twice = [((10, 10, 50, 50), 0.9, 0), CONFIRMED, ((10, 60, 40, 95), 0.8, 0), ((11, 61, 40, 95), 0.7, 0)]
    assert len(found_in(twice)) == 1


def test_a_run_of_a_detector_judges_its_own_data(tmp_path: Path) -> None:
    settings = {"length": "2step", "schedule.warmup": "1step", "data.num_samples": 40, "evaluate.every": "off"}
    learned = reconv.train("quickstart-detection", out=tmp_path / "run", overrides=settings).folder
    lines: list[str] = []
    result = review(ReviewOptions(str(learned), tmp_path / "out"), lines.append)
    assert result.images.has_boxes and len(result.evidence.detections) == len(result.images) == 48
    problems = [finding.box.problem for finding in result.findings if finding.box is not None]
    assert problems and set(problems) <= {"extra"}  # after two steps it is sure of nothing
    page = render(result, limit=5)
    assert page.count('class="finding"') == min(5, len(problems)) and "data:image" in page
    assert sum(row.num_train for row in result.classes) > 40
