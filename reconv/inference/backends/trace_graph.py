"""Tracing a network into a flat fx graph of ATen operators, from one forward pass on real tensors.

`make_fx` gives the same graph, but imports TorchDynamo and SymPy first, which takes two to three seconds.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from reconv.core.compat import name_in_graphs

aten = torch.ops.aten


class TensorMeta(NamedTuple):
    """Properties of the output of a node, as its `meta["tensor_meta"]`."""

    shape: torch.Size
    dtype: torch.dtype


class DispatchMode(TorchDispatchMode):
    """Sees the operators that a network calls. Their values are not needed, so on a CPU the slow ones are not computed.

    It never runs inside of compiled code, so that entering it does not import TorchDynamo.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @staticmethod
    def run(func: Any, args: Any, kwargs: Any) -> Any:
        """The outputs of an operator, of the right shape, dtype and strides; its values may be anything."""
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(f"the values of a tensor decide what the model computes ({func})")
        if func is aten.native_batch_norm.default and args[0].device.type == "cpu" and not args[5]:
            return torch.empty_like(args[0]), args[0].new_empty(0), args[0].new_empty(0)
        if func is aten.convolution.default and _is_channels_last(args[0]) and not args[6]:
            return _empty_convolution(*args)
        return func(*args, **kwargs)


def _empty_convolution(
    x: Tensor, weight: Tensor, _: Tensor | None, stride: Any, padding: Any, dilation: Any, *others: Any
) -> Tensor:
    sides = [
        (side + 2 * pad - spread * (kernel - 1) - 1) // step + 1
        for side, kernel, step, pad, spread in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    return torch.empty((len(x), len(weight), *sides), dtype=x.dtype, memory_format=torch.channels_last)


def _is_channels_last(images: Tensor) -> bool:
    """True if images on a CPU are in channels_last and in no other format: the output of a convolution is, too."""
    is_other = images.is_contiguous() or images.device.type != "cpu"
    return not is_other and images.is_contiguous(memory_format=torch.channels_last)


def trace_graph(model: nn.Module, images: Tensor) -> fx.GraphModule:
    """The operators that the model calls for images like these; raises `RuntimeError` if values decide about them."""
    # In inference mode, and for tensors made in it, autograd does not decompose operators.
    with torch.inference_mode(False), torch.no_grad():
        images = torch.zeros_like(images)
        recorder = _Recorder(images)
        with recorder:
            outputs = model(images)
    if isinstance(outputs, tuple):
        name_in_graphs(type(outputs))
    recorder.graph.output(recorder.as_nodes(outputs))
    recorder.graph.eliminate_dead_code()
    return fx.GraphModule(recorder.constants, recorder.graph)


class _Recorder(DispatchMode):
    """Runs each operator, and adds it to a graph; its outputs have their `tensor_meta`."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}  # parameters, and tensors that the model has made before
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []  # an id is unique only while its tensor lives
        self._set_node(images, self.graph.placeholder("images"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = self.run(func, args, kwargs)
        # A constant that is modified in place must be a new tensor each time.
        target = aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func
        node = self.graph.call_function(target, self.as_nodes(args), self.as_nodes(kwargs))
        if isinstance(outputs, Tensor):
            self._set_node(outputs, node)
        elif isinstance(outputs, tuple | list):
            for index, output in enumerate(outputs):
                if isinstance(output, Tensor):
                    self._set_node(output, self.graph.call_function(operator.getitem, (node, index)))
        return outputs

    def as_nodes(self, values: Any) -> Any:
        """The same structure with nodes in place of tensors."""
        return map_aggregate(values, lambda value: self._node(value) if isinstance(value, Tensor) else value)

    def _node(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self._nodes:
            name = f"constant_{len(self.constants)}"
            self.constants[name] = tensor.detach()
            self._set_node(tensor, self.graph.get_attr(name))
        return self._nodes[id(tensor)]

    def _set_node(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta["tensor_meta"] = TensorMeta(tensor.shape, tensor.dtype)
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
