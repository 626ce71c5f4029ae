"""On a GPU, the fused kernels of training equal plain operations in float64, forward and backward.

Shapes are those of ResNet-50, MobileNetV2, EfficientNet-B0, GoogLeNet, SE-ResNeXt and SSD, and some that fill no tile.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gpu_tensors import (
    TOLERANCES,
    all_dtypes,
    half_dtypes,
    in_float64,
    random_norm,
    random_tensor,
    relative_error,
    worst_error,
)
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from reconv.core.batch import Batch
from reconv.data.transforms.color import device_color_params, jitter_on_device
from reconv.data.transforms.mixup import (
    CUTMIX_BOXES,
    CUTMIX_OFFSETS,
    MIXUP_OFFSETS,
    MIXUP_WEIGHTS,
    mix_images,
    mix_params,
)
from reconv.detection.anchors import generate_anchors
from reconv.kernels import reference
from reconv.kernels.channels_last import channel_rows
from reconv.kernels.conv_output import ConvOutput
from reconv.kernels.fused.layers import FusedDropout
from reconv.kernels.fused.ssd import SSDFeatureMaps
from reconv.kernels.ops import batch_norm as norm
from reconv.kernels.ops import conv1x1_norm_backward as conv_backward
from reconv.kernels.ops import depthwise, max_pool, stem
from reconv.kernels.ops import grouped_conv as grouped
from reconv.kernels.ops import norm_concat as concat
from reconv.kernels.ops import norm_max_pool as pool
from reconv.kernels.ops import norm_squeeze_excite as gated
from reconv.kernels.ops import squeeze_excite as excite
from reconv.kernels.ops import stem_max_pool as stem_pool
from reconv.kernels.ops import sum_conv1x1 as sum_conv
from reconv.kernels.ops.batch_norm import NormParams
from reconv.kernels.ops.bias_relu import bias_relu_pad
from reconv.kernels.ops.box_losses import AnchorLayout, GroundTruthBatch, box_losses
from reconv.kernels.ops.color_jitter import jitter_and_normalize
from reconv.kernels.ops.conv1x1_norm_act import conv1x1_batch_norm_act
from reconv.kernels.ops.conv1x1_statistics import conv1x1_statistics
from reconv.kernels.ops.excitation import excitation_gate
from reconv.kernels.ops.global_avg_pool import global_avg_pool
from reconv.kernels.ops.norm_conv1x1 import batch_norm_act_conv1x1
from reconv.kernels.ops.normalize_images import normalize_and_mix, normalize_images
from reconv.kernels.ops.softmax_topk import softmax_topk
from reconv.kernels.window import STEM_KERNELS, STEM_WINDOWS, PoolWindow
from reconv.models.layers.batch_norm import LayerState
from reconv.models.layers.conv import SameMaxPool2d
from reconv.models.layers.dropout import Dropout
from reconv.recipe.parts.data import AugmentConfig, ColorJitterConfig
from reconv.tasks.detection import MatchConfig, ssd_losses

NORM_SHAPES = (  # channels, side
    (64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7),
    (72, 13),  # fills no block of channels and no tile of rows
)  # fmt: skip
GROUPS = ((8,), (3, 3, 2))
DEPTHWISE_KERNELS = ((32, 112, 3), (144, 56, 3), (960, 7, 3), (240, 28, 5), (1152, 7, 5), (40, 13, 5))
DEPTHWISE = (
    (96, 112, 3),
    (144, 56, 3),
    (576, 14, 3),
    (144, 56, 5),
    (240, 28, 5),
    (72, 13, 3),
)  # channels, side, kernel
GROUPED = ((4, 128, 56), (8, 256, 28), (16, 512, 14), (32, 1024, 7), (4, 80, 13))  # channels per group, channels, side
PROJECTIONS = ((32, 16, 112), (96, 24, 56), (144, 24, 56), (192, 32, 28), (384, 64, 14), (576, 96, 14), (72, 40, 13))
INCEPTION = (  # side, widths of the narrow convolutions, and of the other branches
    (28, (64, 96, 16), (128, 32, 32)), (14, (160, 112, 24), (224, 64, 64)), (7, (384, 192, 48), (384, 128, 128)),
    (13, (8, 72, 24), (40, 8, 16)),
)  # fmt: skip
CONV1X1 = (  # inputs, outputs, side
    (16, 96, 112), (24, 144, 56), (40, 240, 28), (64, 256, 56), (96, 576, 14), (128, 512, 28), (160, 960, 7),
    (256, 64, 56), (256, 1024, 14), (480, 80, 14), (512, 128, 28), (72, 40, 13),
)  # fmt: skip
STEMS = ((64, 224), (32, 150), (72, 26))  # outputs, side of the images
SUM_CONVS = ((256, 64, 56), (256, 128, 56), (512, 128, 28), (512, 256, 28), (1024, 256, 14), (184, 72, 13))
EXPANSIONS = ((16, 96, 112), (24, 144, 56), (32, 192, 28), (40, 240, 28), (64, 384, 14), (8, 24, 13), (56, 136, 13))
SQUEEZE_EXCITE = ((32, 112), (96, 56), (144, 56), (240, 28), (672, 14), (1152, 7))
NORM_SQUEEZE_EXCITE = ((32, 112), (96, 56), (240, 28), (256, 56), (672, 14), (1152, 7), (2048, 7))


def to_sixteenths(tensor: Tensor) -> Tensor:
    """The values rounded to sixteenths, so that two of them are equal or far apart."""
    return (tensor.float() * 16).round().div(16).to(tensor.dtype)


def batch_norm64(x: Tensor, of: NormParams, groups: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """The batch norm of x in float64, and its parameters there."""
    weight, bias = in_float64(of.weight), in_float64(of.bias)
    return reference.batch_norm(x, weight, bias, of.running_var.double(), of.eps, groups)[0], [weight, bias]


def far_from_kinks(z: Tensor) -> Tensor:
    """Where float32 and float64 agree on the side of a kink of ReLU, ReLU6 and Hardswish."""
    far = torch.stack([(z - kink).abs() > 1e-4 for kink in (-3, 0, 3, 6)]).all(0)
    return far.contiguous(memory_format=torch.channels_last)


def norm_errors(form: str, channels: int, side: int, groups: tuple[int, ...], dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of the output and of each gradient."""
    shape = (sum(groups), channels, side, side)
    x, other = (random_tensor(*shape, dtype=dtype) for _ in range(2))
    of, other_of = random_norm(channels), random_norm(channels)
    if form.startswith("pool"):  # a last bit would decide which value of a window is the largest
        x = to_sixteenths(x)
    x64, other64 = in_float64(x), in_float64(other)
    z, parameters = batch_norm64(x64, of, groups)
    leaves, leaves64 = [x.requires_grad_(), of.weight, of.bias], [x64, *parameters]
    if form == "pool":
        y64, outputs = F.max_pool2d(F.relu(z), 3, 2, 1), list(pool.batch_norm_relu_max_pool(x, of, groups)[:2])
    elif form == "pool_same":
        y64 = SameMaxPool2d(3, 2)(F.relu(z))
        outputs = list(pool.batch_norm_relu_max_pool(x, of, groups, PoolWindow(3, 2, "same"))[:2])
    elif form == "pool_ceil":
        y64 = F.max_pool2d(F.relu(z), 3, 2, ceil_mode=True)
        outputs = list(pool.batch_norm_relu_max_pool(x, of, groups, PoolWindow(3, 2, 0, ceil=True))[:2])
    elif form == "join":
        leaves.append(other.requires_grad_())
        leaves64.append(other64)
        z = z + other64
        y64, outputs = F.relu(z), list(norm.batch_norm_add_act(x, of, other, groups, "relu")[:2])
    elif form == "join_norms":
        leaves += [other.requires_grad_(), other_of.weight, other_of.bias]
        added, parameters = batch_norm64(other64, other_of, groups)
        leaves64 += [other64, *parameters]
        z = z + added
        y64, outputs = F.relu(z), list(norm.batch_norm_add_norm_act(x, of, other, other_of, groups, "relu")[:2])
    else:
        y64, outputs = reference.ACTIVATION_FUNCTIONS[form](z), [norm.batch_norm_act(x, of, groups, form)[0]]  # type: ignore[arg-type]
    keep = 1 if form.startswith("pool") else far_from_kinks(z)
    dy = [torch.randn_like(output) * keep for output in outputs]
    torch.autograd.backward(outputs, dy)
    y64.backward(sum(g.double() for g in dy))
    names = ("dx", "dweight", "dbias", "dother", "dweight2", "dbias2")
    gradients = {n: relative_error(a.grad, b.grad) for n, a, b in zip(names, leaves, leaves64, strict=False)}
    return {"y": relative_error(outputs[0], y64), **gradients}


