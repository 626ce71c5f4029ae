"""Rules between detection and the fields about images."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from reconv.recipe.schema import Recipe
from reconv.recipe.unused import unused_options

WHOLE: dict[str, Any] = {"preprocess": {"resize": None, "size": 300}}
GOOD: dict[str, Any] = {"task": "detection", "data": WHOLE, "augment": {"crop": "ssd"}}


def test_a_detection_recipe_with_crop_zoom_and_colours_is_valid() -> None:
    jitter = {"brightness": 0.125, "hue": 0.05, "form": "tensorflow"}
    recipe = Recipe(**{**GOOD, "augment": {"crop": "ssd", "zoom_out": {"probability": 0.5}, "color_jitter": jitter}})
    assert recipe.augment.ssd_crop.min_ious == (0, 0.1, 0.3, 0.5, 0.7, 0.9)
    assert recipe.augment.ssd_crop.no_crop_probability == 1 / 7
    Recipe(**{**GOOD, "augment": {"crop": "none"}})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"augment": {"crop": "random_resized"}}, "augment.crop: resized does not know boxes"),
        ({"augment": {"crop": "ssd", "mixup": {"alpha": 0.2}}}, "augment.mixup.alpha: does not know boxes"),
        ({"augment": {"crop": "ssd", "auto_augment": "randaugment"}}, "augment.auto_augment: does not know boxes"),
        (
            {"augment": {"crop": "ssd", "random_erasing": {"probability": 0.2}}},
            "augment.random_erasing.probability: does not know",
        ),
        (
            {"augment": {"crop": "ssd", "color_jitter": {"hue": 0.1}}},
            "augment.color_jitter.implementation: detection has the form tensorflow",
        ),
        (
            {"augment": {"crop": "ssd", "ssd_crop": {"scale": [0.9, 0.3]}}},
            "augment.ssd_crop.scale: goes from the smaller",
        ),
        ({"data": {}}, "data.preprocess.resize: cuts out the centre"),
        ({"data": {**WHOLE, "background_class": True}}, "data.background_class: detection has a background"),
        ({"data": {**WHOLE, "preload": "device"}}, "data.preload: device is for task: classification"),
        ({"data": {**WHOLE, "source": "cifar10"}}, "data.source: cifar10 has no boxes"),
        ({"data": {**WHOLE, "source": "voc", "num_samples": 3}}, "data.num_samples: is for synthetic data and scat"),
    ],
)
def test_what_detection_would_ignore_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Recipe(**{**GOOD, **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"augment": {"crop": "ssd"}}, "augment.crop: is for task: detection"),
        ({"augment": {"zoom_out": {"probability": 0.1}}}, "augment.zoom_out.probability: is for task: detection"),
        ({"data": {"source": "coco"}}, "data.source: is for task: detection"),
        ({"augment": {"zoom_out": {"probability": 0.1}, "train_like_eval": True}}, "augment.train_like_eval makes"),
        (
            {
                "augment": {"color_jitter": {"hue": 0.1, "implementation": "tensorflow"}},
                "data": {"preprocess": {"per_image_standardization": True}},
            },
            "augment.color_jitter.implementation: tensorflow leaves no whole pixel values",
        ),
    ],
)
def test_what_only_detection_has_is_refused_elsewhere(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Recipe(**fields)


def test_options_of_boxes_without_effect_are_named() -> None:
    unused = dict(unused_options(Recipe(data={"bad_boxes": "skip"}, augment={"ssd_crop": {"trials": 3}})))  # type: ignore[arg-type]
    assert unused == {
        "data.bad_boxes": "task is classification",
        "augment.ssd_crop.trials": "augment.crop is resized",
    }
    assert not dict(unused_options(Recipe(**{**GOOD, "data": {**WHOLE, "bad_boxes": "clip"}})))
