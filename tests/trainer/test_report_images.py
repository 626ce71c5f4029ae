"""The report files of a detection run, and the checks before it starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from detector_example import write_recipe
from PIL import Image

import reconv
from reconv.api import RunResult
from reconv.build.data import check_has_objects
from reconv.cli import main
from reconv.core.errors import DataError, ExitCode, UsageError
from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.dataset import Sample
from reconv.data.inspect.draw_boxes import class_color
from reconv.detection.annotation import Annotation, make_annotation
from reconv.logging.event_log import read_events
from reconv.logging.events import EvalFinished, ImageLogged
from reconv.metrics import coco_eval as coco
from reconv.trainer.callbacks.detection_images import NUM_DETECTION_IMAGES, TILE_PX


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp("detector")
    return reconv.train(write_recipe(folder, num_samples="100"), out=folder / "run")


def test_summary_uses_the_metric_of_the_recipe(result: RunResult) -> None:
    [evaluated] = [e for e in read_events(result.folder / "events.jsonl") if isinstance(e, EvalFinished)]
    assert result.summary["metric"] == "voc10"
    assert result.summary["value"] == evaluated.metrics["voc10"]
    assert {"ap", "ap50", "ar100", "voc07", "voc10"} <= evaluated.metrics.keys()
    assert all(0 <= value <= 1 for value in evaluated.metrics.values())
    assert json.loads((result.folder / "best.json").read_text())["metric"] == "voc10"


def test_detection_report_and_images_are_from_the_last_evaluation(result: RunResult) -> None:
    findings = json.loads((result.folder / "detection.json").read_text())
    assert (findings["step"], findings["weights"], findings["partial"]) == (4, "raw", False)
    assert findings["num_images"] == 20
    assert findings["metrics"]["voc10"] == result.summary["value"]
    [images_logged] = [
        e
        for e in read_events(result.folder / "events.jsonl")
        if isinstance(e, ImageLogged) and e.title == "Ground truth beside prediction"
    ]
    assert len(images_logged.captions) == NUM_DETECTION_IMAGES
    with Image.open(result.folder / images_logged.path) as sheet:
        assert sheet.size == (2 * (2 * TILE_PX + 4) + 2, 6 * TILE_PX + 5 * 2)
        assert sheet.getcolors(maxcolors=1000) is None  # it has more of them
    page = (result.folder / "report.html").read_text()
    assert "Ground truth beside prediction" in page and "Detection analysis" in page


def test_the_first_batch_has_its_boxes_drawn(result: RunResult) -> None:
    [logged] = [
        e
        for e in read_events(result.folder / "events.jsonl")
        if isinstance(e, ImageLogged) and e.title == "First training batch"
    ]
    with Image.open(result.folder / logged.path) as sheet:
        colors = {color for _, color in sheet.getcolors(maxcolors=sheet.width * sheet.height)}
    labels = {name for caption in logged.captions for name in caption.split(", ") if name}
    assert labels
    assert {class_color(int(name.removeprefix("class"))) for name in labels} <= colors


def test_the_recommended_threshold_has_the_highest_f1(result: RunResult) -> None:
    analysis = json.loads((result.folder / "detection.json").read_text())
    best, curve = analysis["best_threshold"], analysis["f1_curve"]
    assert best["f1"] == max(curve["f1"])
    assert curve["f1"][curve["score"].index(best["score"])] == best["f1"]


def test_a_classifier_has_its_worst_and_its_most_uncertain_images() -> None:
    overrides = [("length", "1ep", "test"), ("data.subset_percent", "20", "test")]
    run = reconv.train("quickstart", out="run", overrides=overrides).folder
    logged = {e.title: e for e in read_events(run / "events.jsonl") if isinstance(e, ImageLogged)}
    worst, uncertain = logged["Worst mistakes"], logged["Most uncertain images"]
    assert (len(worst.captions), len(uncertain.captions)) == (32, 16)
    assert worst.classes == tuple(caption.partition("target ")[2][0] for caption in worst.captions)
    assert uncertain.classes == ()
    for caption in worst.captions:
        predicted, target = re.fullmatch(r"predicted (.) \(\d+%\), target (.) · digits\[\d+\]", caption).groups()
        assert predicted != target
    shares = [re.fullmatch(r". \((\d+)%\) or . \((\d+)%\), target . · .*", c).groups() for c in uncertain.captions]
    assert all(int(first) - int(second) in (0, 1) for first, second in shares[:4])
    analysis = json.loads((run / "classification.json").read_text())
    assert analysis["metrics"]["accuracy"] == json.loads((run / "summary.json").read_text())["value"]


def test_evaluate_reproduces_the_metrics_of_the_run(result: RunResult, tmp_path: Path) -> None:
    [evaluated] = [e for e in read_events(result.folder / "events.jsonl") if isinstance(e, EvalFinished)]
    [again] = reconv.evaluate(result.folder, batch_size=7)
    assert again.metrics == pytest.approx(evaluated.metrics, abs=1e-6)
    assert again.num_samples == 20
    [some] = reconv.evaluate(result.folder, samples=5)
    assert (some.num_samples, some.partial) == (5, True)


def test_eval_prints_one_coco_metric_per_line(
    result: RunResult, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["eval", str(result.folder)])
    assert end.value.code == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["step", "4"]
    metrics = {line[0]: line[1:] for line in lines[1:]}
    assert {"ap", "ap50", "ap75", "ap_small", "ar1", "ar10", "ar100", "voc07", "voc10"} <= metrics.keys()
    assert metrics["images"] == ["20"]
    monkeypatch.setattr(coco, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(SystemExit) as end:
        main(["eval", str(result.folder)])
    assert end.value.code == 0
    printed = capsys.readouterr()
    assert "ap50" not in printed.out and "voc10" in printed.out
    assert "pip install 'reconv[detection]'" in printed.err


def test_coco_metric_without_pycocotools_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coco, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(UsageError, match="not installed") as refusal:
        reconv.train(write_recipe(tmp_path, metric="ap"), out=tmp_path / "run")
    assert refusal.value.code == ExitCode.USAGE
    assert "pip install" in refusal.value.hint
    assert not (tmp_path / "run").exists()
    result = reconv.train(write_recipe(tmp_path), out=tmp_path / "run")  # the VOC metric needs no package
    assert result.summary["metric"] == "voc10"
    assert "ap" not in json.loads((tmp_path / "run" / "detection.json").read_text())["metrics"]


class BoxDataset(DetectionDataset):
    """Two images with the given boxes."""

    def __init__(self, *truths: Annotation) -> None:
        self._truths = truths
        self.kind, self.class_names, self.class_ids, self.origin = "test", ("a", "b"), (1, 2), "two images"

    def __len__(self) -> int:
        return len(self._truths)

    def __getitem__(self, index: int) -> Sample:
        return Sample(np.zeros((40, 40, 3), np.uint8), -1, str(index))

    def annotation(self, index: int) -> Annotation:
        return self._truths[index]

    def box_counts(self) -> npt.NDArray[np.int64]:
        return np.array([len(truth) for truth in self._truths])

    def fingerprint(self) -> str:
        return "test"


def test_validation_set_without_objects_is_an_error() -> None:
    box, far = [[0, 0, 10, 10]], [[20, 20, 30, 30]]
    empty, crowd = make_annotation([], [], 1, 40, 40), make_annotation(box, [0], 2, 40, 40, is_crowd=[True])
    hard, plain = make_annotation(far, [1], 3, 40, 40, difficult=[True]), make_annotation(box, [0], 4, 40, 40)
    with pytest.raises(DataError, match="no object") as refusal:
        check_has_objects(BoxDataset(empty, crowd, hard))
    assert refusal.value.code == ExitCode.DATA
    check_has_objects(BoxDataset(empty, crowd, plain))
