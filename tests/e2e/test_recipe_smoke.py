"""A small copy of each distinct preset trains: the same blocks, optimizer, schedule and augmentation, two steps of four
small images. Networks are narrow, with one block per stage."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

import reconv
from reconv.logging.events import Event, TrainProgress
from reconv.recipe.loader import Override, load
from reconv.recipe.presets import preset_names
from reconv.recipe.schema import Recipe

SIDE = 32  # pixels, the smallest size that every network here supports
TINY: dict[str, dict[str, object]] = {
    "resnet": {"depths": [1, 1, 1, 1], "width": 8},
    "resnext": {"depths": [1, 1, 1, 1], "width": 8, "groups": 4, "width_per_group": 16},
    "se_resnext": {"depths": [1, 1, 1, 1], "width": 8, "groups": 4, "width_per_group": 16},
    "resnet_cifar": {"depths": [1, 1, 1], "width": 8},
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.25, "top_width": 64},
    "mobilenet_v": {"width_coefficient": 0.25},
    "googlenet": {"conv_init": "fan_out", "linear_init": "torch"},  # faster to initialize than truncated normals
    "ssd_resnet": {"depths": [1, 1, 1], "width": 8, "num_halved": 5},
}


def family_of(recipe: Recipe) -> str:
    """resnext for resnext101_32x4d, resnet_cifar for resnet20_cifar, efficientnet for efficientnet_b4."""
    name = recipe.model.name
    return re.sub(r"(_b)?\d.*?(_cifar)?$", r"\2", name)


def shrink(recipe: Recipe) -> list[Override]:
    """Overrides that make a recipe small without changing its mathematics: synthetic data, two steps."""
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
        "augment.size": None,
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
    return [(field, value, "small") for field, value in values.items()]


def code_path(recipe: Recipe) -> str:
    """What decides which code a recipe runs: all but its results, and of the optimizer's numbers whether they are 0."""
    tree = recipe.model_dump(mode="json", exclude={"name", "description", "expect", "published", "measured"})
    for section in ("optimizer", "schedule"):
        tree[section] = {key: v if isinstance(v, str) else bool(v) for key, v in tree[section].items()}
    return json.dumps({**tree, "model": {**tree["model"], "name": family_of(recipe)}})


@cache
def distinct() -> list[list[str]]:
    """The presets, those of one code path together."""
    found: dict[str, list[str]] = {}
    for name in preset_names():
        found.setdefault(code_path(load(name, shrink(load(name).recipe)).recipe), []).append(name)
    return list(found.values())


NUM_PARTS = 4  # so that the cores of a test run share the work


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_small_copy_of_each_distinct_preset_trains(part: int, tmp_path: Path) -> None:
    assert len(distinct()) > 30
    for names in distinct()[part::NUM_PARTS]:
        events: list[Event] = []
        small, out = shrink(load(names[0]).recipe), tmp_path / names[0]
        result = reconv.train(names[0], overrides=small, out=out, device="cpu", on_event=events.append)
        losses = [event.loss for event in events if isinstance(event, TrainProgress)]
        assert result.exit_code == 0 and len(losses) == 2 and all(0 < loss < 100 for loss in losses), (names, losses)
