"""Products of one input at once, in modules whose code is known no further.

In a run of assignments, calls of quantized layers with the same variable are gathered before the
first of them: ``q = self.q_proj(x)``, ``k = self.k_proj(x)`` become two results of one call. That
is the same computation whatever stands around it, since the layers depend on nothing else.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import NamedTuple

from .matcher import definition_of

_TOGETHER = "_products_together"
# Nodes whose parts may be computed never, or more than once.
_CONDITIONAL = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension, ast.Compare)


class Grouped(NamedTuple):
    """A method whose products of one input are gathered, and the names of their layers."""

    function: FunctionType
    groups: tuple[tuple[str, ...], ...]


@cache
def grouped(
    function: FunctionType, layers: frozenset[str], together: Callable[..., object]
) -> Grouped | None:
    """The method with products of one input gathered; None if there are none.

    Args:
        function: a method.
        layers: the names of attributes that are quantized layers.
        together: called with the input and the layers; returns their products in a sequence.
    """
    definition = definition_of(function)
    if definition is None:
        return None
    groups: list[tuple[str, ...]] = []
    for node in ast.walk(definition):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                body[:] = _gathered(body, definition.args.args[0].arg, layers, groups)
    if not groups:
        return None
    code = compiled(definition, function)
    scope = {**function.__globals__, _TOGETHER: together}
    twin = FunctionType(code, scope, function.__name__, function.__defaults__)
    twin.__doc__, twin.__qualname__ = function.__doc__, function.__qualname__
    return Grouped(twin, tuple(groups))


def compiled(definition: ast.FunctionDef, function: FunctionType) -> CodeType:
    """The code of a changed definition of a method, which says where the method stood."""
    module = ast.fix_missing_locations(ast.Module([definition], []))
    ast.increment_lineno(module, function.__code__.co_firstlineno - 1)
    whole = compile(module, function.__code__.co_filename, "exec", dont_inherit=True)
    return next(constant for constant in whole.co_consts if isinstance(constant, CodeType))


def _gathered(
    body: list[ast.stmt], owner: str, layers: frozenset[str], groups: list[tuple[str, ...]]
) -> list[ast.stmt]:
    """Statements with the products of each run of assignments in front of it."""
    done: list[ast.stmt] = []
    for run in _runs(body):
        calls: dict[str, list[ast.Call]] = {}
        stored: set[str] = set()
        for statement in run:
            for call in _calls(statement, owner, layers):
                name = call.args[0].id  # type: ignore[attr-defined]
                if name not in stored:
                    calls.setdefault(name, []).append(call)
            names = (n for n in ast.walk(statement) if isinstance(n, ast.Name))
            stored |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
        replaced: dict[ast.Call, ast.Name] = {}
        for name, found in calls.items():
            if len({ast.unparse(call.func) for call in found}) < max(2, len(found)):
                continue
            results = [f"_product_{len(groups)}_{i}" for i in range(len(found))]
            arguments = ", ".join([name, *(ast.unparse(call.func) for call in found)])
            done += ast.parse(f"{', '.join(results)} = {_TOGETHER}({arguments})").body
            groups.append(tuple(call.func.attr for call in found))  # type: ignore[attr-defined]
            replaced |= zip(found, (ast.Name(r, ast.Load()) for r in results), strict=True)
        done += [_Replace(replaced).visit(statement) for statement in run]
    return done


def _runs(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    run: list[ast.stmt] = []
    for statement in body:
        if run and not (isinstance(statement, ast.Assign) and isinstance(run[-1], ast.Assign)):
            yield run
            run = []
        run.append(statement)
    if run:
        yield run


def _calls(node: ast.AST, owner: str, layers: frozenset[str]) -> Iterator[ast.Call]:
    """Calls of layers with one variable, that happen whenever the statement does."""
    if isinstance(node, _CONDITIONAL) or (
        isinstance(node, ast.stmt) and not isinstance(node, ast.Assign | ast.Return | ast.Expr)
    ):
        return
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in layers) == (owner, True)
        and not node.keywords
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Name)
    ):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, owner, layers)


class _Replace(ast.NodeTransformer):
    def __init__(self, replaced: dict[ast.Call, ast.Name]) -> None:
        self.replaced = replaced

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if node in self.replaced:
            return self.replaced[node]
        self.generic_visit(node)
        return node
