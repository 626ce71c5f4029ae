"""Prove on a CUDA GPU that the fused kernels equal their plain references.

    python tools/prove_kernels.py [NAME ...]

Forward and backward against float64 over shapes of ResNet-50, MobileNetV2, EfficientNet-B0 and SSD, in bfloat16,
float16 and float32, and what answers are made of; a name is one of the first column. The exit code says whether all are
equal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from proof_values import TOLERANCES, draw, error, wide
from prove_answers import ANSWER_PROOFS
from torch import Tensor

from reconv.detection.anchors import generate_anchors
from reconv.kernels import reference
from reconv.kernels.batch_norm import ops as norm
from reconv.kernels.batch_norm.ops import Norm
from reconv.kernels.box_losses.ops import AnchorLayout, Truth, box_losses
from reconv.kernels.depthwise.ops import depthwise
from reconv.kernels.max_pool import ops as max_pool
from reconv.kernels.norm_conv1x1.ops import project
from reconv.kernels.norm_max_pool import ops as pool
from reconv.kernels.norm_squeeze_excite import ops as gated
from reconv.kernels.normalize_images.ops import prepare_images
from reconv.kernels.squeeze_excite import ops as excite
from reconv.kernels.stem import ops as stem
from reconv.kernels.window import STEM_KERNELS, PoolWindow
from reconv.models.architecture import SSDFeatureMaps
from reconv.models.layers.conv import SameMaxPool2d
from reconv.tasks.detection import MatchConfig, image_losses

GRID = 16
STAGES = ((64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3))  # planes, side, blocks of ResNet-50
FORMS = ("none", "relu", "relu6", "silu", "join", "join_norms", "pool", "pool_same")
DEPTHWISE = ((96, 112, 3), (144, 56, 3), (576, 14, 3), (144, 56, 5), (240, 28, 5), (72, 13, 3))
PROJECTIONS = ((32, 16, 112), (96, 24, 56), (144, 24, 56), (192, 32, 28), (384, 64, 14), (576, 96, 14), (72, 40, 13))


def draw_norm(channels: int) -> Norm:
    weight, bias = torch.randn(2, channels, device="cuda").unbind()
    return Norm(weight.requires_grad_(), bias.requires_grad_(), torch.ones(channels, device="cuda"), 1e-5)


def on_grid(tensor: Tensor) -> Tensor:
    """The same to a sixteenth."""
    return (tensor.float() * GRID).round().div(GRID).to(tensor.dtype)


def plain(x: Tensor, of: Norm, groups: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """The norm of x in float64, and its parameters there."""
    weight, bias = wide(of.weight), wide(of.bias)
    return reference.batch_norm(x, weight, bias, of.running_var.double(), of.eps, groups)[0], [weight, bias]


def far_from_kinks(z: Tensor) -> Tensor:
    """Where float32 and float64 agree on the side of a ReLU's kink."""
    return ((z.abs() > 1e-4) & ((z - 6).abs() > 1e-4)).contiguous(memory_format=torch.channels_last)


