"""Blocks of other packages' models whose layers are fused: chains of layers, residual sums, squeeze-and-excitation.

A block keeps its class as a base, its children and its state; its new class, which is made here, holds the graph of
what the block computes (`kernels.block_graph`). In training the layers are applied in the order of the graph, with
norms fused with what follows them. The block's own code runs in evaluation, and whenever the graph may not hold any
more. A layer with hooks is always called, so that they see what they would see without kernels.

A block runs fused only while it computes what was traced: in training, with its children and numbers unchanged
(tests/kernels/test_fused_external.py).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn

from reconv.kernels.block_graph import (
    BlockGraph,
    Facts,
    block_facts,
    graph_layer,
    graph_layers,
    has_known_code,
    is_sequential,
    trace_block,
)
from reconv.kernels.fused.conv1x1 import (
    conv1x1_norm_act,
    conv_statistics,
    norm_act_conv1x1,
    supports_conv1x1,
    supports_expansion,
)
from reconv.kernels.fused.layers import FusedDepthwiseConv2d, SqueezeExciteKernels, excitation_gate
from reconv.kernels.fused.norm import (
    FusedBatchNorm2d,
    FusedBatchNormAct2d,
    norm_act,
    norm_act_squeeze_excite,
    supports_excite,
)
from reconv.kernels.fused.plain_layers import has_hooks, is_fusible_act
from reconv.kernels.fused.sums import (
    DualUse,
    dual,
    norm_act_pool,
    norm_add_norm_act,
    norm_squeeze_excite_add_relu,
    single,
)

_IDENTITY = nn.Identity()


class ExternalBlock(nn.Module):
    """A block of another package with its layers fused. Its names must not be those of attributes of the block."""

    fused_plain_class: type[nn.Module]
    fused_graph: BlockGraph | None  # None: the children, one after another
    fused_facts: Facts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and self.follows_fused_graph():
            return self.forward_fused(args[0])
        return super().forward(*args, **kwargs)

    def forward_fused(self, x: Tensor) -> Tensor:
        """The output, where the graph holds."""
        raise NotImplementedError

    def follows_fused_graph(self) -> bool:
        """True if the block computes what its graph says: in training, as long as nothing was changed."""
        return self.training and (self.fused_graph is None or block_facts(self) == self.fused_facts)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the plain class, since the one made here has no name to import."""
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        return _rebuild, (self.fused_plain_class, self.fused_graph, self.fused_facts), state


class ExternalChain(ExternalBlock):
    """Layers that are applied one after another."""

    def fused_layers(self) -> Iterator[nn.Module]:
        """The layers."""
        return self.fused_children() if self.fused_graph is None else graph_layers(self, self.fused_graph.main)

    def fused_children(self) -> Iterator[nn.Module]:
        """All children, also those that occur twice."""
        return (child for child in self._modules.values() if child is not None)

    def forward_fused(self, x: Tensor) -> Tensor:
        return single(_apply(_flatten(self.fused_layers()), x))


class ExternalResidual(ExternalBlock):
    """act(main(x) + shortcut(x))"""

    def forward_fused(self, x: Tensor) -> Tensor:
        return single(self.forward_fused_dual(x))

    def forward_fused_dual(self, x: Tensor | DualUse) -> Tensor | DualUse:
        """The output for the next block's main path and shortcut."""
        assert self.fused_graph is not None
        x, shortcut = dual(x)
        act = graph_layer(self, self.fused_graph.act) if self.fused_graph.act else _IDENTITY
        layers = _flatten(graph_layers(self, self.fused_graph.main))
        others = _flatten(graph_layers(self, self.fused_graph.shortcut))
        is_known = is_fusible_act(act)
        if is_known and layers and _ends_as_norm(layers[-1]):
            y = single(_apply(layers[:-1], x))
            if others and _ends_as_norm(others[-1]):
                return norm_add_norm_act(layers[-1], y, single(_apply(others[:-1], shortcut)), others[-1], act)
            return norm_add_norm_act(layers[-1], y, single(_apply(others, shortcut)), None, act)
        is_gated = len(layers) > 1 and _ends_as_norm(layers[-2]) and _is_gate(layers[-1])
        if is_known and is_gated and type(act) is nn.ReLU:
            norm, se = layers[-2:]
            assert isinstance(norm, FusedBatchNorm2d)
            y, shortcut = single(_apply(layers[:-2], x)), single(_apply(others, shortcut))
            if norm.supports_batch(y):
                gated: Tensor | DualUse = norm_squeeze_excite_add_relu(norm, y, se, shortcut, act)
                return gated
            return act(se(norm(y)) + shortcut)  # type: ignore[no-any-return]
        y = single(_apply(layers, x))
        return act(y + single(_apply(others, shortcut)))  # type: ignore[no-any-return]