@all_dtypes
@pytest.mark.parametrize(
    "form", ["none", "relu", "relu6", "silu", "hardswish", "join", "join_norms", "pool", "pool_same", "pool_ceil"]
)
def test_batch_norm(form: str, dtype: torch.dtype) -> None:
    for channels, side in NORM_SHAPES:
        for groups in GROUPS:
            errors = norm_errors(form, channels, side, groups, dtype)
            assert max(errors.values()) <= TOLERANCES[dtype], (channels, side, groups, errors)


@half_dtypes
@pytest.mark.parametrize("has_norm", [False, True])
def test_sum_and_conv1x1_equal_separate_kernels(has_norm: bool, dtype: torch.dtype) -> None:
    """Filters and gradients are small integers, so that products have the same bits in any order."""
    for channels, outputs, side in SUM_CONVS:
        for groups in GROUPS:
            shape = (sum(groups), channels, side, side)
            x, other, second = (random_tensor(*shape, dtype=dtype) for _ in range(3))
            filters = random_tensor(outputs, channels, 1, 1, dtype=dtype).round()
            dy = random_tensor(shape[0], outputs, side, side, dtype=dtype).round()
            of, other_of = random_norm(channels), random_norm(channels)
            leaves = [x, of.weight, of.bias, other, filters, *([other_of.weight, other_of.bias] if has_norm else [])]
            for leaf in leaves:
                leaf.requires_grad_()
            fused = sum_conv.batch_norm_add_relu_conv1x1(
                ConvOutput(x), of, ConvOutput(other), other_of if has_norm else None, filters, groups
            )
            found = torch.autograd.grad(fused[:2], leaves, [dy, second])
            if has_norm:
                main, again, *_ = norm.batch_norm_add_norm_act(x, of, other, other_of, groups, "relu")
            else:
                main, again, *_ = norm.batch_norm_add_act(x, of, other, groups, "relu")
            expected = torch.autograd.grad([F.conv2d(main, filters), again], leaves, [dy, second])
            errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
            assert max(errors) <= TOLERANCES[dtype] / 4, (channels, outputs, side, groups, errors)
            assert has_norm or torch.equal(found[3], expected[3]), (channels, outputs, side, groups)


