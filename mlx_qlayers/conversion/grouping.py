"""Products of one input at once in modules of which no more is recognised.

In a run of assignments, calls of quantized layers with the same variable are gathered before the
first of them: ``q = self.q_proj(x)``, ``k = self.k_proj(x)`` become two results of one call. That
is the same computation whatever stands around it, since the layers depend on nothing else.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import NamedTuple

from .matcher import Method, Mismatch, parse
from .recorder import current, recorded_method
from .rewriter import replaced, rewritten, statement

_TOGETHER = "_products_together"
# Nodes whose parts may be computed never, or more than once.
_CONDITIONAL = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension, ast.Compare)


class Grouped(NamedTuple):
    """A method whose products of one input are gathered, the names of their layers, and the method
    that keeps what it does.
    """

    function: FunctionType
    groups: tuple[tuple[str, ...], ...]
    recorded: FunctionType


@cache
def grouped(
    function: FunctionType,
    layers: frozenset[str],
    together: Callable[..., object],
    recorded: bool = False,
) -> Grouped | Mismatch:
    """The method with products of one input gathered, or why there are none.

    Args:
        function: a method.
        layers: the names of attributes that are quantized layers.
        together: called with the input and the layers; returns their products in a sequence.
        recorded: keep what it does where a graph is made of it.
    """
    method = parse(function)
    if isinstance(method, Mismatch):
        return method
    groups: list[tuple[str, ...]] = []
    for node in ast.walk(method.definition):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                body[:] = [s for run in _runs(body) for s in _gathered(run, method, layers, groups)]
    if not groups and not recorded:
        return Mismatch("no two of its quantized layers are seen to have the same input")
    names = dict[str, object]({_TOGETHER: together})
    inside = recorded_method(method, **names)
    plain = rewritten(method, **names) if groups else function
    return Grouped(_in_graphs(plain, inside) if recorded else plain, tuple(groups), inside)


def _in_graphs(plain: FunctionType, inside: FunctionType) -> FunctionType:
    """A method that is another one where a graph is made of it."""

    def call(self: object, *args: object, **options: object) -> object:
        return (plain if current.get() is None else inside)(self, *args, **options)

    return call  # type: ignore[return-value]


def _gathered(
    run: list[ast.stmt], method: Method, layers: frozenset[str], groups: list[tuple[str, ...]]
) -> list[ast.stmt]:
    """A run of assignments with the products of each variable in front of it."""
    calls: dict[str, list[ast.Call]] = {}
    stored: set[str] = set()
    for each in run:
        for call in _calls(each, method.parameters[0], layers):
            name = call.args[0].id  # type: ignore[attr-defined]
            if name not in stored:
                calls.setdefault(name, []).append(call)
        names = (n for n in ast.walk(each) if isinstance(n, ast.Name))
        stored |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
    ahead: list[ast.stmt] = []
    results: dict[ast.Call, ast.expr] = {}
    for name, alike in calls.items():
        functions = [ast.unparse(call.func) for call in alike]
        if len(set(functions)) < max(2, len(alike)):
            continue
        products = [f"_product_{len(groups)}_{i}" for i in range(len(alike))]
        code = f"{', '.join(products)} = {_TOGETHER}({', '.join([name, *functions])})"
        ahead.append(statement(code, run[0]))
        groups.append(tuple(call.func.attr for call in alike))  # type: ignore[attr-defined]
        results |= zip(alike, (ast.Name(p, ast.Load()) for p in products), strict=True)
    return ahead + [replaced(results).visit(each) for each in run]


def _runs(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """The statements, those that follow each other and assign in one list."""
    run: list[ast.stmt] = []
    for each in body:
        if run and not (isinstance(each, ast.Assign) and isinstance(run[-1], ast.Assign)):
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def _calls(node: ast.AST, owner: str, layers: frozenset[str]) -> Iterator[ast.Call]:
    """Calls of layers with one variable, that happen whenever the statement does."""
    match node:
        case ast.Call(ast.Attribute(ast.Name(id=name), layer), args=[ast.Name()], keywords=[]) if (
            name == owner and layer in layers
        ):
            yield node
            return
    plain = ast.Assign | ast.Return | ast.Expr
    if not isinstance(node, _CONDITIONAL) and (
        not isinstance(node, ast.stmt) or isinstance(node, plain)
    ):
        for child in ast.iter_child_nodes(node):
            yield from _calls(child, owner, layers)
