"""Preprocessing on the device: that of training, and that of evaluation and prediction."""

from __future__ import annotations

from reconv.build.model import Network, uses_fused_kernels
from reconv.data.transforms.device import EvalPreprocess, TrainPreprocess
from reconv.device import Device
from reconv.recipe.schema import Recipe


def build_eval_preprocess(recipe: Recipe, network: Network) -> EvalPreprocess:
    return EvalPreprocess(recipe.data.preprocess, network.precision.input_dtype, network.channels_last)


def build_train_preprocess(network: Network, recipe: Recipe, num_classes: int, device: Device) -> TrainPreprocess:
    """The preprocessing on the device in training: normalize, flip, mix."""
    return TrainPreprocess(
        recipe.data.preprocess,
        recipe.augment,
        num_classes,
        network.precision.input_dtype,
        network.channels_last,
        uses_fused_kernels(recipe, device),
    )