# Inputs and outputs of a bottleneck's last convolution, outputs of the next one's first, side.
LAST_CONVS = ((64, 256, 64, 56), (64, 256, 128, 13), (128, 256, 128, 14), (128, 512, 128, 28))


@half_dtypes
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("has_shortcut_conv", [False, True])
def test_gradients_left_to_a_convolution(has_shortcut_conv: bool, groups: tuple[int, ...], dtype: torch.dtype) -> None:
    """The end of a bottleneck and the beginning of the next one: the gradients are those of separate kernels."""
    for inputs, outputs, next_outputs, side in LAST_CONVS:
        filters, next_filters, other_filters = (
            random_tensor(*shape, 1, 1, dtype=dtype)
            for shape in ((outputs, inputs), (next_outputs, outputs), (outputs, 64))
        )
        x, source, other = (random_tensor(sum(groups), c, side, side, dtype=dtype) for c in (inputs, 64, outputs))
        of_x, of_y, of_other, of_next = (random_norm(c) for c in (inputs, outputs, outputs, next_outputs))
        leaves = [x, filters, next_filters, of_x.weight, of_x.bias, of_y.weight, of_y.bias]
        leaves += [source, other_filters, of_other.weight, of_other.bias] if has_shortcut_conv else [other]
        gradients = []
        for is_deferred in (False, True):
            for leaf in leaves:
                leaf.requires_grad_()
            last, _ = conv_backward.norm_relu_conv1x1_before_norm(x, of_x, filters, of_y, groups)
            added = ConvOutput(other)
            if has_shortcut_conv and outputs == 256:
                added = conv_backward.conv1x1_before_norm(source, other_filters, of_other, groups)
            elif has_shortcut_conv:
                added = ConvOutput(F.conv2d(source, other_filters))
            if not is_deferred:
                last, added = replace(last, deferred=None), replace(added, deferred=None)
            y, again, *_ = sum_conv.batch_norm_add_relu_conv1x1(
                last, of_y, added, of_other if has_shortcut_conv else None, next_filters, groups, of_next
            )
            torch.manual_seed(1)
            given = [torch.randn_like(y), torch.randn_like(again)]
            gradients.append(torch.autograd.grad([y, again], leaves, given))
        errors = [relative_error(a, b) for a, b in zip(gradients[1], gradients[0], strict=True)]
        assert max(errors) <= TOLERANCES[dtype] / 2, (inputs, outputs, next_outputs, side, errors)


@half_dtypes
@pytest.mark.parametrize("has_norm", [False, True])
def test_a_sum_and_its_convolution_by_one_kernel(has_norm: bool, dtype: torch.dtype) -> None:
    """The sum has the bits of a separate kernel, as has the gradient of its second use: the mask is the same."""
    for channels, outputs in sum_conv.FORWARD_CONFIGS:
        for groups in GROUPS:
            x, other = (random_tensor(sum(groups), channels, 13, 14, dtype=dtype).requires_grad_() for _ in range(2))
            filters, of, other_of = (
                random_tensor(outputs, channels, 1, 1, dtype=dtype),
                *map(random_norm, [channels] * 2),
            )
            given = ConvOutput(x), of, ConvOutput(other), other_of if has_norm else None, filters, groups
            y, again, _, _, stats = sum_conv.batch_norm_add_relu_conv1x1(*given, random_norm(outputs))
            expected, expected_again, *_ = sum_conv.batch_norm_add_relu_conv1x1(*given)  # by two kernels
            assert torch.equal(again, expected_again) and relative_error(y, expected) <= TOLERANCES[dtype] / 4
            assert stats is not None
            known = norm.statistics(y.detach(), random_norm(outputs), channel_rows(y, groups))
            assert relative_error(stats, known) <= 1e-5
            second = [torch.zeros_like(y), torch.randn_like(again)]
            pairs = ([y, again], [expected, expected_again])
            found, plain = (torch.autograd.grad(uses, other, second)[0] for uses in pairs)
            assert torch.equal(found, plain), (channels, outputs, groups)


