"""Images listed in a CSV file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from data_examples import encode, noise

from reconv.core.errors import DataError, ExitCode
from reconv.data.readers.csv_table import CSVDataset
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.detect import detect
from reconv.recipe.parts.data import DataConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten images, half of them one folder down."""
    root = tmp_path / "flat"
    (root / "more").mkdir(parents=True)
    for number in range(10):
        name = f"{number}.png" if number % 2 else f"more/{number}.png"
        (root / name).write_bytes(encode(noise(5, 6, 3, number)))
    return root


def write(folder: Path, *lines: str, name: str = "labels.csv") -> Path:
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def test_a_table_with_splits_is_found_and_read_in_its_order(folder: Path) -> None:
    rows = ["7.png,cat,train", "more/0.png,ant,train", "1.png,ant,val", "more/2.png,bee,train", "3.png,cat,validation"]
    write(folder, "file,label,split", *rows)
    found = detect(folder)
    assert (found.kind, found.path) == ("csv", folder)
    assert "labels.csv" in found.why
    train, val = (open_dataset("auto", folder, split, DataConfig()) for split in ("train", "val"))  # type: ignore[arg-type]
    assert train.class_names == val.class_names == ("ant", "bee", "cat")
    assert [train[index].target for index in range(len(train))] == [2, 0, 1]
    assert [val[index].target for index in range(len(val))] == [0, 2]
    assert train[0].data == encode(noise(5, 6, 3, 7))
    assert train[1].name == os.path.join(folder, "more/0.png")
    assert train.fingerprint() != val.fingerprint()


def test_without_a_split_column_every_fifth_row_is_for_validation(folder: Path) -> None:
    names = [f"{n}.png" if n % 2 else f"more/{n}.png" for n in range(10)]
    write(folder, "label,file", *(f"{n % 3},{name}" for n, name in enumerate(names)))
    train, val = CSVDataset(folder, "train"), CSVDataset(folder, "val")
    assert (len(train), len(val)) == (8, 2)
    assert [os.path.relpath(val.path(index), folder) for index in range(2)] == [names[0], names[5]]
    assert "every 5th row is for validation" in val.origin


def test_a_table_of_training_rows_only_is_split_by_its_file_names(folder: Path) -> None:
    names = [f"{n}.png" if n % 2 else f"more/{n}.png" for n in range(10)]
    write(folder, "file,label,split", *(f"{name},{n % 2},train" for n, name in enumerate(names)))
    train, val = CSVDataset(folder, "train"), CSVDataset(folder, "val")
    assert len(train) + len(val) == 10 and set(val.targets) == {0, 1}
    assert f"{len(train)} images for training, {len(val)} for validation" in train.origin
    reordered = write(folder, "file,label,split", *[f"{name},{n % 2},train" for n, name in enumerate(names)][::-1])
    again = CSVDataset(reordered, "val")
    assert {again.path(i) for i in range(len(again))} == {val.path(i) for i in range(len(val))}


def test_another_fraction_replaces_every_fifth_row(folder: Path) -> None:
    names = [f"{n}.png" if n % 2 else f"more/{n}.png" for n in range(10)]
    write(folder, "file,label", *(f"{name},{n % 2}" for n, name in enumerate(names)))
    val = CSVDataset(folder, "val", data=DataConfig(validation_split=0.7))
    assert len(val) > 2 and "about 70% of each class" in val.origin


def test_test_rows_are_a_split_and_validation_rows_alone_have_their_own_classes(folder: Path) -> None:
    write(folder, "file,label,split", "1.png,a,train", "3.png,b,train", "5.png,b,valid", "7.png,b,test")
    assert [CSVDataset(folder, split).targets.tolist() for split in ("train", "val", "test")] == [[0, 1], [1], [1]]
    write(folder, "file,label,split", "5.png,b,val", "7.png,c,val")
    assert CSVDataset(folder, "val").class_names == ("b", "c")
    with pytest.raises(DataError, match="no training rows"):
        CSVDataset(folder, "train")
    with pytest.raises(DataError, match="no test rows"):
        CSVDataset(folder, "test")


def test_numbers_are_sorted_as_numbers_and_text_as_text(folder: Path) -> None:
    write(folder, "file,label,split", "1.png,10,train", "3.png,9,train", "5.png,2,train", "7.png,10,val")
    assert CSVDataset(folder, "val").class_names == ("2", "9", "10")
    write(folder, "file,label,split", "1.png,10,train", "3.png,9,train", "5.png,b,train", "7.png,10,val")
    assert CSVDataset(folder, "val").class_names == ("10", "9", "b")


