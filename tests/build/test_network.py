"""When fused kernels are used: never on the CPU, by default on a GPU."""

from __future__ import annotations

import pytest
import torch

from reconv.build.model import build_network, uses_fused_kernels, uses_max_pool_kernels
from reconv.core.errors import RecipeError, UsageError
from reconv.data.transforms.train import TrainPreprocess
from reconv.device import open_device
from reconv.kernels.fuse import fuse
from reconv.kernels.fused.norm import FusedBatchNorm2d
from reconv.models.layers.batch_norm import BatchNorm2d
from reconv.recipe.loader import Override, load
from reconv.trainer.train_state import training_kernels


class Gpu:
    """The device attributes that the choice depends on."""

    kind = "cuda"


def recipe(name: str = "cifar10-resnet20", **settings: str):  # type: ignore[no-untyped-def]
    given: list[Override] = [(name.replace("__", "."), value, "--set") for name, value in settings.items()]
    return load(name, given).recipe


def test_no_fused_kernels_on_cpu_and_requesting_them_is_an_error() -> None:
    network = build_network(recipe(), 10, open_device("cpu"))
    norms = [module for module in network.model.modules() if isinstance(module, BatchNorm2d)]
    assert len(norms) > 5 and not any(isinstance(norm, FusedBatchNorm2d) for norm in norms)
    with pytest.raises(UsageError, match=r"engine\.fused_kernels: no layer of resnet20_cifar"):
        build_network(recipe(engine__fused_kernels="on"), 10, open_device("cpu"))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, True),
        ({"engine__compile": "off"}, False),
        ({"engine__compile": "on"}, False),
        ({"engine__fused_kernels": "off"}, False),
        ({"engine__compile": "off", "engine__fused_kernels": "on"}, True),
        ({"precision__mode": "fp64"}, False),
        ({"precision__mode": "16.16"}, False),
        ({"precision__mode": "bf16", "precision__ops__float32": "[linear]"}, False),
    ],
)
def test_fused_kernels_are_the_default_on_gpu_with_native_dtypes(settings: dict[str, str], wanted: bool) -> None:
    assert uses_fused_kernels(recipe(**settings), Gpu()) is wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, True),
        ({"engine__compile": "auto"}, False),  # all layers are fused
        ({"engine__fused_kernels": "on"}, False),  # all layers are fused
        ({"engine__fused_kernels": "off"}, False),
        ({"engine__compile": "on"}, False),
        ({"precision__ops__float32": "[max_pool2d]"}, False),
    ],
)
def test_max_pools_alone_have_kernels_without_torch_compile(settings: dict[str, str], wanted: bool) -> None:
    fast = recipe("cifar10-fast", **settings)
    assert uses_max_pool_kernels(fast, Gpu()) is wanted  # type: ignore[arg-type]
    assert not uses_max_pool_kernels(fast, open_device("cpu"))


def traced_kernels(sizes: list[int], **settings: str) -> list[tuple[str, dict[str, int]]]:
    """Names and constants of the kernels that are compiled ahead for a small ResNet."""
    options = "{depths: [2]}"
    given = recipe("resnet50", model__name="resnet14", model__options=options, precision__mode="bf16", **settings)
    network = build_network(given, 4, open_device("cpu"))
    fuse(network.model.to(memory_format=torch.channels_last))
    preprocess = TrainPreprocess(given.data.preprocess, given.augment, 4, torch.bfloat16, True, True)
    found = training_kernels(network, preprocess, given, sizes)
    return [(variant.kernel.__name__, dict(variant.constants)) for variant in found]


def test_kernels_are_compiled_ahead_for_every_image_size() -> None:
    """Runs of neighboring values that one thread writes depend on the width."""
    runs = {size: [c["RUN"] for name, c in traced_kernels([size]) if "RUN" in c] for size in (64, 90)}
    assert runs[64] != runs[90]
    assert [c["RUN"] for name, c in traced_kernels([64, 90]) if "RUN" in c] == runs[64] + runs[90]


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_kernels_of_checkpointed_stages_are_compiled_ahead(is_recomputed: bool) -> None:
    settings = {"memory__activation_checkpointing": "all"} if is_recomputed else {}
    names = {name for name, _ in traced_kernels([64], **settings)}
    assert ("sum_conv" in names, "conv_many_inputs" in names) == (not is_recomputed, is_recomputed)


@pytest.mark.parametrize("other", [{"engine__compile": "on"}, {"precision__mode": "fp64"}])
def test_fused_kernels_with_torch_compile_or_emulated_dtypes_are_an_error(other: dict[str, str]) -> None:
    with pytest.raises(RecipeError, match=r"engine\.fused_kernels"):
        recipe(engine__fused_kernels="on", **other)


@pytest.mark.parametrize(
    ("model", "options", "num_zeros"),
    [
        ("resnet10", {}, 4),
        ("resnet10", {"model.options.zero_gamma": "never"}, 0),
        ("resnet10", {"model.options.version": "v2"}, 0),
        ("mobilenet_v2", {}, 0),
    ],
)
def test_the_house_recipe_starts_the_last_norm_of_each_resnet_block_at_zero(
    model: str, options: dict[str, str], num_zeros: int
) -> None:
    settings = {"model.name": model, **options}
    house = load("resnet50", [(field, value, "--set") for field, value in settings.items()]).recipe
    network = build_network(house, 10, open_device("cpu"))
    norms = [module for module in network.model.modules() if isinstance(module, BatchNorm2d)]
    assert sum(bool((norm.weight == 0).all()) for norm in norms) == num_zeros
