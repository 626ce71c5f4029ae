"""A network as it answers fastest: one flat list of operations, of which a joint one stands for several of torch's.

Owns the list and what may be joined in it: a convolution and what follows it, a gate and what follows it or the 1x1
convolution that alone reads it, a pool whose places nobody reads. Refuses to know devices and how a joint operation is
computed. Invariant: the list gives the answers of the network it was made of, for any number of images of one shape,
type and layout.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from reconv.kernels.conv_bias_act.candidates import ConvConfig
from reconv.kernels.conv_bias_act.ops import conv_bias_act
from reconv.kernels.pointwise.ops import Epilogue, concat, gate_add_act, global_avg_pool, max_pool

aten = torch.ops.aten
_FUNCTIONS: dict[object, Epilogue] = {
    aten.relu.default: "relu",
    aten.relu_.default: "relu",
    aten.silu.default: "silu",
    aten.silu_.default: "silu",
    aten.sigmoid.default: "sigmoid",
}
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_ROWS = 3  # images that the list is made with
_CLAMPS = (aten.hardtanh.default, aten.hardtanh_.default)  # with 0 and 6, ReLU6
_LARGEST_WINDOW = 15


def compile_inference(model: nn.Module, images: Tensor) -> tuple[Callable[[Tensor], Any], int]:
    """The network's operations on images like these, and how many convolutions took in what follows them."""
    from torch.fx.experimental.proxy_tensor import make_fx  # 1 s of imports

    with torch.no_grad():
        some = torch.zeros_like(images[:1].repeat(_ROWS, 1, 1, 1))
        if images.is_contiguous(memory_format=torch.channels_last):
            some = some.contiguous(memory_format=torch.channels_last)
        listed = make_fx(lambda given: model(given))(some)
    graph = listed.graph
    _free_rows(graph)
    if any(_mutates(node) and not _is_private(node) for node in graph.nodes):
        return _ready(listed), 0  # what others read changes in its place: nothing may be moved
    for node in _calls(graph, aten.max_pool2d_with_indices.default):
        _take_values(graph, node)
    for node in _calls(graph, aten.mean.dim):
        _take_means(graph, node)
    for node in _calls(graph, aten.cat.default):
        _take_side_by_side(graph, node)
    for node in _calls(graph, aten.mul.Tensor):
        _join_gate(graph, node)
    num_joined = sum(_join(graph, node) for node in _calls(graph, aten.convolution.default))
    return _ready(listed), num_joined


def _calls(graph: fx.Graph, target: object) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


def _ready(listed: fx.GraphModule) -> fx.GraphModule:
    listed.graph.lint()
    listed.recompile()
    return listed


def _free_rows(graph: fx.Graph) -> None:
    """Take the number of images out of the list: shapes that begin with it, strides that are only told anew, and group
    norms, which are told it."""
    for node in list(graph.nodes):
        if node.target in _VIEWS and node.args[1][0] == _ROWS:
            node.args = (node.args[0], [-1, *_values(node).shape[1:]])
        elif node.target is aten.as_strided_.default and tuple(node.args[1]) == tuple(_values(node.args[0]).shape):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is aten.native_group_norm.default and (reads := _reads_of_first(node)):
            x, weight, bias, _, _, _, groups, eps = node.args
            with graph.inserting_after(node):
                norm = graph.call_function(F.group_norm, (x, groups, weight, bias, eps))
            _replace(graph, [node, *reads], norm, reads[0])


def _reads_of_first(node: fx.Node) -> list[fx.Node]:
    """Where results of an operation with several are taken out, that of the first in front; none if others are used."""
    if not node.users or not all(read.target is operator.getitem for read in node.users):
        return []
    first, *others = sorted(node.users, key=lambda read: int(str(read.args[1])))
    return [] if first.args[1] != 0 or any(read.users for read in others) else [first, *others]


def _take_values(graph: fx.Graph, pool: fx.Node) -> None:
    """Put a pool that gives values alone in the place of one whose places nobody reads."""
    defaults: tuple[Any, ...] = (None, None, [], [0], [1], False)
    x, kernel, stride, padding, dilation, ceil = pool.args + defaults[len(pool.args) :]
    stride = stride or kernel
    reads = _reads_of_first(pool)
    is_square = all(len(set(sides)) == 1 for sides in (kernel, stride, padding)) and set(dilation) == {1}
    if not reads or not is_square or kernel[0] > _LARGEST_WINDOW or len(_values(x).shape) != 4:
        return
    with graph.inserting_after(pool):
        values = graph.call_function(max_pool, (x, kernel[0], stride[0], padding[0], ceil))
    _replace(graph, [pool, *reads], values, reads[0])


def _replace(graph: fx.Graph, old: list[fx.Node], new: fx.Node, last: fx.Node) -> None:
    """Let those who read the last of the old nodes read the new one; nobody else reads the old."""
    new.meta = dict(last.meta)
    last.replace_all_uses_with(new)
    for node in reversed(old):
        graph.erase_node(node)


def _take_means(graph: fx.Graph, mean: fx.Node) -> None:
    """Put our means in the place of torch's, where they are over the pixels of images."""
    given: tuple[Any, ...] = mean.args
    x, sides, *keeps = given
    if (
        len(_values(x).shape) == 4
        and sorted(side % 4 for side in sides) == [2, 3]
        and keeps == [True]
        and not mean.kwargs
    ):
        with graph.inserting_after(mean):
            _replace(graph, [mean], graph.call_function(global_avg_pool, (x,)), mean)