def test_quotes_commas_a_byte_order_mark_and_spaces_are_read(folder: Path) -> None:
    (folder / "a, b.png").write_bytes(encode(noise(5, 6, 3, 0)))
    text = '\ufefffile, label ,split,note\r\n"a, b.png","tench, Tinca",train,"two\nlines"\r\n\r\n'
    text += '1.png,"x ""y""",train,\r\n'
    (folder / "t.CSV").write_text(text + '1.png,"tench, Tinca",val,\r\n', newline="")
    source = CSVDataset(folder, "train")
    assert source.class_names == ("tench, Tinca", 'x "y"')
    assert source.path(0) == os.path.join(folder, "a, b.png")


BROKEN: dict[str, tuple[tuple[str, ...], str, str]] = {
    "a missing file": (("file,label,split", "1.png,a,train", "absent.png,a,val"), "missing file: absent.png", "line 3"),
    "a missing folder": (("file,label,split", "1.png,a,train", "no/1.png,a,val"), "missing file: no/1.png", "line 3"),
    "a column twice": (("file,label,label", "1.png,a,b"), "column label more than once", "line 1"),
    "a file column twice": (("file,file,label", "1.png,a,b"), "column file more than once", "line 1"),
    "too few cells": (("file,label,split", "1.png,a,train", "3.png,a"), "2 cells instead of 3", "line 3"),
    "too many cells": (("file,label", "1.png,a,train"), "3 cells instead of 2", "line 2"),
    "an unknown split": (("file,label,split", "1.png,a,train", "3.png,a,dev"), "split 'dev'", "line 3"),
    "no label": (("file,label,split", "1.png,,train"), "row has no (file|label)", "line 2"),
    "no training rows": (("file,label,split", "1.png,a,val"), "no training rows", "line 1"),
    "no rows": (("file,label,split",), "no training rows", "line 1"),
    "a class of validation alone": (("file,label,split", "1.png,a,train", "3.png,b,val"), "label 'b'", "line 3"),
    "an open quote": (("file,label,split", "1.png,a,train", '"3.png,b,val'), "not valid CSV", "line 3"),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_damaged_table_is_refused_with_its_path_and_line(folder: Path, name: str) -> None:
    lines, what, where = BROKEN[name]
    write(folder, *lines)
    with pytest.raises(DataError, match=what) as caught:
        for split in ("train", "val"):
            open_dataset("auto", folder, split, DataConfig())  # type: ignore[arg-type]
    assert caught.value.code == ExitCode.DATA
    assert caught.value.where == f"{folder / 'labels.csv'}, {where}"
    assert caught.value.hint


def test_two_tables_are_ambiguous_and_other_csv_files_are_ignored(folder: Path) -> None:
    write(folder, "file,label,split", "1.png,a,train", "3.png,a,val")
    write(folder, "ImageId,PredictionString", "x,y", name="solution.csv")
    assert len(open_dataset("auto", folder, "train", DataConfig())) == 1
    write(folder, "file,label", "1.png,a", name="other.csv")
    with pytest.raises(DataError, match="2 CSV files") as caught:
        open_dataset("auto", folder, "train", DataConfig())
    assert "labels.csv, other.csv" in caught.value.why


def test_a_file_deleted_after_opening_is_a_data_error(folder: Path) -> None:
    write(folder, "file,label,split", "1.png,a,train", "3.png,a,val")
    source = CSVDataset(folder, "train")
    (folder / "1.png").unlink()
    with pytest.raises(DataError, match="cannot read"):
        source[0]


def test_class_folders_beside_a_table_are_ambiguous(tree: Path) -> None:
    write(tree, "file,label", "train/ant/000.JPEG,a")
    with pytest.raises(DataError, match="more than one kind of data"):
        detect(tree)
    assert detect(tree, "folder").kind == "folder"
    assert detect(tree, "csv").kind == "csv"


def test_the_index_takes_under_100_bytes_per_sample(folder: Path) -> None:
    write(folder, "file,label,split", *["more/0.png,a,train"] * 20_000, "1.png,a,val")
    source = CSVDataset(folder, "train")
    assert len(source) == 20_000
    assert source.index_bytes / len(source) < 100


def test_all_missing_files_of_a_table_are_reported_at_once(folder: Path) -> None:
    write(folder, "file,label,split", "1.png,a,train", "gone.png,a,train", "3.png,a,val", "no/1.png,a,val")
    with pytest.raises(DataError, match=r"missing file: gone\.png") as caught:
        CSVDataset(folder, "train")
    assert caught.value.where.endswith("line 3")
    assert "1 more:" in caught.value.why and caught.value.why.endswith("line 5")
