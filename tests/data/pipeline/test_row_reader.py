"""Rows filled from files in two calls: the bytes of rows filled one by one, and errors in row order."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from data_examples import encode
from hypothesis import given
from hypothesis import strategies as st
from jpeg_examples import encoded, photograph
from PIL import Image

from reconv.core.errors import DataError
from reconv.data.dataset import Dataset, Subset, WithBackground, sample_files, select_rows
from reconv.data.decode import native
from reconv.data.pipeline.row_reader import RowReader, Source
from reconv.data.pipeline.sample_cache import CacheBudget, CachedDataset
from reconv.data.pipeline.samples import DecodePipeline, can_fill_from_files
from reconv.data.readers.csv_table import CSVDataset
from reconv.data.readers.digits import open_digits
from reconv.data.readers.folder import FolderDataset
from reconv.data.transforms.geometry import (
    CROP_AREA,
    CROP_POSITION,
    CROP_RATIO,
    crop_params,
    random_resized_crop_box,
)
from reconv.data.transforms.host import train_view
from reconv.recipe.parts.data import AugmentConfig, ColorJitterConfig, PreprocessConfig

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("compiled_decoder")]

SPEC, NATIVE = PreprocessConfig(size=32), AugmentConfig(decoder="native")
MADE = {"b.jpg": True, "c.jpg": False, "d.png": False, "e.jpg": True, "f.jpg": True}  # c is progressive
LARGE_BYTES = 17 * 2**20


@pytest.fixture
def mixed(tmp_path: Path) -> FolderDataset:
    """A class of files that the compiled decoder supports or rejects; the first is larger than its buffer."""
    large = encoded(photograph(70, 60))
    files = {
        "a.jpg": large + bytes(LARGE_BYTES - len(large)),  # decoders stop at the end marker
        "b.jpg": encoded(photograph(120, 90)),
        "c.jpg": encoded(photograph(120, 90), progressive=True),
        "d.png": encode(photograph(60, 50)),
        "e.jpg": encoded(photograph(90, 120), mode="L"),
        "f.jpg": encoded(photograph(300, 200, 7), subsampling="4:2:0"),
    }
    for class_name in ("cat", "dog"):
        (tmp_path / "train" / class_name).mkdir(parents=True)
        for name, data in files.items():
            (tmp_path / "train" / class_name / name).write_bytes(data)
        (tmp_path / "val" / class_name).mkdir(parents=True)  # else a part of train/ would be held out
        (tmp_path / "val" / class_name / "b.jpg").write_bytes(files["b.jpg"])
    return FolderDataset(tmp_path, "train")


def rows_of(pipeline: DecodePipeline, indices: list[int], first: int = 0) -> dict[str, npt.NDArray[np.generic]]:
    rows = {column.name: column.empty(len(indices)) for column in pipeline.columns}
    pipeline(np.array(indices), pipeline.params(3, np.arange(first, first + len(indices))), rows)
    return rows


def test_rows_filled_together_equal_rows_filled_one_by_one(mixed: FolderDataset) -> None:
    from_files, from_memory = (
        DecodePipeline(mixed, SPEC, NATIVE),
        DecodePipeline(CachedDataset(mixed, CacheBudget(0)), SPEC, NATIVE),
    )
    indices = [*range(len(mixed)), 1, 5, 1]
    ours, expected = rows_of(from_files, indices), rows_of(from_memory, indices)
    assert np.array_equal(ours["images"], expected["images"])
    assert ours["targets"].tolist() == expected["targets"].tolist() == [0] * 6 + [1] * 6 + [0] * 3
    for row, index in enumerate(indices):
        for alone in (from_files, from_memory):
            assert np.array_equal(rows_of(alone, [index], row)["images"][0], ours["images"][row])


def table_of(mixed: FolderDataset) -> Dataset:
    """The same files in a CSV's order: dogs first, every second image left out."""
    root = Path(mixed.path(0)).parents[2]
    names = [os.path.relpath(mixed.path(index), root) for index in range(0, len(mixed), 2)][::-1]
    lines = ["file,label,split", *(f"{name},{Path(name).parent.name},train" for name in names)]
    (root / "labels.csv").write_text("\n".join(lines))
    return CSVDataset(root, "train")


