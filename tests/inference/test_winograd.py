"""The folded backend uses Winograd convolutions where a rule says that they are faster, and gives eager's outputs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from reconv.bench.infer import open_network
from reconv.inference.backends import winograd
from reconv.inference.backends.base import EagerBackend
from reconv.inference.backends.choose import LoadedNetwork, choose_backend
from reconv.inference.backends.fold import FoldedBackend
from reconv.inference.backends.onednn import PackedConvolution
from reconv.inference.backends.precisions import largest_difference
from reconv.inference.backends.winograd import WinogradConvolution, is_faster, is_supported, with_winograd
from reconv.kernels.ops.conv_candidates import ConvConfig

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("compiled_winograd", "as_on_a_fast_cpu")]

CONFIG = ConvConfig((1, 1), (1, 1), (1, 1), 1, "relu")


@pytest.fixture
def as_on_a_fast_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a processor with AVX2 or AVX-512: another one runs the same code by plain instructions."""
    monkeypatch.setattr(winograd, "PLAIN", -1)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the inputs of all Winograd convolutions."""
    shapes: list[tuple[int, ...]] = []
    original = winograd.winograd_conv

    def record(x: Tensor, *args: Any) -> Tensor:
        shapes.append(tuple(x.shape))
        return original(x, *args)

    monkeypatch.setattr(winograd, "winograd_conv", record)
    yield shapes


def load_resnet(name: str) -> LoadedNetwork:
    """A ResNet for images of 64 px whose norms have weights that are not 0."""
    settings = {"model.name": name, "data.preprocess.size": 64, "precision.mode": "fp32"}
    recipe, network, device = open_network(
        "resnet50", [(field, value, "test") for field, value in settings.items()], "cpu"
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in network.model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.weight.copy_(torch.rand(len(module.weight), generator=generator) + 0.5)
    network.model.eval()
    return LoadedNetwork(recipe, network, device)


def images_of(loaded: LoadedNetwork, num: int) -> Tensor:
    generator = torch.Generator().manual_seed(num)
    return torch.randint(0, 256, (num, *loaded.image_shape), generator=generator, dtype=torch.uint8)


def folded(loaded: LoadedNetwork) -> FoldedBackend:
    backend = choose_backend(loaded, "folded", "auto", print)
    assert isinstance(backend, FoldedBackend) and backend.difference is not None and backend.difference < 1e-5
    return backend


def num_modules(backend: FoldedBackend, kind: type) -> int:
    assert isinstance(backend._forward, torch.nn.Module)
    return sum(isinstance(module, kind) for module in backend._forward.modules())


@pytest.mark.parametrize(
    ("name", "num_winograd", "num_packed"),
    [("resnet18", 13, 20), pytest.param("resnet50", 13, 53, marks=pytest.mark.slow)],
)
def test_a_folded_resnet_uses_winograd_and_equals_eager(
    name: str, num_winograd: int, num_packed: int, calls: list[tuple[int, ...]]
) -> None:
    loaded = load_resnet(name)
    backend, eager = folded(loaded), EagerBackend(loaded.recipe, loaded.network)
    assert num_modules(backend, WinogradConvolution) == num_winograd
    assert num_modules(backend, PackedConvolution) == num_packed
    for num in (1, 3, 16):
        calls.clear()
        found = backend(images_of(loaded, num))
        assert largest_difference(found, eager(images_of(loaded, num))) < 1e-5
        assert torch.equal(backend(images_of(loaded, num)), found)
        sides = {shape[2] for shape in calls}
        assert sides == {1: {16}, 3: {16, 8}, 16: {16, 8, 4}}[num]


def test_networks_in_several_threads_give_the_outputs_of_one() -> None:
    loaded = load_resnet("resnet18")
    backends, images = [folded(loaded) for _ in range(2)], images_of(loaded, 16)
    expected = backends[0](images)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda backend: [backend(images) for _ in range(6)], backends))
    assert [len(outputs) for outputs in found] == [6, 6]
    assert all(torch.equal(output, expected) for outputs in found for output in outputs)


def test_without_the_library_every_convolution_is_direct(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = load_resnet("resnet18")
    with monkeypatch.context() as patch:
        patch.setattr(winograd, "LIBRARY", tmp_path / "missing.so")
        winograd.problem.cache_clear()
        backend = folded(loaded)
    winograd.problem.cache_clear()
    assert num_modules(backend, WinogradConvolution) == 0 and num_modules(backend, PackedConvolution) == 20
    eager = EagerBackend(loaded.recipe, loaded.network)
    assert largest_difference(backend(images_of(loaded, 3)), eager(images_of(loaded, 3))) < 1e-5


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((32, 32, 1, 1), CONFIG._replace(padding=(0, 0))),
        ((32, 32, 5, 5), CONFIG),
        ((32, 32, 3, 3), CONFIG._replace(stride=(2, 2))),
        ((32, 32, 3, 3), CONFIG._replace(padding=(0, 0))),
        ((32, 32, 3, 3), CONFIG._replace(dilation=(2, 2))),
        ((32, 16, 3, 3), CONFIG._replace(groups=2)),
        ((32, 32, 3, 3), CONFIG._replace(act="silu")),
        ((64, 3, 3, 3), CONFIG),
        ((12, 64, 3, 3), CONFIG),
    ],
)
def test_other_convolutions_stay_direct(shape: tuple[int, ...], config: ConvConfig) -> None:
    direct = torch.nn.Identity()
    assert is_supported(torch.zeros(32, 32, 3, 3), CONFIG)
    assert with_winograd(direct, torch.zeros(shape), torch.zeros(shape[0]), config) is direct


def test_bf16_stays_direct() -> None:
    assert not is_supported(torch.zeros(32, 32, 3, 3, dtype=torch.bfloat16), CONFIG)


def test_instructions_that_were_not_measured_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "PLAIN", winograd.fastest_instructions())
    assert not is_supported(torch.zeros(32, 32, 3, 3), CONFIG)


def test_several_threads_need_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "can_use_threads", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert is_supported(torch.zeros(32, 32, 3, 3), CONFIG)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not is_supported(torch.zeros(32, 32, 3, 3), CONFIG)


def test_a_library_with_other_outputs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    original = winograd.winograd_conv
    monkeypatch.setattr(winograd, "winograd_conv", lambda *args: original(*args) * 1.001)
    weight, bias = torch.randn(32, 32, 3, 3), torch.randn(32)
    direct = PackedConvolution(weight, bias, CONFIG, [1, 32, 8, 8])
    assert with_winograd(direct, weight, bias, CONFIG) is direct
    monkeypatch.setattr(winograd, "winograd_conv", original)
    assert with_winograd(direct, weight, bias, CONFIG) is not direct


def test_small_batches_and_nearly_empty_tiles_are_direct() -> None:
    assert is_faster(1, 56, 56) and is_faster(1, 14, 14) and is_faster(3, 7, 7)
    assert not is_faster(2, 7, 7)  # 8 tiles
    assert not is_faster(8, 5, 5)  # 25 of 64 pixels
    assert not is_faster(100, 2, 2) and not is_faster(0, 56, 56)
