"""The run that a benchmark measures: a recipe on real or synthetic data, set up as `train` does it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch

from reconv.build.data import Datasets, data_path, open_split
from reconv.core.version import __version__
from reconv.device import Device, configure_algorithms
from reconv.distributed.process_group import ProcessGroup
from reconv.recipe.loader import Override, load
from reconv.recipe.schema import Recipe
from reconv.trainer.micro_batch import choose_micro_batch
from reconv.trainer.options import RunOptions
from reconv.trainer.prepare import PreparedRun, prepare_run

Input = Literal["device", "host", "real"]
LogFunction = Callable[[str], None]
NUM_CLASSES = {"digits": 10, "cifar10": 10, "cifar100": 100, "voc": 20, "scattered-digits": 10}
IMAGENET_CLASSES = 1000
COCO_CLASSES = 80
SYNTHETIC_BATCHES = 1000  # in an epoch; only those that are used are generated

_SYNTHETIC_SOURCES = {"device": "synthetic-device", "host": "synthetic"}


def no_log(text: str) -> None:
    """Discards what is logged."""


def bench_args(
    recipe: str,
    *,
    input: Input = "device",
    data: str | None = None,
    overrides: Sequence[Override] = (),
    device: str = "auto",
    nic: str | None = None,
) -> RunOptions:
    """The arguments of a run on real data, or on synthetic images generated once on the device or anew on the host."""
    overrides = [*overrides, ("loggers", [], "bench")]
    if input != "real":
        overrides += _synthetic_data(load(recipe, overrides).recipe, _SYNTHETIC_SOURCES[input])
    return RunOptions(recipe, tuple(overrides), data if input == "real" else None, device=device, nic=nic)


@contextmanager
def open_bench_run(args: RunOptions) -> Iterator[PreparedRun]:
    """Set up a run without a run directory; only the training set is opened."""
    with prepare_run(args, _open_train_set) as run:
        run = replace(run, plan=replace(run.plan, freeze_steps=0))  # measured with all parameters trained
        configure_algorithms(run.device, run.recipe.engine)  # as for a long run: the length of this one means nothing
        yield choose_micro_batch(run)


def _open_train_set(recipe: Recipe, process_group: ProcessGroup) -> Datasets:
    dataset = open_split(recipe, data_path(recipe), "train")
    return Datasets(dataset, dataset)


def num_classes_of(recipe: Recipe) -> int:
    """The number of classes of the recipe's dataset; for an unknown dataset that of ImageNet, or of COCO."""
    default = COCO_CLASSES if recipe.task == "detection" else IMAGENET_CLASSES
    num_classes = recipe.data.num_classes or NUM_CLASSES.get(recipe.data.source, default)
    return num_classes + 1 if recipe.data.background_class else num_classes


def _synthetic_data(recipe: Recipe, source: str) -> list[Override]:
    fields = {
        "data.source": source,
        "data.path": None,
        "data.subset_percent": 100,
        "data.preload": "off",
        "data.background_class": False,
        "data.num_classes": num_classes_of(recipe),
        "data.num_samples": SYNTHETIC_BATCHES * recipe.batch.size,
    }
    return [(field, value, "bench") for field, value in fields.items()]


def describe_setup(recipe: Recipe, device: Device) -> dict[str, Any]:
    """The device, the versions and the whole recipe, for the result of a benchmark."""
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
