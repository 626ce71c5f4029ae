"""Triton's interpreter without what takes most of its time and changes no result."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from reconv.core.compat import complete_interpreter, semantic_tensor

complete_interpreter(interpreter)

# A kernel calls functions of the language through three others, which are made again for every launch.
_builtins: dict[Any, list[tuple[str, Any]]] = {}


def _patch_builtin(language: Any, builder: Any, scope: Any) -> None:
    if language not in _builtins:
        members = inspect.getmembers(language)
        _builtins[language] = [(name, _interpreted(member)) for name, member in members if tl.core.is_builtin(member)]
    for name, member in _builtins[language]:
        scope.set_attr(language, name, member)


def _interpreted(member: Any) -> Any:
    function = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    return call


interpreter._patch_builtin = _patch_builtin

_called: set[interpreter.InterpretedFunction] = set()


def _call(function: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """Call a device function from a kernel; Triton replaces its language's functions again for every such call."""
    if function not in _called:
        _called.add(function)
        interpreter._patch_lang(function.fn)
    try:
        return function.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


interpreter.InterpretedFunction.__call__ = _call

# Every integer operation is computed again in int64 for an assertion that is checked in debug mode only.
_builder = interpreter.interpreter_builder
_builder.options = replace(_builder.options, sanitize_overflow=False)

# Every operation makes types and tensors, whose shapes are checked, multiplied, printed and wrapped each time: those of
# a shape that was seen before are copied. The rest of a type or a tensor does not depend on the shape.
_init_type, _init_tensor = tl.block_type.__init__, tl.tensor.__init__
_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_tensors: dict[tuple[Any, ...], dict[str, Any]] = {}
_tensors_of_shape: dict[int, dict[str, Any]] = {}


def _init_known_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    sides = shape.values if type(shape) is tl.tuple else shape
    key = (element_ty.name, *[side.value if type(side) is tl.constexpr else side for side in sides])
    if key not in _types:
        _init_type(self, element_ty, shape)
        _types[key] = dict(self.__dict__)
    self.__dict__.update(_types[key], element_ty=element_ty)


def _init_known_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    shape = type.shape if type.is_block() else None
    known = _tensors_of_shape.get(id(shape))  # _types keeps these tuples, so that an id stays theirs
    if known is None:
        key = () if shape is None else (*shape.values,)
        if key not in _tensors:
            _init_tensor(self, handle, type)
            _tensors[key] = dict(self.__dict__)
        known = _tensors_of_shape[id(shape)] = _tensors[key]
    self.__dict__.update(known, handle=handle, type=type, dtype=type.scalar)


tl.block_type.__init__ = _init_known_type
tl.tensor.__init__ = _init_known_tensor


# Of most values NumPy needs as many bytes as Triton; the others are checked.
def _init_handle(
    self: interpreter.TensorHandle, data: Any, dtype: tl.dtype, attr: dict[Any, Any] | None = None
) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if type(dtype) is not tl.dtype or 8 * data.itemsize > dtype.primitive_bitwidth:
        self.__post_init__()


interpreter.TensorHandle.__init__ = _init_handle

# The IR type of a block is a copy of its type.
_to_ir = tl.block_type.to_ir


def _to_itself(self: tl.block_type, builder: Any) -> Any:
    plain = type(self.element_ty) is tl.dtype and type(builder) is interpreter.InterpreterBuilder
    return self if plain else _to_ir(self, builder)


tl.block_type.to_ir = _to_itself

# Most types are compared with themselves, and most of what may be a constexpr is one, a tensor or a number.
_equal_types, _unwrap = tl.dtype.__eq__, tl.core._unwrap_if_constexpr


def _unwrap_known(value: Any) -> Any:
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    return value if kind is tl.tensor or kind is int else _unwrap(value)


tl.dtype.__eq__ = lambda self, other: self is other or _equal_types(self, other)
tl.core._unwrap_if_constexpr = _unwrap_known

# Tensors of one shape need no broadcast; they have one tuple for it, which is compared faster than its values. What two
# other shapes are broadcast to is found once.
_broadcast = TritonSemantic.broadcast_impl_value
_shapes: dict[tuple[int, int], list[int]] = {}


def _broadcast_others(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    if lhs.shape is rhs.shape:
        return lhs, rhs
    key = (id(lhs.shape), id(rhs.shape))  # _tensors keeps these tuples, so that an id stays theirs
    if key in _shapes:
        return _expand(self, lhs, _shapes[key]), _expand(self, rhs, _shapes[key])
    results = _broadcast(self, lhs, rhs)
    if len(lhs.shape) == len(rhs.shape):
        _shapes[key] = list(results[0].type.shape)
    return results


def _expand(self: TritonSemantic, value: tl.tensor, shape: list[int]) -> tl.tensor:
    if value.type.shape.values == shape:
        return value
    return semantic_tensor(self, self.builder.create_broadcast(value.handle, shape), tl.block_type(value.dtype, shape))


TritonSemantic.broadcast_impl_value = _broadcast_others

# Two operands mostly have one type, which they keep, or one is a number, of which the same tensor is made each time.
_check_operands = TritonSemantic.binary_op_type_checking_impl
_KEPT_TYPES = {id(dtype) for dtype in (tl.int1, tl.int32, tl.int64, tl.float32)}
_MAX_NUMBERS = 1024
_numbers: dict[tuple[Any, ...], tl.tensor] = {}


def _check_new_operands(self: TritonSemantic, lhs: Any, rhs: Any, *flags: bool, **more: bool) -> tuple[Any, Any]:
    is_left = type(lhs) is tl.tensor
    tensor, other = (lhs, rhs) if is_left else (rhs, lhs)
    if type(other) is tl.tensor and tensor.dtype is other.dtype and id(other.dtype) in _KEPT_TYPES:
        return self.broadcast_impl_value(lhs, rhs)
    if type(tensor) is not tl.tensor or type(other) not in (bool, int, float):
        return _check_operands(self, lhs, rhs, *flags, **more)
    value = repr(other) if type(other) is float else other  # 0.0 equals -0.0
    key = (tensor.dtype.name, id(tensor.shape), is_left, type(other), value, flags, *more.items())
    if key not in _numbers:
        checked = _check_operands(self, lhs, rhs, *flags, **more)
        kept, number = checked if is_left else checked[::-1]
        if kept is not tensor:  # it has another type now
            return checked
        number.handle.data.setflags(write=False)
        if len(_numbers) == _MAX_NUMBERS:
            _numbers.clear()
        _numbers[key] = number
    return (tensor, _numbers[key]) if is_left else (_numbers[key], tensor)


TritonSemantic.binary_op_type_checking_impl = _check_new_operands

# The dtype of NumPy is looked up in a table that is made for every look-up.
_find_dtype = cache(interpreter._get_np_dtype)


def _np_dtype(dtype: tl.dtype) -> np.dtype[Any]:
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _find_dtype(scalar)


interpreter._get_np_dtype = _np_dtype


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply bfloat16: it would multiply their bits as integers."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def as_float32(self: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype == tl.bfloat16:
            floats = ((v.data.astype(np.uint32) << 16).view(np.float32) for v in (a, b))
            a, b = (interpreter.TensorHandle(value, tl.float32) for value in floats)
        return create_dot(self, a, b, *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", as_float32)
