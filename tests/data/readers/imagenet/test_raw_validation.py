"""ImageNet's validation images without class folders, and where their labels are found."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_examples import encode, noise

from reconv.cli import main
from reconv.core.errors import DataError
from reconv.data.dataset import Split
from reconv.data.inspect.check import check
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.detect import detect
from reconv.data.readers.folder import FolderDataset
from reconv.recipe.parts.data import DataConfig

WNIDS = ("n01440764", "n01443537", "n01484850")
ANSWERS = (2, 0, 1, 2)
FILES = [f"ILSVRC2012_val_{number:08}.JPEG" for number in range(1, 5)]
SYNSETS = [WNIDS[answer] for answer in ANSWERS]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    root = tmp_path / "imagenet"
    for number, wnid in enumerate(WNIDS):
        (root / "train" / wnid).mkdir(parents=True)
        (root / "train" / wnid / f"{wnid}_1.JPEG").write_bytes(encode(noise(12, 12, 3, number), "JPEG"))
    (root / "validation").mkdir()
    for number, file in enumerate(FILES):
        (root / "validation" / file).write_bytes(encode(noise(12, 12, 3, 10 + number), "JPEG"))
    return root


LABELS = {
    "synset_labels.txt": "\n".join(SYNSETS),
    "validation/synset_labels.txt": "\n".join(SYNSETS),
    "val.txt": "\n".join(f"{file} {answer}" for file, answer in sorted(zip(FILES, ANSWERS, strict=True), reverse=True)),
    "imagenet_2012_validation_synset_labels.txt": "\n".join(SYNSETS),
    "LOC_val_solution.csv": "ImageId,PredictionString\n"
    + "\n".join(f"{file[:-5]},{synset} 1 2 3 4 " for file, synset in zip(FILES, SYNSETS, strict=True)),
    "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt": "30\n10\n20\n30\n",
}


@pytest.mark.parametrize("place", LABELS)
def test_labels_are_found_beside_the_images(raw: Path, place: str) -> None:
    (raw / place).parent.mkdir(parents=True, exist_ok=True)
    (raw / place).write_text(LABELS[place])
    if "devkit" in place:
        (raw / place).with_name("synsets.txt").write_text("10 n01440764\n20 n01443537\n30 n01484850\n")
    assert detect(raw).kind == "folder"
    val = open_dataset("auto", raw, "val", DataConfig())
    assert [val[index].target for index in range(len(val))] == list(ANSWERS)
    assert val[1].name == str(raw / "validation" / FILES[1])
    assert val[1].data == (raw / "validation" / FILES[1]).read_bytes()
    report = check(str(raw), DataConfig(), 1)
    assert {split: own.num_samples for split, own in report.splits.items()} == {"train": 3, "val": 4}
    assert not report.errors


def test_kaggles_list_is_found_three_levels_up(raw: Path) -> None:
    inner = raw / "ILSVRC" / "Data" / "CLS-LOC"
    inner.mkdir(parents=True)
    (raw / "train").rename(inner / "train")
    (raw / "validation").rename(inner / "val")
    (raw / "LOC_val_solution.csv").write_text(LABELS["LOC_val_solution.csv"])
    assert FolderDataset(inner, "val").targets.tolist() == list(ANSWERS)


def test_some_of_the_images_keep_their_labels(raw: Path) -> None:
    (raw / "validation" / FILES[0]).unlink()
    for name in ("synset_labels.txt", "LOC_val_solution.csv"):
        (raw / name).write_text(LABELS[name])
        assert FolderDataset(raw, "val").targets.tolist() == list(ANSWERS[1:])
        (raw / name).unlink()


def test_without_labels_the_error_names_what_was_looked_for(raw: Path) -> None:
    with pytest.raises(DataError, match="neither class folders nor a list of labels") as caught:
        FolderDataset(raw, "val")
    assert "synset_labels.txt" in caught.value.why and "class folders" in caught.value.hint
    assert [issue.kind for issue in check(str(raw), DataConfig(), 1).errors] == ["unreadable-split"]


def test_validation_images_alone_have_the_thousand_classes(raw: Path) -> None:
    (raw / "train").rename(raw.parent / "elsewhere")
    (raw / "synset_labels.txt").write_text(LABELS["synset_labels.txt"])
    val = open_dataset("auto", raw, "val", DataConfig())
    assert len(val.class_names) == 1000
    assert [val[index].target for index in range(len(val))] == list(ANSWERS)


def test_unlabeled_test_images_are_not_used_for_validation(raw: Path) -> None:
    (raw / "validation").rename(raw / "test")
    for number in range(5):
        (raw / "train" / WNIDS[0] / f"more{number}.JPEG").write_bytes(encode(noise(12, 12, 3, 50 + number), "JPEG"))
    assert "is held out for validation" in FolderDataset(raw, "val").origin
    assert [issue.kind for issue in check(str(raw), DataConfig(), 1).issues if issue.level == "error"] == []


@pytest.mark.parametrize("kind", ["tfrecord", "folder", "packed", "tar"])
def test_the_unpacked_images_are_converted_into_their_own_folder_and_still_read_as_before(
    raw: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (raw / "synset_labels.txt").write_text("\n".join(SYNSETS))
    (raw / "train" / "n01440764.tar").write_bytes(b"left by the instructions that unpack it")
    splits: tuple[Split, ...] = ("train", "val")
    before = {split: open_dataset("auto", raw, split, DataConfig()).fingerprint() for split in splits}
    command = ["data", "convert", str(raw), str(raw / "records"), "--to", kind]
    more = ["--shards", "2,1"] if kind == "tfrecord" else []
    for said in ("is complete", "was already there"):
        with pytest.raises(SystemExit, match="0"):
            main([*command, *more])
        assert said in capsys.readouterr().out
    assert {split: open_dataset("auto", raw, split, DataConfig()).fingerprint() for split in splits} == before
    written = open_dataset(kind, raw / "records", "val", DataConfig())
    found = {(written[index].data, written.class_names[written[index].target]) for index in range(len(written))}
    assert found == {
        ((raw / "validation" / file).read_bytes(), wnid) for file, wnid in zip(FILES, SYNSETS, strict=True)
    }


@pytest.mark.parametrize("inside", ["val", "train/records", "validation/records", "test", "."])
def test_nothing_is_written_where_it_would_be_read_as_data(
    raw: Path, inside: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (raw / "synset_labels.txt").write_text("\n".join(SYNSETS))
    with pytest.raises(SystemExit) as end:
        main(["data", "convert", str(raw), str(raw / inside), "--to", "packed"])
    assert end.value.code == 2 and "would be read as a part of that data" in capsys.readouterr().err


def test_nothing_is_written_among_class_folders(raw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wnid in WNIDS:
        (raw / "train" / wnid / "2.JPEG").write_bytes(encode(noise(12, 12, 3, 20), "JPEG"))
    with pytest.raises(SystemExit) as end:
        main(["data", "convert", str(raw / "train"), str(raw / "train" / "records"), "--to", "packed"])
    assert end.value.code == 2 and "lies inside the data to convert" in capsys.readouterr().err
