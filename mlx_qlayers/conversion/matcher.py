"""Recognises what a module computes by the code of its ``__call__``.

Many of mlx-lm's architectures spell their attention, feed-forward and decoder layers alike, up to
the names of attributes and local variables. Such a method is brought into a normal form in which
these names are numbers; it is known if a method of :mod:`.patterns` has the same normal form and
the global names in both mean the same objects. Nothing is guessed from a name.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections import Counter
from collections.abc import Callable
from functools import cache, lru_cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import mlx.nn as nn


class Known(NamedTuple):
    """A recognised class.

    Attributes:
        form: the name of the function in :mod:`.patterns`.
        names: its attributes' names in the class, by their names in the form.
    """

    form: str
    names: dict[str, str]


class NormalForm(NamedTuple):
    """A method without its names: what it computes, and its attribute and global names in order."""

    text: str
    attributes: tuple[str, ...]
    globals: tuple[str, ...]


@cache
def recognise(cls: type[nn.Module]) -> Known | None:
    """What an object of this class computes when it is called, if that is known."""
    call = inspect.getattr_static(cls, "__call__", None)
    found = normal_form(call) if isinstance(call, FunctionType) else None
    if found is None:
        return None
    for form, pattern in _forms():
        same = found.text == pattern.text and _same_globals(found.globals, call, form)
        if same:
            names = dict(zip(pattern.attributes, found.attributes, strict=True))
            return Known(form.__name__, names)
    return None


@cache
def _forms() -> list[tuple[FunctionType, NormalForm]]:
    from . import patterns as forms

    found = []
    for function in vars(forms).values():
        if isinstance(function, FunctionType) and function.__module__ == forms.__name__:
            form = normal_form(function)
            assert form is not None
            found.append((function, form))
    return found


def _same_globals(names: tuple[str, ...], a: Callable[..., Any], b: FunctionType) -> bool:
    scopes = [function.__globals__ for function in (a, b) if isinstance(function, FunctionType)]
    return all(scopes[0].get(name) is scopes[1].get(name) is not None for name in names)


def definition_of(function: FunctionType) -> ast.FunctionDef | None:
    """The source of a plain method; None if it is not at hand, has a closure or other functions."""
    if function.__code__.co_freevars or "__wrapped__" in vars(function):
        return None
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return None
    a = definition.args
    if a.posonlyargs or a.vararg or a.kwonlyargs or a.kwarg:
        return None
    inner = [n for n in ast.walk(definition) if isinstance(n, ast.Lambda | ast.FunctionDef)]
    if inner != [definition] or not _was_compiled_from_its_file(function):
        return None
    return definition


def normal_form(function: FunctionType) -> NormalForm | None:
    """The normal form of a method; None if it is no plain method."""
    definition = definition_of(function)
    if definition is None:
        return None
    names = _Names(definition)
    definition.body = [names.visit(s) for s in _inlined(_without_docstring(definition.body))]
    definition.name, definition.returns = "", None
    definition.args = names.visit(definition.args)
    return NormalForm(ast.dump(definition), tuple(names.attributes), tuple(names.globals))


def _was_compiled_from_its_file(function: FunctionType) -> bool:
    """Whether the source that is found is that of the code: its file may have changed since."""
    code = function.__code__
    return any(
        (other.co_qualname, other.co_code, other.co_names)
        == (code.co_qualname, code.co_code, code.co_names)
        for other in _codes("".join(linecache.getlines(code.co_filename)))
        if other.co_firstlineno == code.co_firstlineno
    )


@lru_cache(maxsize=8)
def _codes(text: str) -> list[CodeType]:
    found, todo = [], [compile(text, "<source>", "exec", dont_inherit=True)]
    while todo:
        found.append(code := todo.pop())
        todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return found


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if documented else body


def _inlined(body: list[ast.stmt]) -> list[ast.stmt]:
    """Put a value that only the next statement uses, once, in the place of its name."""
    done: list[ast.stmt] = []
    for i, statement in enumerate(body):
        while done and isinstance(last := done[-1], ast.Assign):
            name = last.targets[0].id if isinstance(last.targets[0], ast.Name) else ""
            if not _loads(statement, name) == 1 == _loads_before_store(body[i:], name):
                break
            statement = _Inline(name, last.value).visit(statement)
            done.pop()
        done.append(statement)
    return done


def _loads(node: ast.AST, name: str) -> int:
    if not isinstance(node, ast.Assign | ast.Return):
        return 0
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name]
    return sum(isinstance(n.ctx, ast.Load) for n in names)


def _loads_before_store(body: list[ast.stmt], name: str) -> int:
    count = 0
    for statement in body:
        uses = Counter(
            type(n.ctx) for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == name
        )
        count += uses[ast.Load]
        if uses[ast.Store] and isinstance(statement, ast.Assign):
            break
    return count


class _Inline(ast.NodeTransformer):
    def __init__(self, name: str, value: ast.expr) -> None:
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        load = node.id == self.name and isinstance(node.ctx, ast.Load)
        return self.value if load else node


class _Names(ast.NodeTransformer):
    """Numbers local names and attributes of ``self`` in the order of their appearance."""

    def __init__(self, definition: ast.FunctionDef) -> None:
        self.locals = {a.arg: f"v{i}" for i, a in enumerate(definition.args.args)}
        self.owner = definition.args.args[0].arg if definition.args.args else ""
        for node in ast.walk(definition):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.locals.setdefault(node.id, "")
        self.attributes: dict[str, str] = {}
        self.globals: dict[str, None] = {}
        self.count = len(definition.args.args)

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id not in self.locals:
            self.globals[node.id] = None
            return node
        if not self.locals[node.id]:
            self.locals[node.id] = f"v{self.count}"
            self.count += 1
        return ast.Name(self.locals[node.id], node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg, None)  # a caller may pass it by name

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        name = node.attr
        if isinstance(node.value, ast.Name) and node.value.id == self.owner:
            name = self.attributes.setdefault(name, f"a{len(self.attributes)}")
        return ast.Attribute(self.visit(node.value), name, node.ctx)

    def visit_Call(self, node: ast.Call) -> ast.Call:
        keywords = sorted(node.keywords, key=lambda k: k.arg or "")
        return self.generic_visit(ast.Call(node.func, node.args, keywords))  # type: ignore[return-value]
