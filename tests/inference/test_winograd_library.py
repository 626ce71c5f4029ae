"""The compiled Winograd convolution equals torch's for every shape, and its bits depend on the image alone."""

from __future__ import annotations

import gc
import itertools
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.inference.backends import winograd
from reconv.inference.backends.winograd import fastest_instructions, transform_weights, winograd_conv

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("compiled_winograd")]

TOLERANCE = 5e-6  # relative to the largest output; a direct convolution in float32 is within 2e-6


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(shape, generator=generator)


def images(*shape: int, seed: int = 0) -> Tensor:
    return draw(*shape, seed=seed).contiguous(memory_format=torch.channels_last)


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape and found.is_contiguous(memory_format=torch.channels_last)
    return float((found.double() - expected).abs().max() / expected.abs().max())


def expected_conv(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, relu: bool) -> Tensor:
    y = F.conv2d(x.double(), weight.double(), None if bias is None else bias.double(), padding=1)
    y = y if other is None else y + other.double()
    return y.relu() if relu else y


def all_instructions() -> list[int]:
    """Those of this processor, and slower ones."""
    return list(range(fastest_instructions() + 1))


@pytest.mark.parametrize("channels", [(1, 1), (3, 5), (16, 16), (17, 33), (40, 24), (64, 70)])
def test_the_output_equals_torchs_in_float64_for_every_size_and_batch(channels: tuple[int, int]) -> None:
    in_channels, out_channels = channels
    weight, bias = draw(out_channels, in_channels, 3, 3), draw(out_channels)
    sizes = [(1, 1), (1, 7), (2, 3), (4, 4), (5, 9), (6, 6), (13, 8), (17, 19)]
    cases = list(itertools.product(all_instructions(), sizes, (1, 2, 5)))
    for instructions, size, batch in cases:
        x = images(batch, in_channels, *size)
        found = winograd_conv(x, transform_weights(weight, bias, instructions))
        assert difference(found, expected_conv(x, weight, bias, None, False)) < TOLERANCE, (instructions, size, batch)
    assert len(cases) >= 24


def test_weights_on_huge_pages_outlive_their_maker_and_give_the_same_output() -> None:
    weight, x = draw(192, 128, 3, 3), images(2, 128, 7, 7)
    weights = [transform_weights(weight, None, instructions) for instructions in all_instructions()]
    gc.collect()
    assert all(layer.panels.numel() * 4 > 2 << 20 for layer in weights)
    for layer in weights:
        assert difference(winograd_conv(x, layer), expected_conv(x, weight, None, None, False)) < TOLERANCE


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_bias_sum_and_relu_are_part_of_it(has_bias: bool, adds: bool, relu: bool) -> None:
    for (in_channels, out_channels), batch in itertools.product([(24, 20), (32, 64)], (1, 3, 4)):
        weight, bias = draw(out_channels, in_channels, 3, 3), draw(out_channels) * 20 if has_bias else None
        x = images(batch, in_channels, 9, 11)
        other = images(batch, out_channels, 9, 11, seed=1) * 20 if adds else None
        expected = expected_conv(x, weight, bias, other, relu)
        for instructions in all_instructions():
            found = winograd_conv(x, transform_weights(weight, bias, instructions), other, relu)
            assert difference(found, expected) < TOLERANCE
            assert not relu or float(found.min()) == 0


def test_weights_and_images_in_any_memory_format_give_the_same_bits() -> None:
    weight, x, other = draw(32, 16, 3, 3), images(2, 16, 10, 6), images(2, 32, 10, 6, seed=1)
    found = winograd_conv(x, transform_weights(weight, None), other)
    weight = weight.contiguous(memory_format=torch.channels_last)
    again = winograd_conv(x.contiguous(), transform_weights(weight, None), other.contiguous())
    assert torch.equal(again, found)
    column = images(2, 16, 10, 12)[..., 3:9]
    copied = column.contiguous(memory_format=torch.channels_last)
    weights = transform_weights(weight, None)
    assert not column.is_contiguous() and torch.equal(winograd_conv(column, weights), winograd_conv(copied, weights))


