"""oneDNN's fused convolutions in a compiled graph: bias, sum and activation in one pass over packed weights.

torch.compile uses the same operators on a CPU; they are private, so each is tried once before it is used.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from reconv.inference.backends.winograd import with_winograd
from reconv.kernels.ops.conv_bias_act import conv_bias_act
from reconv.kernels.ops.conv_candidates import ConvConfig, ConvInputs, torch_conv

_ACTIVATIONS: dict[str, tuple[str, list[float]]] = {
    "none": ("none", []),
    "relu": ("relu", []),
    "relu6": ("hardtanh", [0.0, 6.0]),
    "silu": ("swish", []),
    "sigmoid": ("sigmoid", []),
}
_DTYPES = (torch.float32, torch.bfloat16)
_MAX_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def use_onednn(network: Any) -> int:
    """Replace the fused convolutions of a compiled graph, in place; returns how many."""
    if not isinstance(network, fx.GraphModule) or not torch.backends.mkldnn.is_available():
        return 0
    num_replaced = 0
    for node in list(network.graph.nodes):
        if node.target is conv_bias_act and (convolution := _packed(network, node)) is not None:
            x, _, _, other, gate, _ = node.args
            name = f"packed_convolution_{num_replaced}"
            network.add_submodule(name, convolution)
            with network.graph.inserting_after(node):
                new = network.graph.call_module(name, (x, other, gate))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            network.graph.erase_node(node)
            num_replaced += 1
    network.graph.eliminate_dead_code()
    network.graph.lint()
    network.recompile()
    return num_replaced


def _packed(network: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """The convolution of a node on packed weights; None where oneDNN has none that equals it.

    One that Winograd's algorithm computes faster does so, for the batches where it is.
    """
    args: tuple[Any, ...] = node.args
    x, weight_node, bias_node, other, _, config = args
    if weight_node.op != "get_attr" or bias_node.op != "get_attr":
        return None
    weight, bias = (operator.attrgetter(str(n.target))(network).detach() for n in (weight_node, bias_node))
    if weight.dtype not in _DTYPES:
        return None
    shape = list(x.meta["tensor_meta"].shape)
    try:
        convolution = PackedConvolution(weight, bias, config, shape)
        if not _equals_plain(convolution, weight, bias, config, shape, other is not None):
            return None
        return with_winograd(convolution, weight, bias, config)
    except RuntimeError:  # not supported by this build or CPU
        return None


def _equals_plain(
    convolution: PackedConvolution, weight: Tensor, bias: Tensor, config: ConvConfig, shape: list[int], adds: bool
) -> bool:
    """True if a packed convolution equals torch's on one small image."""
    side = max(2 * max(weight.shape[2:]), 4)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, shape[1], side, side, generator=generator).to(weight.dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    expected = torch_conv(ConvInputs(x, weight, bias), config._replace(act="none"))
    other = torch.ones_like(expected) if adds else None
    expected = torch_conv(ConvInputs(x, weight, bias, other), config)
    difference = (convolution(x, other, None).double() - expected.double()).abs().max()
    return bool(difference <= _MAX_DIFFERENCE[weight.dtype] * expected.double().abs().max().clamp(min=1e-30))


class PackedConvolution(nn.Module):
    """act(conv(x * gate) + bias + other) with weights in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor, config: ConvConfig, shape: list[int]) -> None:
        """`shape` is that of an example of its input; other sizes of batches and images work, too."""
        super().__init__()
        sizes = ([*config.padding], [*config.stride], [*config.dilation], config.groups)
        pack: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
        self._weight: Tensor = pack(weight.to_mkldnn(), *sizes, shape)
        self._bias = bias
        self._sizes = sizes
        self._act, self._scalars = _ACTIVATIONS[config.act]

    def forward(self, x: Tensor, other: Tensor | None, gate: Tensor | None) -> Tensor:
        if gate is not None:
            x = x * gate
        convolution = torch.ops.mkldnn._convolution_pointwise
        if other is None:
            y: Tensor = convolution(x, self._weight, self._bias, *self._sizes, self._act, self._scalars, "")
        else:
            act = None if self._act == "none" else self._act
            y = convolution(x, other, self._weight, self._bias, *self._sizes, "add", 1.0, act, self._scalars, "")
        return y
