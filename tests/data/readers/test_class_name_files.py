"""Class names for people: ImageNet's, and those in a file beside the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reconv.data.readers.class_name_files import display_names
from reconv.data.readers.imagenet.classes import imagenet_names, with_imagenet_names

CLASSES = ("n01440764", "n01443537", "n99999999")


def test_imagenet_has_a_thousand_names_in_the_order_of_its_indices() -> None:
    names = imagenet_names()
    assert len(names) == len(set(names.values())) == 1000
    assert list(names) == sorted(names)
    by_index = list(names.values())
    known = {0: "tench", 65: "sea snake", 207: "golden retriever", 281: "tabby", 388: "giant panda", 404: "airliner"}
    known |= {508: "computer keyboard", 609: "jeep", 817: "sports car", 954: "banana", 980: "volcano", 985: "daisy"}
    assert {index: by_index[index] for index in known} == known
    assert with_imagenet_names(("background", "n01440764", "cat")) == ("background", "tench", "cat")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("classes.txt", "Tinca\nCarassius\nother\n"),
        ("class_names.txt", "n01440764 Tinca\nn01443537\tCarassius\nn99999999: other\n"),
        ("labels.txt", "0 Tinca\n2 other\n1 Carassius\n"),
        ("classes.json", {"0": "Tinca", "1": "Carassius", "2": "other"}),
        ("class_names.json", {"n01440764": "Tinca", "n01443537": "Carassius", "n99999999": "other", "n1": "more"}),
        ("classes.json", ["Tinca", "Carassius", "other"]),
        (
            "classes.json",
            {"0": ["n01440764", "Tinca"], "1": ["n01443537", "Carassius"], "7": ["n99999999", "other"]},
        ),
    ],
)
def test_names_are_read_by_class_and_by_index(tmp_path: Path, file: str, content: Any) -> None:
    (tmp_path / file).write_text(content if isinstance(content, str) else json.dumps(content))
    names, note = display_names(tmp_path, CLASSES)
    assert names == ("Tinca", "Carassius", "other")
    assert note == f"class names from {file}"
    assert display_names(tmp_path, ("background", *CLASSES))[0] == ("background", *names)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("Tinca\nCarassius\n", "2 names for 3 classes"),
        ("Tinca\nTinca\nother\n", "'Tinca' occurs twice"),
        ("n01440764\nCarassius\nother\n", "1 of its names are classes, the others are not"),
    ],
)
def test_a_file_that_does_not_fit_is_not_used_and_said_so(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "classes.txt").write_text(content)
    names, note = display_names(tmp_path, CLASSES)
    assert names == ("tench", "goldfish", "n99999999")
    assert note == f"classes.txt is not used for class names: {why}"


def test_a_list_of_the_classes_themselves_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("b\na\n")
    assert display_names(tmp_path, ("a", "b")) == (("a", "b"), "")
    (tmp_path / "labels.json").write_text("{")
    assert display_names(tmp_path, ("a", "b")) == (("a", "b"), "")
