"""`fuse(model)`: a pass over a finished model that swaps layers and blocks for their fused classes.

A fused class derives from the plain one, adds no state, and computes with fused kernels what they support at run
time: training, CUDA, channels_last. Everything else runs the plain code. So parameters, state-dict keys, module names
and evaluation outputs stay the same, and a fused model can be copied and pickled. As in FSDP2's `fully_shard`, the
class of a module is changed in place.

Models of other packages are recognized by what their blocks compute (`block_graph`), if they have batch norms.

Each kernel equals its reference forward and backward: in Triton's interpreter in tests/kernels, and on a GPU in
tests/gpu/test_gpu_kernels.py. Kernels read nothing on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from reconv.kernels.block_graph import has_known_code
from reconv.kernels.fused.blocks import (
    FusedBasicBlock,
    FusedBasicConv2d,
    FusedBottleneck,
    FusedConvNormAct,
    FusedEfficientNet,
    FusedGoogLeNet,
    FusedInception,
    FusedInvertedResidual,
    FusedMBConv,
    FusedMobileNetV2,
    FusedPreBasicBlock,
    FusedPreBottleneck,
    FusedResNet,
)
from reconv.kernels.fused.external import external_block_class
from reconv.kernels.fused.layers import (
    FusedDepthwiseConv2d,
    FusedDropout,
    FusedGroupedConv2d,
    FusedMaxPool2d,
    FusedSameMaxPool2d,
    FusedSqueezeExcitation,
    FusedStemConv2d,
    fused_conv_class,
    pool_window,
)
from reconv.kernels.fused.norm import FusedBatchNorm2d, FusedBatchNormAct2d
from reconv.kernels.fused.ssd import FusedExtra, FusedSSD
from reconv.models.architecture import ReconvModel
from reconv.models.efficientnet import EfficientNet, MBConv
from reconv.models.fastnet import FastNet
from reconv.models.googlenet import BasicConv2d, GoogLeNet, Inception
from reconv.models.layers.batch_norm import BatchNorm2d, BatchNormAct2d
from reconv.models.layers.conv import ConvNormAct, SameMaxPool2d, SqueezeExcitation
from reconv.models.layers.dropout import Dropout
from reconv.models.mobilenet import InvertedResidual, MobileNetV2
from reconv.models.resnet import BasicBlock, Bottleneck, PreBasicBlock, PreBottleneck, ResNet
from reconv.models.ssd import SSD, Extra

_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    BatchNorm2d: FusedBatchNorm2d,
    BatchNormAct2d: FusedBatchNormAct2d,
    SameMaxPool2d: FusedSameMaxPool2d,
    SqueezeExcitation: FusedSqueezeExcitation,
    Extra: FusedExtra,
    SSD: FusedSSD,
}
# Swapped only if something inside them was.
_BLOCKS: dict[type[nn.Module], type[nn.Module]] = {
    ConvNormAct: FusedConvNormAct,
    BasicBlock: FusedBasicBlock,
    Bottleneck: FusedBottleneck,
    PreBasicBlock: FusedPreBasicBlock,
    PreBottleneck: FusedPreBottleneck,
    ResNet: FusedResNet,
    InvertedResidual: FusedInvertedResidual,
    MobileNetV2: FusedMobileNetV2,
    MBConv: FusedMBConv,
    EfficientNet: FusedEfficientNet,
    BasicConv2d: FusedBasicConv2d,
    Inception: FusedInception,
    GoogLeNet: FusedGoogLeNet,
}
# Of our models, torch's own convolutions and pools are swapped inside these alone: elsewhere they were not measured.
_FAMILIES = (*_BLOCKS, Extra, SSD, FastNet)
_MAX_DEPTHWISE, _MAX_POOL = 5, 15  # sides of kernels and windows in external models
DEPTHWISE_7 = "depthwise 7x7"  # of stride 1, with or without a bias: a pattern that is fused on request


def fuse(model: nn.Module) -> int:
    """Swap the model's layers and blocks for fused ones, in place; returns how many modules were swapped."""
    num_swapped = fuse_layers(model)
    return num_swapped + (_fuse_dropouts(model) if num_swapped else 0)  # for them alone no network has kernels


def fuse_layers(
    model: nn.Module,
    is_traceable: Callable[[nn.Module], bool] = has_known_code,
    patterns: Collection[str] = (),
) -> int:
    """The same without dropouts; `is_traceable` says which blocks of other packages may be traced, `patterns` what is
    fused in them besides."""
    num_swapped = _fuse(model, in_family=False)
    is_wanted = _has_external_norm(model) or DEPTHWISE_7 in patterns
    return num_swapped + (_fuse_external(model, is_traceable, patterns) if is_wanted else 0)


