"""ImageNet's original archives in miniature: nested tars, lists of labels, the devkit."""

from __future__ import annotations

import importlib.util
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from data_examples import encode, noise
from scipy.io import savemat

from reconv.cli import main
from reconv.core.errors import DataError, ExitCode, UsageError
from reconv.data.convert.open_splits import open_splits
from reconv.data.dataset import Split
from reconv.data.readers.detect import detect
from reconv.data.readers.folder import FolderDataset
from reconv.data.readers.imagenet.archives import COUNTS, TRAIN_FILE, VAL_FILE
from reconv.data.readers.imagenet.labels import DEVKIT_FOLDER, TRUTH_FILE, validation_synsets

SYNSETS = ("n01440764", "n02119789", "n03000001")
KIT_NUMBERS = {2: "n01440764", 1: "n02119789", 3: "n03000001"}  # the kit's order is another
TRUTH = ["n03000001", "n01440764", "n02119789", "n01440764"]
EXPECTED: dict[Split, int] = {"train": 6, "val": 4}


def jpeg(seed: int) -> bytes:
    return encode(noise(12, 16, 3, seed), "JPEG")


def write_tar(path: Path, members: dict[str, bytes]) -> bytes:
    """A tar with these files, in this order."""
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path.read_bytes()


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    """Both archives: 1, 2 and 3 training images in three classes, 4 validation images; not in order."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    inner = {}
    for number, synset in enumerate(SYNSETS):
        files = {f"{synset}_{100 - image}.JPEG": jpeg(10 * number + image) for image in range(number + 1)}
        inner[f"{synset}.tar"] = write_tar(tmp_path / "inner.tar", files)
    write_tar(folder / TRAIN_FILE, dict(reversed(inner.items())))
    images = {f"ILSVRC2012_val_{number:08}.JPEG": jpeg(50 + number) for number in (3, 1, 4, 2)}
    write_tar(folder / VAL_FILE, images)
    return folder


def write_kit(folder: Path, mapping: str) -> None:
    """A kit's data folder, its mapping as text or as the published file."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {synset: number for number, synset in KIT_NUMBERS.items()}
    (folder / TRUTH_FILE).write_text("".join(f"{numbers[synset]}\n" for synset in TRUTH))
    if mapping == "synsets.txt":
        lines = [f"{number} {synset}\n" for number, synset in KIT_NUMBERS.items()]
        (folder / mapping).write_text("".join(lines))
    if mapping == "meta.mat":
        write_meta(folder / mapping)


def write_meta(path: Path, compressed: bool = True) -> None:
    rows = [
        (number, synset, f"words of {synset}", np.array([[7.0, 8.0]])) for number, synset in sorted(KIT_NUMBERS.items())
    ]
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("children", "O")]
    synsets = np.array(rows, dtype=kinds).reshape(-1, 1)
    savemat(path, {"other": np.eye(3), "synsets": synsets}, do_compression=compressed)


def write_labels(folder: Path, label_format: str) -> Path:
    """Write the labels of the validation images in a format; the path of the file or folder."""
    names = [f"ILSVRC2012_val_{number:08}.JPEG" for number in range(1, 5)]
    path = folder / "labels.txt"
    if label_format == "list":
        path.write_text("\n".join(TRUTH) + "\n")
    elif label_format == "named":
        path.write_text(
            "".join(f"val/{name} {synset}\n" for name, synset in reversed([*zip(names, TRUTH, strict=True)]))
        )
    elif label_format == "numbered":
        path.write_text("".join(f"{name} {SYNSETS.index(synset)}\n" for name, synset in zip(names, TRUTH, strict=True)))
    elif label_format == "kit.tar.gz":
        write_kit(folder / "kit" / "data", "meta.mat")
        path = folder / f"{DEVKIT_FOLDER}.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            tar.add(folder / "kit", DEVKIT_FOLDER)
    else:
        write_kit(folder / DEVKIT_FOLDER / "data", label_format)
        path = folder / DEVKIT_FOLDER
    return path


LABEL_FORMATS = ("list", "named", "numbered", "synsets.txt", "meta.mat", "kit.tar.gz")


