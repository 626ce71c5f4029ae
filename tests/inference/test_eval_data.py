"""Evaluating a model on data other than its validation set."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from data_examples import encode, noise

import reconv
from reconv.build.saved_model import ModelClasses
from reconv.core.errors import DataError
from reconv.data.dataset import Dataset, all_targets
from reconv.data.readers.dataset_factory import open_dataset
from reconv.inference.eval_data import match_classes
from reconv.recipe.parts.data import DataConfig

CLASSES = ("ant", "bee", "cat")


def write(root: Path, names: tuple[str, ...], num_images: int = 10) -> Path:
    for label, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for number in range(num_images):
            (root / name / f"{number}.png").write_bytes(encode(noise(8, 8, 3, 100 * label + number)))
    return root


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("flat") / "animals", CLASSES)


@pytest.fixture(scope="module")
def run(flat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on class folders without splits."""
    settings = {"data.source": "auto", "batch.size": "8", "length": "2step", "schedule.warmup": "0step"}
    overrides = [(field, value, "--set") for field, value in settings.items()]
    out = tmp_path_factory.mktemp("runs") / "run"
    return reconv.train("quickstart", data=str(flat), out=out, overrides=overrides).folder


def count(run: Path, data: Path | None, **options: str) -> int:
    [result] = reconv.evaluate(run, data=data, **options)
    return result.num_samples


def test_only_held_out_images_of_the_training_data_are_evaluated(run: Path, flat: Path, tmp_path: Path) -> None:
    [own] = reconv.evaluate(run)
    assert 3 <= own.num_samples < 15
    [named] = reconv.evaluate(run, data=flat)
    moved = Path(shutil.copytree(flat, tmp_path / "moved"))
    [copied] = reconv.evaluate(run, data=moved)
    assert own.metrics == named.metrics == copied.metrics
    assert count(run, moved, split="train") == 30 - own.num_samples
    with pytest.raises(DataError, match="no test split"):
        reconv.evaluate(run, data=moved, split="test")


def test_a_validation_set_alone_is_evaluated_as_a_whole(run: Path, tmp_path: Path) -> None:
    some = write(tmp_path / "some", ("bee", "cat"), num_images=1)
    messages: list[str] = []
    [result] = reconv.evaluate(run, data=some, log=messages.append)
    assert result.num_samples == 2
    assert "all 2 images are evaluated; 2 of 3 classes, matched by name" in messages[0]
    (tmp_path / "tree").mkdir()
    some.rename(tmp_path / "tree" / "valid")
    assert reconv.evaluate(run, data=tmp_path / "tree")[0].metrics == result.metrics


def test_unknown_classes_are_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="differ from those the model was trained on") as caught:
        reconv.evaluate(run, data=write(tmp_path / "some", ("bee", "dog"), num_images=1))
    assert "not a class of the model: dog; it has 3 classes: ant, bee, cat" in caught.value.why


def test_classes_are_matched_by_name(tmp_path: Path) -> None:
    dataset = open_dataset("auto", write(tmp_path, ("bee", "cat"), 2), "train", DataConfig())
    matched = match_classes(dataset, ModelClasses(("cat", "ant", "bee"), are_known=True))
    assert _targets(dataset) == [0, 1]
    assert _targets(matched) == [2, 0]
    assert matched.class_names == ("cat", "ant", "bee")
    assert matched.fingerprint() != dataset.fingerprint()


def test_weights_without_names_take_data_with_as_many_classes(tmp_path: Path) -> None:
    dataset = open_dataset("auto", write(tmp_path, ("bee", "cat"), 2), "train", DataConfig())
    assert match_classes(dataset, ModelClasses(("0", "1"), are_known=False)) is dataset
    with pytest.raises(DataError, match="2 classes in the dataset, 3 in the model"):
        match_classes(dataset, ModelClasses(("0", "1", "2"), are_known=False))


def _targets(dataset: Dataset) -> list[int]:
    return [dataset[index].target for index in range(len(dataset))]


def test_several_labels_per_image_are_matched_by_name(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(encode(noise(8, 8, 3, number)))
    (tmp_path / "labels.csv").write_text("file,label,split\n0.png,bee;cat,val\n1.png,cat,val\n")
    dataset = open_dataset("auto", tmp_path, "val", DataConfig(), multilabel=True)
    matched = match_classes(dataset, ModelClasses(("cat", "ant", "bee"), are_known=True))
    assert [matched[index].labels for index in range(2)] == [(2, 0), (0,)]
    assert all_targets(matched).tolist() == [[1, 0, 1], [1, 0, 0]]
