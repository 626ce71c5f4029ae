"""Augmentation and preprocessing fields that contradict each other are refused with all other problems."""

from __future__ import annotations

from pathlib import Path

import pytest

from reconv.errors import RecipeError
from reconv.recipe.loader import dump, load
from reconv.recipe.units import Duration


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load(str(path))
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("augment: {cutmix: {lam: 0.5}}", "augment.cutmix.lam: is for the kinds fixed and random"),
        ("augment: {cutmix: {mode: fixed, alpha: 1.0}}", "augment.cutmix.alpha: is for the kind beta"),
        ("augment: {combine: both, mixup: {alpha: 0.2}}", "augment.combine: both needs"),
        ("augment: {cutmix: {alpha: 1.0, roll: 2}}\nbatch: {size: 2}", "augment.cutmix.roll: 2 samples before"),
        ("augment: {cutmix: {mode: random, lam: 0.8}}\nbatch: {group: 1}", "no partner in a group of one"),
        ("augment: {random_erasing: {scale: [0.3, 0.1]}}", "augment.random_erasing.scale: goes from"),
        (
            "augment: {progressive_resizing: [[2ep, 64], [1ep, 96]]}",
            "augment.progressive_resizing: must rise, but 1ep follows 2ep",
        ),
        ("augment: {progressive_resizing: [[5min, 64]]}", "augment.progressive_resizing: cannot be in minutes"),
        ("augment: {progressive_resizing: [[0ep, big]]}", "augment.progressive_resizing: takes"),
        ("augment: {progressive_resizing: [12]}", "augment.progressive_resizing: takes"),
        (
            "augment: {train_like_eval: true, auto_augment: autoaugment}",
            "augment.auto_augment: changes training images",
        ),
        (
            "augment: {train_like_eval: true, random_erasing: {probability: 0.1}}",
            "augment.random_erasing.probability: changes",
        ),
        ("data: {preprocess: {divide_by: 1}}", "is a mean of 0 to 1"),
        ("data: {preprocess: {mean: [123.68, 116.78, 103.94]}}", "123.68 is above 1"),
        ("data: {preprocess: {size: 300}}", "256 leaves no room for a crop of data.preprocess.size 300"),
        ("data: {preprocess: {resize: auto}}", "data.preprocess.resize: takes"),
        ("augment: {randaugment: {magnitude: 31}}", "augment.randaugment.magnitude: takes"),
        ("augment: {auto_augment: autoaugmnt}", "did you mean autoaugment?"),
    ],
)
def test_a_contradiction_is_said_in_words(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(tmp_path, text)


def test_grey_pictures_have_no_hue_and_every_problem_comes_at_once(tmp_path: Path) -> None:
    text = (
        "data: {preprocess: {channels: 1}}\naugment: {color_jitter: {hue: 0.1, saturation: 0.2}, scale: [0.9, 0.1]}\n"
    )
    said = refusal(tmp_path, text)
    for words in ("5 problems", "mean: has 3", "std: has 3", "jitter.hue: needs", "jitter.saturation: needs", "area"):
        assert words in said


def test_published_forms_are_accepted_and_written_back(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(
        """
data: {preprocess: {size: 380, resize: auto-ratio, divide_by: 1, mean: [123.68, 116.78, 103.94], std: [1, 1, 1]}}
augment:
  progressive_resizing: [[0ep, 192], [50%, 288]]
  attempts: 100
  scale: [0.05, 1.0]
  auto_augment: randaugment
  mixup: {alpha: 0.2, mode: sample, lam_at_least_half: true}
  cutmix: {mode: random, lam: 0.85, roll: 2}
  combine: both
batch: {size: 768, group: 3}
"""
    )
    recipe = load(str(path)).recipe
    assert recipe.augment.progressive_resizing == ((Duration(0, "ep"), 192), (Duration(50, "%"), 288))
    again = tmp_path / "again.yaml"
    again.write_text(dump(recipe))
    assert load(str(again)).recipe == recipe
    typed = load(str(path), [("augment.progressive_resizing", "[[1ep, 64]]", "--set")]).recipe
    assert typed.augment.progressive_resizing == ((Duration(1, "ep"), 64),)
