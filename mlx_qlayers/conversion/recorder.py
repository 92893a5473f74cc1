"""Keeps what somebody else's code did with arrays, while a graph is made of it.

A recorded function is the same code with each call, operator and subscript made by a function of
this file, which keeps what gave an array beside doing it. So what an array is can be read back to
where it came from, whatever the code looks like. Functions that the code calls by name are recorded
as well, those under ``mx.compile`` too, and modules that choose experts.
"""

from __future__ import annotations

import ast
import copy
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..runtime.backend import undone
from .matcher import Method, Mismatch, names_used, parse
from .rewriter import rewritten

# The attribute of a class that is its recorded call.
RECORDED = "_recorded"
# What is another array computed otherwise.
SAME = "same"
_CALLED, _OPERATOR, _SLICE = "_called", "_operator", "_slice"
_COMPARISONS = {ast.Gt: "gt", ast.GtE: "ge", ast.Lt: "lt", ast.LtE: "le"}
_OPERATORS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.MatMult: "matmul",
}


class Node(NamedTuple):
    """What gave an array.

    Attributes:
        op: the name of the function: that of ``mx``, of an array's method, of ``operator``, or of a
            class of activations.
        args: its positional arguments; an array whose method it is comes first.
        options: those by name.
        line: the line of code, for a reader.
        y: the array, which keeps its identity for as long as this lives.
    """

    op: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    line: str
    y: mx.array


# What takes the place of a call: given the recorder and the node, another array or None.
Rule = Callable[["Recorder", Node], "mx.array | None"]


class Recorder:
    """What is known of arrays.

    Attributes:
        nodes: by the identity of arrays.
        rules: what may take the place of a result, by the name of the function.
        on_module: called with the recorder, a module, its arguments and what it gave.
        notes: what rules keep, by the identity of arrays.
        reports: what rules recognised, or why not.
        on_pair: called with the recorder and two arrays that a function gave; gives others or None.
        latest: what takes the place of an array in later calls; with it modules are recorded that
            choose no experts, too.
    """

    def __init__(
        self,
        rules: dict[str, Rule],
        on_module: Callable[..., Any] | None = None,
        latest: Callable[[mx.array], mx.array] | None = None,
        on_pair: Callable[..., Any] | None = None,
    ) -> None:
        self.on_pair = on_pair
        self.latest = latest
        self.nodes: dict[int, Node] = {}
        self.rules, self.on_module = rules, on_module
        self.notes: dict[int, Any] = {}
        self.reports: list[Any] = []

    def node(self, array: Any) -> Node | None:
        """What gave an array."""
        return self.nodes.get(id(array)) if isinstance(array, mx.array) else None

    def keep(self, node: Node) -> mx.array:
        """Keep a node; gives its array, or what takes its place."""
        rule = self.rules.get(node.op)
        other = None if rule is None else rule(self, node)
        if other is None:
            self.nodes[id(node.y)] = node
        return node.y if other is None else other


def keeps_order(node: Node) -> bool:
    """Whether an array has the elements of another one in the same order."""
    x, *more = node.args
    if node.op in ("reshape", "flatten", "unflatten", "squeeze", "expand_dims", "contiguous"):
        return True
    if node.op == "astype":
        return bool(x.dtype == node.y.dtype)
    axes = [*range(x.ndim)] if node.op in ("transpose", "swapaxes") else []
    if node.op == "transpose":
        given = more[0] if more and isinstance(more[0], tuple | list) else more
        axes = [axis % x.ndim for axis in given]
    elif node.op == "swapaxes" and len(more) == 2:
        one, other = more
        axes[one], axes[other] = axes[other], axes[one]
    kept = [axis for axis in axes if x.shape[axis] != 1]
    return bool(axes) and not node.options and kept == sorted(kept)


