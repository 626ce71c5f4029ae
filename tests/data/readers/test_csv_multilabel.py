"""Images with several labels each, listed in a CSV file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from data_examples import encode, noise

from reconv.core.errors import DataError
from reconv.data.dataset import all_targets, class_counts, is_multilabel
from reconv.data.inspect.check import check
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.sample_cache import CacheBudget, cache_samples
from reconv.data.readers.csv_table import MultilabelCSVDataset
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.detect import detect
from reconv.recipe.parts.data import DataConfig, PreprocessConfig

BY_CELL = ["file,label,split", "0.png,cat;dog,train", "1.png,,train", "2.png,dog | emu,train", "3.png,cat,val"]
BY_COLUMN = ["file,dog,cat,emu,split", "0.png,1,1,0,train", "1.png,0,0,0,train", "2.png,1,0,1,train", "3.png,0,1,0,val"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(encode(noise(8, 8, 3, number)))
    return tmp_path


def write(folder: Path, lines: list[str]) -> Path:
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("lines", "names", "rows"),
    [
        (BY_CELL, ("cat", "dog", "emu"), [[1, 1, 0], [0, 0, 0], [0, 1, 1]]),
        (BY_COLUMN, ("dog", "cat", "emu"), [[1, 1, 0], [0, 0, 0], [1, 0, 1]]),
    ],
)
def test_both_layouts_give_multi_hot_targets(
    folder: Path, lines: list[str], names: tuple[str, ...], rows: list[list[int]]
) -> None:
    root = write(folder, lines)
    assert detect(root).kind == "csv"
    whole = open_dataset("auto", root, "train", DataConfig(), multilabel=True)
    assert is_multilabel(whole) and whole.class_names == names
    assert whole[2].labels == tuple(np.flatnonzero(rows[2]))
    assert all_targets(whole).tolist() == rows
    assert class_counts(whole) == tuple(np.sum(rows, axis=0))
    half = cache_samples(
        open_dataset("csv", root, "train", DataConfig(subset_percent=67), multilabel=True), CacheBudget(0)
    )
    assert is_multilabel(half) and all_targets(half).tolist() == rows[:2]
    for dataset, expected in ((whole, rows), (half, rows[:2])):
        [batch] = EvalLoader(dataset, PreprocessConfig(size=8, resize=8), 3, DataContext.on_host())
        assert torch.equal(batch["targets"], torch.tensor(expected, dtype=torch.float32))
    assert MultilabelCSVDataset(root, "val").class_names == names


def test_a_fingerprint_changes_with_a_label(folder: Path) -> None:
    before = MultilabelCSVDataset(write(folder, BY_CELL), "train").fingerprint()
    assert MultilabelCSVDataset(write(folder, BY_CELL), "train").fingerprint() == before
    changed = [line.replace("dog | emu", "cat | emu") for line in BY_CELL]
    assert MultilabelCSVDataset(write(folder, changed), "train").fingerprint() != before


@pytest.mark.parametrize(
    ("line", "wrong", "text"),
    [
        (BY_CELL, "3.png,fox,val", "label 'fox' occurs in no training row"),
        (BY_COLUMN, "3.png,0,yes,0,val", "column cat has 'yes'"),
        (BY_CELL, ",cat,val", "row has no file"),
        (["file,dog,dog,split", "0.png,1,1,train"], "1.png,0,1,val", "column dog more than once"),
    ],
)
def test_a_wrong_table_is_refused(folder: Path, line: list[str], wrong: str, text: str) -> None:
    with pytest.raises(DataError, match=text):
        MultilabelCSVDataset(write(folder, [*line[:4], wrong]), "val")


def test_a_column_per_class_needs_the_multilabel_task_and_folders_the_other(folder: Path) -> None:
    with pytest.raises(DataError, match="a column per class") as caught:
        open_dataset("auto", write(folder, BY_COLUMN), "train", DataConfig())
    assert "--set task=multilabel" in str(caught.value)
    origin = open_dataset(
        "auto", write(folder, [*BY_CELL[:2], "1.png,cat,train", BY_CELL[-1]]), "train", DataConfig()
    ).origin
    assert "for several per image: train with task: multilabel" in origin
    (folder / "labels.csv").unlink()
    for number, split in enumerate(("train", "val")):
        (folder / split / "cat").mkdir(parents=True)
        (folder / f"{number}.png").rename(folder / split / "cat" / f"{number}.png")
    with pytest.raises(DataError, match="folder data has one class per image"):
        open_dataset("auto", folder, "train", DataConfig(), multilabel=True)


@pytest.mark.parametrize("lines", [BY_CELL, BY_COLUMN])
def test_the_check_counts_labels_and_finds_an_image_with_two_sets_of_them(folder: Path, lines: list[str]) -> None:
    (folder / "1.png").write_bytes((folder / "0.png").read_bytes())
    report = check(str(write(folder, lines)), DataConfig(), 1)
    assert dict(report.splits["train"].classes) == {"cat": 1, "dog": 2, "emu": 1}
    assert [issue.count for issue in report.issues if issue.kind == "two-labels"] == [1]
    assert {name for name, (_, rows) in report.examples.items() if rows} == {"cat", "dog", "emu"}
