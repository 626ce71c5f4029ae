"""Triton's interpreter, which `conftest.py` turns on for all tests, turned off for tests that predict as users do."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import pytest

from reconv import kernels


@cache
def _import_kernels() -> None:
    """A kernel is one of the interpreter or of the GPU from its import on, whatever the variable is later."""
    for module in pkgutil.walk_packages(kernels.__path__, "reconv.kernels."):
        if module.name.startswith("reconv.kernels.triton."):
            importlib.import_module(module.name)


def use_torch_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pool and normalize by torch on a CPU, as users' networks do; the interpreter is slow."""
    _import_kernels()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
