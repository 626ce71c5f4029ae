"""Outputs of networks for whole datasets, and probabilities by heads that are fitted to features in folds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from reconv.build.data import build_eval_loader
from reconv.build.derived_recipe import load_derived
from reconv.build.head_features import head_layer
from reconv.build.model import build_eval_preprocess, build_network
from reconv.build.saved_model import find_weights
from reconv.checkpoint.load_weights import load_weights, read_weights
from reconv.core.errors import CheckpointError
from reconv.core.machine import Machine, cores_per_process
from reconv.data.dataset import F64, I64, Dataset
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.device import Device, open_device
from reconv.inference.predictor import Predictor
from reconv.precision import at_least_float32
from reconv.recipe.loader import Override
from reconv.recipe.schema import Recipe
from reconv.recipe.workers import AUTO_THREADS, IN_MEMORY
from reconv.tasks.evaluation import InferenceStep

F32 = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
BATCH_SIZE = 64
_DECAYS = (1e-4, 1e-3, 1e-2, 1e-1)  # of the heads; the one that predicts other folds best is taken
_STEPS = 60


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Outputs of a network for the n images of a dataset; rows of unreadable images are zero."""

    features: F32  # [n, d] input of the last layer, else the logits
    probs: F64  # [n, classes of the network]


@dataclass(frozen=True, slots=True)
class FeatureNetwork:
    """A network on its device, with the recipe that prepares its images."""

    recipe: Recipe
    step: InferenceStep
    device: Device

    @classmethod
    def of_predictor(cls, predictor: Predictor) -> FeatureNetwork:
        """The network of a run as it was trained."""
        return cls(predictor.recipe, predictor.inference_step, predictor.device)

    @classmethod
    def of_weights(cls, weights: str, data: Sequence[Override], device: str, num_classes: int) -> FeatureNetwork:
        """The network of initial weights, with the preprocessing that `finetune` derives; `data` are its overrides."""
        recipe = load_derived("finetune", [*data, ("model.init", weights, "--init")], measurement=None).recipe
        opened = open_device(device)
        network = build_network(recipe, num_classes, opened)
        at_least_float32(network.model)
        located = find_weights(weights).located
        path = located.ema or located.weights
        load_weights(network.model, read_weights(path, num_classes=num_classes), strict=False, source=str(path))
        network.model.eval()
        step = InferenceStep(network.model, build_eval_preprocess(recipe, network), network.precision)
        return cls(recipe, step, opened)

    def outputs(self, dataset: Dataset, progress: Callable[[int], None] = lambda done: None) -> Outputs:
        """Features and probabilities of all images of a dataset."""
        model, bad = self.step.model, BadSamples(len(dataset) + 1)
        in_memory = dataset.kind in IN_MEMORY
        threads = 0 if in_memory else min(cores_per_process(Machine(), 1), AUTO_THREADS)
        loader = build_eval_loader(self.recipe, dataset, self.device, BATCH_SIZE, threads, bad)
        found = head_layer(model)
        features: F32 | None = None
        probs: F64 | None = None
        with _recorded_input(None if found is None else found[1]) as inputs, torch.no_grad():
            for batch in loader:
                inputs.clear()
                logits = self.step(batch).float().cpu()
                if not bool(logits.isfinite().all()):
                    raise CheckpointError(
                        "the outputs of the network are not finite",
                        why="its weights have a NaN or are too large",
                        hint="take other weights with --init or --run",
                    )
                rows = batch["indices"].cpu().numpy()
                # With views of test-time augmentation the first is the image itself.
                taken = inputs[0].float().cpu().flatten(1) if inputs and len(inputs[0]) == len(rows) else logits
                if features is None or probs is None:
                    features = np.zeros((len(dataset), taken.shape[1]), np.float32)
                    probs = np.zeros((len(dataset), logits.shape[1]))
                features[rows] = taken.numpy()
                probs[rows] = logits.double().softmax(1).numpy()
                progress(len(rows))
        assert features is not None and probs is not None
        return Outputs(features, probs)


@contextmanager
def _recorded_input(layer: nn.Module | None) -> Iterator[list[Tensor]]:
    """Inputs of a layer while the context is open."""
    inputs: list[Tensor] = []
    if layer is None:
        yield inputs
        return
    handle = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    try:
        yield inputs
    finally:
        handle.remove()


def head_probabilities(features: F32, labels: I64, folds: I64, num_classes: int) -> F64:
    """Probabilities [n, classes] by softmax heads on features, each fitted to the other folds.

    Rows whose fold is negative belong to none: they get the mean of all heads. The weight decay is the one that
    explains the labels of the first fold best.
    """
    x = torch.from_numpy(_standardized(features, folds >= 0))
    y = torch.from_numpy(labels)
    numbers = sorted(set(folds[folds >= 0].tolist()))
    held_out = folds >= 0
    probs = np.zeros((len(labels), num_classes))
    decay = _best_decay(x, y, held_out, folds == numbers[0], num_classes)
    for number in numbers:
        others = torch.from_numpy(held_out & (folds != number))
        predicted = _fit_head(x[others], y[others], num_classes, decay)(x).numpy()
        probs[folds == number] = predicted[folds == number]
        probs[~held_out] += predicted[~held_out] / len(numbers)
    return probs


def _best_decay(x: Tensor, y: Tensor, held_out: Flags, is_first: Flags, num_classes: int) -> float:
    """The weight decay whose head, fitted to the other folds, explains the labels of the first fold best."""
    others, first = torch.from_numpy(held_out & ~is_first), torch.from_numpy(is_first)

    def loss(decay: float) -> float:
        predicted = _fit_head(x[others], y[others], num_classes, decay)(x[first])
        return float(nn.functional.nll_loss(predicted.clamp_min(1e-12).log(), y[first]))

    return min(_DECAYS, key=loss)


def _standardized(features: F32, chosen: npt.NDArray[np.bool_]) -> F32:
    mean, deviation = features[chosen].mean(axis=0), features[chosen].std(axis=0)
    scaled: F32 = (features - mean) / np.maximum(deviation, 1e-6)
    return scaled / np.float32(np.sqrt(features.shape[1]))


def _fit_head(x: Tensor, y: Tensor, num_classes: int, decay: float) -> Callable[[Tensor], Tensor]:
    """A softmax head fitted by L-BFGS, from images to probabilities in fp64."""
    weight = torch.zeros(x.shape[1], num_classes, requires_grad=True)
    bias = torch.zeros(num_classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=_STEPS, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(x @ weight + bias, y) + decay / x.shape[1] * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        head_weight, head_bias = weight.detach().clone(), bias.detach().clone()
    return lambda rows: (rows @ head_weight + head_bias).double().softmax(1)
