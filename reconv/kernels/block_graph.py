"""Graph of what a module of another package computes with its children: a chain, a residual sum, or squeeze-and-
excitation.

torch.fx traces the module's own code with the children as leaves, so classes are recognized by what they compute and
not by their names. A module that computes anything else, or decides by values, has no graph. Only code of known
packages is traced: that of users may count, draw or store something, which tracing would do once more and training
then never again.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from torch import fx

Facts = tuple[tuple[str, object], ...]

TRACED_PACKAGES = ("timm", "torchvision")  # their blocks do nothing but compute

# Activations that a block calls as functions, by the name of the layer that takes their place in a graph.
_FUNCTIONS: dict[Any, str] = {
    F.relu: "@relu",
    torch.relu: "@relu",
    F.relu6: "@relu6",
    F.silu: "@silu",
    F.hardswish: "@hardswish",
}
_FUNCTION_LAYERS: dict[str, nn.Module] = {
    "@relu": nn.ReLU(),
    "@relu6": nn.ReLU6(),
    "@silu": nn.SiLU(),
    "@hardswish": nn.Hardswish(),
}

_ADD = (operator.add, operator.iadd, torch.add)
_MULTIPLY = (operator.mul, operator.imul, torch.mul)
_IMAGE_AXES = ((2, 3), (-2, -1), (3, 2), (-1, -2))
_SCALARS = (bool, int, float, str, type(None))
# Their layers without parameters keep the shape of what they get.
_ELEMENTWISE = ("torch.nn.modules.activation", "timm.layers.activations", "timm.layers.activations_me")


@dataclass(frozen=True, slots=True)
class BlockGraph:
    """Names of a module's children, in the order in which they are applied; "@relu" is a function that it calls.

    chain: main(x). residual: act(main(x) + shortcut(x)). gate: x * main(means of x).
    """

    kind: Literal["chain", "residual", "gate"]
    main: tuple[str, ...]
    shortcut: tuple[str, ...] = ()  # empty: x itself
    act: str = ""  # empty: none
    pool: str = ""  # of a gate: the child that computes the means; empty: no child does


def has_known_code(module: nn.Module) -> bool:
    """True if nothing but a module's children and its graph matter."""
    return is_plain_container(module) or type(module).__module__.partition(".")[0] in TRACED_PACKAGES


def is_plain_container(module: nn.Module) -> bool:
    """True if a module is torch's own nn.Sequential."""
    return type(module) is nn.Sequential


