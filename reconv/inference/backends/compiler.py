"""Compiling a model for inference: one flat fx graph with fused operations.

A convolution is fused with the sum and activation after it; a gate with the sum and activation after it, or with a 1x1
convolution that is its only consumer; max-pools whose indices are unused are replaced. The graph returns the model's
outputs for any batch size of one image shape, dtype and memory format.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from reconv.inference.backends.trace_graph import trace_graph
from reconv.kernels.ops.conv_bias_act import conv_bias_act
from reconv.kernels.ops.conv_candidates import ConvConfig
from reconv.kernels.ops.pointwise import Epilogue, concat, gate_add_act, global_avg_pool, max_pool

aten = torch.ops.aten
_ACTIVATIONS: dict[object, Epilogue] = {
    aten.relu.default: "relu",
    aten.relu_.default: "relu",
    aten.silu.default: "silu",
    aten.silu_.default: "silu",
    aten.sigmoid.default: "sigmoid",
}
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_TRACE_BATCH = 3  # batch size of the example; recognized in the graph
_HARDTANH = (aten.hardtanh.default, aten.hardtanh_.default)  # ReLU6 if the limits are 0 and 6
_MAX_WINDOW = 15


def compile_inference(model: nn.Module, images: Tensor) -> tuple[Callable[[Tensor], Any], int]:
    """The model's graph for images like these, and the number of fused convolutions."""
    example = images[:1].repeat(_TRACE_BATCH, 1, 1, 1)
    if images.is_contiguous(memory_format=torch.channels_last):
        example = example.contiguous(memory_format=torch.channels_last)
    traced = trace_graph(model, example)
    graph = traced.graph
    _free_batch_size(graph)
    if any(_mutates(node) and not _is_private(node) for node in graph.nodes):
        return _finish(traced), 0  # a shared tensor is modified in place: reordering is unsafe
    for node in _calls(graph, aten.max_pool2d_with_indices.default):
        _replace_max_pool(graph, node)
    for node in _calls(graph, aten.mean.dim):
        _replace_mean(graph, node)
    for node in _calls(graph, aten.cat.default):
        _replace_concat(graph, node)
    for node in _calls(graph, aten.mul.Tensor):
        _fuse_gate(graph, node)
    num_fused = sum(_fuse_conv(graph, node) for node in _calls(graph, aten.convolution.default))
    return _finish(traced), num_fused


def _calls(graph: fx.Graph, target: object) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


def _finish(traced: fx.GraphModule) -> fx.GraphModule:
    traced.graph.lint()
    traced.recompile()
    return traced


def _free_batch_size(graph: fx.Graph) -> None:
    """Remove the example's batch size from the graph: from views, redundant as_strided_ and group norms."""
    for node in list(graph.nodes):
        if node.target in _VIEWS and node.args[1][0] == _TRACE_BATCH:
            node.args = (node.args[0], [-1, *_tensor_meta(node).shape[1:]])
        elif node.target is aten.as_strided_.default and tuple(node.args[1]) == tuple(_tensor_meta(node.args[0]).shape):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is aten.native_group_norm.default and (users := _first_output_users(node)):
            x, weight, bias, _, _, _, groups, eps = node.args
            with graph.inserting_after(node):
                norm = graph.call_function(F.group_norm, (x, groups, weight, bias, eps))
            _replace(graph, [node, *users], norm, users[0])


def _first_output_users(node: fx.Node) -> list[fx.Node]:
    """The users of the node's outputs, the first output's user first; empty if other outputs are used."""
    if not node.users or not all(user.target is operator.getitem for user in node.users):
        return []
    first, *others = sorted(node.users, key=lambda user: int(str(user.args[1])))
    return [] if first.args[1] != 0 or any(user.users for user in others) else [first, *others]


def _replace_max_pool(graph: fx.Graph, pool: fx.Node) -> None:
    """Replace a max-pool whose indices are unused by one without indices."""
    defaults: tuple[Any, ...] = (None, None, [], [0], [1], False)
    x, kernel, stride, padding, dilation, ceil = pool.args + defaults[len(pool.args) :]
    stride = stride or kernel
    users = _first_output_users(pool)
    is_square = all(len(set(sides)) == 1 for sides in (kernel, stride, padding)) and set(dilation) == {1}
    if not users or not is_square or kernel[0] > _MAX_WINDOW or len(_tensor_meta(x).shape) != 4:
        return
    with graph.inserting_after(pool):
        values = graph.call_function(max_pool, (x, kernel[0], stride[0], padding[0], ceil))
    _replace(graph, [pool, *users], values, users[0])


def _replace(graph: fx.Graph, old: list[fx.Node], new: fx.Node, last: fx.Node) -> None:
    """Replace `old` nodes by `new`, which takes the uses of `last`; the old nodes have no other users."""
    new.meta = dict(last.meta)
    last.replace_all_uses_with(new)
    for node in reversed(old):
        graph.erase_node(node)


def _replace_mean(graph: fx.Graph, mean: fx.Node) -> None:
    """Replace a mean over the pixels of images by global_avg_pool."""
    args: tuple[Any, ...] = mean.args
    x, sides, *keeps = args
    if (
        len(_tensor_meta(x).shape) == 4
        and sorted(side % 4 for side in sides) == [2, 3]
        and keeps == [True]
        and not mean.kwargs
    ):
        with graph.inserting_after(mean):
            _replace(graph, [mean], graph.call_function(global_avg_pool, (x,)), mean)


