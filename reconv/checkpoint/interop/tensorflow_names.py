"""Renames the tensors of TensorFlow ResNets to torchvision's names, and converts their layouts.

Two naming schemes are known: layers numbered in the order of creation (`resnet_model/conv2d_1/kernel`, the official
models and their derivatives), and scopes of stage and unit (`all/stage1/unit1/conv1/weight`). Depth, kind of block and
version follow from the kernels and norms; anything ambiguous is an error.

Models trained with TensorFlow's SAME padding give the same logits only with that padding: it is asymmetric for strided
layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

from reconv.core.errors import CheckpointError

_NUMBERED = re.compile(
    r"(?:(?P<scope>.+)/)?(?P<kind>conv2d|batch_normalization|dense)(?:_(?P<number>\d+))?/(?P<part>\w+)"
)
_STAGED = re.compile(
    r"(?:.+/)?(?:(?:stage0|stage(?P<stage>[1-9]\d*)/unit(?P<unit>[1-9]\d*))/(?P<kind>conv|bn|gn)(?P<place>\d|1?sc)|fc1)"
    r"/(?:[^/]+/)?(?P<part>weight|bias|gamma|beta|moving_mean|moving_variance)"
)
_NORM_PARTS = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}

HEAD = "fc.weight"

Layers = dict[int, dict[str, Tensor]]  # by layer number, then by parameter name


def to_resnet(
    tensors: Mapping[str, Tensor], *, scope: str | None = None, drop_background: bool = False
) -> dict[str, Tensor]:
    """The weights under torchvision's names and layouts, without optimizer slots, counters and EMA.

    `scope` chooses among several models in one checkpoint. `drop_background` removes the first class of the head.
    """
    state = _from_stages(tensors) or _from_numbers(tensors, scope)
    if drop_background:
        for name in {"fc.weight", "fc.bias"} & state.keys():
            state[name] = state[name][1:].contiguous()
    return state


def _from_stages(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The scheme of stages and units; empty if the names are different."""
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not (match := _STAGED.fullmatch(name)):
            continue
        part = match["part"]
        if match["kind"] is None:
            state[f"fc.{part}"] = _to_torch_layout(tensor, name)
            continue
        block = f"layer{match['stage']}.{int(match['unit']) - 1}." if match["unit"] else ""
        if match["place"].endswith("sc"):
            module = "downsample.0" if match["kind"] == "conv" else "downsample.1"
        else:
            number = int(match["place"]) + (0 if block else 1)  # the stem counts from zero
            module = f"{'conv' if match['kind'] == 'conv' else 'bn'}{number}"
        state[f"{block}{module}.{_NORM_PARTS.get(part, part)}"] = _to_torch_layout(tensor, name)
    return state if "conv1.weight" in state else {}


def _from_numbers(tensors: Mapping[str, Tensor], scope: str | None) -> dict[str, Tensor]:
    """The scheme of layers numbered in the order of creation."""
    layers = _layers_of(tensors, scope)
    kernels = [layers["conv2d"][number]["kernel"] for number in sorted(layers["conv2d"])]
    norms = [layers["batch_normalization"][number] for number in sorted(layers["batch_normalization"])]
    if any("bias" in layer for layer in layers["conv2d"].values()) or any(kernel.ndim != 4 for kernel in kernels):
        raise _not_a_resnet("its convolutions have biases, or kernels that do not have four dimensions")
    convs = dict(zip(_conv_names([int(kernel.shape[0]) for kernel in kernels]), kernels, strict=True))
    state = {f"{name}.weight": _to_torch_layout(kernel, name) for name, kernel in convs.items()}
    num_projections = sum(name.endswith("downsample.0") for name in convs)
    is_v2 = num_projections > 0 and len(norms) == len(convs) - num_projections
    widths = _pre_activation_norms(convs) if is_v2 else _post_activation_norms(convs)
    if len(norms) != len(widths):
        raise _not_a_resnet(f"it has {len(convs)} convolutions and {len(norms)} norms")
    for (name, width), norm in zip(widths.items(), norms, strict=True):
        if norm.keys() != _NORM_PARTS.keys() or any(part.shape != (width,) for part in norm.values()):
            raise _not_a_resnet(f"the norm at {name} has other parameters or another width than {width}")
        state |= {f"{name}.{_NORM_PARTS[part]}": values for part, values in norm.items()}
    if len(layers["dense"]) > 1:
        raise _not_a_resnet(f"it has {len(layers['dense'])} dense layers")
    for head in layers["dense"].values():
        state |= {
            f"fc.{part.replace('kernel', 'weight')}": _to_torch_layout(head[part], f"dense/{part}") for part in head
        }
    return state