# That of the graph that is being made in this context.
current: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Let recorded functions keep what they do."""
    before = current.get()
    with undone(lambda: current.set(before)):
        current.set(recorder)
        yield recorder


@cache
def recorded(function: FunctionType) -> FunctionType | Mismatch:
    """A function that keeps what it does."""
    method = parse(function)
    return method if isinstance(method, Mismatch) else recorded_method(method)


def recorded_method(method: Method, **names: object) -> FunctionType:
    """The same of one whose definition was changed, in which ``names`` have a meaning as well."""
    twin = method._replace(definition=copy.deepcopy(method.definition))
    twin.definition.body = [_Calls().visit(each) for each in twin.definition.body]
    return rewritten(twin, **{_CALLED: called, _OPERATOR: operator, _SLICE: slice}, **names)


@cache
def chooses(function: Any) -> bool:
    """Whether a function, or one that it calls by name, looks for the largest of some numbers."""
    plain = uncompiled(function)
    if not isinstance(plain, FunctionType):
        return False
    names = [*names_used(plain)]
    own = (plain.__globals__.get(name) for name in names)
    return "argpartition" in names or any(
        is_of_a_model(each) and each is not function and chooses(each) for each in own
    )


def uncompiled(function: Any) -> Any:
    """The function under ``mx.compile``; any other object as it is."""
    code = getattr(function, "__code__", None)
    if type(function).__module__ != "mlx.core" or code is None or code.co_freevars:
        return function
    plain = FunctionType(code, function.__globals__, function.__name__)
    plain.__defaults__, plain.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return plain


def called(function: Any, *args: Any, **options: Any) -> Any:
    """What a call gives, kept if it is an array."""
    recorder = current.get()
    if recorder is None:
        return function(*args, **options)
    if (latest := recorder.latest) is not None:
        args = tuple(latest(a) if isinstance(a, mx.array) else a for a in args)
    if isinstance(function, nn.Module):
        return _of_module(recorder, function, *args, **options)
    own = function.__self__ if isinstance(function, MethodType) else None
    plain = uncompiled(function.__func__ if isinstance(function, MethodType) else function)
    of_a_model = isinstance(plain, FunctionType) and is_of_a_model(plain)
    if of_a_model and not isinstance(twin := recorded(plain), Mismatch):
        args = args if own is None else (own, *args)
        return _pair(recorder, twin(*args, **options))
    y = function(*args, **options)
    if not isinstance(y, mx.array):
        return y
    holder = getattr(function, "__self__", None)
    if isinstance(holder, mx.array):
        args = (holder, *args)
    return _keep(recorder, getattr(function, "__name__", ""), args, options, y)


def _of_module(recorder: Recorder, module: Any, *args: Any, **options: Any) -> Any:
    call = type(module).__call__
    # Classes of this package's have a call of a model, recorded otherwise, or one of their own.
    own = vars(type(module)).get(RECORDED) if recorder.latest else None
    seen = own or (is_of_a_model(call) and (recorder.latest or chooses(call)))
    if seen and not isinstance(twin := own or recorded(call), Mismatch):
        return _pair(recorder, twin(module, *args, **options))
    y = module(*args, **options)
    if recorder.on_module is not None:
        recorder.on_module(recorder, module, args, y)
    if isinstance(y, mx.array) and type(module) in (nn.Sigmoid, nn.Softmax):
        return _keep(recorder, type(module).__name__.lower(), args, {"axis": -1}, y)
    return y


def _pair(recorder: Recorder, result: Any) -> Any:
    """What a function gave; experts and their shares may come from elsewhere."""
    is_pair = recorder.on_pair is not None and isinstance(result, tuple) and len(result) == 2
    if not is_pair or not all(isinstance(each, mx.array) for each in result):
        return result
    others = recorder.on_pair(recorder, *result) if recorder.on_pair else None
    for y, other in zip(result, others or (), strict=False):
        recorder.nodes[id(other)] = Node(SAME, (y,), {}, "", other)
    return others or result


def _keep(recorder: Recorder, op: str, args: Any, options: dict[str, Any], y: mx.array) -> mx.array:
    frame = sys._getframe(2)
    while frame.f_globals is globals() and frame.f_back is not None:
        frame = frame.f_back
    line = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
    return recorder.keep(Node(op, args, options, line, y))


def is_of_a_model(function: Any) -> bool:
    """Whether a function is one of a file of models, and not MLX's or this package's."""
    module = getattr(function, "__module__", None) or ""
    there = isinstance(function, FunctionType) or hasattr(function, "__code__")
    return there and module.partition(".")[0] not in ("mlx", __name__.partition(".")[0])


class _Calls(ast.NodeTransformer):
    """Let :func:`called` make calls, operators and subscripts."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return _call(node, node.func, *node.args, keywords=node.keywords)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        name = _OPERATORS.get(type(node.op))
        return node if name is None else _call(node, _operator(name), node.left, node.right)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        name = _COMPARISONS.get(type(node.ops[0])) if len(node.ops) == 1 else None
        return node if name is None else _call(node, _operator(name), node.left, *node.comparators)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        is_number = isinstance(node.operand, ast.Constant)
        negates = isinstance(node.op, ast.USub) and not is_number
        return _call(node, _operator("neg"), node.operand) if negates else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return node
        return _call(node, _operator("getitem"), node.value, node.slice)

    def visit_Slice(self, node: ast.Slice) -> ast.expr:
        self.generic_visit(node)
        ends = [e or ast.Constant(None) for e in (node.lower, node.upper, node.step)]
        return ast.copy_location(ast.Call(ast.Name(_SLICE, ast.Load()), ends, []), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        self.generic_visit(node)
        name = _OPERATORS.get(type(node.op))
        if name is None or not isinstance(node.target, ast.Name):
            return node
        read = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
        value = _call(node, _operator(name), read, node.value)
        return ast.copy_location(ast.Assign([node.target], value), node)


def _operator(name: str) -> ast.expr:
    return ast.Attribute(ast.Name(_OPERATOR, ast.Load()), name, ast.Load())


def _call(
    node: ast.AST, function: ast.expr, *args: ast.expr, keywords: list[ast.keyword] | None = None
) -> ast.expr:
    call = ast.Call(ast.Name(_CALLED, ast.Load()), [function, *args], keywords or [])
    return ast.copy_location(call, node)
