"""What is measured: the recipe on the data that was asked for, and the words about machine and versions.

Owns how a recipe meets made-up or real data in a benchmark. Refuses to time anything. Invariant: apart from the data,
the recipe is the one that `train` would run, and it is part of the result.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from reconv import __version__
from reconv.data.dataset import Dataset
from reconv.data.decode.native import choose_decoder
from reconv.device import Device, configure_algorithms, open_device
from reconv.distributed.environment import SINGLE_PROCESS, LaunchEnv
from reconv.environment_checks import Machine, cores_of_one
from reconv.recipe.loader import Override, load
from reconv.recipe.plan import Facts, Plan, make_plan
from reconv.recipe.schema import Recipe
from reconv.trainer.build.data_context import gpu_decode_share
from reconv.trainer.build.datasets import data_path, open_split
from reconv.trainer.build.network import check_model

Input = Literal["device", "host", "real"]
IMAGENET_CLASSES = 1000
COCO_CLASSES = 80
CLASSES = {"digits": 10, "cifar10": 10, "cifar100": 100, "voc": 20, "scattered-digits": 10}  # where the name tells
BATCHES_MADE_UP = 1000  # in an epoch of made-up images; only those that are used are ever made

_SOURCES = {"device": "synthetic-device", "host": "synthetic"}


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """A recipe with its data, plan and device."""

    recipe: Recipe
    plan: Plan
    source: Dataset
    device: Device
    input: Input


def open_subject(
    name: str,
    *,
    input: Input,
    data: str | None,
    overrides: Sequence[Override],
    device: str,
    launch_env: LaunchEnv = SINGLE_PROCESS,
) -> BenchTarget:
    """Open the recipe on real data, or on made-up images of its size, made once for the device or anew on the host."""
    given = list(overrides)
    if input == "real":
        given += [("data.path", data, "--data")] if data is not None else []
    else:
        given += _made_up(load(name, given).recipe, _SOURCES[input])
    recipe = load(name, given).recipe
    source = open_split(recipe, data_path(recipe), "train")
    facts = Facts(
        num_train=len(source),
        num_val=len(source),
        num_classes=len(source.class_names),
        source=source.kind,
        world_size=launch_env.world_size,
        cores=cores_of_one(Machine(), launch_env.local_world_size),
        decoder=choose_decoder(recipe.augment.decoder),
    )
    plan = make_plan(recipe, facts)
    check_model(recipe, plan.num_classes)
    opened = open_device(device, plan.threads, launch_env.local_rank)
    share = gpu_decode_share(recipe, plan, source, opened, resumed=None)
    plan = make_plan(recipe, replace(facts, gpu_share=share))
    configure_algorithms(opened, recipe.engine)
    return BenchTarget(recipe, plan, source, opened, input)


def num_classes_of(recipe: Recipe) -> int:
    """The classes of the recipe's data, as far as its name tells; ImageNet's otherwise, or COCO's for detection."""
    usual = COCO_CLASSES if recipe.task == "detection" else IMAGENET_CLASSES
    known = recipe.data.num_classes or CLASSES.get(recipe.data.source, usual)
    return known + 1 if recipe.data.background_class else known


def _made_up(recipe: Recipe, source: str) -> list[Override]:
    wanted = {
        "data.source": source,
        "data.path": None,
        "data.subset_percent": 100,
        "data.preload": "off",
        "data.background_class": False,
        "data.num_classes": num_classes_of(recipe),
        "data.num_samples": BATCHES_MADE_UP * recipe.batch.size,
    }
    return [(field, value, "bench") for field, value in wanted.items()]


def about(recipe: Recipe, device: Device) -> dict[str, Any]:
    """The device, the versions and the whole recipe: what a figure means nothing without."""
    return {
        "device": device.describe(),
        "versions": {
            "reconv": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "recipe": recipe.model_dump(mode="json"),
    }