def errors(form: str, channels: int, side: int, groups: tuple[int, ...], dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of one form's output and gradients."""
    shape = (sum(groups), channels, side, side)
    x, of, other, other_of = (
        draw(*shape, dtype=dtype),
        draw_norm(channels),
        draw(*shape, dtype=dtype),
        draw_norm(channels),
    )
    if form.startswith("pool"):  # of values that are equal or far apart: a last bit would decide who wins a window
        x = on_grid(x)
    x64, other64 = wide(x), wide(other)
    leaves, leaves64 = [x.requires_grad_(), of.weight, of.bias], [x64]
    z, parameters = plain(x64, of, groups)
    leaves64 += parameters
    if form in ("relu", "relu6", "silu", "none"):
        y64, outputs = reference.FUNCTIONS[form](z), [norm.normalise(x, of, groups, form)[0]]  # type: ignore[arg-type]
    elif form == "pool":
        y64, outputs = F.max_pool2d(F.relu(z), 3, 2, 1), list(pool.normalise_pool(x, of, groups)[:2])
    elif form == "pool_same":
        y64 = SameMaxPool2d(3, 2)(F.relu(z))
        outputs = list(pool.normalise_pool(x, of, groups, PoolWindow(3, 2, "same"))[:2])
    elif form == "join":
        leaves.append(other.requires_grad_())
        leaves64.append(other64)
        z = z + other64
        y64, outputs = F.relu(z), list(norm.join(x, of, other, groups, "relu")[:2])
    else:
        leaves += [other.requires_grad_(), other_of.weight, other_of.bias]
        added, parameters = plain(other64, other_of, groups)
        leaves64 += [other64, *parameters]
        z = z + added
        y64, outputs = F.relu(z), list(norm.join_norms(x, of, other, other_of, groups, "relu")[:2])
    keep = 1 if form.startswith("pool") else far_from_kinks(z)
    dy = [torch.randn_like(output) * keep for output in outputs]
    torch.autograd.backward(outputs, dy)
    y64.backward(sum(g.double() for g in dy))
    names = ("dx", "dweight", "dbias", "dother", "dweight2", "dbias2")
    found = {name: error(a.grad, b.grad) for name, a, b in zip(names, leaves, leaves64, strict=False)}
    return {"y": error(outputs[0], y64), **found}


def prove_form(form: str) -> bool:
    """Print the worst errors of a form of the norm, of each type; whether all are within the tolerance."""
    shapes = [(64, 112), *((p * k, side) for p, side, _ in STAGES for k in (1, 4))]
    is_right = True
    for dtype, tolerance in TOLERANCES.items():
        worst: dict[str, float] = {}
        for channels, side in [*shapes, (72, 13)]:  # the last fills no block of channels and no tile of rows
            for groups in ((8,), (3, 3, 2)):
                for name, value in errors(form, channels, side, groups, dtype).items():
                    worst[name] = max(worst.get(name, 0.0), value if value == value else float("inf"))
        is_right &= max(worst.values()) <= tolerance
        words = " ".join(f"{name} {value:.1e}" for name, value in worst.items())
        print(f"{form:10} {str(dtype)[6:]:9} {len(shapes) * 2 + 2:6}  {words} ({tolerance:.0e})", flush=True)
    return is_right


def prove_stem() -> bool:
    """Print the errors of the stem's other form against the plain convolution, both in float64."""
    images, worst = draw(4, 3, 224, 224, dtype=torch.bfloat16), 0.0
    for kernel in STEM_KERNELS:
        weight = torch.randn(64, 3, kernel, kernel, device="cuda").double()
        blocks = F.conv2d(stem.stem_images(images, kernel, images.dtype).double(), stem.stem_weight(weight))
        worst = max(worst, error(blocks, F.conv2d(images.double(), weight, stride=2, padding=kernel // 2)))
    print(f"{'stem':10} {'float64':9} {len(STEM_KERNELS):6}  y {worst:.1e} (1e-12)")
    return worst < 1e-12


def prove_prepare() -> bool:
    """Print the error of images prepared in one pass."""
    images = torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8, device="cuda")
    flips = torch.rand(64, device="cuda") < 0.5
    factor, shift = torch.rand(1, 3, 1, 1, device="cuda") / 50, torch.randn(1, 3, 1, 1, device="cuda")
    expected = torch.where(flips.view(-1, 1, 1, 1), images.flip(-1), images).double() * factor + shift
    is_right = True
    for dtype, tolerance in TOLERANCES.items():
        worst = error(prepare_images(images, flips, factor, shift, dtype), expected)
        is_right &= worst <= tolerance
        print(f"{'prepare':10} {str(dtype)[6:]:9} {1:6}  y {worst:.1e} ({tolerance:.0e})")
    return is_right


def prove_depthwise() -> bool:
    """Print the worst errors of depthwise convolutions of stride 2 over MobileNetV2's and EfficientNet-B0's shapes."""
    is_right = True
    for dtype, tolerance in TOLERANCES.items():
        worst = 0.0
        for channels, side, kernel in DEPTHWISE:
            leaves = [draw(8, channels, side, side, dtype=dtype), draw(channels, 1, kernel, kernel, dtype=dtype)]
            worst = max(worst, apart(leaves, partial(depthwise, stride=2), partial(_strided, kernel=kernel)))
        is_right &= worst <= tolerance
        print(
            f"{'depthwise':10} {str(dtype)[6:]:9} {len(DEPTHWISE):6}  y, dx, dw {worst:.1e} ({tolerance:.0e})",
            flush=True,
        )
    return is_right


def _strided(x: Tensor, weight: Tensor, kernel: int) -> Tensor:
    return F.conv2d(x, weight, stride=2, padding=kernel // 2, groups=len(weight))


def prove_projection() -> bool:
    """Print the worst errors of norm, activation and 1x1 convolution over MobileNetV2's shapes, of the half types."""
    is_right = True
    for dtype, tolerance in TOLERANCES.items():
        if dtype == torch.float32:
            continue
        worst = 0.0
        for channels, outputs, side in PROJECTIONS:
            for groups, act in (((8,), "relu6"), ((3, 3, 2), "silu")):
                worst = max(worst, _projection_error(channels, outputs, side, groups, act, dtype))  # type: ignore[arg-type]
        is_right &= worst <= tolerance
        shapes = 2 * len(PROJECTIONS)
        print(
            f"{'projection':10} {str(dtype)[6:]:9} {shapes:6}  y, all gradients {worst:.1e} ({tolerance:.0e})",
            flush=True,
        )
    return is_right


def _projection_error(
    channels: int, outputs: int, side: int, groups: tuple[int, ...], act: reference.Activation, dtype: torch.dtype
) -> float:
    of = draw_norm(channels)
    x = on_grid(draw(sum(groups), channels, side, side, dtype=dtype))
    filters = draw(outputs, channels, 1, 1, dtype=dtype)

    def ours(x: Tensor, filters: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return project(x, Norm(weight, bias, of.running_var, of.eps), filters, groups, act)[0]

    def plainly(x: Tensor, filters: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = reference.batch_norm(x, weight, bias, of.running_var.double(), of.eps, groups)[0]
        return F.conv2d(reference.FUNCTIONS[act](z), filters)

    return apart([x, filters, of.weight.detach(), of.bias.detach()], ours, plainly)


def apart(tensors: list[Tensor], ours: Callable[..., Tensor], plainly: Callable[..., Tensor]) -> float:
    """The worst relative error of a function's output and gradients, against another's in float64."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    leaves64 = [wide(tensor) for tensor in tensors]
    y, y64 = ours(*leaves), plainly(*leaves64)
    dy = torch.randn_like(y)
    y.backward(dy)
    y64.backward(dy.double())
    return max(error(y, y64), *(error(a.grad, b.grad) for a, b in zip(leaves, leaves64, strict=True)))


def prove_max_pool() -> bool:
    """Print whether the max-pools of GoogLeNet and ResNet give torch's bits, values and gradients."""
    is_right = True
    windows = (PoolWindow(3, 1, 1, True), PoolWindow(3, 2, 0, True), PoolWindow(2, 2, 0, True))
    for window in (*windows, PoolWindow(3, 2, 1, False)):
        for dtype in TOLERANCES:
            x = draw(8, 192, 29, 28, dtype=dtype).mul(2).round().requires_grad_()  # many equal values
            again = x.detach().clone().requires_grad_()
            y = max_pool.max_pool(x, window)
            assert window.pad != "same"
            expected = F.max_pool2d(again, window.side, window.stride, window.pad, ceil_mode=window.ceil)
            dy = torch.randn_like(y).round()
            y.backward(dy)
            expected.backward(dy)
            is_right &= torch.equal(y, expected) and torch.equal(x.grad, again.grad)  # type: ignore[arg-type]
            is_right &= torch.equal(max_pool.max_pool_values(x.detach(), window), expected)
    print(f"{'max_pool':10} {'all':9} {4:6}  {'equal bits' if is_right else 'NOT EQUAL'}")
    return is_right


def prove_excite() -> bool:
    """Print the worst errors of squeeze and excitation over EfficientNet-B0's shapes."""
    is_right = True
    for dtype, tolerance in TOLERANCES.items():
        worst = 0.0
        for channels, side in ((32, 112), (96, 56), (144, 56), (240, 28), (672, 14), (1152, 7)):
            x = draw(8, channels, side, side, dtype=dtype).requires_grad_()
            x64 = wide(x)
            y = excite.squeeze_excite(x, torch.sigmoid)
            y64 = x64 * torch.sigmoid(x64.mean((2, 3), keepdim=True))
            dy = torch.randn_like(y)
            y.backward(dy)
            y64.backward(dy.double())
            worst = max(worst, error(y, y64), error(x.grad, x64.grad))
        is_right &= worst <= tolerance
        print(f"{'excite':10} {str(dtype)[6:]:9} {6:6}  y, dx {worst:.1e} ({tolerance:.0e})")
    return is_right


def prove_gated() -> bool:
    """Print the worst errors of squeeze and excitation with its norm over shapes of EfficientNet-B0 and SE-ResNeXt."""
    is_right = True
    for dtype, tolerance in TOLERANCES.items():
        worst = 0.0
        for channels, side in ((32, 112), (96, 56), (240, 28), (256, 56), (672, 14), (1152, 7), (2048, 7)):
            for act in ("silu", "join"):
                worst = max(worst, *_gated_errors(act, (5, 3), channels, side, dtype))
        is_right &= worst <= 2 * tolerance
        print(f"{'gated':10} {str(dtype)[6:]:9} {14:6}  y, dx, dweight, dbias {worst:.1e} ({2 * tolerance:.0e})")
    return is_right


def _gated_errors(act: str, groups: tuple[int, ...], channels: int, side: int, dtype: torch.dtype) -> list[float]:
    x, other = (draw(sum(groups), channels, side, side, dtype=dtype).requires_grad_() for _ in range(2))
    of, x64, other64 = draw_norm(channels), wide(x), wide(other)
    z, (weight, bias) = plain(x64, of, groups)
    activation = F.silu(z) if act == "silu" else z
    y64 = activation * torch.sigmoid(activation.mean((2, 3), keepdim=True))
    keep: Tensor | int = 1
    if act == "silu":
        y, _stats = gated.excite(x, of, groups, "silu", torch.sigmoid)
    else:
        keep = ((y64 + other64).abs() > 0.1).contiguous(memory_format=torch.channels_last)  # the gate is rounded
        y64 = F.relu(y64 + other64)
        y, _again, _stats = gated.excite_join(x, of, other, groups, torch.sigmoid)
    dy = torch.randn_like(y) * keep
    y.backward(dy)
    y64.backward(dy.double())
    pairs = [(y, y64), (x.grad, x64.grad), (of.weight.grad, weight.grad), (of.bias.grad, bias.grad)]
    return [error(a, b) for a, b in pairs]


def prove_box_losses() -> bool:
    """Print the worst errors of SSD's losses and of the gradients of its maps, against the plain losses."""
    sides, per_cell, num_classes, n = (38, 19, 10, 5, 3, 1), (4, 6, 6, 6, 4, 4), 81, 8
    ratios = [(2.0,), (2.0, 3.0), (2.0, 3.0), (2.0, 3.0), (2.0,), (2.0,)]
    anchors = generate_anchors([1 / side for side in sides], sides, [0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05], ratios)
    layout, rules = AnchorLayout(per_cell, num_classes), MatchConfig()
    low = torch.rand(n, 200, 2, device="cuda") * 0.7
    boxes = torch.cat([low, low + 0.02 + 0.28 * torch.rand_like(low)], dim=2)
    labels = torch.randint(1, num_classes, (n, 200), device="cuda")
    counts = torch.tensor([0, 1, 2, 5, 10, 20, 50, 200], device="cuda")
    shown = (boxes, labels, counts, anchors.cuda())
    truth = Truth(*shown, rules.variances, rules.threshold, rules.negatives)
    is_right = True
    for dtype, tolerance in TOLERANCES.items():
        pairs = zip(sides, per_cell, strict=True)
        maps = [draw(n, layout.channels(b), s, s, dtype=dtype).requires_grad_() for s, b in pairs]
        again = [x.detach().clone().requires_grad_() for x in maps]
        biases = tuple(
            (torch.randn(num_classes * b, device="cuda"), torch.randn(4 * b, device="cuda")) for b in per_cell
        )
        found = box_losses(maps, biases, layout, truth)
        expected = image_losses(*SSDFeatureMaps(tuple(again), biases, per_cell, num_classes).answers(), *shown, rules)
        worst = max(error(a, b) for a, b in zip(found, expected, strict=True))
        torch.stack(found).sum().backward()
        torch.stack(expected).sum().backward()
        worst = max(worst, *(error(a.grad, b.grad) for a, b in zip(maps, again, strict=True)))
        is_right &= worst <= tolerance
        print(f"{'box_losses':10} {str(dtype)[6:]:9} {6:6}  losses, dx {worst:.1e} ({tolerance:.0e})")
    return is_right


PROOFS: dict[str, Callable[[], bool]] = {
    **{form: partial(prove_form, form) for form in FORMS},
    "stem": prove_stem,
    "prepare": prove_prepare,
    "max_pool": prove_max_pool,
    "depthwise": prove_depthwise,
    "projection": prove_projection,
    "excite": prove_excite,
    "gated": prove_gated,
    "box_losses": prove_box_losses,
    **ANSWER_PROOFS,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", choices=[*PROOFS, []], help="of what is proven; else all")
    names = parser.parse_args().names or list(PROOFS)
    began_s = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'form':10} {'type':9} shapes  worst relative error (tolerance)")
    results = [PROOFS[name]() for name in names]
    is_right = all(results)
    spent_s = time.perf_counter() - began_s
    print(f"proven in {spent_s:.0f} s, compilation included: {'equal' if is_right else 'NOT EQUAL'}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