def plain_classes() -> dict[type[nn.Module], type[nn.Module]]:
    """Fused classes of layers and of our own blocks, and the classes that they were made from."""
    pairs = {fused: plain for plain, fused in (_LAYERS | _BLOCKS).items()}
    convs: list[type[nn.Module]] = [FusedStemConv2d, FusedDepthwiseConv2d, FusedGroupedConv2d]
    return {**pairs, **dict.fromkeys(convs, nn.Conv2d), FusedMaxPool2d: nn.MaxPool2d, FusedDropout: Dropout}


def fuse_max_pools(model: nn.Module) -> int:
    """Swap the max-pools alone of a FastNet, in place; returns how many were swapped.

    Their kernels give torch's bits, and its fused norms were slower than plain ones. Other models were not measured.
    """
    if not isinstance(model, FastNet):
        return 0
    pools = [module for module in model.modules() if _fused_pool_class(module) is not None]
    for pool in pools:
        pool.__class__ = FusedMaxPool2d
    return len(pools)


def _fuse(module: nn.Module, in_family: bool) -> int:
    in_family = in_family or isinstance(module, _FAMILIES)
    num_swapped = sum(_fuse(child, in_family) for child in module.children())
    fused = _fused_class(module, in_family, num_swapped > 0 or _has_fused_norm(module))
    if fused is not None:
        module.__class__ = fused
    return num_swapped + (fused is not None)


def _has_fused_norm(module: nn.Module) -> bool:
    """True if a norm of a block is fused, as are those that `standalone` has fused before."""
    return type(module) in _BLOCKS and any(isinstance(layer, FusedBatchNorm2d) for layer in module.modules())


def _fuse_dropouts(model: nn.Module) -> int:
    dropouts = [module for module in model.modules() if type(module) is Dropout]
    for dropout in dropouts:
        dropout.__class__ = FusedDropout
    return len(dropouts)


def _fused_class(module: nn.Module, in_family: bool, is_swapped_inside: bool) -> type[nn.Module] | None:
    if in_family and isinstance(module, nn.Conv2d):
        return fused_conv_class(module) if module.bias is None else None
    if in_family and type(module) is nn.MaxPool2d:
        return _fused_pool_class(module)
    if type(module) in _BLOCKS:
        return _BLOCKS[type(module)] if is_swapped_inside else None
    return _LAYERS.get(type(module))


def _fused_pool_class(module: nn.Module) -> type[nn.Module] | None:
    return FusedMaxPool2d if type(module) is nn.MaxPool2d and pool_window(module) is not None else None


def is_depthwise_7(conv: nn.Conv2d) -> bool:
    """True if kernels compute a convolution as the pattern of this name."""
    is_same = (conv.kernel_size, conv.stride, conv.padding_mode) == ((7, 7), (1, 1), "zeros")
    return is_same and fused_conv_class(conv) is FusedDepthwiseConv2d


def _is_ours(module: nn.Module) -> bool:
    return isinstance(module, (ReconvModel, *_FAMILIES))


def _has_external_norm(module: nn.Module) -> bool:
    """True if a norm outside our own models was fused. A model without one is left to torch.compile."""
    if _is_ours(module):
        return False
    return isinstance(module, FusedBatchNorm2d) or any(map(_has_external_norm, module.children()))


def _fuse_external(module: nn.Module, is_traceable: Callable[[nn.Module], bool], patterns: Collection[str]) -> int:
    """Swap what other packages' models are made of; returns how many modules were swapped."""
    if _is_ours(module):
        return 0
    num_swapped = sum(_fuse_external(child, is_traceable, patterns) for child in module.children())
    fused = _external_class(module, is_traceable, patterns)
    if fused is not None:
        module.__class__ = fused
    return num_swapped + (fused is not None)


def _external_class(
    module: nn.Module, is_traceable: Callable[[nn.Module], bool], patterns: Collection[str]
) -> type[nn.Module] | None:
    if isinstance(module, nn.Conv2d):
        fused = fused_conv_class(module) if module.padding_mode == "zeros" else None
        if fused is FusedDepthwiseConv2d and (module.kernel_size[0] > _MAX_DEPTHWISE or module.bias is not None):
            return fused if DEPTHWISE_7 in patterns and is_depthwise_7(module) else None
        return fused
    if type(module) is nn.MaxPool2d:
        window = pool_window(module)
        return FusedMaxPool2d if window is not None and window.side <= _MAX_POOL else None
    if isinstance(module, nn.modules.batchnorm._BatchNorm) or next(module.children(), None) is None:
        return None
    return None if any(map(_is_ours, module.modules())) else external_block_class(module, is_traceable)