@all_dtypes
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_norm_and_concat(groups: tuple[int, ...], dtype: torch.dtype) -> None:
    for side, widths, added in INCEPTION:
        inputs = [random_tensor(sum(groups), c, side, side, dtype=dtype) for c in (sum(widths), *added)]
        norms = [random_norm(channels) for channels in (*widths, *added)]
        inputs64 = [in_float64(x) for x in inputs]
        parts = (*inputs64[0].split(widths, 1), *inputs64[1:])
        found = [batch_norm64(x, of, groups) for x, of in zip(parts, norms, strict=True)]
        first, *narrow = (z for z, _ in found[:3])
        exact = [torch.cat([first, *(z for z, _ in found[3:])], 1), *narrow]
        y, *others, _ = concat.batch_norm_relu_split(
            inputs[0].requires_grad_(), norms[:3], groups, widths[0] + sum(added)
        )
        added_inputs = [x.requires_grad_() for x in inputs[1:]]
        y, _ = concat.batch_norm_relu_concat(y, added_inputs, norms[3:], groups)
        dys = [torch.randn_like(t) * far_from_kinks(z) for t, z in zip((y, *others), exact, strict=True)]
        torch.autograd.backward((y, *others), dys)
        torch.autograd.backward([F.relu(z) for z in exact], [dy.double() for dy in dys])
        errors = [relative_error(t, F.relu(z)) for t, z in zip((y, *others), exact, strict=True)]
        errors += [relative_error(a.grad, b.grad) for a, b in zip(inputs, inputs64, strict=True)]
        for of, (_, (weight, bias)) in zip(norms, found, strict=True):
            errors += [relative_error(of.weight.grad, weight.grad), relative_error(of.bias.grad, bias.grad)]
        assert max(errors) <= TOLERANCES[dtype], (side, widths, added, errors)


@all_dtypes
def test_softmax_topk(dtype: torch.dtype) -> None:
    logits = torch.randn(256, 1000, device="cuda").to(dtype)
    scores, labels = softmax_topk(logits, 5)
    expected = logits.float().softmax(1)
    torch.testing.assert_close(scores, expected.topk(5).values)
    torch.testing.assert_close(expected.gather(1, labels), scores)


