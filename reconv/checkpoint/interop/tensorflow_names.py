"""The names and layouts of TensorFlow ResNets, turned into torchvision's.

Owns two ways of naming: layers numbered in the order of their creation (`resnet_model/conv2d_1/kernel`, the official
models and what descends from them), and scopes of stage and unit (`all/stage1/unit1/conv1/weight`). Refuses to know
files and networks: depths, kind of block and version follow from the kernels and norms. Invariant: a tensor is mapped
only where its place is certain; anything that does not add up is refused, never guessed.

Networks that were trained with TensorFlow's SAME padding give their logits only under that padding: strided layers
there pad less in front than behind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

from reconv.errors import CheckpointError

_NUMBERED = re.compile(
    r"(?:(?P<scope>.+)/)?(?P<kind>conv2d|batch_normalization|dense)(?:_(?P<number>\d+))?/(?P<part>\w+)"
)
_STAGED = re.compile(
    r"(?:.+/)?(?:(?:stage0|stage(?P<stage>[1-9]\d*)/unit(?P<unit>[1-9]\d*))/(?P<kind>conv|bn|gn)(?P<place>\d|1?sc)|fc1)"
    r"/(?:[^/]+/)?(?P<part>weight|bias|gamma|beta|moving_mean|moving_variance)"
)
_NORM_PARTS = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}

HEAD = "fc.weight"

Layers = dict[int, dict[str, Tensor]]  # by the number of the layer, then by the part


def to_resnet(
    tensors: Mapping[str, Tensor], *, scope: str | None = None, drop_background: bool = False
) -> dict[str, Tensor]:
    """The weights under torchvision's names and layouts; optimizer slots, steps and averages are left out.

    `scope` tells networks of one checkpoint apart. `drop_background` takes the first of 1001 classes off the head.
    """
    state = _from_stages(tensors) or _from_numbers(tensors, scope)
    if drop_background:
        for name in {"fc.weight", "fc.bias"} & state.keys():
            state[name] = state[name][1:].contiguous()
    return state


def _from_stages(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scopes of stage and unit; nothing if there are none."""
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not (match := _STAGED.fullmatch(name)):
            continue
        part = match["part"]
        if match["kind"] is None:
            state[f"fc.{part}"] = _laid_out(tensor, name)
            continue
        block = f"layer{match['stage']}.{int(match['unit']) - 1}." if match["unit"] else ""
        if match["place"].endswith("sc"):
            module = "downsample.0" if match["kind"] == "conv" else "downsample.1"
        else:
            number = int(match["place"]) + (0 if block else 1)  # the stem counts from zero
            module = f"{'conv' if match['kind'] == 'conv' else 'bn'}{number}"
        state[f"{block}{module}.{_NORM_PARTS.get(part, part)}"] = _laid_out(tensor, name)
    return state if "conv1.weight" in state else {}


def _from_numbers(tensors: Mapping[str, Tensor], scope: str | None) -> dict[str, Tensor]:
    """Layers numbered in the order of creation."""
    layers = _layers_of(tensors, scope)
    kernels = [layers["conv2d"][number]["kernel"] for number in sorted(layers["conv2d"])]
    norms = [layers["batch_normalization"][number] for number in sorted(layers["batch_normalization"])]
    if any("bias" in layer for layer in layers["conv2d"].values()) or any(kernel.ndim != 4 for kernel in kernels):
        raise _not_a_resnet("its convolutions have biases, or kernels that are not of four dimensions")
    convs = dict(zip(_conv_names([int(kernel.shape[0]) for kernel in kernels]), kernels, strict=True))
    state = {f"{name}.weight": _laid_out(kernel, name) for name, kernel in convs.items()}
    num_projections = sum(name.endswith("downsample.0") for name in convs)
    is_v2 = num_projections > 0 and len(norms) == len(convs) - num_projections
    widths = _norms_before(convs) if is_v2 else _norms_behind(convs)
    if len(norms) != len(widths):
        raise _not_a_resnet(f"it has {len(convs)} convolutions and {len(norms)} norms")
    for (name, width), norm in zip(widths.items(), norms, strict=True):
        if norm.keys() != _NORM_PARTS.keys() or any(part.shape != (width,) for part in norm.values()):
            raise _not_a_resnet(f"the norm in the place of {name} has other parts or another width than {width}")
        state |= {f"{name}.{_NORM_PARTS[part]}": values for part, values in norm.items()}
    if len(layers["dense"]) > 1:
        raise _not_a_resnet(f"it has {len(layers['dense'])} dense layers")
    for head in layers["dense"].values():
        state |= {f"fc.{part.replace('kernel', 'weight')}": _laid_out(head[part], f"dense/{part}") for part in head}
    return state


def _norms_behind(convs: Mapping[str, Tensor]) -> dict[str, int]:
    """The norms of v1 and their widths in the order of creation: one behind each convolution."""
    return {
        name.replace("downsample.0", "downsample.1").replace("conv", "bn"): int(kernel.shape[3])
        for name, kernel in convs.items()
    }


def _norms_before(convs: Mapping[str, Tensor]) -> dict[str, int]:
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
            "the TensorFlow checkpoint has no ResNet that is known here" if not chosen else "which of its networks?",
            why=f"scopes with numbered convolutions and norms: {', '.join(sorted(found)) or 'none'}; "
            f"tensors such as {', '.join(sorted(tensors)[:3]) or 'none'}",
            then="name one of the scopes, or convert the names in a script of your own",
        )
    kinds = found[chosen[0]]
    if any("kernel" not in layer for kind in ("conv2d", "dense") for layer in kinds[kind].values()):
        raise _not_a_resnet("a layer has a bias but no kernel")
    return kinds


def _conv_names(kernels: list[int]) -> Iterator[str]:
    """The name of each convolution, out of the kernel sizes in the order of creation.

    A block is 3x3, 3x3 or 1x1, 3x3, 1x1; the first of a stage has its 1x1 projection in front of that.
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
            raise _not_a_resnet(f"{block} has kernels {found} in place of {sizes}")
        for i in range(1, len(sizes) + 1):
            yield f"{block}.conv{i}"
        at, unit = at + len(sizes), unit + 1


def _laid_out(tensor: Tensor, name: str) -> Tensor:
    """Kernels from height, width, in, out to out, in, height, width; matrices transposed; vectors as they are."""
    if tensor.ndim == 4:
        return tensor.permute(3, 2, 0, 1).contiguous()
    if tensor.ndim == 2:
        return tensor.t().contiguous()
    if tensor.ndim == 1:
        return tensor
    raise _not_a_resnet(f"{name} has {tensor.ndim} dimensions")


def _not_a_resnet(why: str) -> CheckpointError:
    return CheckpointError(
        "the TensorFlow checkpoint is not a ResNet that is known here",
        why=why,
        then="convert the names in a script of your own and save them as .safetensors",
    )
