"""Opening datasets: subsets and the background class."""

from __future__ import annotations

from pathlib import Path

import pytest

import reconv
from reconv.data.dataset import Subset, at_most, evenly_spaced
from reconv.data.readers.arrays import ArrayDataset
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.digits import open_digits
from reconv.recipe.parts.data import DataConfig


def test_subset_percent_selects_training_samples_evenly_and_keeps_validation(tree: Path) -> None:
    data = DataConfig(subset_percent=50)
    train = open_dataset("folder", tree, "train", data)
    assert isinstance(train, Subset)
    assert [train[index].target for index in range(len(train))] == [0, 0, 0, 1, 1, 2]
    assert len(open_dataset("folder", tree, "val", data)) == 5
    digits = open_dataset("digits", None, "train", data)
    assert isinstance(digits, ArrayDataset)
    assert len(digits) == 718
    assert digits.fingerprint() != open_digits("train").fingerprint()
    assert evenly_spaced(7, 100).tolist() == list(range(7))
    assert evenly_spaced(1000, 0.01).tolist() == [0]
    assert at_most(7, 3).tolist() == [0, 2, 4]
    assert at_most(3, 7).tolist() == [0, 1, 2]
    assert at_most(0, 7).tolist() == []  # of a dataset without usable images


@pytest.mark.parametrize("kind", ["digits", "synthetic"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_every_target_is_one_higher_and_class_0_never_occurs(kind: str, split: str) -> None:
    plain = open_dataset(kind, None, split, DataConfig())  # type: ignore[arg-type]
    shifted = open_dataset(kind, None, split, DataConfig(background_class=True))  # type: ignore[arg-type]
    assert shifted.class_names == ("background", *plain.class_names)
    assert len(shifted) == len(plain) > 100
    for index in range(50):
        assert shifted[index].target == plain[index].target + 1
    assert shifted.fingerprint() != plain.fingerprint()


def test_a_model_with_a_background_class_trains(tmp_path: Path) -> None:
    given = [("data.background_class", "true", "--set"), ("length", "2ep", "--set")]
    result = reconv.train("quickstart", out=tmp_path / "run", overrides=given)
    assert float(result.summary["value"]) > 0.8
    [prediction] = reconv.predict(result.folder, [_write_image(tmp_path)], top=11)
    assert "background" in {score.name for score in prediction.classes}


def _write_image(folder: Path) -> Path:
    from PIL import Image

    Image.new("L", (8, 8), 100).save(folder / "gray.png")
    return folder / "gray.png"