@pytest.mark.parametrize("kernel", STEM_KERNELS)
def test_stem_space_to_depth(kernel: int) -> None:
    images = random_tensor(4, 3, 224, 224, dtype=torch.bfloat16)
    weight = torch.randn(64, 3, kernel, kernel, device="cuda").double()
    blocks = F.conv2d(stem.space_to_depth(images, kernel, images.dtype).double(), stem.space_to_depth_weight(weight))
    assert relative_error(blocks, F.conv2d(images.double(), weight, stride=2, padding=kernel // 2)) < 1e-12


@half_dtypes
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("kernel", STEM_KERNELS)
def test_stem_convolution_with_the_statistics_of_its_output(
    kernel: int, groups: tuple[int, ...], dtype: torch.dtype
) -> None:
    for outputs, side in STEMS:
        blocks, weight = random_stem(kernel, groups, outputs, side, dtype)
        of = random_norm(outputs)

        def plain(weight: Tensor, blocks: Tensor = blocks) -> Tensor:
            return F.conv2d(blocks.double(), stem.space_to_depth_weight(weight))

        def fused(weight: Tensor, blocks: Tensor = blocks, of: NormParams = of) -> tuple[Tensor, Tensor]:
            return stem.stem_conv_statistics(blocks, stem.space_to_depth_weight(weight), of, groups)

        error = worst_error([weight], lambda weight, fused=fused: fused(weight)[0], plain)
        assert error <= TOLERANCES[dtype], (outputs, side)
        y, stats = fused(weight)
        expected = norm.statistics(y, of, channel_rows(y, groups))
        torch.testing.assert_close(stats, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(stats, fused(weight)[1]), "sums are in a fixed order"


@half_dtypes
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("window", STEM_WINDOWS, ids=str)
def test_stem_with_norm_and_max_pool(window: PoolWindow, groups: tuple[int, ...], dtype: torch.dtype) -> None:
    for kernel, (outputs, side) in itertools.product(STEM_KERNELS, STEMS):
        blocks, weight = random_stem(kernel, groups, outputs, side, dtype)
        of, weight64 = random_norm(outputs), in_float64(weight)
        filters = stem.space_to_depth_weight(weight.requires_grad_())
        y, again, _ = stem_pool.stem_conv_norm_relu_max_pool(blocks, filters, of, groups, window)
        x64 = in_float64(stem.conv_output(blocks, filters.detach(), of, groups)[0])  # ties as in the kernel
        z, (scale, bias) = batch_norm64(x64, of, groups)
        pools = {"same": SameMaxPool2d(3, 2), 1: nn.MaxPool2d(3, 2, 1), 0: nn.MaxPool2d(3, 2, ceil_mode=True)}
        y64 = pools[window.pad](F.relu(z))
        dy = [torch.randn_like(y), torch.randn_like(y)]
        torch.autograd.backward([y, again], dy)
        y64.backward(sum(g.double() for g in dy))
        F.conv2d(blocks.double(), stem.space_to_depth_weight(weight64)).backward(x64.grad)
        pairs = [(y, y64), (weight.grad, weight64.grad), (of.weight.grad, scale.grad), (of.bias.grad, bias.grad)]
        errors = [relative_error(a, b) for a, b in pairs]
        assert max(errors) <= TOLERANCES[dtype], (kernel, outputs, side, errors)


def test_roundings_of_a_stems_gradient_cancel() -> None:
    """Over a million pixels a rounding that prefers one direction would show: it made an error of 8e-3 once."""
    groups, dtype = (64,), torch.bfloat16
    blocks, weight = random_stem(7, groups, 64, 224, dtype)
    of, filters = random_norm(64), stem.space_to_depth_weight(weight)
    x, stats = stem.conv_output(blocks, filters, of, groups)
    operand = norm.NormInput(x, stats, of.weight.detach(), of.bias.detach())
    _, peak, place = pool.write_pooled(operand, groups)
    peaks, dz = replace(operand, x=peak), torch.empty_like(peak)
    given = torch.randn_like(peak), torch.randn_like(peak)
    sums = norm.gradient_sums(*given, peaks, None, None, dz, channel_rows(peak, groups), "relu")
    exact = pool.input_gradient(dz.float(), place, replace(operand, x=x.float()), sums, groups).double()
    expected = conv2d_weight(blocks.double(), filters.shape, exact)
    found = stem_pool.weight_gradient(dz, place, operand, sums, blocks, groups)
    assert relative_error(found, expected) <= 4e-3


def random_stem(
    kernel: int, groups: tuple[int, ...], outputs: int, side: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Blocks of random images, and a weight whose values are multiples of a sixteenth.

    The output of the convolution then has the same bits in any order of its sums.
    """
    images = to_sixteenths(random_tensor(sum(groups), 3, side, side, dtype=dtype))
    weight = to_sixteenths(random_tensor(outputs, 3, kernel, kernel, dtype=dtype)).float()
    return stem.space_to_depth(images, kernel, dtype), weight


@all_dtypes
@pytest.mark.parametrize("side", [224, 300, 299, 13])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_normalize_images(layout: torch.memory_format, side: int, dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (64, 3, side, side), dtype=torch.uint8, device="cuda")
    images = images.contiguous(memory_format=layout)
    flips = torch.rand(64, device="cuda") < 0.5
    factor, shift = torch.rand(1, 3, 1, 1, device="cuda") / 50, torch.randn(1, 3, 1, 1, device="cuda")
    expected = torch.where(flips.view(-1, 1, 1, 1), images.flip(-1), images).double() * factor + shift
    assert relative_error(normalize_images(images, flips, factor, shift, dtype), expected) <= TOLERANCES[dtype]


@all_dtypes
def test_dropout_has_the_bits_of_the_layer(dtype: torch.dtype) -> None:
    plain = Dropout(0.3).cuda()
    LayerState(plain, seed=5).set_micro_batch(Batch({}, torch.arange(64, device="cuda"), (64,)), 3)
    fused = copy.deepcopy(plain)
    fused.__class__ = FusedDropout
    x, dy = torch.randn(2, 64, 1280, device="cuda").to(dtype)
    given = [x.clone().requires_grad_() for _ in range(2)]
    expected, found = plain(given[0]), fused(given[1])
    assert torch.equal(found, expected) and 0 < (found == 0).sum() < found.numel()
    expected.backward(dy)
    found.backward(dy)
    assert torch.equal(given[0].grad, given[1].grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels, hidden", [(32, 8), (96, 4), (672, 28), (1152, 48), (2048, 128)])
def test_excitation_gate(channels: int, hidden: int, dtype: torch.dtype) -> None:
    shapes = ((70, channels, 1, 1), (hidden, channels, 1, 1), (hidden,), (channels, hidden, 1, 1), (channels,))
    given = []
    for shape in shapes:
        drawn = torch.randn(shape, device="cuda") * (1.0 if len(shape) == 1 else shape[1] ** -0.5)
        given.append(drawn.to(torch.float32 if len(shape) == 1 else dtype).requires_grad_())
    means, weight1, bias1, weight2, bias2 = exact = [tensor.detach().double().requires_grad_() for tensor in given]
    gate = excitation_gate(given[0], given[1], given[2], given[3], given[4], "silu")
    expected = torch.sigmoid(F.conv2d(F.silu(F.conv2d(means, weight1, bias1)), weight2, bias2))
    dgate = torch.randn_like(gate)
    gate.backward(dgate)
    expected.backward(dgate.double())
    assert relative_error(gate, expected) <= TOLERANCES[dtype]
    for narrow, wide in zip(given, exact, strict=True):
        assert relative_error(narrow.grad, wide.grad) <= 2 * TOLERANCES[dtype]


@all_dtypes
@pytest.mark.parametrize("mixing", ["mixup", "cutmix", "both"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_normalize_and_mix(layout: torch.memory_format, mixing: str, dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8, device="cuda").contiguous(memory_format=layout)
    flips = torch.rand(64, device="cuda") < 0.5
    factor, shift = torch.rand(1, 3, 1, 1, device="cuda") / 50, torch.randn(1, 3, 1, 1, device="cuda")
    augment = AugmentConfig.model_validate(
        {
            "combine": "both",
            **({} if mixing == "cutmix" else {"mixup": {"alpha": 0.2, "partner": "permutation", "mode": "sample"}}),
            **({} if mixing == "mixup" else {"cutmix": {"mode": "fixed", "lam": 0.6}}),
        }
    )
    drawn = mix_params(augment, 0, 0, np.arange(64), (60, 4), 224)
    params = {name: torch.from_numpy(values).cuda() for name, values in drawn.items()}
    flipped = torch.where(flips.view(-1, 1, 1, 1), images.flip(-1), images)
    expected = mix_images(flipped.double() * factor + shift, params, augment)
    mixup = None if mixing == "cutmix" else (params[MIXUP_OFFSETS], params[MIXUP_WEIGHTS])
    cutmix = None if mixing == "mixup" else (params[CUTMIX_OFFSETS], params[CUTMIX_BOXES])
    found = normalize_and_mix(images, flips, factor, shift, mixup, cutmix, dtype)
    assert relative_error(found, expected) <= TOLERANCES[dtype]


@all_dtypes
@pytest.mark.parametrize("channels, side", [(2048, 7), (1280, 7), (1024, 8), (72, 13), (64, 8)])
def test_global_average_pooling_has_torchs_bits(channels: int, side: int, dtype: torch.dtype) -> None:
    x = random_tensor(64, channels, side, side, dtype=dtype).requires_grad_()
    dmeans = torch.randn(64, channels, 1, 1, device="cuda").to(dtype)
    means, expected_means = global_avg_pool(x), F.adaptive_avg_pool2d(x, 1)
    (gradient,) = torch.autograd.grad(means, x, dmeans)
    (expected,) = torch.autograd.grad(expected_means, x, dmeans)
    assert torch.equal(means, expected_means) and torch.equal(gradient, expected)
    assert gradient.is_contiguous(memory_format=torch.channels_last) and gradient.dtype == dtype


@all_dtypes
def test_color_jitter(dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (64, 3, 300, 300), dtype=torch.uint8, device="cuda")
    flips = torch.rand(64, device="cuda") < 0.5
    factor, shift = torch.rand(1, 3, 1, 1, device="cuda") / 50, torch.randn(1, 3, 1, 1, device="cuda")
    config = ColorJitterConfig(brightness=0.125, contrast=0.5, saturation=0.5, hue=0.05, implementation="tensorflow")
    params = torch.from_numpy(device_color_params(config, 0, np.arange(64))).cuda()
    flipped = torch.where(flips.view(-1, 1, 1, 1), images.flip(-1), images)
    expected = jitter_on_device(flipped, params, torch.float64) * factor + shift
    found = jitter_and_normalize(images, params, flips, factor, shift, dtype)
    assert relative_error(found, expected) <= TOLERANCES[dtype]


@all_dtypes
@pytest.mark.parametrize("channels, side, kernel", DEPTHWISE)
def test_strided_depthwise_convolution(channels: int, side: int, kernel: int, dtype: torch.dtype) -> None:
    leaves = [
        random_tensor(8, channels, side, side, dtype=dtype),
        random_tensor(channels, 1, kernel, kernel, dtype=dtype),
    ]
    plain = partial(F.conv2d, stride=2, padding=kernel // 2, groups=channels)
    assert worst_error(leaves, partial(depthwise.depthwise_conv, stride=2), plain) <= TOLERANCES[dtype]


@half_dtypes
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels, side, kernel", DEPTHWISE_KERNELS)
def test_depthwise_convolution_with_the_statistics_of_its_output(
    channels: int, side: int, kernel: int, stride: int, groups: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = random_tensor(sum(groups), channels, side, side, dtype=dtype)
    weight = random_tensor(channels, 1, kernel, kernel, dtype=dtype)
    plain = partial(F.conv2d, stride=stride, padding=kernel // 2, groups=channels)
    assert worst_error([x, weight], partial(depthwise.depthwise_conv, stride=stride), plain) <= TOLERANCES[dtype]
    of = random_norm(channels)
    y, stats = depthwise.depthwise_conv_statistics(x, weight, stride, of, groups)
    assert torch.equal(y, depthwise.depthwise_conv(x, weight, stride))
    torch.testing.assert_close(stats, norm.statistics(y, of, channel_rows(y, groups)), rtol=1e-4, atol=1e-4)
    again = [depthwise.depthwise_conv_statistics(x, weight, stride, of, groups)[1] for _ in range(3)]
    assert all(torch.equal(stats, other) for other in again), "sums are in a fixed order"


@half_dtypes
@pytest.mark.parametrize("size, channels, side", GROUPED)
def test_grouped_convolution(size: int, channels: int, side: int, dtype: torch.dtype) -> None:
    leaves = [random_tensor(8, channels, side, side, dtype=dtype), random_tensor(channels, size, 3, 3, dtype=dtype)]
    plain = partial(F.conv2d, padding=1, groups=channels // size)
    assert worst_error(leaves, grouped.grouped_conv, plain) <= TOLERANCES[dtype]
    config = grouped.GroupedGradientTile(16, 4, 1, 2)
    found = [grouped.weight_gradient(leaves[0].neg(), leaves[0], leaves[1], config) for _ in range(4)]
    assert all(torch.equal(found[0], again) for again in found[1:])


@half_dtypes
@pytest.mark.parametrize("groups, act", [((8,), "relu6"), ((3, 3, 2), "silu"), ((8,), "hardswish")])
def test_norm_and_conv1x1(groups: tuple[int, ...], act: reference.Activation, dtype: torch.dtype) -> None:
    for channels, outputs, side in PROJECTIONS:
        of = random_norm(channels)
        x = to_sixteenths(random_tensor(sum(groups), channels, side, side, dtype=dtype))
        filters = random_tensor(outputs, channels, 1, 1, dtype=dtype)

        def fused(x: Tensor, filters: Tensor, weight: Tensor, bias: Tensor, of: NormParams = of) -> Tensor:
            return batch_norm_act_conv1x1(x, NormParams(weight, bias, of.running_var, of.eps), filters, groups, act)[0]

        def plain(x: Tensor, filters: Tensor, weight: Tensor, bias: Tensor, of: NormParams = of) -> Tensor:
            z = reference.batch_norm(x, weight, bias, of.running_var.double(), of.eps, groups)[0]
            return F.conv2d(reference.ACTIVATION_FUNCTIONS[act](z), filters)

        error = worst_error([x, filters, of.weight.detach(), of.bias.detach()], fused, plain)
        assert error <= TOLERANCES[dtype], (channels, outputs, side)


@half_dtypes
@pytest.mark.parametrize("groups", GROUPS)
def test_conv1x1_with_the_statistics_of_its_output(groups: tuple[int, ...], dtype: torch.dtype) -> None:
    for inputs, outputs, side in CONV1X1:
        of, x = random_norm(outputs), random_tensor(sum(groups), inputs, side, side, dtype=dtype) + 0.5
        filters = random_tensor(outputs, inputs, 1, 1, dtype=dtype)
        error = worst_error([x, filters], lambda x, w, of=of: conv1x1_statistics(x, w, of, groups)[0], F.conv2d)
        assert error <= TOLERANCES[dtype], (inputs, outputs, side)
        y, stats = conv1x1_statistics(x, filters, of, groups)
        parts = [part.double().transpose(0, 1).flatten(1) for part in y.split(groups)]
        exact = [[z.mean(1), z.var(1), (z.var(1, correction=0) + of.eps).rsqrt()] for z in parts]
        expected = torch.stack([torch.stack(one) for one in exact])
        torch.testing.assert_close(stats.double(), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(stats, conv1x1_statistics(x, filters, of, groups)[1]), "sums are in a fixed order"


@half_dtypes
@pytest.mark.parametrize("groups, act", [((8,), "relu6"), ((3, 3, 2), "silu"), ((8,), "hardswish")])
def test_conv1x1_and_norm(groups: tuple[int, ...], act: reference.Activation, dtype: torch.dtype) -> None:
    for inputs, outputs, side in EXPANSIONS:
        of = random_norm(outputs)
        x = random_tensor(sum(groups), inputs, side, side, dtype=dtype)
        filters = random_tensor(outputs, inputs, 1, 1, dtype=dtype)

        def fused(x: Tensor, filters: Tensor, weight: Tensor, bias: Tensor, of: NormParams = of) -> Tensor:
            return conv1x1_batch_norm_act(x, filters, NormParams(weight, bias, of.running_var, of.eps), groups, act)[0]

        def plain(x: Tensor, filters: Tensor, weight: Tensor, bias: Tensor, of: NormParams = of) -> Tensor:
            y = F.conv2d(x, filters)
            z = reference.batch_norm(y, weight, bias, of.running_var.double(), of.eps, groups)[0]
            return reference.ACTIVATION_FUNCTIONS[act](z)

        error = worst_error([x, filters, of.weight.detach(), of.bias.detach()], fused, plain)
        assert error <= TOLERANCES[dtype], (inputs, outputs, side)


@all_dtypes
@pytest.mark.parametrize(
    "window",
    [
        PoolWindow(3, 1, 1, True),
        PoolWindow(3, 2, 0, True),
        PoolWindow(2, 2, 0, True),
        PoolWindow(2, 2, 0, False),
        PoolWindow(3, 2, 1, False),
    ],
    ids=str,
)
def test_max_pool_is_bitwise_equal_to_torchs(window: PoolWindow, dtype: torch.dtype) -> None:
    x = random_tensor(8, 192, 29, 28, dtype=dtype).mul(2).round().requires_grad_()  # many equal values
    again = x.detach().clone().requires_grad_()
    y = max_pool.max_pool(x, window)
    assert window.pad != "same"
    expected = F.max_pool2d(again, window.side, window.stride, window.pad, ceil_mode=window.ceil)
    dy = torch.randn_like(y).round()
    y.backward(dy)
    expected.backward(dy)
    assert torch.equal(y, expected)
    assert x.grad is not None and again.grad is not None and torch.equal(x.grad, again.grad)
    assert torch.equal(max_pool.max_pool_inference(x.detach(), window), expected)
    y, used = max_pool.max_pool_and_input(x, window)
    other = torch.randn_like(x).round()
    (both,) = torch.autograd.grad((y, used), x, (dy, other))
    assert torch.equal(both, again.grad + other)  # integers are summed exactly


@all_dtypes
def test_squeeze_excite(dtype: torch.dtype) -> None:
    for channels, side in SQUEEZE_EXCITE:
        x = random_tensor(8, channels, side, side, dtype=dtype)
        error = worst_error(
            [x],
            lambda x: excite.squeeze_excite(x, torch.sigmoid),
            lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
        )
        assert error <= TOLERANCES[dtype], (channels, side)


@all_dtypes
@pytest.mark.parametrize("form", ["silu", "hardswish", "join"])
def test_norm_and_squeeze_excite(form: str, dtype: torch.dtype) -> None:
    groups = (5, 3)
    for channels, side in NORM_SQUEEZE_EXCITE:
        x, other = (random_tensor(sum(groups), channels, side, side, dtype=dtype).requires_grad_() for _ in range(2))
        of, x64, other64 = random_norm(channels), in_float64(x), in_float64(other)
        z, (weight, bias) = batch_norm64(x64, of, groups)
        activation = z if form == "join" else reference.ACTIVATION_FUNCTIONS[form](z)
        y64 = activation * torch.sigmoid(activation.mean((2, 3), keepdim=True))
        keep: Tensor | int = 1
        if form != "join":
            keep = far_from_kinks(z)
            y, _ = gated.batch_norm_act_squeeze_excite(x, of, groups, form, torch.sigmoid)  # type: ignore[arg-type]
        else:
            keep = ((y64 + other64).abs() > 0.1).contiguous(memory_format=torch.channels_last)  # the gate is rounded
            y64 = F.relu(y64 + other64)
            y, _, _ = gated.batch_norm_squeeze_excite_add_relu(x, of, other, groups, torch.sigmoid)
        dy = torch.randn_like(y) * keep
        y.backward(dy)
        y64.backward(dy.double())
        pairs = [(y, y64), (x.grad, x64.grad), (of.weight.grad, weight.grad), (of.bias.grad, bias.grad)]
        errors = [relative_error(a, b) for a, b in pairs]
        assert max(errors) <= 2 * TOLERANCES[dtype], (channels, side, errors)


@all_dtypes
@pytest.mark.parametrize("channels, side", [(256, 38), (128, 10), (72, 13)])
def test_padded_bias_and_relu(channels: int, side: int, dtype: torch.dtype) -> None:
    leaves = [random_tensor(8, channels, side, side, dtype=dtype), torch.randn(channels, device="cuda")]
    padding = (0, 1, 0, 1)

    def plain(x: Tensor, bias: Tensor) -> Tensor:
        return F.pad(F.relu(x + bias.view(-1, 1, 1)), padding)

    assert worst_error(leaves, partial(bias_relu_pad, padding=padding), plain) <= TOLERANCES[dtype]


@all_dtypes
def test_box_losses(dtype: torch.dtype) -> None:
    sides, per_cell, num_classes, n = (38, 19, 10, 5, 3, 1), (4, 6, 6, 6, 4, 4), 81, 8
    ratios = [(2.0,), (2.0, 3.0), (2.0, 3.0), (2.0, 3.0), (2.0,), (2.0,)]
    anchors = generate_anchors([1 / side for side in sides], sides, [0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05], ratios)
    layout, rules = AnchorLayout(per_cell, num_classes), MatchConfig()
    low = torch.rand(n, 200, 2, device="cuda") * 0.7
    boxes = torch.cat([low, low + 0.02 + 0.28 * torch.rand_like(low)], dim=2)
    labels = torch.randint(1, num_classes, (n, 200), device="cuda")
    counts = torch.tensor([0, 1, 2, 5, 10, 20, 50, 200], device="cuda")
    shown = (boxes, labels, counts, anchors.cuda())
    truth = GroundTruthBatch(*shown, rules.variances, rules.match_iou, rules.negative_ratio)
    pairs = zip(sides, per_cell, strict=True)
    maps = [random_tensor(n, layout.channels(b), s, s, dtype=dtype).requires_grad_() for s, b in pairs]
    again = [x.detach().clone().requires_grad_() for x in maps]
    biases = tuple((torch.randn(num_classes * b, device="cuda"), torch.randn(4 * b, device="cuda")) for b in per_cell)
    found = box_losses(maps, biases, layout, truth)
    expected = ssd_losses(*SSDFeatureMaps(tuple(again), biases, per_cell, num_classes).output(), *shown, rules)
    torch.stack(found).sum().backward()
    torch.stack(expected).sum().backward()
    errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    errors += [relative_error(a.grad, b.grad) for a, b in zip(maps, again, strict=True)]
    assert max(errors) <= TOLERANCES[dtype], errors