class ExternalSqueezeExcitation(ExternalBlock, SqueezeExciteKernels):
    """x times a gate computed from its means."""

    def gate_of_means(self, means: Tensor) -> Tensor:
        assert self.fused_graph is not None
        layers = list(graph_layers(self, self.fused_graph.main))
        network = _gate_layers(layers)
        gate = None if network is None else excitation_gate(means, *network)
        if gate is not None:
            return gate
        for layer in layers:
            means = layer(means)
        return means

    def supports_kernels(self, x: Tensor) -> bool:
        return self.follows_fused_graph() and super().supports_kernels(x)

    def follows_fused_graph(self) -> bool:
        assert self.fused_graph is not None
        is_called = not self.fused_graph.pool or not has_hooks(self.get_submodule(self.fused_graph.pool))
        return is_called and super().follows_fused_graph()

    def forward_fused(self, x: Tensor) -> Tensor:
        if super().supports_kernels(x):
            return self.forward_kernels(x)
        out: Tensor = self.fused_plain_class.forward(self, x)
        return out


def _gate_layers(layers: Sequence[nn.Module]) -> tuple[nn.Module, nn.Module, nn.Module] | None:
    """fc1, activation and fc2 of layers that end in a sigmoid; None if there are others."""
    others = [layer for layer in layers if type(layer) is not nn.Identity or has_hooks(layer)]
    if len(others) != 4 or type(others[3]) is not nn.Sigmoid or has_hooks(others[3]):
        return None
    return others[0], others[1], others[2]


_KINDS: dict[str, type[ExternalBlock]] = {
    "chain": ExternalChain,
    "residual": ExternalResidual,
    "gate": ExternalSqueezeExcitation,
}


def _kind_of(graph: BlockGraph | None) -> type[ExternalBlock]:
    return ExternalChain if graph is None else _KINDS[graph.kind]


def external_block_class(
    module: nn.Module, is_traceable: Callable[[nn.Module], bool] = has_known_code
) -> type[ExternalBlock] | None:
    """The fused class of a block of another package; None if nothing in it is fused, or nothing known."""
    if isinstance(module, ExternalBlock) or not is_traceable(module):
        return None
    graph = None if is_sequential(module) else trace_block(module)
    if graph is None and not is_sequential(module):
        return None
    kind = _kind_of(graph)
    if any(hasattr(module, name) for name in set(dir(kind)) - set(dir(nn.Module))):
        return None
    has_norm = any(isinstance(layer, FusedBatchNorm2d) for layer in module.modules())
    if not has_norm and kind is not ExternalSqueezeExcitation:
        return None
    plain: Any = type(module)
    try:
        return _fused_class(plain, graph, () if graph is None else block_facts(module))
    except TypeError:  # a class that does not want subclasses
        return None


@cache
def _fused_class(plain: Any, graph: BlockGraph | None, facts: Facts) -> type[ExternalBlock]:
    members = {"fused_plain_class": plain, "fused_graph": graph, "fused_facts": facts, "__module__": plain.__module__}
    bases = (_kind_of(graph), plain)
    fused: Any = types.new_class(f"Fused{plain.__name__}", bases, exec_body=lambda space: space.update(members))
    return fused  # type: ignore[no-any-return]


def _rebuild(plain: Any, graph: BlockGraph | None, facts: Facts) -> nn.Module:
    made = _fused_class(plain, graph, facts)
    return made.__new__(made)