def _take_side_by_side(graph: fx.Graph, cat: fx.Node) -> None:
    """Put our concatenation in the place of torch's, where it is of the channels of images."""
    given: tuple[Any, ...] = cat.args
    parts, *sides = given
    if sides == [1] and all(len(_values(part).shape) == 4 for part in parts):
        with graph.inserting_after(cat):
            _replace(graph, [cat], graph.call_function(concat, (parts,)), cat)


def _join_gate(graph: fx.Graph, gated: fx.Node) -> None:
    """Put a joint operation in the place of images times their gate and of the sum and activation that alone read it,
    but where a 1x1 convolution alone reads it, which will take the gate in."""
    found = _gate(gated)
    after = _only_user(gated)
    if found is None or (after is not None and _is_pointwise(after)):
        return
    chain, other, act = _chain(gated)
    with graph.inserting_after(chain[-1]):
        _replace(graph, chain, graph.call_function(gate_add_act, (*found, other, act)), chain[-1])


def _join(graph: fx.Graph, conv: fx.Node) -> bool:
    """Put a joint operation in the place of a convolution with a bias, of the sum and activation that alone read it,
    and of a gate before a 1x1; whether that could be done."""
    given: tuple[Any, ...] = conv.args
    x, weight, bias, stride, padding, dilation, is_transposed, _, groups = given
    if bias is None or is_transposed or len(_values(conv).shape) != 4:
        return False
    chain, other, act = _chain(conv)
    gate = None
    if _is_pointwise(conv) and (found := _gate(x)) is not None:  # which others do not read: `_join_gate`
        chain.insert(0, x)
        x, gate = found
    shape = ConvConfig(tuple(stride), tuple(padding), tuple(dilation), groups, act)
    with graph.inserting_after(chain[-1]):
        _replace(graph, chain, graph.call_function(conv_bias_act, (x, weight, bias, other, gate, shape)), chain[-1])
    return True


def _chain(first: fx.Node) -> tuple[list[fx.Node], fx.Node | None, Epilogue]:
    """An operation with the sum and activation that alone read what comes before; what is added; which activation."""
    chain: list[fx.Node] = [first]
    other: fx.Node | None = None
    act: Epilogue = "none"
    after = _only_user(first)
    if after is not None and _is_sum(after):
        chain.append(after)
        other = next(term for term in after.args if isinstance(term, fx.Node) and term is not first)
        after = _only_user(after)
    if after is not None and (found := _activation(after)) is not None:
        chain.append(after)
        act = found
    return chain, other, act


def _gate(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Images and their gate, where a node multiplies such."""
    if node.target is not aten.mul.Tensor or not all(isinstance(factor, fx.Node) for factor in node.args):
        return None
    factors: tuple[Any, ...] = node.args
    x, gate = sorted(factors, key=lambda factor: -_values(factor).shape.numel())
    shape = tuple(_values(x).shape)
    is_gate = len(shape) == 4 and tuple(_values(gate).shape) == (*shape[:2], 1, 1)
    return (x, gate) if is_gate and _values(x).dtype == _values(gate).dtype else None


def _is_pointwise(node: fx.Node) -> bool:
    """Whether a node is a 1x1 convolution of stride 1 with a bias."""
    if node.target is not aten.convolution.default:
        return False
    given: tuple[Any, ...] = node.args
    _, weight, bias, stride, padding, _, is_transposed, _, groups = given
    is_small = {*_values(weight).shape[2:], *stride} == {1} and not any(padding)
    return is_small and len(stride) == 2 and groups == 1 and bias is not None and not is_transposed


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _values(node: fx.Node) -> Any:
    """What has the shape and type of what a node gives: a record of them, or a tensor of the network itself."""
    if node.op == "get_attr":
        assert node.graph.owning_module is not None and isinstance(node.target, str)
        return operator.attrgetter(node.target)(node.graph.owning_module)
    return node.meta["tensor_meta"]


def _is_sum(node: fx.Node) -> bool:
    """Whether a node adds two different tensors of one shape and type."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    a, b = node.args
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or a is b:
        return False
    return bool((_values(a).shape, _values(a).dtype) == (_values(b).shape, _values(b).dtype))


def _activation(node: fx.Node) -> Epilogue | None:
    if node.target in _CLAMPS:
        return "relu6" if tuple(node.args[1:]) == (0.0, 6.0) else None
    return _FUNCTIONS.get(node.target)


def _mutates(node: fx.Node) -> bool:
    """Whether an operation writes to what it is given."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_private(node: fx.Node) -> bool:
    """Whether all that an operation writes to is one tensor of memory of its own, which nobody else reads."""
    assert isinstance(node.target, torch._ops.OpOverload)
    taken = zip(node.target._schema.arguments, node.args, strict=False)  # what has a name is no first argument
    written = [value for argument, value in taken if argument.is_write]
    return len(written) == 1 and isinstance(written[0], fx.Node) and _is_own(written[0])


def _is_own(node: fx.Node) -> bool:
    """Whether a tensor has one reader and is no view of another; what was written to in place is looked at there."""
    if len(node.users) > 1 or node.op == "get_attr":
        return False
    source = node.args[0] if node.target is operator.getitem else node
    if not (isinstance(source, fx.Node) and isinstance(source.target, torch._ops.OpOverload)):
        return True
    infos = [returned.alias_info for returned in source.target._schema.returns]
    return all(info is None or info.is_write for info in infos)
