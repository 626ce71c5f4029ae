"""A convolution with its bias, sum and activation, perhaps behind a gate, equals plain operations in every form."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import TOLERANCE, assert_near, draw
from torch import Tensor

from reconv.kernels.conv_bias_act.candidates import (
    Given,
    Shape,
    Tile,
    by_blas,
    by_filters,
    by_tiles,
    forms_for,
    in_two_passes,
    plain,
    tiles,
)
from reconv.kernels.conv_bias_act.ops import product
from reconv.kernels.pointwise.ops import Ending

ACTS = ("none", "relu", "relu6", "silu", "sigmoid")


def pointwise(act: Ending = "relu") -> Shape:
    return Shape((1, 1), (0, 0), (1, 1), 1, act)


def drawn(x: tuple[int, ...], outputs: int, dtype: torch.dtype, *, adds: bool = False, gates: bool = False) -> Given:
    """The tensors of a 1x1 convolution."""
    images, weight = draw(x, dtype, 1).detach(), draw((outputs, x[1], 1, 1), dtype, 2).detach()
    bias = draw((1, outputs, 1, 1), dtype, 3).detach().flatten()
    other = draw((x[0], outputs, *x[2:]), dtype, 4).detach() if adds else None
    return Given(images, weight, bias, other, draw((*x[:2], 1, 1), dtype, 5).detach() if gates else None)


def exact(given: Given, shape: Shape) -> Tensor:
    return plain(Given(*(None if t is None else t.double() for t in given)), shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("adds", [False, True])
def test_one_pass_over_the_output_equals_plain_operations(adds: bool, act: Ending, dtype: torch.dtype) -> None:
    shape = Shape((2, 2), (1, 1), (1, 1), 2, act)
    x, weight = draw((2, 8, 9, 9), dtype, 1).detach(), draw((24, 4, 3, 3), dtype, 2).detach()
    bias = draw((1, 24, 1, 1), dtype, 3).detach().flatten()
    given = Given(x, weight, bias, draw((2, 24, 5, 5), dtype, 4).detach() if adds else None)
    y = in_two_passes(given, shape)
    assert_near(y, exact(given, shape), TOLERANCE[dtype])
    assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)


# Rows that fill no tile, channels in one step and in several, or no multiple of eight, outputs in blocks.
CASES = [
    ((2, 24, 5, 7), 16, Tile(16, 32, 16, 4)),
    ((3, 72, 4, 4), 40, Tile(32, 32, 32, 4)),
    ((5, 10, 1, 1), 24, Tile(16, 16, 32, 4)),
    ((2, 16, 3, 3), 6, Tile(16, 16, 16, 4)),
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("adds", "gates"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("x", "outputs", "tile"), CASES, ids=str)
def test_our_product_equals_plain_operations(
    x: tuple[int, ...], outputs: int, tile: Tile, adds: bool, gates: bool, dtype: torch.dtype
) -> None:
    given = drawn(x, outputs, dtype, adds=adds, gates=gates)
    y = by_tiles(given, pointwise("silu"), tile)
    assert_near(y, exact(given, pointwise("silu")), TOLERANCE[dtype])
    assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("act", ACTS)
def test_our_product_ends_in_every_activation(act: Ending) -> None:
    given = drawn((1, 8, 4, 4), 8, torch.float32)
    assert_near(by_tiles(given, pointwise(act), Tile(16, 16, 16, 4)), exact(given, pointwise(act)), 2e-5)


@pytest.mark.parametrize("act", ["none", "relu"])
def test_a_product_of_rows_equals_plain_operations(act: Ending) -> None:
    given = drawn((3, 24, 5, 4), 10, torch.float32)
    y = by_blas(given, pointwise(act))
    assert_near(y, exact(given, pointwise(act)), 2e-5)
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("act", ["none", "relu", "silu"])
def test_every_form_that_is_tried_equals_plain_operations(act: Ending, adds: bool, gates: bool) -> None:
    given, shape = drawn((2, 16, 6, 6), 24, torch.float16, adds=adds, gates=gates), pointwise(act)
    forms = [form for form in forms_for(given, shape) if "by_cudnn" not in repr(form)]  # which no CPU has
    blas = not adds and act != "silu"
    assert len(forms) == (3 if gates else 2) + blas
    for form in forms:
        assert_near(form(given, shape), exact(given, shape), TOLERANCE[torch.float16])


# In a row from image to image, in rectangles, strides, filters, sides that are no multiple of four, uneven channels.
DEPTHWISE = [
    ((3, 24, 7, 7), 3, 1, 1),
    ((2, 8, 9, 6), 5, 1, 2),
    ((2, 40, 10, 11), 5, 2, 2),
    ((1, 8, 5, 5), 3, 2, 0),
    ((2, 8, 5, 38), 3, 1, 1),
    ((1, 16, 37, 70), 3, 2, 1),
    ((1, 8, 3, 3), 7, 1, 3),
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("size", "kernel", "stride", "pad"), DEPTHWISE, ids=str)
def test_a_depthwise_convolution_of_ours_equals_plain_operations(
    size: tuple[int, ...], kernel: int, stride: int, pad: int, dtype: torch.dtype
) -> None:
    channels = size[1]
    shape = Shape((stride, stride), (pad, pad), (1, 1), channels, "silu")
    x, weight = draw(size, dtype, 1).detach(), draw((channels, 1, kernel, kernel), dtype, 2).detach()
    given = Given(x, weight, draw((1, channels, 1, 1), dtype, 3).detach().flatten())
    assert by_filters in forms_for(given, shape)
    y = by_filters(given, shape)
    assert_near(y, exact(given, shape), TOLERANCE[dtype])
    assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)


def test_other_convolutions_are_not_filtered_channel_by_channel() -> None:
    x, bias = draw((2, 16, 6, 6), torch.float32, 1).detach(), torch.randn(16)
    each, weight = Shape((1, 1), (1, 1), (1, 1), 16, "relu6"), torch.randn(16, 1, 3, 3)
    assert by_filters in forms_for(Given(x, weight, bias), each)
    others = [
        (Given(x, weight, bias, other=x), each),
        (Given(x, torch.randn(16, 1, 3, 5), bias), each._replace(padding=(1, 2))),
        (Given(x, torch.randn(32, 1, 3, 3), torch.randn(32)), each),
        (Given(x, torch.randn(16, 2, 3, 3), bias), each._replace(groups=8)),
        (Given(x, weight, bias), each._replace(dilation=(2, 2))),
        (Given(x, weight, bias), each._replace(stride=(2, 1))),
        (Given(x.contiguous(), weight, bias), each),
    ]
    for given, shape in others:
        assert by_filters not in forms_for(given, shape)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("kernel", [3, 7])
def test_a_stem_over_blocks_of_pixels_equals_plain_operations(
    kernel: int, adds: bool, layout: torch.memory_format
) -> None:
    shape = Shape((2, 2), (kernel // 2, kernel // 2), (1, 1), 1, "silu")
    x = draw((2, 3, 12, 10), torch.float32, 1).detach().contiguous(memory_format=layout)
    weight, bias = draw((16, 3, kernel, kernel), torch.float32, 2).detach(), draw((1, 16, 1, 1), torch.float32, 3)
    other = draw((2, 16, 6, 5), torch.float32, 4).detach() if adds else None
    given = Given(x, weight, bias.detach().flatten(), other)
    _, blocks = forms_for(given, shape)
    assert "over_blocks" in repr(blocks)
    assert_near(blocks(given, shape), exact(given, shape), 2e-5)


def test_other_convolutions_are_not_made_over_blocks() -> None:
    x, weight, bias = torch.randn(2, 3, 12, 10), torch.randn(8, 3, 7, 7), torch.randn(8)
    stem = Shape((2, 2), (3, 3), (1, 1), 1, "silu")
    assert len(forms_for(Given(x, weight, bias), stem)) == 2
    others = [(x[..., :9], stem), (x, stem._replace(stride=(1, 1))), (x, stem._replace(padding=(2, 2)))]
    for images, shape in [*others, (x, stem._replace(dilation=(2, 2)))]:
        assert len(forms_for(Given(images, weight, bias), shape)) == 1


def test_convolutions_are_given_to_the_forms_that_take_them() -> None:
    def names(given: Given, shape: Shape) -> str:
        return " ".join(repr(form) for form in forms_for(given, shape))

    given = drawn((2, 16, 64, 64), 24, torch.float16)
    assert "by_tiles" in names(given, pointwise()) and "by_blas" in names(given, pointwise())
    assert "by_tiles" not in names(drawn((2, 16, 64, 64), 24, torch.float32), pointwise())
    for shape in (Shape((2, 2), (0, 0), (1, 1), 1, "relu"), Shape((1, 1), (1, 1), (1, 1), 1, "relu")):
        assert "by_tiles" not in names(given, shape) and "by_blas" not in names(given, shape)
    apart = given._replace(x=given.x.contiguous())
    assert "by_tiles" not in names(apart, pointwise()) and "by_blas" not in names(apart, pointwise())
    other = torch.zeros(2, 24, 64, 64, dtype=torch.float16)  # one channel after the other
    assert "by_tiles" not in names(given._replace(other=other), pointwise())
    gated = given._replace(gate=torch.ones(2, 16, 1, 1, dtype=torch.float16))
    assert "by_tiles" in names(gated, pointwise()) and "by_tiles" not in names(gated, shape)


def test_a_gate_of_our_product_may_lie_in_memory_in_any_way() -> None:
    given = drawn((3, 8, 2, 2), 8, torch.float32)
    gate = torch.rand(8, 3, 1, 1, generator=torch.Generator().manual_seed(1)).transpose(0, 1)
    given = given._replace(gate=gate)
    assert_near(by_tiles(given, pointwise(), Tile(16, 16, 16, 4)), exact(given, pointwise()), 2e-5)


def test_tiles_cover_all_outputs_and_are_few() -> None:
    for images, pixels in ((1, 256), (1, 50_000), (256, 49), (256, 196), (256, 12544)):
        for channels, outputs in ((16, 96), (96, 24), (240, 40), (672, 192), (320, 1280), (10, 240), (2048, 16)):
            found = tiles(images, pixels, channels, outputs)
            assert 1 <= len(found) == len(set(found)) <= 2
            for tile in found:
                assert tile.shared_bytes(channels, 2) <= 160 * 1024  # of 227 KiB that a Hopper has
                assert all(side & (side - 1) == 0 and side >= 16 for side in tile[:3])


def test_a_tile_needs_shared_memory_for_its_steps_or_its_outputs() -> None:
    # As Triton 3.6 says for Hopper, of a product over many channels and over few.
    assert Tile(128, 64, 256, 8).shared_bytes(2048, 2) == 147_456
    assert Tile(128, 32, 128, 8).shared_bytes(32, 2) == 32_768


def test_channels_that_kernels_do_not_take_are_computed_plainly() -> None:
    given = Given(torch.randn(2, 8, 4, 4), torch.randn(5, 8, 1, 1), torch.randn(5), torch.randn(2, 5, 4, 4))
    torch.testing.assert_close(in_two_passes(given, pointwise()), plain(given, pointwise()))


def test_on_the_cpu_the_plain_form_is_the_one() -> None:
    given = drawn((2, 8, 4, 4), 8, torch.float32, gates=True)
    assert torch.equal(product(*given, pointwise()), plain(given, pointwise()))
