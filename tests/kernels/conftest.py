"""Triton's interpreter without what takes most of its time and changes no result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

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


def _init_known_type(self: tl.block_type, element_ty: tl.dtype, shape: Iterable[Any]) -> None:
    key = (str(element_ty), *[side.value if isinstance(side, tl.constexpr) else side for side in shape])
    if key not in _types:
        _init_type(self, element_ty, shape)
        _types[key] = dict(self.__dict__)
    self.__dict__.update(_types[key], element_ty=element_ty)


def _init_known_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    key = (*type.shape,) if type.is_block() else ()
    if key not in _tensors:
        _init_tensor(self, handle, type)
        _tensors[key] = dict(self.__dict__)
    self.__dict__.update(_tensors[key], handle=handle, type=type, dtype=type.scalar)


tl.block_type.__init__ = _init_known_type
tl.tensor.__init__ = _init_known_tensor

# Tensors of one shape need no broadcast; they have one tuple for it, which is compared faster than its values.
_broadcast = TritonSemantic.broadcast_impl_value


def _broadcast_others(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast(self, lhs, rhs)


TritonSemantic.broadcast_impl_value = _broadcast_others

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
