"""The initial weights of a run (`model.init`), and which of them are trained (`model.freeze_backbone`, `trainable`).

A run that resumes from its own checkpoint does not need the weights it started from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from reconv.build.model import Network, build_meta_model
from reconv.build.saved_model import FoundWeights, find_weights
from reconv.checkpoint.load_weights import LoadReport, compare_weights, first_few, load_weights, read_weights
from reconv.checkpoint.locate import LocatedWeights, is_remote, is_tensorflow, read_located
from reconv.core.errors import CheckpointError
from reconv.data.dataset import Dataset
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.readers.dataset_factory import subsample
from reconv.data.transforms.normalize import EvalPreprocess
from reconv.models.fastnet import SPECS as WHITENED
from reconv.models.fastnet import FastNet, whitening_filters
from reconv.models.frozen import TrainedParameters, freeze_except, head_patterns
from reconv.recipe.schema import Recipe


def check_weights_exist(recipe: Recipe) -> None:
    """Refuse initial weights that are neither on this machine nor can be downloaded."""
    name = recipe.model.init
    if name is not None and not (is_remote(name) or Path(name).exists() or is_tensorflow(Path(name))):
        raise CheckpointError(
            "the initial weights were not found",
            where=name,
            why="there is no file, run or TensorFlow checkpoint of this name",
            hint=f"ls '{Path(name).parent}'; or use published weights, for example torchvision:resnet50",
        )


def check_weights_readable(recipe: Recipe) -> None:
    """Refuse local initial weights that cannot be read.

    Reading them twice takes 0.1 s for a ResNet-50. Remote weights are checked when they are downloaded.
    """
    check_weights_exist(recipe)
    name = recipe.model.init
    if name is not None and not is_remote(name):
        _read(find_weights(name))


def check_init(recipe: Recipe, num_classes: int, log: Callable[[str], None]) -> tuple[str, ...]:
    """Refuse initial weights and trained parameters that do not fit the network, before there is a run directory.

    Published weights are downloaded to the cache; returns notes on that.
    """
    name = recipe.model.init
    notes: tuple[str, ...] = ()
    if name is None and not recipe.model.trainable:
        return ()
    model = build_meta_model(recipe, num_classes)
    if name is not None:
        found = find_weights(name, log=log)
        notes = found.notes
        path, tensors = _read(found, num_classes)
        _check_report(recipe, compare_weights(model, tensors), path)
    if patterns := _trained_patterns(model, recipe):
        freeze_except(model, patterns)
    return notes


def init_weights(
    network: Network, recipe: Recipe, num_classes: int, *, is_resumed: bool, log: Callable[[str], None]
) -> list[str]:
    """Load the initial weights; returns notes for the log."""
    notes: list[str] = []
    if recipe.model.init is not None and not is_resumed:
        check_weights_exist(recipe)
        notes += _load(network, recipe, recipe.model.init, num_classes, log)
    return notes


def freeze_parameters(network: Network, recipe: Recipe) -> TrainedParameters | None:
    """Freeze what the recipe does not train; None if it trains everything."""
    patterns = _trained_patterns(network.model, recipe)
    return freeze_except(network.model, patterns) if patterns else None


def _trained_patterns(model: nn.Module, recipe: Recipe) -> Sequence[str]:
    """Name patterns of the parameters to train; empty: all."""
    return head_patterns(model) if recipe.model.freeze_backbone else recipe.model.trainable


def _check_report(recipe: Recipe, report: LoadReport, path: Path) -> None:
    """Refuse weights of another network."""
    report.check_any(str(path))
    if report.is_mostly_new and (recipe.model.freeze_backbone or recipe.model.freeze_until != "off"):
        raise CheckpointError(
            "the initial weights are those of another model: most frozen layers would keep random weights",
            where=str(recipe.model.init),
            why=str(report),
            hint="use weights of this model, or freeze nothing: leave --freeze out, or --set model.freeze_until=off",
        )


def _read(found: FoundWeights, num_classes: int | None = None) -> tuple[Path, dict[str, Tensor]]:
    """The path and the tensors of the EMA weights if there are some, else of the weights."""

    def read(located: LocatedWeights) -> tuple[Path, dict[str, Tensor]]:
        path = located.ema or located.weights
        return path, read_weights(path, num_classes=num_classes)

    return read_located(found.located, read)


def _load(network: Network, recipe: Recipe, name: str, num_classes: int, log: Callable[[str], None]) -> list[str]:
    found = find_weights(name, log=log)
    path, tensors = _read(found, num_classes)
    report = load_weights(network.model, tensors, strict=False, source=str(path))
    _check_report(recipe, report, path)
    notes = [f"weights from {name}: {report}"]
    new = [*report.missing, *(changed for changed, _, _ in report.reshaped)]
    if new:
        notes.append(f"initialized from the seed: {first_few(new)}")
    # SSD's published backbone pads its strided convolutions explicitly, as torch does, and its max-pool is SAME here.
    if is_tensorflow(path) and recipe.task != "detection" and recipe.model.options.get("padding") != "same":
        notes.append(
            "if the TensorFlow model pads strided convolutions with SAME (Habana's ResNeXt, Graphcore's CNNs), it "
            "needs --set model.options.padding=same; TensorFlow's official ResNets pad them explicitly and need nothing"
        )
    return notes


NUM_WHITENING_IMAGES = 2000


@dataclass(frozen=True, slots=True)
class FittedWhitening:
    """Filters for the first layer of a `FastNet`."""

    filters: Tensor
    num_images: int  # that they were fitted to

    def init(self, network: Network) -> str:
        """Initialize the network's first layer; returns a note for the log."""
        assert isinstance(network.model, FastNet)
        network.model.set_whitening(self.filters)
        fitted = f"fitted to {self.num_images:,} training images"
        return f"the first layer whitens image patches, {fitted}, and is not trained"


def start_whitening(recipe: Recipe, dataset: Dataset) -> Future[FittedWhitening] | None:
    """Fit the whitening layer of a network that has one, in a thread: meanwhile the network is built."""
    if recipe.model.name not in WHITENED:
        return None
    thread = ThreadPoolExecutor(1, "whitening")
    future = thread.submit(_fit_whitening, recipe, dataset)
    thread.shutdown(wait=False)
    return future


def _fit_whitening(recipe: Recipe, dataset: Dataset) -> FittedWhitening:
    subset = subsample(dataset, min(100.0, 100 * NUM_WHITENING_IMAGES / len(dataset)))
    bad_samples = BadSamples(recipe.data.bad_images.limit)  # they are logged when training meets them
    context = DataContext.on_host()
    [batch] = EvalLoader(subset, recipe.data.preprocess, len(subset), context, bad_samples=bad_samples)
    images = EvalPreprocess(recipe.data.preprocess, torch.float32)(batch)["images"]
    return FittedWhitening(whitening_filters(images), len(subset))
