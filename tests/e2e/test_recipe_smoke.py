"""A smoke twin of each preset: the same blocks, optimizer, schedule and augmentation, two steps of four tiny images.

Networks are narrow and one block a stage deep.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

import reconv
from reconv.logging.events import Event, TrainProgress
from reconv.recipe.loader import Override, load
from reconv.recipe.presets import preset_names
from reconv.recipe.schema import Recipe

SIDE = 32  # pixels: the least that every network here takes
TINY: dict[str, dict[str, object]] = {
    "resnet": {"depths": [1, 1, 1, 1], "width": 8},
    "resnext": {"depths": [1, 1, 1, 1], "width": 8, "groups": 4, "width_per_group": 16},
    "se_resnext": {"depths": [1, 1, 1, 1], "width": 8, "groups": 4, "width_per_group": 16},
    "resnet_cifar": {"depths": [1, 1, 1], "width": 8},
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.25, "top_width": 64},
    "mobilenet_v": {"width_coefficient": 0.25},
    "googlenet": {"conv_init": "fan_out", "linear_init": "torch"},  # drawn faster than truncated normals
    "ssd_resnet": {"depths": [1, 1, 1], "width": 8, "num_halved": 5},
}


@cache
def recipe_of(name: str) -> Recipe:
    return load(name).recipe


def family_of(recipe: Recipe) -> str:
    """resnext101_32x4d is a resnext, resnet20_cifar a resnet_cifar, efficientnet_b4 an efficientnet."""
    name = recipe.model.name
    return re.sub(r"(_b)?\d.*?(_cifar)?$", r"\2", name)


def shrink(recipe: Recipe) -> list[Override]:
    """What makes a recipe small and leaves its mathematics: any device, no data at hand, two steps."""
    group = recipe.batch.group if isinstance(recipe.batch.group, int) and recipe.batch.group <= 4 else 4
    options = dict(TINY.get(family_of(recipe), {}))
    if recipe.task == "detection":
        options["extra_widths"] = [8] * (len(recipe.detection.anchors.aspect_ratios) - 1)
    values: dict[str, object] = {
        "model.options": options,
        "data.source": "synthetic",
        "data.preload": "off",
        "data.num_samples": 4,
        "data.num_classes": 10,
        "data.preprocess.size": SIDE,
        "data.preprocess.resize": None,
        "batch.size": 4,
        "batch.group": group,
        "length": "2step",
        "schedule.warmup": "1step" if recipe.schedule.warmup.value else "0step",
        "schedule.decay_until": None,
        "precision": {"mode": "fp32", "loss_scale": "dynamic"},
        "engine.compile": "off",
        "evaluate.every": "off",
        "save.every": "off",
        "save.keep_at": [],
        "checkpoint_average.last": "off",
        "log.every": "1step",
    }
    return [(field, value, "twin") for field, value in values.items()]


@pytest.mark.parametrize("name", preset_names())
def test_a_smoke_twin_trains(name: str, tmp_path: Path) -> None:
    events: list[Event] = []
    small = shrink(recipe_of(name))
    result = reconv.train(name, overrides=small, out=tmp_path / "run", device="cpu", on_event=events.append)
    assert result.exit_code == 0
    losses = [event.loss for event in events if isinstance(event, TrainProgress)]
    assert len(losses) == 2
    assert all(0 < loss < 100 for loss in losses)
