"""Every candidate of conv_bias_act equals plain operations."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DTYPES, TOLERANCE, alternate, assert_near, draw, pairwise
from torch import Tensor

from reconv.kernels.ops.conv_bias_act import conv_bias_act
from reconv.kernels.ops.conv_candidates import (
    ConvConfig,
    ConvInputs,
    GemmTile,
    conv_then_pointwise,
    cublas_gemm,
    find_candidates,
    gemm_tiles,
    torch_conv,
    triton_depthwise,
    triton_gemm,
)
from reconv.kernels.ops.pointwise import Epilogue

ACTS = ("none", "relu", "relu6", "silu", "sigmoid")


def pointwise(act: Epilogue = "relu") -> ConvConfig:
    return ConvConfig((1, 1), (0, 0), (1, 1), 1, act)


def drawn(
    x: tuple[int, ...], outputs: int, dtype: torch.dtype, *, adds: bool = False, gates: bool = False
) -> ConvInputs:
    """The tensors of a 1x1 convolution."""
    images, weight = draw(x, dtype, 1).detach(), draw((outputs, x[1], 1, 1), dtype, 2).detach()
    bias = draw((1, outputs, 1, 1), dtype, 3).detach().flatten()
    other = draw((x[0], outputs, *x[2:]), dtype, 4).detach() if adds else None
    return ConvInputs(images, weight, bias, other, draw((*x[:2], 1, 1), dtype, 5).detach() if gates else None)


def exact(inputs: ConvInputs, config: ConvConfig) -> Tensor:
    return torch_conv(ConvInputs(*(None if t is None else t.double() for t in inputs)), config)  # type: ignore[arg-type]


@pytest.mark.parametrize("adds, act, dtype", pairwise([False, True], ACTS, DTYPES), ids=str)
def test_conv_then_pointwise_equals_plain_operations(adds: bool, act: Epilogue, dtype: torch.dtype) -> None:
    config = ConvConfig((2, 2), (1, 1), (1, 1), 2, act)
    x, weight = draw((2, 8, 9, 9), dtype, 1).detach(), draw((24, 4, 3, 3), dtype, 2).detach()
    bias = draw((1, 24, 1, 1), dtype, 3).detach().flatten()
    inputs = ConvInputs(x, weight, bias, draw((2, 24, 5, 5), dtype, 4).detach() if adds else None)
    y = conv_then_pointwise(inputs, config)
    assert_near(y, exact(inputs, config), TOLERANCE[dtype])
    assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)


# Partial tiles, channels in one step, in several and no multiple of eight, several blocks of outputs.
CASES = [
    ((2, 24, 5, 7), 16, GemmTile(16, 32, 16, 4)),
    ((3, 72, 4, 4), 40, GemmTile(32, 32, 32, 4)),
    ((5, 10, 1, 1), 24, GemmTile(16, 16, 32, 4)),
    ((2, 16, 3, 3), 6, GemmTile(16, 16, 16, 4)),
]


@pytest.mark.parametrize("case, adds, gates, dtype", pairwise(CASES, [False, True], [False, True], DTYPES), ids=str)
def test_triton_gemm_equals_plain_operations(
    case: tuple[tuple[int, ...], int, GemmTile], adds: bool, gates: bool, dtype: torch.dtype
) -> None:
    x, outputs, tile = case
    inputs = drawn(x, outputs, dtype, adds=adds, gates=gates)
    y = triton_gemm(inputs, pointwise("silu"), tile)
    assert_near(y, exact(inputs, pointwise("silu")), TOLERANCE[dtype])
    assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("act", ACTS)
def test_triton_gemm_has_every_activation(act: Epilogue) -> None:
    inputs = drawn((1, 8, 4, 4), 8, torch.float32)
    assert_near(triton_gemm(inputs, pointwise(act), GemmTile(16, 16, 16, 4)), exact(inputs, pointwise(act)), 2e-5)


@pytest.mark.parametrize("act", ["none", "relu"])
def test_cublas_gemm_equals_plain_operations(act: Epilogue) -> None:
    inputs = drawn((3, 24, 5, 4), 10, torch.float32)
    y = cublas_gemm(inputs, pointwise(act))
    assert_near(y, exact(inputs, pointwise(act)), 2e-5)
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("act, adds, gates", pairwise(["none", "relu", "silu"], [False, True], [False, True]))
def test_every_candidate_equals_plain_operations(act: Epilogue, adds: bool, gates: bool) -> None:
    inputs, config = drawn((2, 16, 6, 6), 24, torch.float16, adds=adds, gates=gates), pointwise(act)
    candidates = [
        candidate for candidate in find_candidates(inputs, config) if "cudnn_conv" not in repr(candidate)
    ]  # not on CPU
    blas = not adds and act != "silu"
    assert len(candidates) == (3 if gates else 2) + blas
    for candidate in candidates:
        assert_near(candidate(inputs, config), exact(inputs, config), TOLERANCE[torch.float16])


# Consecutive and rectangular tiles, strides, kernels, sides that are no multiple of four, uneven channels.
DEPTHWISE = [
    ((3, 24, 7, 7), 3, 1, 1),
    ((2, 8, 9, 6), 5, 1, 2),
    ((2, 40, 10, 11), 5, 2, 2),
    ((1, 8, 5, 5), 3, 2, 0),
    ((2, 8, 5, 38), 3, 1, 1),
    ((1, 16, 37, 70), 3, 2, 1),
    ((1, 8, 3, 3), 7, 1, 3),
]


@pytest.mark.parametrize(("size", "kernel", "stride", "pad", "dtype"), alternate(DEPTHWISE, DTYPES), ids=str)
def test_triton_depthwise_equals_plain_operations(
    size: tuple[int, ...], kernel: int, stride: int, pad: int, dtype: torch.dtype
) -> None:
    channels = size[1]
    config = ConvConfig((stride, stride), (pad, pad), (1, 1), channels, "silu")
    x, weight = draw(size, dtype, 1).detach(), draw((channels, 1, kernel, kernel), dtype, 2).detach()
    inputs = ConvInputs(x, weight, draw((1, channels, 1, 1), dtype, 3).detach().flatten())
    assert triton_depthwise in find_candidates(inputs, config)
    y = triton_depthwise(inputs, config)
    assert_near(y, exact(inputs, config), TOLERANCE[dtype])
    assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)


def test_triton_depthwise_is_no_candidate_for_other_convolutions() -> None:
    x, bias = draw((2, 16, 6, 6), torch.float32, 1).detach(), torch.randn(16)
    each, weight = ConvConfig((1, 1), (1, 1), (1, 1), 16, "relu6"), torch.randn(16, 1, 3, 3)
    assert triton_depthwise in find_candidates(ConvInputs(x, weight, bias), each)
    others = [
        (ConvInputs(x, weight, bias, other=x), each),
        (ConvInputs(x, torch.randn(16, 1, 3, 5), bias), each._replace(padding=(1, 2))),
        (ConvInputs(x, torch.randn(32, 1, 3, 3), torch.randn(32)), each),
        (ConvInputs(x, torch.randn(16, 2, 3, 3), bias), each._replace(groups=8)),
        (ConvInputs(x, weight, bias), each._replace(dilation=(2, 2))),
        (ConvInputs(x, weight, bias), each._replace(stride=(2, 1))),
        (ConvInputs(x.contiguous(), weight, bias), each),
    ]
    for inputs, config in others:
        assert triton_depthwise not in find_candidates(inputs, config)


@pytest.mark.parametrize(
    "kernel, adds, layout", pairwise([3, 7], [False, True], [torch.contiguous_format, torch.channels_last])
)
def test_space_to_depth_conv_equals_plain_operations(kernel: int, adds: bool, layout: torch.memory_format) -> None:
    config = ConvConfig((2, 2), (kernel // 2, kernel // 2), (1, 1), 1, "silu")
    x = draw((2, 3, 12, 10), torch.float32, 1).detach().contiguous(memory_format=layout)
    weight, bias = draw((16, 3, kernel, kernel), torch.float32, 2).detach(), draw((1, 16, 1, 1), torch.float32, 3)
    other = draw((2, 16, 6, 5), torch.float32, 4).detach() if adds else None
    inputs = ConvInputs(x, weight, bias.detach().flatten(), other)
    _, blocks = find_candidates(inputs, config)
    assert "space_to_depth_conv" in repr(blocks)
    assert_near(blocks(inputs, config), exact(inputs, config), 2e-5)


def test_space_to_depth_conv_is_no_candidate_for_other_convolutions() -> None:
    x, weight, bias = torch.randn(2, 3, 12, 10), torch.randn(8, 3, 7, 7), torch.randn(8)
    stem = ConvConfig((2, 2), (3, 3), (1, 1), 1, "silu")
    assert len(find_candidates(ConvInputs(x, weight, bias), stem)) == 2
    others = [(x[..., :9], stem), (x, stem._replace(stride=(1, 1))), (x, stem._replace(padding=(2, 2)))]
    for images, config in [*others, (x, stem._replace(dilation=(2, 2)))]:
        assert len(find_candidates(ConvInputs(images, weight, bias), config)) == 1


def test_candidates_depend_on_dtype_layout_and_kernel() -> None:
    def names(inputs: ConvInputs, config: ConvConfig) -> str:
        return " ".join(repr(candidate) for candidate in find_candidates(inputs, config))

    inputs = drawn((2, 16, 64, 64), 24, torch.float16)
    assert "triton_gemm" in names(inputs, pointwise()) and "cublas_gemm" in names(inputs, pointwise())
    assert "triton_gemm" not in names(drawn((2, 16, 64, 64), 24, torch.float32), pointwise())
    for config in (ConvConfig((2, 2), (0, 0), (1, 1), 1, "relu"), ConvConfig((1, 1), (1, 1), (1, 1), 1, "relu")):
        assert "triton_gemm" not in names(inputs, config) and "cublas_gemm" not in names(inputs, config)
    apart = inputs._replace(x=inputs.x.contiguous())
    assert "triton_gemm" not in names(apart, pointwise()) and "cublas_gemm" not in names(apart, pointwise())
    other = torch.zeros(2, 24, 64, 64, dtype=torch.float16)  # not channels_last
    assert "triton_gemm" not in names(inputs._replace(other=other), pointwise())
    gated = inputs._replace(gate=torch.ones(2, 16, 1, 1, dtype=torch.float16))
    assert "triton_gemm" in names(gated, pointwise()) and "triton_gemm" not in names(gated, config)


def test_triton_gemm_takes_a_gate_of_any_layout() -> None:
    inputs = drawn((3, 8, 2, 2), 8, torch.float32)
    gate = torch.rand(8, 3, 1, 1, generator=torch.Generator().manual_seed(1)).transpose(0, 1)
    inputs = inputs._replace(gate=gate)
    assert_near(triton_gemm(inputs, pointwise(), GemmTile(16, 16, 16, 4)), exact(inputs, pointwise()), 2e-5)


def test_gemm_tiles_are_few_and_fit_into_shared_memory() -> None:
    for images, pixels in ((1, 256), (1, 50_000), (256, 49), (256, 196), (256, 12544)):
        for channels, outputs in ((16, 96), (96, 24), (240, 40), (672, 192), (320, 1280), (10, 240), (2048, 16)):
            found = gemm_tiles(images, pixels, channels, outputs)
            assert 1 <= len(found) == len(set(found)) <= 2
            for tile in found:
                assert tile.shared_bytes(channels, 2) <= 160 * 1024  # of 227 KiB that a Hopper has
                assert all(side & (side - 1) == 0 and side >= 16 for side in tile[:3])


def test_shared_memory_of_a_tile_is_as_triton_reports_it() -> None:
    # As Triton 3.6 says for Hopper, of a product over many channels and over few.
    assert GemmTile(128, 64, 256, 8).shared_bytes(2048, 2) == 147_456
    assert GemmTile(128, 32, 128, 8).shared_bytes(32, 2) == 32_768


def test_unsupported_channels_are_computed_by_torch() -> None:
    inputs = ConvInputs(torch.randn(2, 8, 4, 4), torch.randn(5, 8, 1, 1), torch.randn(5), torch.randn(2, 5, 4, 4))
    torch.testing.assert_close(conv_then_pointwise(inputs, pointwise()), torch_conv(inputs, pointwise()))


def test_on_cpu_torch_is_used() -> None:
    inputs = drawn((2, 8, 4, 4), 8, torch.float32, gates=True)
    assert torch.equal(conv_bias_act(*inputs, pointwise()), torch_conv(inputs, pointwise()))