@pytest.mark.parametrize("label_format", LABEL_FORMATS)
def test_every_format_of_labels_gives_the_same_classes(archives: Path, tmp_path: Path, label_format: str) -> None:
    labels = write_labels(tmp_path, label_format)
    for source in (archives, archives / TRAIN_FILE):
        splits, root = open_splits(str(source), "auto", labels, EXPECTED)
        assert root == archives
        val = splits["val"]
        assert val.class_names == SYNSETS
        found = [val[index] for index in range(len(val))]
        assert [val.class_names[sample.target] for sample in found] == TRUTH
        assert [sample.data for sample in found] == [jpeg(50 + number) for number in range(1, 5)]
        assert found[0].name == f"val/{TRUTH[0]}/ILSVRC2012_val_00000001.JPEG"


@pytest.mark.parametrize("name", ["imagenet_2012_validation_synset_labels.txt", "synset_labels.txt"])
def test_a_list_beside_the_archives_is_found(archives: Path, name: str) -> None:
    (archives / name).write_text("\n".join(TRUTH))
    val = open_splits(str(archives), "auto", None, EXPECTED)[0]["val"]
    assert [val.class_names[val[index].target] for index in range(4)] == TRUTH


@pytest.mark.parametrize("label_format", ["synsets.txt", "kit.tar.gz"])
def test_a_devkit_beside_the_archives_is_found(archives: Path, label_format: str) -> None:
    write_labels(archives, label_format)
    val = open_splits(str(archives), "auto", None, EXPECTED)[0]["val"]
    assert [val.class_names[val[index].target] for index in range(4)] == TRUTH


def test_training_images_are_in_the_order_of_class_and_name(archives: Path, tmp_path: Path) -> None:
    train = open_splits(str(archives), "auto", write_labels(tmp_path, "list"), EXPECTED)[0]["train"]
    found = [train[index] for index in range(len(train))]
    assert [sample.target for sample in found] == [0, 1, 1, 2, 2, 2]
    names = [sample.name for sample in found]
    assert names == sorted(names)
    assert names[0] == "train/n01440764/n01440764_100.JPEG"
    # By name 100 comes before 98: these are words, not numbers.
    assert [sample.data for sample in found] == [jpeg(seed) for seed in (0, 10, 11, 20, 22, 21)]


def test_the_command_converts_the_archives_to_folders(archives: Path, tmp_path: Path) -> None:
    labels = write_labels(tmp_path, "kit.tar.gz")
    words = ["data", "convert", archives, tmp_path / "tree", "--to", "folder", "--labels", labels, "--expect", "6,4"]
    before = {path.name: path.read_bytes() for path in archives.iterdir()}
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert not ended.value.code
    assert (tmp_path / "tree/train/n03000001/n03000001_99.JPEG").read_bytes() == jpeg(21)
    assert (tmp_path / "tree/val/n03000001/ILSVRC2012_val_00000001.JPEG").read_bytes() == jpeg(51)
    assert len(FolderDataset(tmp_path / "tree", "train")) == 6
    assert {path.name: path.read_bytes() for path in archives.iterdir()} == before


def test_counts_must_be_the_published_ones_unless_others_are_given(archives: Path, tmp_path: Path) -> None:
    labels = write_labels(tmp_path, "list")
    assert COUNTS == {"train": 1_281_167, "val": 50_000}
    cases: list[tuple[dict[Split, int] | None, str]] = [
        (None, "has 6 images instead of 1,281,167"),
        ({"train": 7, "val": 4}, "has 6 images instead of 7"),
        ({"train": 6, "val": 5}, "has 4 images instead of 5"),
    ]
    for expected, message in cases:
        with pytest.raises(DataError, match=message) as caught:
            open_splits(str(archives), "auto", labels, expected)
        assert "--expect TRAIN,VAL" in caught.value.hint
        assert caught.value.code == ExitCode.DATA