def _replace_concat(graph: fx.Graph, cat: fx.Node) -> None:
    """Replace a concatenation of images along the channels."""
    args: tuple[Any, ...] = cat.args
    parts, *sides = args
    if sides == [1] and all(len(_tensor_meta(part).shape) == 4 for part in parts):
        with graph.inserting_after(cat):
            _replace(graph, [cat], graph.call_function(concat, (parts,)), cat)


def _fuse_gate(graph: fx.Graph, gated: fx.Node) -> None:
    """Fuse the product of images and their gate with the sum and activation that are its only consumers.

    A gate whose only consumer is a 1x1 convolution is left to `_fuse_conv`.
    """
    found = _gate(gated)
    after = _only_user(gated)
    if found is None or (after is not None and _is_pointwise(after)):
        return
    chain, other, act = _chain(gated)
    with graph.inserting_after(chain[-1]):
        _replace(graph, chain, graph.call_function(gate_add_act, (*found, other, act)), chain[-1])


def _fuse_conv(graph: fx.Graph, conv: fx.Node) -> bool:
    """Fuse a convolution that has a bias with the sum and activation that are its only consumers, and a 1x1 with the
    gate before it; returns whether that was possible."""
    args: tuple[Any, ...] = conv.args
    x, weight, bias, stride, padding, dilation, is_transposed, _, groups = args
    if bias is None or is_transposed or len(_tensor_meta(conv).shape) != 4:
        return False
    chain, other, act = _chain(conv)
    gate = None
    if _is_pointwise(conv) and (found := _gate(x)) is not None:  # its only consumer: see `_fuse_gate`
        chain.insert(0, x)
        x, gate = found
    shape = ConvConfig(tuple(stride), tuple(padding), tuple(dilation), groups, act)
    with graph.inserting_after(chain[-1]):
        _replace(graph, chain, graph.call_function(conv_bias_act, (x, weight, bias, other, gate, shape)), chain[-1])
    return True


def _chain(first: fx.Node) -> tuple[list[fx.Node], fx.Node | None, Epilogue]:
    """An operation with the sum and activation that are its only consumers; the other summand; the activation."""
    chain: list[fx.Node] = [first]
    other: fx.Node | None = None
    act: Epilogue = "none"
    after = _only_user(first)
    if after is not None and _is_residual_sum(after):
        chain.append(after)
        other = next(term for term in after.args if isinstance(term, fx.Node) and term is not first)
        after = _only_user(after)
    if after is not None and (found := _activation(after)) is not None:
        chain.append(after)
        act = found
    return chain, other, act


def _gate(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Images and their gate, if a node multiplies them."""
    if node.target is not aten.mul.Tensor or not all(isinstance(factor, fx.Node) for factor in node.args):
        return None
    factors: tuple[Any, ...] = node.args
    x, gate = sorted(factors, key=lambda factor: -_tensor_meta(factor).shape.numel())
    shape = tuple(_tensor_meta(x).shape)
    is_gate = len(shape) == 4 and tuple(_tensor_meta(gate).shape) == (*shape[:2], 1, 1)
    return (x, gate) if is_gate and _tensor_meta(x).dtype == _tensor_meta(gate).dtype else None


def _is_pointwise(node: fx.Node) -> bool:
    """True if a node is a 1x1 convolution of stride 1 with a bias."""
    if node.target is not aten.convolution.default:
        return False
    args: tuple[Any, ...] = node.args
    _, weight, bias, stride, padding, _, is_transposed, _, groups = args
    is_small = {*_tensor_meta(weight).shape[2:], *stride} == {1} and not any(padding)
    return is_small and len(stride) == 2 and groups == 1 and bias is not None and not is_transposed


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _tensor_meta(node: fx.Node) -> Any:
    """The metadata of a node's output, or the tensor itself for a parameter."""
    if node.op == "get_attr":
        assert node.graph.owning_module is not None and isinstance(node.target, str)
        return operator.attrgetter(node.target)(node.graph.owning_module)
    return node.meta["tensor_meta"]


def _is_residual_sum(node: fx.Node) -> bool:
    """True if a node adds two different tensors of the same shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    a, b = node.args
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or a is b:
        return False
    return bool((_tensor_meta(a).shape, _tensor_meta(a).dtype) == (_tensor_meta(b).shape, _tensor_meta(b).dtype))


def _activation(node: fx.Node) -> Epilogue | None:
    if node.target in _HARDTANH:
        return "relu6" if tuple(node.args[1:]) == (0.0, 6.0) else None
    return _ACTIVATIONS.get(node.target)


def _mutates(node: fx.Node) -> bool:
    """True if an operation changes an argument in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_private(node: fx.Node) -> bool:
    """True if an operation changes exactly one tensor, which owns its memory and has no other users."""
    assert isinstance(node.target, torch._ops.OpOverload)
    taken = zip(node.target._schema.arguments, node.args, strict=False)  # keyword arguments come last
    written = [value for argument, value in taken if argument.is_write]
    return len(written) == 1 and isinstance(written[0], fx.Node) and _owns_memory(written[0])


def _owns_memory(node: fx.Node) -> bool:
    """True if a tensor has at most one user and is not a view of another."""
    if len(node.users) > 1 or node.op == "get_attr":
        return False
    source = node.args[0] if node.target is operator.getitem else node
    if not (isinstance(source, fx.Node) and isinstance(source.target, torch._ops.OpOverload)):
        return True
    infos = [returned.alias_info for returned in source.target._schema.returns]
    return all(info is None or info.is_write for info in infos)