def _post_activation_norms(convs: Mapping[str, Tensor]) -> dict[str, int]:
    """The norms of v1 and their widths, in the order of creation: one after each convolution."""
    return {
        name.replace("downsample.0", "downsample.1").replace("conv", "bn"): int(kernel.shape[3])
        for name, kernel in convs.items()
    }


def _pre_activation_norms(convs: Mapping[str, Tensor]) -> dict[str, int]:
    """The norms of v2: one before each convolution but the stem and the projections, and a last one."""
    widths: dict[str, int] = {}
    width = 0
    for name, kernel in convs.items():
        if name.endswith("downsample.0"):
            continue
        if name != "conv1":
            widths[name.replace("conv", "bn")] = width
        width = int(kernel.shape[3])
    return widths | {"bn_last": width}


def _layers_of(tensors: Mapping[str, Tensor], scope: str | None) -> dict[str, Layers]:
    """The numbered layers of one scope, by kind."""
    wanted = {"conv2d": {"kernel", "bias"}, "batch_normalization": set(_NORM_PARTS), "dense": {"kernel", "bias"}}
    scopes: dict[str, dict[str, Layers]] = {}
    for name, tensor in tensors.items():
        match = _NUMBERED.fullmatch(name)
        if match and match["part"] in wanted[match["kind"]]:
            kinds = scopes.setdefault(match["scope"] or "", {kind: {} for kind in wanted})
            kinds[match["kind"]].setdefault(int(match["number"] or 0), {})[match["part"]] = tensor
    found = {name: kinds for name, kinds in scopes.items() if kinds["conv2d"] and kinds["batch_normalization"]}
    chosen = [name for name in found if scope is None or name == scope]
    if len(chosen) != 1:
        raise CheckpointError(
            "the TensorFlow checkpoint has no supported ResNet"
            if not chosen
            else "the TensorFlow checkpoint has several models",
            why=f"scopes with numbered convolutions and norms: {', '.join(sorted(found)) or 'none'}; "
            f"tensors such as {', '.join(sorted(tensors)[:3]) or 'none'}",
            hint="convert the names in a script of your own and save them as .safetensors",
        )
    kinds = found[chosen[0]]
    if any("kernel" not in layer for kind in ("conv2d", "dense") for layer in kinds[kind].values()):
        raise _not_a_resnet("a layer has a bias but no kernel")
    return kinds


def _conv_names(kernels: list[int]) -> Iterator[str]:
    """The name of each convolution, from the kernel sizes in the order of creation.

    A block is 3x3, 3x3 or 1x1, 3x3, 1x1; the first of a stage has a 1x1 projection before that.
    """
    yield "conv1"
    at, stage, unit = 1, 1, 0
    sizes = [1, 3, 1] if kernels[1:4] in ([1, 1, 3], [1, 3, 1]) else [3, 3]
    while at < len(kernels):
        projects = kernels[at : at + 2] == [1, sizes[0]]
        if projects and at > 1:
            stage, unit = stage + 1, 0
        block = f"layer{stage}.{unit}"
        if projects:
            yield f"{block}.downsample.0"
            at += 1
        found = kernels[at : at + len(sizes)]
        if found != sizes:
            raise _not_a_resnet(f"{block} has kernels {found} instead of {sizes}")
        for i in range(1, len(sizes) + 1):
            yield f"{block}.conv{i}"
        at, unit = at + len(sizes), unit + 1


def _to_torch_layout(tensor: Tensor, name: str) -> Tensor:
    """HWIO kernels as OIHW, matrices transposed, vectors unchanged."""
    if tensor.ndim == 4:
        return tensor.permute(3, 2, 0, 1).contiguous()
    if tensor.ndim == 2:
        return tensor.t().contiguous()
    if tensor.ndim == 1:
        return tensor
    raise _not_a_resnet(f"{name} has {tensor.ndim} dimensions")


def _not_a_resnet(why: str) -> CheckpointError:
    return CheckpointError(
        "the TensorFlow checkpoint is not a supported ResNet",
        why=why,
        hint="convert the names in a script of your own and save them as .safetensors",
    )
