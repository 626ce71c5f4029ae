"""Check that the code of a user's block can be traced: it computes, and does nothing that tracing would do once more.

A block that counts, prints, draws or stores something in its forward pass would do so while it is traced, and never
again once it is fused. So its source is read first: `forward` and the methods that it calls may assign local names,
call children, add, multiply and decide by numbers that the module holds, and nothing else.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import operator
import textwrap
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.If, ast.For, ast.Expr, ast.Pass, ast.Assert)
_EXPRESSIONS = (
    *(ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp),
    *(ast.Tuple, ast.List, ast.keyword, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context),
)
_FUNCTIONS = (
    *(torch.add, torch.mul, torch.mean, torch.relu, torch.flatten, torch.sigmoid, operator.add, operator.mul),
    *(F.relu, F.relu6, F.silu, F.hardswish, F.adaptive_avg_pool2d, isinstance, len),
)
_SCALARS = (bool, int, float, str, type(None))
_MAX_METHODS = 16


def why_not_traced(module: nn.Module) -> str:
    """The reason why a module's code is not traced; empty if it is pure."""
    kind = type(module)
    seen: set[str] = set()
    missing = ["forward"]
    while missing and len(seen) <= _MAX_METHODS:
        method = missing.pop()
        seen.add(method)
        function = inspect.getattr_static(kind, method, None)
        if not inspect.isfunction(function):
            return f"its {method} is not a plain method"
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return "its source cannot be read"
        problem, called = _check(module, tree.body[0], function.__globals__)
        if problem:
            return f"its {method} {problem}"
        missing += [name for name in called if name not in seen]
    return ""


def _check(module: nn.Module, function: ast.stmt, names: dict[str, Any]) -> tuple[str, list[str]]:
    """Find effects of a function besides computing, and the methods of the module that it calls."""
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return "is decorated", []
    called: list[str] = []
    local = {argument.arg for argument in function.args.args}
    self_name = function.args.args[0].arg if function.args.args else ""
    local |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in _code(function):
        if isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS):
            return f"has a statement that is not traced (line {node.lineno})", []
        if not isinstance(node, (ast.stmt, *_EXPRESSIONS)):
            return f"has an expression that is not traced ({type(node).__name__})", []
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            return f"sets {ast.unparse(node)}", []
        if _is_attribute_of(node, self_name) and not _is_plain_attribute(module, node.attr):
            return f"reads {ast.unparse(node)}", []
        if isinstance(node, ast.Call):
            problem = _check_call(module, node, self_name, local, names, called)
            if problem:
                return problem, []
        elif isinstance(node, ast.Name) and node.id not in local and not _is_known(names.get(node.id, node), node.id):
            return f"reads {node.id}", []
    return "", called


def _code(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """All nodes of a function's body, without docstrings and annotations."""
    stack: list[ast.AST] = [s for s in reversed(function.body) if not _is_text(s)]
    while stack:
        node = stack.pop()
        yield node
        skipped = node.annotation if isinstance(node, ast.AnnAssign) else None
        stack += [child for child in reversed([*ast.iter_child_nodes(node)]) if child is not skipped]


def _is_attribute_of(node: ast.AST, name: str) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_plain_attribute(module: nn.Module, name: str) -> bool:
    """True if reading an attribute has no effect, and gives a child, a number, a text or a method."""
    if name in module._modules or name in vars(module):
        return name in module._modules or type(vars(module)[name]) in _SCALARS
    static = inspect.getattr_static(type(module), name, None)
    return inspect.isfunction(static) or (type(static) in _SCALARS and static is not None)


def _check_call(
    module: nn.Module, call: ast.Call, self_name: str, local: set[str], names: dict[str, Any], called: list[str]
) -> str:
    """The problem with a call; empty if it is of a child, a method or a known function. Adds methods to `called`."""
    target = call.func
    if _is_attribute_of(target, self_name):
        if target.attr not in module._modules:
            called.append(target.attr)
        return ""
    if isinstance(target, ast.Name) and target.id in local:
        return ""
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in local:
        is_pure = target.attr in ("mean", "relu", "flatten", "add", "mul")
        return "" if is_pure else f"calls {ast.unparse(target)}"
    return "" if _resolve(target, names) in _FUNCTIONS else f"calls {ast.unparse(target)}"


def _resolve(target: ast.expr, names: dict[str, Any]) -> Any:
    """The function that a dotted name stands for."""
    if isinstance(target, ast.Name):
        return names.get(target.id, getattr(builtins, target.id, None))
    if isinstance(target, ast.Attribute):
        return getattr(_resolve(target.value, names), target.attr, None)
    return None


def _is_known(value: Any, name: str) -> bool:
    """True if a global name stands for torch, a class, or a known function."""
    return inspect.ismodule(value) or inspect.isclass(value) or value in _FUNCTIONS or name in ("isinstance", "len")