def is_sequential(module: nn.Module) -> bool:
    """True if a module applies its children one after another and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def trace_block(module: nn.Module) -> BlockGraph | None:
    """The graph of a module in training, which is not changed; None if it computes something else."""
    from torch import fx

    class ChildTracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    try:
        with warnings.catch_warnings(action="ignore"):
            graph = ChildTracer().trace(_shallow_copy(module))
    except Exception:  # the code of others, on symbols instead of tensors
        return None
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    result = nodes[-1].args[0]
    if len(inputs) != 1 or not isinstance(result, fx.Node):
        return None
    match = _match(module, inputs[0], result)
    num_matched = 0 if match is None else _num_nodes(match)
    return match if num_matched == len(nodes) - 2 else None  # all of them, except input and output


def block_facts(module: nn.Module) -> Facts:
    """Values that the code of a module may decide by: numbers, texts and missing children. Its graph holds while they
    do.
    """
    scalars = [(name, value) for name, value in vars(module).items() if type(value) in _SCALARS and name != "training"]
    return (*scalars, *((name, child is None) for name, child in module._modules.items()))


def _shallow_copy(module: nn.Module) -> nn.Module:
    """A copy with the same children, in training, whose attributes the traced code may change."""
    copied = type(module).__new__(type(module))
    attributes = {
        name: value.copy() if type(value) in (dict, list, set) else value for name, value in vars(module).items()
    }
    copied.__dict__ = {**attributes, "training": True}
    return copied


def _match(module: nn.Module, x: fx.Node, result: fx.Node) -> BlockGraph | None:
    names, origin = _names_before(result)
    if origin is x:
        return BlockGraph("chain", names) if names else None
    if _is_call(origin, _MULTIPLY) and not names:
        return _match_gate(module, x, origin)
    if _is_call(origin, _ADD) and len(names) <= 1:
        return _match_residual(module, x, origin, "".join(names))
    return None


def _match_residual(module: nn.Module, x: fx.Node, total: fx.Node, act: str) -> BlockGraph | None:
    paths = [_names_before(node) for node in _operands(total)]
    if any(origin is not x for _, origin in paths) or not any(names for names, _ in paths):
        return None
    # The order of the paths must not matter: no path changes what the other one reads, and no norm is in both.
    if any(names and _changes_input(graph_layer(module, names[0])) for names, _ in paths):
        return None
    (first, _), (second, _) = paths
    if _parameters(module, first) & _parameters(module, second):
        return None
    main, shortcut = (first, second) if _num_layers(module, first) >= _num_layers(module, second) else (second, first)
    return BlockGraph("residual", main, shortcut, act)


def _match_gate(module: nn.Module, x: fx.Node, product: fx.Node) -> BlockGraph | None:
    operands = [node for node in _operands(product) if node is not x]
    if len(operands) != 1:
        return None
    names, origin = _names_before(operands[0])
    pool = ""
    if origin is x and names:  # the first child computes the means
        pool, *others = names
        names = tuple(others)
        layer = graph_layer(module, pool)
        if type(layer) is not nn.AdaptiveAvgPool2d or layer.output_size not in (1, (1, 1)):
            return None
    elif not _is_mean(origin, x):
        return None
    return BlockGraph("gate", names, pool=pool) if _keeps_channels(module, names) else None


def _keeps_channels(module: nn.Module, names: tuple[str, ...]) -> bool:
    """True if layers give as many channels as they get, for images of one pixel."""
    layers = [graph_layer(module, name) for name in names]
    convs = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    is_pointwise = all((conv.kernel_size, conv.stride, conv.padding) == ((1, 1), (1, 1), (0, 0)) for conv in convs)
    others = [layer for layer in layers if not isinstance(layer, nn.Conv2d | nn.Identity | nn.BatchNorm2d)]
    is_elementwise = all(
        type(layer).__module__ in _ELEMENTWISE and next(layer.parameters(), None) is None for layer in others
    )
    return bool(convs) and is_pointwise and is_elementwise and convs[0].in_channels == convs[-1].out_channels


def _names_before(node: fx.Node) -> tuple[tuple[str, ...], fx.Node]:
    """The children that were applied one after another to get a node, nothing else reading between; and their input."""
    names: list[str] = []
    while (name := _layer_name(node)) and len(node.users) == 1:
        names.insert(0, name)
        argument: Any = node.args[0]
        if not hasattr(argument, "op"):
            break
        node = argument
    return tuple(names), node


def _layer_name(node: fx.Node) -> str:
    """The child that a node calls, or the layer in place of an activation function; empty for other nodes."""
    if len(node.args) != 1:
        return ""
    if node.op == "call_module" and not node.kwargs:
        return str(node.target)
    is_function = node.op == "call_function" and set(node.kwargs) <= {"inplace"}
    return _FUNCTIONS.get(node.target, "") if is_function else ""


def _is_call(node: fx.Node, functions: tuple[Any, ...]) -> bool:
    is_binary = len(node.args) == 2 and not node.kwargs and len(node.users) == 1
    return node.op == "call_function" and node.target in functions and is_binary and len(_operands(node)) == 2


def _operands(node: fx.Node) -> list[fx.Node]:
    return [argument for argument in node.args if hasattr(argument, "op")]  # type: ignore[misc]


def _is_mean(node: fx.Node, x: fx.Node) -> bool:
    """True if a node is the mean of x over its pixels, [n, channels, 1, 1]."""
    if len(node.args) < 1 or node.args[0] is not x or len(node.users) != 1:
        return False
    if node.op == "call_function" and node.target is F.adaptive_avg_pool2d:
        return node.args[1:] in ((1,), ((1, 1),)) and not node.kwargs
    if (node.op, node.target) not in (("call_method", "mean"), ("call_function", torch.mean)):
        return False
    arguments = dict(zip(("dim", "keepdim"), node.args[1:], strict=False)) | dict(node.kwargs)
    axes: Any = arguments.pop("dim", ())
    return tuple(axes if isinstance(axes, list | tuple) else ()) in _IMAGE_AXES and arguments == {"keepdim": True}


def _changes_input(module: nn.Module) -> bool:
    """True if the first layer of a module works in place."""
    while (child := next(module.children(), None)) is not None:
        module = child
    return bool(getattr(module, "inplace", False))


def _parameters(module: nn.Module, names: tuple[str, ...]) -> set[nn.Parameter]:
    return {parameter for name in names for parameter in graph_layer(module, name).parameters()}


def _num_layers(module: nn.Module, names: tuple[str, ...]) -> int:
    return sum(1 for name in names for _ in graph_layer(module, name).modules())


def _num_nodes(graph: BlockGraph) -> int:
    """Operations of a graph: one for each child, and the sum; or the product, and the mean that is not a child."""
    children = len(graph.main) + len(graph.shortcut) + bool(graph.act)
    return children + {"chain": 0, "residual": 1, "gate": 2}[graph.kind]


def graph_layers(module: nn.Module, names: tuple[str, ...]) -> Iterator[nn.Module]:
    """The children of these names."""
    for name in names:
        yield graph_layer(module, name)


def graph_layer(module: nn.Module, name: str) -> nn.Module:
    """The child of this name, or the layer in place of an activation function."""
    return _FUNCTION_LAYERS[name] if name in _FUNCTION_LAYERS else module.get_submodule(name)
