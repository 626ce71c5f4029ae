"""The input of a pretrained network's last layer, from which the rate follows at which SGD diverges.

It is measured on the CPU on evenly spaced training images, whatever device trains, so that a derived rate does not
depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from reconv.build.model import model_options
from reconv.build.saved_model import find_weights
from reconv.checkpoint.load_weights import compare_weights, load_weights, read_weights
from reconv.core.custom_code import code_errors
from reconv.core.errors import DataError
from reconv.data.dataset import Dataset, Subset, at_most
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.transforms.normalize import EvalPreprocess
from reconv.models import build_model
from reconv.models.frozen import head_patterns
from reconv.recipe.derive import HeadFacts, SecondMoment
from reconv.recipe.parts.code import add_code_path
from reconv.recipe.schema import Recipe

NUM_IMAGES = 32  # more change the second digit of the eigenvalue at most: it is the mean's, nearly


def head_facts(recipe: Recipe, dataset: Dataset, log: Callable[[str], None] | None = None) -> HeadFacts | None:
    """Measure the head's input in the network of a recipe with its initial weights; None if that says nothing.

    That is so where the last layer is not linear, where the weights are of another network, and where no image can be
    read. Remote weights are downloaded.
    """
    assert recipe.model.init is not None
    add_code_path(recipe)
    num_classes = len(dataset.class_names)
    model = build_model(recipe.model.name, seed=recipe.seed, **model_options(recipe, num_classes))
    head = head_layer(model)
    if head is None:
        return None
    located = find_weights(recipe.model.init, log=log).located
    path = located.ema or located.weights
    tensors = read_weights(path, num_classes=num_classes)
    if compare_weights(model, tensors).is_mostly_new:  # of another network: training refuses them or starts anew
        return None
    load_weights(model, tensors, strict=False, source=str(path))
    images = _images(recipe, dataset)
    if images is None:
        return None
    name, layer = head
    with code_errors(f"the forward pass of {recipe.model.name}"):
        running = second_moment(head_input(model, layer, images, batch_statistics=False))
        batch = running  # one image may have no variance
        if len(images) > 1:
            batch = second_moment(head_input(model, layer, images, batch_statistics=True))
    return HeadFacts(name, len(images), recipe.data.preprocess.size, running, batch)


def head_layer(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """The name of a network's last layer, and the layer; None if it is not linear."""
    patterns = head_patterns(model)
    matching = [
        (name, module)
        for name, module in model.named_modules()
        if any(fnmatchcase(f"{name}.weight", pattern) for pattern in patterns) and hasattr(module, "weight")
    ]
    if not matching or not isinstance(matching[-1][1], nn.Linear):
        return None
    return matching[-1][0], matching[-1][1]


def _images(recipe: Recipe, dataset: Dataset) -> Tensor | None:
    """Some training images as evaluation prepares them [n, channels, size, size]; None if none can be read."""
    subset = Subset(dataset, at_most(len(dataset), NUM_IMAGES))
    bad_samples = BadSamples(len(subset))  # they are logged, or end the run, when training meets them
    loader = EvalLoader(subset, recipe.data.preprocess, len(subset), DataContext.on_host(), bad_samples=bad_samples)
    try:
        [batch] = loader
    except DataError:
        return None
    return EvalPreprocess(recipe.data.preprocess, torch.float32)(batch)["images"]


@torch.no_grad()
def head_input(model: nn.Module, layer: nn.Module, images: Tensor, *, batch_statistics: bool) -> Tensor:
    """Input of a layer for images in evaluation: one row for each, or for each position if it is applied to several.

    With `batch_statistics` batch norms work as in training, and change their running statistics.
    """
    inputs: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train(batch_statistics)
    try:
        model(images)
    finally:
        handle.remove()
    return inputs[-1].flatten(0, -2)


def second_moment(rows: Tensor) -> SecondMoment:
    """The largest eigenvalue and the trace of E[x x^T] over rows [n, d]."""
    x = rows.double()
    gram = x @ x.T if len(x) <= x.shape[1] else x.T @ x
    eigenvalues = torch.linalg.eigvalsh(gram / len(x))
    return SecondMoment(float(eigenvalues[-1]), float(eigenvalues.sum()))
