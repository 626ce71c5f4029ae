"""Named pipes, sockets and devices in place of files: they are named and never waited for."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from box_examples import write_coco, write_voc, write_yolo
from data_examples import encode, noise

from reconv.core.errors import DataError
from reconv.data.convert.dataset import convert, make_target
from reconv.data.convert.open_splits import open_splits
from reconv.data.convert.transcode import TranscodeOptions
from reconv.data.inspect.check import check
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.folder import FolderDataset
from reconv.recipe.parts.data import DataConfig
from reconv.storage.local import MappedFile, ReadStream, UnmappedFile, read

pytestmark = pytest.mark.usefixtures("no_blocking_pipe")


def coco(root: Path) -> Path:
    boxes = [{"category_id": 1, "bbox": [1, 1, 5, 5]}]
    images = [("a.jpg", 20, 20, boxes), ("b.jpg", 20, 20, boxes)]
    return write_coco(root, {"train": images, "val": images}, {1: "cat"})


def voc(root: Path) -> Path:
    stems = ("a", "b")
    images = {stem: (20, 20, [("cat", (1.0, 1.0, 5.0, 5.0), 0)]) for stem in stems}
    return write_voc(root, {"train": stems, "val": stems}, images)


def yolo(root: Path) -> Path:
    lines = ["0 0.5 0.5 0.4 0.4"]
    return write_yolo(root, "images/train", {"a": lines, "b": lines}, ("cat",))


def table(root: Path) -> Path:
    root.mkdir()
    rows = [f"{number}.png,{'ab'[number % 2]},{split}" for number, split in enumerate(["train"] * 4 + ["val"] * 2)]
    for number in range(6):
        (root / f"{number}.png").write_bytes(encode(noise(9, 9, 3, number)))
    (root / "labels.csv").write_text("\n".join(["file,label,split", *rows]))
    return root


def converted(kind: str) -> Callable[[Path], Path]:
    def write(root: Path) -> Path:
        splits, origin = open_splits("digits", "auto", None, None)
        convert(splits, origin, root, make_target(kind, TranscodeOptions(), 400, None), 1, lambda done, total: None)
        return root

    return write


def taken(path: Path) -> object:
    return UnmappedFile(path).read(0, 1)


def streamed(path: Path) -> object:
    return ReadStream(path).read()


# A layout, whether it has boxes, and one of its files.
PLACES: dict[str, tuple[Callable[[Path], Path], bool, str]] = {
    "an image of COCO": (coco, True, "train2017/b.jpg"),
    "the annotations of COCO": (coco, True, "annotations/instances_train2017.json"),
    "an image of VOC": (voc, True, "JPEGImages/b.jpg"),
    "an annotation of VOC": (voc, True, "Annotations/b.xml"),
    "a list of VOC": (voc, True, "ImageSets/Main/train.txt"),
    "an image of YOLO": (yolo, True, "images/train/b.jpg"),
    "the boxes of YOLO": (yolo, True, "labels/train/b.txt"),
    "an image of a table": (table, False, "2.png"),
    "the table": (table, False, "labels.csv"),
    "a tar": (converted("tar"), False, "train-*1.tar"),
    "a packed shard": (converted("packed"), False, "train-*0001*.packed"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_pipe_in_a_dataset_is_refused_by_name(place: str, tmp_path: Path) -> None:
    write, has_boxes, pattern = PLACES[place]
    root = write(tmp_path / "data")
    [path] = root.glob(pattern)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError) as caught:
        source = open_dataset("auto", root, "train", DataConfig(), boxes=has_boxes)
        for index in range(len(source)):
            source[index]
    content = f"{caught.value.where} {caught.value.what} {caught.value.why}"
    assert path.name in content and "a named pipe" in content
    try:
        assert not check(str(root), DataConfig(), 2).as_json()["ok"]
    except DataError as error:
        assert path.name in f"{error.where} {error.what}"


def test_a_pipe_in_place_of_the_shard_index_does_not_block(tmp_path: Path) -> None:
    root = converted("tar")(tmp_path / "data")
    num_samples = len(open_dataset("auto", root, "train", DataConfig()))
    [index] = [path for path in root.rglob(".*") if path.is_file() and "train" in path.name]
    index.unlink()
    os.mkfifo(index)
    assert len(open_dataset("auto", root, "train", DataConfig())) == num_samples


@pytest.mark.parametrize("way", [read, MappedFile, taken, streamed])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to a pipe"])
def test_special_files_are_refused_by_every_reader(
    kind: str, way: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, word = tmp_path / "a.jpg", "named pipe"
    if kind == "socket":
        monkeypatch.chdir(tmp_path)  # a socket's name is short
        word = "socket"
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
        word = "device"
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DataError, match="cannot read") as caught:
        way(path)
    assert word in caught.value.why
    del caught
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_image_replaced_by_a_pipe_after_listing_is_refused(tree: Path) -> None:
    source = FolderDataset(tree, "train")
    path = Path(source.path(3))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="cannot read") as caught:
        source[3]
    assert caught.value.where == str(path)


def test_check_reports_pipes_and_sockets(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tree / "train" / "ant" / "pipe.jpg")
    monkeypatch.chdir(tree / "train" / "bee")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket.jpg")
    [issue] = check(str(tree), DataConfig(), 2).issues
    assert issue.kind == "broken-link"
    assert [Path(path).name for path in issue.paths] == ["pipe.jpg", "socket.jpg"]


def test_a_broken_link_to_labels_is_an_error(tmp_path: Path) -> None:
    root = yolo(tmp_path / "data")
    file = root / "labels" / "train" / "b.txt"
    file.unlink()
    file.symlink_to(tmp_path / "not-mounted" / "b.txt")
    with pytest.raises(DataError, match=r"cannot read .*b\.txt"):
        open_dataset("auto", root, "train", DataConfig(), boxes=True)
