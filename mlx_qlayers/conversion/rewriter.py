"""Changes a method of somebody else's module: other statements, or other meanings of its names.

The method stays as it is: the changed one is another function, which says where the first stands.
"""

from __future__ import annotations

import ast
from types import CodeType, FunctionType
from typing import Any

from .matcher import Method


def rewritten(method: Method, **names: object) -> FunctionType:
    """The method by its changed definition, in which ``names`` have a meaning as well."""
    function, module = method.function, ast.Module([method.definition], [])
    code = compile(
        ast.fix_missing_locations(module), function.__code__.co_filename, "exec", dont_inherit=True
    )
    body = next(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return rebound(function, {**function.__globals__, **names}, body)


def rebound(function: FunctionType, scope: dict[str, Any], code: CodeType) -> FunctionType:
    """A function as another one is, with other code or other globals."""
    twin = FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__, twin.__doc__ = function.__kwdefaults__, function.__doc__
    twin.__qualname__ = function.__qualname__
    twin.__dict__.update(function.__dict__)
    return twin


def statement(code: str, at: ast.stmt) -> ast.stmt:
    """A statement that stands in the line of another."""
    (new,) = ast.parse(code).body
    for node in ast.walk(new):
        ast.copy_location(node, at)
    return new


class replaced(ast.NodeTransformer):
    """Put expressions in the place of others: ``replaced(nodes).visit(statement)``."""

    def __init__(self, nodes: dict[ast.Call, ast.expr]) -> None:
        self.nodes = nodes

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if node in self.nodes:
            return ast.copy_location(self.nodes[node], node)
        self.generic_visit(node)
        return node
