"""Your own map-style datasets as data of a run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from reconv.core.custom_code import CustomCodeError, provide
from reconv.core.errors import DataError, ReconvError, UsageError
from reconv.data.dataset import LabelError, all_targets
from reconv.data.inspect.check import check
from reconv.data.readers.custom import CustomDataset
from reconv.data.readers.dataset_factory import open_dataset
from reconv.recipe.parts.data import DataConfig

PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
LETTERS = ["a", "b", "c"]


class Listed:
    """A dataset of the given samples."""

    def __init__(self, *samples: Any, classes: Any = LETTERS) -> None:
        self.samples, self.classes = samples, classes

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.samples[index], Exception):
            raise self.samples[index]
        return self.samples[index]


def opened(*samples: Any) -> CustomDataset:
    return CustomDataset(Listed(*samples), "pkg:make", "train")


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.fromarray(PIXELS), PIXELS),
        (Image.fromarray(PIXELS[:, :, 0]), PIXELS[:, :, :1]),
        (Image.fromarray(np.dstack([PIXELS, PIXELS[:, :, 0]])), PIXELS),  # an alpha channel is dropped
        (PIXELS, PIXELS),
        (PIXELS[:, :, 0], PIXELS[:, :, :1]),
        (torch.from_numpy(PIXELS).permute(2, 0, 1), PIXELS),
    ],
)
def test_images_of_every_kind_become_the_same_pixels(image: Any, expected: Any) -> None:
    sample = opened((image, torch.tensor(2)))[0]
    assert np.array_equal(sample.data, expected)
    assert sample.target == 2 and sample.name == "pkg:make(train)[0]"


def test_bytes_of_an_image_file_stay_encoded() -> None:
    assert opened((b"\xff\xd8", 1))[0].data == b"\xff\xd8"


@pytest.mark.parametrize(
    ("sample", "error", "message"),
    [
        ((torch.rand(3, 4, 4), 0), UsageError, r"a tensor \[3, 4, 4\] of torch.float32"),
        ((PIXELS.astype(np.float64), 0), UsageError, "of float64"),
        (("path.png", 0), UsageError, "is a str"),
        (PIXELS, UsageError, "not a pair"),
        ((PIXELS, "cat"), LabelError, "not a class index"),
        ((PIXELS, 0.5), LabelError, "not a class index"),
        (OSError("truncated"), DataError, "cannot be read"),
        (KeyError("typo"), CustomCodeError, "raised KeyError"),
    ],
)
def test_a_sample_that_cannot_be_used_is_an_error_that_names_it(
    sample: Any, error: type[ReconvError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        opened((PIXELS, 0), sample)[1]
    assert "pkg:make(train)[1]" in str(caught.value)


def test_class_names_are_required_and_found_behind_a_subset() -> None:
    subset = torch.utils.data.Subset(Listed((PIXELS, 0), (PIXELS, 1)), [1])  # type: ignore[arg-type]
    assert CustomDataset(subset, "pkg:make", "val").class_names == ("a", "b", "c")
    with pytest.raises(UsageError, match="does not say what its classes are"):
        CustomDataset(Listed(classes=None), "pkg:make", "val")


def test_the_fingerprint_changes_with_length_classes_and_the_datasets_own() -> None:
    class Own(Listed):
        def fingerprint(self) -> str:
            return str(self.samples)

    def digest(dataset: Any) -> str:
        return CustomDataset(dataset, "pkg:make", "train").fingerprint()

    found = [digest(Listed(1, 2)), digest(Listed(1)), digest(Listed(1, 2, classes=["a"])), digest(Own(1, 2))]
    assert len({*found, digest(Own(1, 3))}) == 5
    assert digest(Listed(3, 4)) == found[0]


def test_it_survives_pickling_and_gives_targets_where_it_has_them() -> None:
    copy = pickle.loads(pickle.dumps(opened((PIXELS, 1), (PIXELS, 2))))
    assert np.array_equal(copy[1].data, PIXELS)
    assert all_targets(copy).tolist() == [1, 2]
    with_targets = Listed("unread", "unread")
    with_targets.targets = [2, 0]  # type: ignore[attr-defined]
    assert all_targets(CustomDataset(with_targets, "pkg:make", "train")).tolist() == [2, 0]


def test_a_maker_gets_split_options_and_the_path_if_it_takes_one(tmp_path: Path) -> None:
    calls = []

    def make(split: str, path: Path | None, scale: int = 1) -> Listed:
        calls.append((split, path, scale))
        return Listed((PIXELS, 0))

    def without_path(split: str) -> Listed:
        return Listed((PIXELS, 0))

    provide({"python:make_j": make, "python:without_j": without_path})
    data = DataConfig(source="python:make_j", options={"scale": 3})
    dataset = open_dataset(data.source, tmp_path, "val", data)
    assert calls == [("val", tmp_path, 3)] and len(dataset) == 1
    with pytest.raises(UsageError, match="cannot be called with split, path, wrong"):
        open_dataset(data.source, None, "val", DataConfig(source=data.source, options={"wrong": 3}))
    with pytest.raises(UsageError, match="takes no `path`"):
        open_dataset("python:without_j", tmp_path, "val", DataConfig())


def test_data_check_reads_it() -> None:
    provide({"python:checked_k": lambda split: Listed((PIXELS, 0), (PIXELS[::-1], 1), OSError("bad"))})
    report = check("python:checked_k", DataConfig(), 1)
    assert report.splits["train"].num_samples == 3
    assert [path for path, _ in report.splits["train"].bad] == ["python:checked_k(train)[2]"]