def test_nan_stays_nan() -> None:
    x = images(1, 16, 8, 8)
    x[0, 3, 1, 1] = float("nan")
    found = winograd_conv(x, transform_weights(draw(16, 16, 3, 3), None), None, True)
    assert bool(found[:, :, :3, :3].isnan().all()) and bool(found[:, :, 4:, 4:].isfinite().all())


@pytest.fixture
def torch_threads() -> Iterator[int]:
    """The number of threads before a test, which is set again after it."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("shape", [(1, 16, 5, 5), (1, 24, 14, 14), (5, 24, 14, 14), (1, 16, 40, 40)])
def test_an_image_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(shape: tuple[int, ...]) -> None:
    x, weights = images(*shape), transform_weights(draw(80, shape[1], 3, 3), draw(80))
    torch.set_num_threads(1)
    alone = [winograd_conv(image[None], weights) for image in x]
    for num_threads in (1, 2, 3, 7):
        torch.set_num_threads(num_threads)
        for _ in range(3):
            assert torch.equal(winograd_conv(x, weights), torch.cat(alone))


@pytest.mark.usefixtures("torch_threads")
def test_threads_that_run_at_once_do_not_disturb_each_other() -> None:
    torch.set_num_threads(2)
    layers = [transform_weights(draw(48, channels, 3, 3), draw(48)) for channels in (16, 40, 24, 64)]
    inputs = [images(3, weights.panels.shape[2], 12, 12) for weights in layers]
    expected = [winograd_conv(x, weights) for x, weights in zip(inputs, layers, strict=True)]

    def repeat(number: int) -> list[Tensor]:
        torch.set_num_threads(2)
        return [winograd_conv(inputs[number], layers[number]) for _ in range(40)]

    with ThreadPoolExecutor(len(layers)) as pool:
        found = list(pool.map(repeat, range(len(layers))))
    for outputs, output in zip(found, expected, strict=True):
        assert len(outputs) == 40 and all(torch.equal(one, output) for one in outputs)


def test_without_torchs_threads_it_runs_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = images(2, 16, 20, 20), transform_weights(draw(32, 16, 3, 3), None)
    expected = winograd_conv(x, weights)
    monkeypatch.setattr(winograd, "_torch_parallel", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert not winograd.can_use_threads() and torch.equal(winograd_conv(x, weights), expected)


def test_an_empty_batch_has_an_empty_output() -> None:
    found = winograd_conv(torch.empty(0, 16, 8, 8), transform_weights(draw(24, 16, 3, 3), None))
    assert found.shape == (0, 24, 8, 8)


@pytest.mark.parametrize(
    "x",
    [torch.zeros(1, 15, 8, 8), torch.zeros(1, 16, 8, 8, dtype=torch.float64), torch.zeros(1, 16, 8, 8, device="meta")],
)
def test_other_images_are_refused(x: Tensor) -> None:
    weights = transform_weights(draw(16, 16, 3, 3), None)
    with pytest.raises(ValueError, match=r"expected float32 \(1, 16, 8, 8\) on the CPU"):
        winograd_conv(x, weights)
    with pytest.raises(ValueError, match=r"expected float32 \(1, 16, 8, 8\) on the CPU"):
        winograd_conv(torch.zeros(1, 16, 8, 8), weights, x)


def test_a_missing_damaged_or_older_library_is_a_problem_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged, older, other = (tmp_path / f"{name}.so" for name in ("damaged", "older", "other"))
    damaged.write_bytes(b"no library")
    compiler = shutil.which("cc") or "gcc"
    for library, function in ((older, "reconv_winograd_version"), (other, "something_else")):
        source = library.with_suffix(".c")
        source.write_text(f"int {function}(void) {{ return 0; }}")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    found = []
    for library in (tmp_path / "missing.so", damaged, older, other):
        monkeypatch.setattr(winograd, "LIBRARY", library)
        winograd.problem.cache_clear()
        found.append(winograd.problem())
    monkeypatch.undo()
    winograd.problem.cache_clear()
    assert found[0] == "it was not compiled" and found[1].startswith("it does not load: ")
    assert found[2] == "it has version 0 instead of 1: compile it again"
    assert found[3].startswith("it does not load: ")
