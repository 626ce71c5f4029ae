"""Reviews beside cleanlab, usearch, pycocotools, Label Studio's SDK and FiftyOne.

pip install cleanlab usearch pycocotools label-studio-sdk fiftyone && make external
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from review_examples import write_photos, write_predictions
from sklearn.metrics import average_precision_score

from reconv.review import neighbors
from reconv.review.exports import export
from reconv.review.labels import confident_joint, judge_labels, normalized_margin, self_confidence
from reconv.review.run import Review, ReviewOptions, review


def example(seed: int, num_classes: int = 7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """True classes, labels of which a fifth is wrong, and probabilities of a network."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(3000, num_classes)) * 3
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    true = (rng.random((3000, 1)) < probs.cumsum(axis=1)).argmax(axis=1)
    wrong = rng.random(3000) < 0.2
    return true, np.where(wrong, (true + rng.integers(1, num_classes, 3000)) % num_classes, true), probs


@pytest.mark.parametrize("seed", range(5))
def test_confident_learning_equals_cleanlab(seed: int) -> None:
    count = pytest.importorskip("cleanlab.count", reason="pip install cleanlab")
    rank = pytest.importorskip("cleanlab.rank")
    true, labels, probs = example(seed)
    theirs = count.compute_confident_joint(labels, probs)  # rounded
    assert np.abs(confident_joint(labels, probs) - theirs).max() <= 1
    assert self_confidence(labels, probs) == pytest.approx(rank.get_self_confidence_for_each_label(labels, probs))
    assert normalized_margin(labels, probs) == pytest.approx(rank.get_normalized_margin_for_each_label(labels, probs))
    ours = average_precision_score(labels != true, judge_labels(labels, probs).wrong)
    best = average_precision_score(labels != true, 1 - rank.get_self_confidence_for_each_label(labels, probs))
    assert ours >= best - 0.01


def test_the_index_finds_the_exact_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("usearch.index", reason="pip install usearch")
    features = np.random.default_rng(0).normal(size=(4000, 32)).astype(np.float32)
    exact, similarities = neighbors.nearest_neighbors(features, 5)
    monkeypatch.setattr(neighbors, "MAX_EXACT", 1000)
    found, theirs = neighbors.nearest_neighbors(features, 5)
    again, _ = neighbors.nearest_neighbors(features, 5)
    assert np.array_equal(found, again)
    assert found.shape == exact.shape and (found != np.arange(4000)[:, None]).all()
    assert np.mean([len(set(a) & set(b)) / 5 for a, b in zip(found, exact, strict=True)]) > 0.9
    assert theirs[:, 0] == pytest.approx(similarities[:, 0], abs=0.2)


@pytest.fixture
def found(tmp_path: Path) -> Review:
    photos = write_photos(tmp_path / "photos")
    table = write_predictions(tmp_path / "p.csv", photos, {"train/cat/1.png": "owl", "val/dog/2.png": "cat"})
    return review(ReviewOptions(str(photos), tmp_path / "out", predictions=(table,)), lambda text: None)


def test_pycocotools_reads_the_export(found: Review, tmp_path: Path) -> None:
    coco = pytest.importorskip("pycocotools.coco", reason="pip install pycocotools")
    export(found.images, list(found.findings), "coco", tmp_path)
    loaded = coco.COCO(str(tmp_path / "coco.json"))
    assert len(loaded.getImgIds()) == len(loaded.getAnnIds()) == 2
    assert [category["name"] for category in loaded.loadCats(loaded.getCatIds())] == ["cat", "dog", "owl"]


def test_label_studio_accepts_the_tasks(found: Review, tmp_path: Path) -> None:
    interface = pytest.importorskip("label_studio_sdk.label_interface", reason="pip install label-studio-sdk")
    export(found.images, list(found.findings), "label-studio", tmp_path)
    config = interface.LabelInterface((tmp_path / "label-studio.xml").read_text())
    config.validate()
    tasks: list[dict[str, Any]] = json.loads((tmp_path / "label-studio.json").read_text())
    assert len(tasks) == 2
    for task in tasks:
        assert config.validate_task(task, validate_regions_only=False)
        assert all(config.validate_prediction(prediction) for prediction in task["predictions"])


def test_fiftyone_imports_the_export(found: Review, tmp_path: Path) -> None:
    fiftyone = pytest.importorskip("fiftyone", reason="pip install fiftyone")
    export(found.images, list(found.findings), "fiftyone", tmp_path)
    dataset = fiftyone.Dataset.from_dir(
        dataset_type=fiftyone.types.FiftyOneImageClassificationDataset,
        labels_path=str(tmp_path / "fiftyone" / "labels.json"),
        data_path=str(tmp_path / "fiftyone" / "data.json"),
    )
    try:
        assert sorted(sample.ground_truth.label for sample in dataset) == ["cat", "dog"]
    finally:
        dataset.delete()
