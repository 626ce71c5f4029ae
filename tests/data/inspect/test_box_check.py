"""Checks of images with boxes: every issue is found, named and counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from box_examples import write_coco, write_voc, write_yolo
from data_examples import encode, noise
from PIL import Image

from reconv.cli import main
from reconv.data.boxes.table import PROBLEMS, ProblemKind
from reconv.data.inspect.check import CheckReport, check, class_tiles
from reconv.data.inspect.lenient_open import DataIssue
from reconv.data.readers.shards.tfrecord_format import encode_example, write_records
from reconv.recipe.parts.data import DataConfig

CATEGORIES = {1: "person", 18: "dog"}


def boxes(*corners: tuple[float, float, float, float]) -> list[dict[str, Any]]:
    return [{"category_id": 1 + 17 * (n % 2), "bbox": list(corner)} for n, corner in enumerate(corners)]


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    train = [(f"{n}.jpg", 30, 40, boxes((1, 1, 9, 9), (20, 10, 15, 15))) for n in range(3)]
    val = [(f"v{n}.jpg", 30, 40, boxes((n, 1, 9, 9), (20, 10, 15, 15))) for n in range(2)]
    return write_coco(tmp_path / "coco", {"train": train, "val": val}, CATEGORIES)


def run_check(path: Path, workers: int = 2) -> CheckReport:
    return check(str(path), DataConfig(), workers)


def found(checked: CheckReport) -> dict[str, DataIssue]:
    kinds = [issue.kind for issue in checked.issues]
    assert len(kinds) == len(set(kinds))
    return {issue.kind: issue for issue in checked.issues}


def change(root: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    file = root / "annotations" / "instances_train2017.json"
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def test_good_boxes_have_no_issues_and_are_counted_by_class(coco: Path) -> None:
    checked = run_check(coco)
    assert checked.issues == ()
    assert checked.splits["train"].classes == {"person": 3, "dog": 3}
    assert checked.as_json()["splits"]["train"]["num_boxes"] == 6 and checked.as_json()["ok"]
    shown = {name: (count, [tile.size for tile in tiles]) for name, count, tiles in class_tiles(checked)}
    assert shown == {"person": (3, [(40, 30)] * 3), "dog": (3, [(40, 30)] * 3)}


BAD_BOX_KINDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "outside": lambda t: t["annotations"][1].update(bbox=[30, 1, 20, 5]),
    "zero-area": lambda t: t["annotations"][1].update(bbox=[30, 1, 0, 5]),
    "swapped": lambda t: t["annotations"][1].update(bbox=[30, 20, -4, 5]),
    "unknown-class": lambda t: t["annotations"][1].update(category_id=77),
    "not-finite": lambda t: t["annotations"][1].update(bbox=[float("nan"), 1, 2, 3]),
    "duplicate-id": lambda t: t["annotations"][1].update(id=t["annotations"][0]["id"]),
    "unknown-image": lambda t: t["annotations"][1].update(image_id=12345),
    "no-box": lambda t: t["annotations"][1].update(bbox=None),
    "no-class": lambda t: t["annotations"][1].pop("category_id"),
    "no-flag": lambda t: t["annotations"][1].update(iscrowd="0"),
    "no-area": lambda t: t["annotations"][1].update(area="large"),
    "no-id": lambda t: t["images"].append({}),
    "no-file-name": lambda t: t["images"].append({"id": 9, "width": 30, "height": 30}),
    "no-size": lambda t: t["images"].append({"id": 9, "file_name": "0.jpg", "width": 30}),
}


@pytest.mark.parametrize("kind", BAD_BOX_KINDS)
def test_every_bad_annotation_is_found_and_named(coco: Path, kind: str) -> None:
    change(coco, BAD_BOX_KINDS[kind])
    issues = found(run_check(coco))
    assert [name for name, issue in issues.items() if issue.level == "error"] == [kind]
    assert issues[kind].total == 1
    (path,) = issues[kind].paths
    assert "box 2" in path if kind in ("outside", "zero-area", "swapped", "unknown-class", "not-finite") else path


def test_a_class_id_with_another_name_in_validation_is_found(coco: Path) -> None:
    file = coco / "annotations" / "instances_val2017.json"
    file.write_text(file.read_text().replace('"dog"', '"wolf"'))
    assert [issue.kind for issue in run_check(coco).errors] == ["other-class"]


def test_every_kind_of_problem_has_a_text() -> None:
    assert set(PROBLEMS) == set(get_args(ProblemKind)) and len(PROBLEMS) == 12


def test_missing_damaged_and_resized_images_are_distinguished(coco: Path) -> None:
    (coco / "train2017" / "0.jpg").unlink()
    (coco / "train2017" / "1.jpg").write_bytes(b"no image")
    (coco / "train2017" / "2.jpg").write_bytes(encode(noise(9, 9, 3, 0), "JPEG"))
    checked = run_check(coco)
    issues = found(checked)
    assert [Path(issues[kind].paths[0]).name for kind in ("missing-file", "bad-image", "wrong-size")] == [
        "0.jpg",
        "1.jpg",
        "2.jpg",
    ]
    assert dict(checked.splits["train"].bad)[str(coco / "train2017" / "2.jpg")].startswith("the image is 9 x 9")


def test_images_and_classes_without_boxes_are_warnings(coco: Path) -> None:
    change(coco, lambda t: t.update(annotations=[a for a in t["annotations"] if a["category_id"] == 1][1:]))
    issues = found(run_check(coco))
    assert {kind: f.level for kind, f in issues.items()} == {"unannotated": "warning", "never-trained": "warning"}
    assert issues["unannotated"].paths == (str(coco / "train2017" / "0.jpg"),)
    assert issues["never-trained"].paths == ("dog",)


def test_an_image_in_both_splits_is_a_leak(coco: Path) -> None:
    (coco / "val2017" / "v0.jpg").write_bytes((coco / "train2017" / "0.jpg").read_bytes())
    assert [f.kind for f in run_check(coco).errors] == ["leak"]


def test_bad_voc_and_yolo_annotations_are_found(tmp_path: Path) -> None:
    images = {"a": (20, 20, [("dog", (5, 5, 25, 9), 0)]), "b": (20, 20, [("dog", (1, 1, 9, 9), 0)])}
    voc = write_voc(tmp_path / "v", {"train": ["a", "c"], "val": ["b"]}, images)
    assert {f.kind for f in run_check(voc).errors} == {"outside", "no-annotation", "missing-file"}
    yolo = write_yolo(tmp_path / "y", "images/train", {"a": ["0 0.5 0.5 0.1 0.1", "7 0.5 0.5 0.1 0.1", "0 1"]}, ["c"])
    bad = {f.kind: f for f in run_check(yolo).errors if f.kind != "leak" and "train" in f.text}
    assert set(bad) == {"unknown-class", "no-box"}
    assert bad["no-box"].paths[0].startswith(str(yolo / "labels" / "train" / "a.txt:3"))


def test_records_with_boxes_are_checked(tmp_path: Path) -> None:
    def record(number: int, right: float, label: int = 1) -> bytes:
        return encode_example(
            {
                "image/encoded": [encode(noise(20, 20, 3, number), "JPEG")],
                "image/height": [20],
                "image/width": [20],
                "image/source_id": [b"same"],
                "image/object/class/label": [label],
                "image/object/class/text": [b"dog"],
                **{f"image/object/bbox/{edge}": [0.1] for edge in ("xmin", "ymin")},
                "image/object/bbox/xmax": [right],
                "image/object/bbox/ymax": [0.9],
            }
        )

    write_records(tmp_path / "train-00000-of-00001", [record(0, 0.9), record(1, 1.9)])
    write_records(tmp_path / "val-00000-of-00001", [record(2, 0.9, 5)])
    issues = found(run_check(tmp_path))
    assert {kind for kind, f in issues.items() if f.level == "error"} == {"duplicate-id", "outside", "unknown-class"}


def test_an_unreadable_split_is_reported_and_the_other_checked(coco: Path) -> None:
    (coco / "annotations" / "instances_val2017.json").write_text("{}")
    checked = run_check(coco)
    assert [f.kind for f in checked.errors] == ["unreadable-split"] and set(checked.splits) == {"train"}


def command(*words: object) -> int:
    """The exit code of a command line."""
    with pytest.raises(SystemExit) as ended:
        main(["data", *map(str, words)])
    return int(ended.value.code or 0)


def test_the_command_prints_tables_and_writes_both_files(
    coco: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert command("check", coco, "--out", out, "--quiet") == 0
    printed = capsys.readouterr().out
    assert "boxes" in printed and "no errors" in printed
    change(coco, BAD_BOX_KINDS["outside"])
    assert command("check", coco, "--out", out, "--quiet", "--json") == 3
    content = json.loads(capsys.readouterr().out)
    assert [f["kind"] for f in content["issues"]] == ["outside"]
    assert json.loads((out / "check.json").read_text()) == content
    with Image.open(out / "contact.png") as sheet:
        assert sheet.width > 200


RECIPE = """
task: detection
model: {name: ssd_resnet34}
data: {preprocess: {size: 300, resize: null}}
augment: {crop: ssd, zoom_out: {probability: 0.5}}
batch: {size: 4}
length: 2ep
"""


def test_show_draws_the_boxes_the_model_sees(coco: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(RECIPE)
    out = tmp_path / "show.png"
    assert command("show", coco, "--recipe", tmp_path / "my.yaml", "--out", out, "--images", 3) == 0
    with Image.open(out) as sheet:
        pixels = np.asarray(sheet.convert("RGB"))
    from reconv.data.inspect.draw_boxes import class_color

    for label in range(2):
        assert (pixels == class_color(label)).all(-1).sum() > 50
