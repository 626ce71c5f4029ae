"""Triton's interpreter without two things that take two thirds of its time and change no result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from triton import language as tl
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