SOURCES: dict[str, Callable[[FolderDataset], Dataset]] = {
    "a folder": lambda mixed: mixed,
    "a table": table_of,
    "a share": lambda mixed: Subset(mixed, np.array([7, 2, 1, 11])),
    "a share of a share": lambda mixed: Subset(Subset(mixed, np.array([7, 2, 1, 11])), np.array([3, 0, 1])),
    "a background": WithBackground,
    "a share with a background": lambda mixed: Subset(WithBackground(mixed), np.array([5, 6])),
    "a table with a background": lambda mixed: WithBackground(table_of(mixed)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_any_file_backed_dataset_is_filled_from_files_with_the_same_result(mixed: FolderDataset, name: str) -> None:
    dataset = SOURCES[name](mixed)
    indices = [*range(len(dataset)), 0]
    found = sample_files(dataset, np.array(indices))
    assert found is not None
    for path, target, index in zip(*found, indices, strict=True):
        sample = dataset[index]
        assert (os.fsdecode(path), int(target), Path(os.fsdecode(path)).read_bytes()) == (
            sample.name,
            sample.target,
            sample.data,
        )
    ours = rows_of(DecodePipeline(dataset, SPEC, NATIVE), indices)
    expected = rows_of(DecodePipeline(CachedDataset(dataset, CacheBudget(0)), SPEC, NATIVE), indices)
    assert np.array_equal(ours["images"], expected["images"])
    assert ours["targets"].tolist() == expected["targets"].tolist() == [dataset[i].target for i in indices]


@pytest.mark.parametrize("name", SOURCES)
def test_supported_files_are_read_by_the_compiled_decoder_only(
    mixed: FolderDataset, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = SOURCES[name](mixed)
    good = [i for i in range(len(dataset)) if MADE.get(Path(dataset[i].name).name)]
    assert good
    pipeline = DecodePipeline(dataset, SPEC, NATIVE)
    monkeypatch.setattr(type(dataset), "__getitem__", None)  # whoever reads row by row fails
    assert rows_of(pipeline, good)["images"].any()


@pytest.mark.parametrize("decode_threads", [2, 5])
def test_threads_of_the_decoder_give_the_same_rows(mixed: FolderDataset, decode_threads: int) -> None:
    indices = [i % len(mixed) for i in range(150)]
    alone = rows_of(DecodePipeline(mixed, SPEC, NATIVE), indices)
    pipeline = DecodePipeline(mixed, SPEC, NATIVE, decode_threads)
    with ThreadPoolExecutor(4) as pool:
        for together in pool.map(lambda _: rows_of(pipeline, indices), range(8)):
            assert np.array_equal(together["images"], alone["images"])
            assert np.array_equal(together["targets"], alone["targets"])


def test_tasks_are_larger_where_the_decoder_has_threads_of_its_own(mixed: FolderDataset) -> None:
    photographs = Subset(mixed, np.array([1, 2, 5, 7]))  # without the PNG files
    assert DecodePipeline(photographs, SPEC, NATIVE, 2).min_rows_per_task == 64
    few = [
        DecodePipeline(photographs, SPEC, NATIVE),
        DecodePipeline(photographs, SPEC, None, 2),
        DecodePipeline(photographs, SPEC, AugmentConfig(decoder="pillow"), 2),
        DecodePipeline(mixed, SPEC, NATIVE, 2),
        DecodePipeline(CachedDataset(photographs, CacheBudget(0)), SPEC, NATIVE, 2),
        DecodePipeline(Subset(mixed, np.array([1, 2, 8])), SPEC, NATIVE, 2),  # two of three are progressive
    ]
    assert [pipeline.min_rows_per_task for pipeline in few] == [4] * 6


def test_datasets_without_files_or_in_memory_have_no_paths(mixed: FolderDataset) -> None:
    one = np.array([0])
    pixels = open_digits("train")
    assert sample_files(mixed, one) is not None
    assert [
        sample_files(dataset, one) for dataset in (pixels, Subset(pixels, one), CachedDataset(mixed, CacheBudget(0)))
    ] == [None] * 3


class Paths(NamedTuple):
    files: list[bytes]

    def paths(self) -> list[bytes]:
        return self.files

    def read(self, row: int) -> Source:
        raise DataError(f"row {row} was left to be read alone")


def test_unsupported_files_are_filled_alone(mixed: FolderDataset) -> None:
    paths = Paths([os.fsencode(mixed.path(index)) for index in range(6)])
    images = np.zeros((6, 3, 32, 32), np.uint8)
    outcomes = RowReader(train_view(SPEC, NATIVE), True).fill(paths, crop_params(NATIVE, 3, np.arange(6)), images)
    assert [not isinstance(outcome, DataError) for outcome in outcomes] == [False, *MADE.values()]
    assert [outcomes[row] for row in (1, 4, 5)] == [(120, 90), (90, 120), (300, 200)]


@pytest.mark.parametrize("damage", ["vanished", "cut", "empty", "device", "folder"])
def test_of_two_bad_files_of_a_task_the_first_is_reported(mixed: FolderDataset, damage: str) -> None:
    for index in (2, 4):
        path = Path(mixed.path(index))
        data = path.read_bytes()
        path.unlink()
        match damage:
            case "cut":
                path.write_bytes(data[: len(data) // 2])
            case "empty":
                path.touch()
            case "folder":
                path.mkdir()
            case "device":
                path.symlink_to("/dev/null")
    with pytest.raises(DataError) as caught:
        rows_of(DecodePipeline(mixed, SPEC, NATIVE), [0, 1, 2, 3, 4, 5])
    assert "c.jpg" in str(caught.value.where)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 700), st.integers(1, 700)), min_size=1, max_size=20),
    position=st.integers(0, 2**40),
    scale=st.sampled_from([(0.08, 1.0), (1.0, 1.0), (0.9, 1.0)]),
    ratio=st.sampled_from([(3 / 4, 4 / 3), (0.1, 1.0), (1.0, 1.0)]),
    attempts=st.sampled_from([1, 10]),
    fallback=st.sampled_from(["center", "whole"]),
)
def test_boxes_of_a_task_are_those_of_each_image(
    sizes: list[tuple[int, int]],
    position: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    attempts: int,
    fallback: str,
) -> None:
    augment = AugmentConfig(scale=scale, ratio=ratio, attempts=attempts, fallback=fallback)
    params = crop_params(augment, 0, position + np.arange(len(sizes), dtype=np.int64))
    rule = native.CropRule(*scale, *ratio, attempts, fallback == "whole")
    areas, ratios, positions = (params[name] for name in (CROP_AREA, CROP_RATIO, CROP_POSITION))
    boxes = native.crop_boxes(np.array(sizes, np.int32), 2**20, areas, ratios, positions, rule)
    expected = [
        list(random_resized_crop_box(*size, select_rows(params, row), augment)) for row, size in enumerate(sizes)
    ]
    assert boxes.tolist() == expected


def test_images_without_or_with_too_many_pixels_have_an_empty_box() -> None:
    rows, two = np.full((3, 1), 0.5), np.full((3, 2), 0.5)
    rule = native.CropRule(1.0, 1.0, 1.0, 1.0, 1, 0)
    sizes = np.array([[0, 9], [4, 4], [5, 4]], np.int32)
    assert native.crop_boxes(sizes, 16, rows, rows, two, rule).tolist() == [[0] * 4, [0, 0, 4, 4], [0] * 4]
    with pytest.raises(ValueError, match="rows of 2 float64"):
        native.crop_boxes(sizes, 16, rows, rows, np.full((3, 4), 0.5)[:, ::2], rule)


def test_files_are_read_until_one_does_not_fit(mixed: FolderDataset, tmp_path: Path) -> None:
    paths = [os.fsencode(mixed.path(index)) for index in (1, 3, 5)]
    sizes = [os.path.getsize(path) for path in paths]
    for num_fitting in range(4):
        capacity = sum(sizes[:num_fitting]) + (sizes[num_fitting] - 1 if num_fitting < 3 else 0)
        buffer = np.full(capacity + 8, 7, np.uint8)
        ends, found = native.read_files(paths, buffer[:capacity])
        assert ends.tolist() == np.cumsum(sizes[:num_fitting]).tolist()
        assert found.tolist() == [[120, 90], [0, 0], [300, 200]][:num_fitting]
        assert (buffer[sum(sizes[:num_fitting]) :] == 7).all()


def test_an_unreadable_file_takes_no_space_in_the_buffer(mixed: FolderDataset, tmp_path: Path) -> None:
    paths = [os.fsencode(mixed.path(1)), os.fsencode(tmp_path / "none"), os.fsencode(tmp_path)]
    ends, sizes = native.read_files(paths, np.empty(2**20, np.uint8))
    assert sizes.tolist() == [[120, 90], [0, 0], [0, 0]]
    assert len(set(ends.tolist())) == 1


def test_files_are_always_closed(mixed: FolderDataset, tmp_path: Path) -> None:
    paths = [os.fsencode(mixed.path(index)) for index in range(6)] + [os.fsencode(tmp_path)]
    free = os.dup(0)  # the lowest free descriptor
    os.close(free)
    for first in range(len(paths)):
        native.read_files(paths[first:], np.empty(2**20, np.uint8))
    again = os.dup(0)
    os.close(again)
    assert again == free


def test_an_image_with_too_many_pixels_is_not_filled(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        Image.new("L", (10_000, 9_000)).save(tmp_path / split / "cat" / "large.jpg")
    with pytest.raises(DataError, match="too large"):
        rows_of(DecodePipeline(FolderDataset(tmp_path, "train"), SPEC, NATIVE), [0])


def test_images_that_need_more_than_a_crop_are_not_filled_from_files() -> None:
    assert can_fill_from_files(SPEC, NATIVE)
    assert not can_fill_from_files(PreprocessConfig(size=32, channels=1), NATIVE)
    assert not can_fill_from_files(PreprocessConfig(size=32, interpolation="nearest"), NATIVE)
    for change in ({"decoder": "pillow"}, {"crop": "none"}, {"color_jitter": ColorJitterConfig(brightness=0.4)}):
        assert not can_fill_from_files(SPEC, NATIVE.model_copy(update=change))


def test_outputs_that_are_not_contiguous_are_rejected() -> None:
    ends, boxes = np.zeros(2, np.int64), np.zeros((2, 4))
    for out in (np.zeros((2, 3, 8, 16), np.uint8)[..., ::2], np.zeros((1, 3, 8, 8), np.uint8), np.zeros((2, 3, 8, 8))):
        with pytest.raises(ValueError, match=r"contiguous uint8|for each of 2 files"):
            native.crop_files(np.zeros(8, np.uint8), ends, boxes, out, interpolation="bilinear", antialias=True)
