"""A network as it answers fastest: one flat list of operations, a convolution and what follows it being one of them.

Owns the list and what may be joined in it. Refuses to know devices and how a joint operation is computed. Invariant:
the list gives the answers of the network it was made of, for any number of images of one shape, type and layout.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from reconv.kernels.passes import largest
from reconv.kernels.product import Shape, product
from reconv.kernels.reference import Activation

aten = torch.ops.aten
_FUNCTIONS: dict[object, Activation] = {
    aten.relu.default: "relu",
    aten.relu_.default: "relu",
    aten.silu.default: "silu",
    aten.silu_.default: "silu",
}
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_ROWS = 3  # images that the list is made with
_CLAMPS = (aten.hardtanh.default, aten.hardtanh_.default)  # with 0 and 6, ReLU6
_LARGEST_WINDOW = 15


def answering(model: nn.Module, images: Tensor) -> tuple[Callable[[Tensor], Any], int]:
    """The network's operations on images like these, and how many convolutions took in what follows them."""
    from torch.fx.experimental.proxy_tensor import make_fx  # 1 s of imports

    with torch.no_grad():
        some = torch.zeros_like(images[:1].repeat(_ROWS, 1, 1, 1))
        if images.is_contiguous(memory_format=torch.channels_last):
            some = some.contiguous(memory_format=torch.channels_last)
        listed = make_fx(lambda given: model(given))(some)
    graph = listed.graph
    _free_rows(graph)
    if any(_mutates(node) and len(_source(node).users) > 1 for node in graph.nodes):
        return _ready(listed), 0  # what others read changes in its place: nothing may be moved
    for node in _calls(graph, aten.max_pool2d_with_indices.default):
        _take_values(graph, node)
    num_joined = sum(_join(graph, node) for node in _calls(graph, aten.convolution.default))
    return _ready(listed), num_joined


def _calls(graph: fx.Graph, target: object) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


def _ready(listed: fx.GraphModule) -> fx.GraphModule:
    listed.graph.lint()
    listed.recompile()
    return listed


def _free_rows(graph: fx.Graph) -> None:
    """Take the number of images out of the list: shapes that begin with it, and strides that are only told anew."""
    for node in list(graph.nodes):
        if node.target in _VIEWS and node.args[1][0] == _ROWS:
            node.args = (node.args[0], [-1, *_values(node).shape[1:]])
        elif node.target is aten.as_strided_.default and tuple(node.args[1]) == tuple(_values(node.args[0]).shape):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _take_values(graph: fx.Graph, pool: fx.Node) -> None:
    """Put a pool that gives values alone in the place of one whose places nobody reads."""
    defaults: tuple[Any, ...] = (None, None, [], [0], [1], False)
    x, kernel, stride, padding, dilation, ceil = pool.args + defaults[len(pool.args) :]
    stride = stride or kernel
    reads = {read.args[1]: read for read in pool.users}
    is_known = all(read.target is operator.getitem for read in pool.users) and not (1 in reads and reads[1].users)
    is_square = all(len(set(sides)) == 1 for sides in (kernel, stride, padding)) and set(dilation) == {1}
    if not is_known or 0 not in reads or not is_square or kernel[0] > _LARGEST_WINDOW or len(_values(x).shape) != 4:
        return
    with graph.inserting_after(pool):
        values = graph.call_function(largest, (x, kernel[0], stride[0], padding[0], ceil))
    _replace(graph, [pool, *reads.values()], values, reads[0])


def _replace(graph: fx.Graph, old: list[fx.Node], new: fx.Node, last: fx.Node) -> None:
    """Let those who read the last of the old nodes read the new one; nobody else reads the old."""
    new.meta = dict(last.meta)
    last.replace_all_uses_with(new)
    for node in reversed(old):
        graph.erase_node(node)


def _join(graph: fx.Graph, conv: fx.Node) -> bool:
    """Put a joint operation in the place of a convolution with a bias and of the sum and activation that alone read
    it; whether that could be done."""
    given: tuple[Any, ...] = conv.args
    x, weight, bias, stride, padding, dilation, is_transposed, _, groups = given
    if bias is None or is_transposed or len(_values(conv).shape) != 4:
        return False
    chain, other = [conv], None
    act: Activation = "none"
    after = _only_user(conv)
    if after is not None and _is_sum(after):
        chain.append(after)
        other = next(term for term in after.args if term is not conv)
        after = _only_user(after)
    if after is not None and (found := _activation(after)) is not None:
        chain.append(after)
        act = found
    shape = Shape(tuple(stride), tuple(padding), tuple(dilation), groups, act)
    with graph.inserting_after(chain[-1]):
        joint = graph.call_function(product, (x, weight, bias, other, shape))
    _replace(graph, chain, joint, chain[-1])
    return True


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _values(node: fx.Node) -> Any:
    """Shape and type of what a node gives."""
    return node.meta["tensor_meta"]


def _is_sum(node: fx.Node) -> bool:
    """Whether a node adds two different tensors of one shape and type."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    a, b = node.args
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or a is b:
        return False
    return bool((_values(a).shape, _values(a).dtype) == (_values(b).shape, _values(b).dtype))


def _activation(node: fx.Node) -> Activation | None:
    if node.target in _CLAMPS:
        return "relu6" if tuple(node.args[1:]) == (0.0, 6.0) else None
    return _FUNCTIONS.get(node.target)


def _mutates(node: fx.Node) -> bool:
    """Whether an operation writes to what it is given."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source