@pytest.mark.parametrize("name", [TRAIN_FILE, VAL_FILE])
@pytest.mark.parametrize("share", [0, 0.3, 0.6, 0.8])
def test_a_truncated_archive_is_refused(archives: Path, tmp_path: Path, name: str, share: float) -> None:
    labels = write_labels(tmp_path, "list")
    whole = (archives / name).read_bytes()
    end = whole.rstrip(b"\0")
    (archives / name).write_bytes(whole[: int(len(end) * share)])
    with pytest.raises(DataError, match=r"cannot list|instead of"):
        open_splits(str(archives), "auto", labels, EXPECTED)


def test_a_missing_archive_is_an_error(archives: Path, tmp_path: Path) -> None:
    (archives / VAL_FILE).unlink()
    with pytest.raises(DataError, match=f"no {VAL_FILE}"):
        open_splits(str(archives), "auto", write_labels(tmp_path, "list"), EXPECTED)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("n01440764\n", "1 labels for 4 validation images"),
        ("n01440764\n" * 3 + "n09999999\n", "line 4: n09999999 is not a class"),
        ("1\n2\n3\n1\n", "line 1: 1 is a class number of the devkit"),
        ("a.JPEG 7\n" * 4, "line 1: class 7 is not one of 0 to 2"),
        ("ILSVRC2012_val_00000001.JPEG 1\n" * 4, "no label for ILSVRC2012_val_00000002.JPEG (3 such images)"),
    ],
)
def test_wrong_labels_are_reported_with_their_line(archives: Path, tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "labels.txt").write_text(text)
    with pytest.raises(DataError) as caught:
        open_splits(str(archives), "auto", tmp_path / "labels.txt", EXPECTED)
    assert why in caught.value.why
    assert "--labels" in caught.value.hint


def test_without_labels_the_error_names_the_searched_files(archives: Path) -> None:
    with pytest.raises(DataError, match=f"(?s)cannot read the labels.*{TRUTH_FILE}.*{DEVKIT_FOLDER}"):
        open_splits(str(archives), "auto", None, EXPECTED)


@pytest.fixture
def devkit(tmp_path: Path) -> Path:
    """A folder with the devkit's ground truth and mapping."""
    (tmp_path / TRUTH_FILE).write_text("3\n2\n1\n2\n")
    write_meta(tmp_path / "meta.mat", compressed=True)
    return tmp_path


FILES = [f"ILSVRC2012_val_{number:08}.JPEG" for number in range(1, 5)]


@pytest.mark.parametrize("compressed", [True, False])
def test_the_mapping_of_the_devkit_is_read(devkit: Path, compressed: bool) -> None:
    write_meta(devkit / "meta.mat", compressed)
    assert list(validation_synsets(devkit, FILES, SYNSETS).values()) == TRUTH


def test_a_damaged_mapping_is_a_data_error(devkit: Path) -> None:
    data = (devkit / "meta.mat").read_bytes()
    for content in (b"", b"no MATLAB file", data[:100], data[: len(data) // 2], data[:130] + b"\xff" * 40 + data[170:]):
        (devkit / "meta.mat").write_bytes(content)
        with pytest.raises(DataError) as caught:
            validation_synsets(devkit, FILES, SYNSETS)
        assert caught.value.where == "meta.mat"


def test_without_scipy_the_error_says_what_to_install(devkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        validation_synsets(devkit, FILES, SYNSETS)
    assert "pip install 'reconv[imagenet]'" in caught.value.hint


def test_archives_beside_image_folders_are_ambiguous(archives: Path, tree: Path, tmp_path: Path) -> None:
    labels = write_labels(tmp_path, "list")
    with pytest.raises(DataError, match=r"(?s)original ImageNet archives.*reconv data convert"):
        detect(archives)
    (tree / "train").rename(archives / "train")
    (tree / "val").rename(archives / "val")
    assert detect(archives).kind == "folder"
    with pytest.raises(UsageError, match="--from folder or --from archives"):
        open_splits(str(archives), "auto", labels, EXPECTED)
    assert len(open_splits(str(archives), "archives", labels, EXPECTED)[0]["train"]) == 6
    assert len(open_splits(str(archives), "folder", None, None)[0]["train"]) == 11