def _flatten(layers: Iterator[nn.Module]) -> list[nn.Module]:
    """The layers, with chains replaced by their own layers and without identities, unless they have hooks."""
    flat: list[nn.Module] = []
    for layer in layers:
        if has_hooks(layer):
            flat.append(layer)
        elif isinstance(layer, ExternalChain) and layer.follows_fused_graph():
            flat += _flatten(layer.fused_layers())
        elif type(layer) is not nn.Identity:
            flat.append(layer)
    return flat


def _apply(layers: Sequence[nn.Module], x: Tensor | DualUse) -> Tensor | DualUse:
    """The layers' output, with norms fused with what follows them."""
    position = 0
    while position < len(layers):
        layer = layers[position]
        position += 1
        if isinstance(layer, ExternalResidual) and layer.follows_fused_graph() and not has_hooks(layer):
            x = layer.forward_fused_dual(x)
        elif isinstance(layer, FusedBatchNorm2d) and not has_hooks(layer):
            x, num_fused = _apply_norm(layer, single(x), layers[position : position + 2])
            position += num_fused
        elif isinstance(layer, nn.Conv2d):
            x, num_fused = _apply_conv(layer, single(x), layers[position : position + 3])
            position += num_fused
        else:
            x = layer(single(x))
    return x


def _apply_norm(
    norm: FusedBatchNorm2d, x: Tensor, following: Sequence[nn.Module], stats: Tensor | None = None
) -> tuple[Tensor | DualUse, int]:
    """The output of a norm and of the layers behind it that are fused with it, and how many they are.

    `stats` are x's statistics, if they are known.
    """
    act, used = _act_behind(norm, following)
    if act is None or not norm.supports_batch(x):
        return norm(x), 0
    after = following[used] if len(following) > used and not has_hooks(following[used]) else _IDENTITY
    if isinstance(after, SqueezeExciteKernels) and supports_excite(norm, after, x):
        return norm_act_squeeze_excite(norm, x, act, after, stats), used + 1
    if isinstance(after, nn.Conv2d) and _is_plain_conv(after) and supports_conv1x1(norm, after, x):
        return norm_act_conv1x1(norm, x, act, after, stats), used + 1
    if isinstance(after, nn.MaxPool2d) and used:
        return norm_act_pool(norm, x, act, after), used + 1
    return norm_act(norm, x, act, stats), used


def _apply_conv(conv: nn.Conv2d, x: Tensor, following: Sequence[nn.Module]) -> tuple[Tensor | DualUse, int]:
    """The output of a convolution and of the norm and activation that are fused with it, and how many they are.

    Where squeeze-and-excitation follows, the norm is fused with that instead.
    """
    norm = following[0] if following else _IDENTITY
    if not isinstance(norm, FusedBatchNorm2d) or has_hooks(norm) or not norm.supports_batch(x):
        return conv(x), 0
    if isinstance(conv, FusedDepthwiseConv2d):
        y, stats = conv_statistics(conv, norm, x)
        out, used = _apply_norm(norm, y, following[1:], stats)
        return out, 1 + used
    if not any(isinstance(layer, SqueezeExciteKernels) for layer in following):
        act, used = _act_behind(norm, following[1:])
        if act is not None and supports_expansion(conv, norm, x):
            return conv1x1_norm_act(conv, norm, x, act), 1 + used
    return conv(x), 0


def _act_behind(norm: FusedBatchNorm2d, following: Sequence[nn.Module]) -> tuple[nn.Module | None, int]:
    """The activation that is fused with a norm, and how many layers behind the norm it is; None: call the norm."""
    if isinstance(norm, FusedBatchNormAct2d):
        return norm.fusible_act(), 0
    return (following[0], 1) if following and is_fusible_act(following[0]) else (_IDENTITY, 0)


def _is_plain_conv(conv: nn.Conv2d) -> bool:
    return type(conv) is nn.Conv2d and conv.padding == (0, 0)


def _ends_as_norm(layer: nn.Module) -> bool:
    """True if a layer is a norm without an activation and without hooks."""
    if not isinstance(layer, FusedBatchNorm2d) or has_hooks(layer):
        return False
    return not isinstance(layer, FusedBatchNormAct2d) or type(layer.fusible_act()) is nn.Identity


def _is_gate(layer: nn.Module) -> bool:
    return isinstance(layer, SqueezeExciteKernels) and not has_hooks(layer)
