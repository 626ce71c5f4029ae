"""On a GPU, the kernels of inference equal plain operations in float64: pointwise passes and fused convolutions."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from gpu_tensors import TOLERANCES, all_dtypes, half_dtypes, random_tensor, relative_error

from reconv.kernels.ops import pointwise as passes
from reconv.kernels.ops.conv_candidates import (
    Candidate,
    ConvConfig,
    ConvInputs,
    find_candidates,
    torch_conv,
    triton_depthwise,
)

GATED = ((32, 112), (96, 56), (144, 56), (240, 28), (672, 14), (1152, 7), (2048, 7), (72, 13))  # channels, side
DEPTHWISE = (  # channels, side, kernel, stride
    (32, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1), (144, 56, 5, 2), (240, 28, 5, 1), (672, 14, 5, 2),
    (1152, 7, 5, 1), (72, 13, 3, 1), (48, 95, 3, 1),
)  # fmt: skip
CONV1X1: tuple[tuple[int, int, int, passes.Epilogue], ...] = (  # channels, outputs, side, activation
    (16, 96, 112, "silu"), (96, 24, 56, "none"), (144, 40, 28, "none"), (40, 240, 28, "silu"), (672, 192, 7, "none"),
    (320, 1280, 7, "silu"), (64, 256, 56, "relu"), (1024, 2048, 7, "relu"), (32, 192, 28, "relu6"),
    (72, 104, 13, "relu"), (2048, 16, 1, "relu"), (10, 240, 1, "sigmoid"), (240, 10, 1, "silu"),
)  # fmt: skip


def assert_forms_are_near(forms: Iterable[Candidate], given: ConvInputs, shape: ConvConfig) -> None:
    exact = ConvInputs(*(None if t is None else t.double() for t in given))  # type: ignore[arg-type]
    expected = torch_conv(exact, shape)
    for form in forms:
        assert relative_error(form(given, shape), expected) <= TOLERANCES[given.x.dtype], (form, shape)


@all_dtypes
@pytest.mark.parametrize("channels, side", GATED)
def test_global_avg_pool_gate_and_concat(channels: int, side: int, dtype: torch.dtype) -> None:
    x, other = (random_tensor(8, channels, side, side, dtype=dtype) for _ in range(2))
    gate = random_tensor(8, channels, 1, 1, dtype=dtype)
    parts = [x, other[:, :24].contiguous(memory_format=torch.channels_last), other]
    gated = x.double() * gate.double()
    for found, expected in (
        (passes.global_avg_pool(x), x.double().mean((2, 3), keepdim=True)),
        (passes.gate_add_act(x, gate, None, "none"), gated),
        (passes.gate_add_act(x, gate, other, "relu"), F.relu(gated + other.double())),
        (passes.concat(parts), torch.cat(parts, 1)),
    ):
        assert relative_error(found, expected) <= TOLERANCES[dtype]


@half_dtypes
@pytest.mark.parametrize("adds, gates", [(False, False), (True, False), (True, True)])
def test_every_candidate_of_a_1x1_convolution_except_cudnn(adds: bool, gates: bool, dtype: torch.dtype) -> None:
    for channels, outputs, side, act in CONV1X1:
        given = ConvInputs(
            random_tensor(8, channels, side, side, dtype=dtype),
            random_tensor(outputs, channels, 1, 1, dtype=dtype),
            random_tensor(1, outputs, 1, 1, dtype=dtype).flatten(),
            random_tensor(8, outputs, side, side, dtype=dtype) if adds else None,
            random_tensor(8, channels, 1, 1, dtype=dtype) if gates else None,
        )
        shape = ConvConfig((1, 1), (0, 0), (1, 1), 1, act)
        forms = [form for form in find_candidates(given, shape) if "cudnn_conv" not in repr(form)]
        assert_forms_are_near(forms, given, shape)


@all_dtypes
@pytest.mark.parametrize("channels, side, kernel, stride", DEPTHWISE)
def test_depthwise_convolution(channels: int, side: int, kernel: int, stride: int, dtype: torch.dtype) -> None:
    weight, bias = (
        random_tensor(channels, 1, kernel, kernel, dtype=dtype),
        random_tensor(1, channels, 1, 1, dtype=dtype),
    )
    given = ConvInputs(random_tensor(8, channels, side, side, dtype=dtype), weight, bias.flatten())
    shape = ConvConfig((stride, stride), (kernel // 2, kernel // 2), (1, 1), channels, "silu")
    assert_forms_are_near([triton_depthwise], given, shape)


@half_dtypes
@pytest.mark.parametrize("kernel, outputs", [(3, 32), (3, 48), (7, 64)])
def test_stem_plain_and_space_to_depth(kernel: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight = random_tensor(8, 3, 224, 224, dtype=dtype), random_tensor(outputs, 3, kernel, kernel, dtype=dtype)
    given = ConvInputs(x, weight, random_tensor(1, outputs, 1, 1, dtype=dtype).flatten())
    shape = ConvConfig((2, 2), (kernel // 2, kernel // 2), (1, 1), 1, "silu")
    forms = find_candidates(given, shape)
    assert len(forms) == 2
    assert_forms_are_near(forms, given, shape)
