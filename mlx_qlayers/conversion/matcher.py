"""Recognises what a method of somebody else's module does, by its code alone.

A method is parsed into a tree without what does not matter: docstring, annotations, names of values
that are used once. The patterns of :mod:`.patterns` are Python code too. A method matches one where
both are the same tree, up to the names of local variables and of attributes of ``self``, and global
names mean the same objects. Nothing is guessed from a name. :mod:`.rewriter` changes methods.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import textwrap
from collections.abc import Iterator
from functools import cache, lru_cache
from types import CodeType, FunctionType
from typing import Any, Literal, NamedTuple

import mlx.nn as nn

# What need not be called in a method: its argument takes its place.
_OPTIONAL = ("q_norm", "k_norm")


class Match(NamedTuple):
    """What was recognised.

    Attributes:
        pattern: the name of the function in :mod:`.patterns`.
        names: names of attributes in the method, by their names in the pattern.
    """

    pattern: str
    names: dict[str, str]

    @property
    def kind(self) -> str:
        """``"mlp"``, ``"attention"`` or ``"block"``, by which the names of patterns begin."""
        return self.pattern.partition("_")[0]


class Mismatch(NamedTuple):
    """Why nothing was recognised; it counts as false.

    Attributes:
        reason: what differs.
        line: the file, the line and the code that stopped the comparison, if one did.
        progress: how many names and values agreed before.
    """

    reason: str
    line: str = ""
    progress: int = 0

    @property
    def kind(self) -> str:
        """That of the products of one input, which may be gathered all the same."""
        return "group"

    def __bool__(self) -> Literal[False]:
        return False

    def __str__(self) -> str:
        return f"{self.line}: {self.reason}" if self.line else self.reason


class Method(NamedTuple):
    """A method and its parsed source, which its owner may change."""

    function: Any  # a FunctionType, which mypy would bind
    definition: ast.FunctionDef

    @property
    def parameters(self) -> list[str]:
        return [a.arg for a in self.definition.args.args]

    def stored(self) -> set[str]:
        """The names of local variables."""
        nodes = (n for n in ast.walk(self.definition) if isinstance(n, ast.Name))
        return {n.id for n in nodes if isinstance(n.ctx, ast.Store)} | {*self.parameters}

    def meaning(self, name: str) -> object:
        """What a global name stands for; None if for nothing."""
        return self.function.__globals__.get(name, getattr(builtins, name, None))

    def mismatch(self, reason: str, node: ast.AST | None = None, progress: int = 0) -> Mismatch:
        """A mismatch at a node of the definition."""
        file, number = self.function.__code__.co_filename, getattr(node, "lineno", 0)
        line = f"{file.rpartition('/')[2]}:{number}: {linecache.getline(file, number).strip()}"
        return Mismatch(reason, line if number else "", progress)


def parse(function: object) -> Method | Mismatch:
    """A plain method with its source, by the lines of its file."""
    if not isinstance(function, FunctionType):
        return Mismatch("it is no method written in Python")
    if function.__code__.co_freevars or "__wrapped__" in vars(function):
        return Mismatch("the method is wrapped, or uses variables of a function around it")
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return Mismatch("the source of the method is not at hand")
    if not isinstance(definition, ast.FunctionDef):
        return Mismatch("it is no plain method")
    # What mx.compile gives is no FunctionType: this is the function under it.
    decorators = {ast.unparse(each).split(",")[0] for each in definition.decorator_list}
    if decorators - {"mx.compile", "partial(mx.compile"}:
        return Mismatch("it is no plain method")
    definition.decorator_list = []
    a = definition.args
    if a.posonlyargs or a.vararg or a.kwarg:
        return Mismatch("it takes other than plain parameters")
    inner = [n for n in ast.walk(definition) if isinstance(n, ast.Lambda | ast.FunctionDef)]
    if inner != [definition]:
        return Mismatch("there is a function inside it")
    if not _was_compiled_from_its_file(function.__code__):
        return Mismatch("its file has changed since it was imported")
    ast.increment_lineno(definition, function.__code__.co_firstlineno - 1)
    return Method(function, definition)


@cache
def recognise(cls: type[nn.Module]) -> Match | Mismatch:
    """What an object of this class computes when it is called."""
    method = parse(inspect.getattr_static(cls, "__call__", None))
    if isinstance(method, Mismatch):
        return method
    body = inlined(method.definition.body)
    closest = Mismatch("there is no pattern", progress=-1)
    for pattern, wanted in _patterns():
        result = _compare(pattern, method, wanted, body)
        if isinstance(result, Match):
            return result
        closest = max(closest, result, key=lambda mismatch: mismatch.progress)
    return closest


def names_used(function: FunctionType) -> Iterator[str]:
    """The names that a function looks up: globals and attributes. Its source need not be there."""
    todo = [function.__code__]
    for code in todo:
        yield from code.co_names
        todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


@cache
def _patterns() -> list[tuple[Method, list[ast.stmt]]]:
    from . import patterns

    parsed = []
    for function in vars(patterns).values():
        if isinstance(function, FunctionType) and function.__module__ == patterns.__name__:
            pattern = parse(function)
            assert isinstance(pattern, Method), (function, pattern)
            parsed.append((pattern, inlined(pattern.definition.body)))
    return parsed


def _compare(
    pattern: Method, method: Method, wanted: list[ast.stmt], body: list[ast.stmt]
) -> Match | Mismatch:
    comparison, name = _Comparison(pattern, method), pattern.function.__name__
    try:
        comparison.same(pattern.definition.args, method.definition.args, method.definition)
        comparison.same(wanted, body, method.definition)
    except _Differs as stop:
        given, expected, node = stop.args
        reason = f"{given} where {name} has {expected}"
        return method.mismatch(reason, node, comparison.progress)
    return Match(name, comparison.attributes)


class _Differs(Exception):
    """Two trees differ: what the method has, what the pattern has, and where."""


class _Comparison:
    """Compares a method with a pattern, and keeps what the names in the pattern stand for."""

    def __init__(self, pattern: Method, method: Method) -> None:
        self.pattern, self.method = pattern, method
        self.locals = pattern.stored(), method.stored()
        self.attributes: dict[str, str] = {}
        self.variables: dict[str, str] = {}
        self.progress = 0

    def same(self, p: Any, n: Any, at: ast.AST) -> None:
        """Raise unless two trees are the same; ``at`` is what is around the second."""
        at = n if hasattr(n, "lineno") else at
        inner: list[tuple[Any, Any]] = []
        if _calls_own(p) in _OPTIONAL and not _calls_own(n):
            p = p.args[0]
        if type(p) is not type(n):
            agree = False
        elif isinstance(p, ast.Name):
            agree = self._means(p.id, n.id)
        elif isinstance(p, ast.arg):  # a caller may pass it by name
            agree = p.arg == n.arg and _bound(self.variables, p.arg, n.arg)
        elif isinstance(p, ast.Attribute):
            own = _owner(p) == _owner(n) == "self"
            agree = _bound(self.attributes, p.attr, n.attr) if own else p.attr == n.attr
            inner = [] if own else [(p.value, n.value)]
        elif isinstance(p, ast.Call):
            wanted, given = map(_by_name, (p.keywords, n.keywords))
            agree, inner = True, [(p.func, n.func), (p.args, n.args), (wanted, given)]
        elif isinstance(p, ast.AST):
            fields = [name for name in p._fields if name not in ("type_comment", "kind")]
            agree, inner = True, [(getattr(p, f, None), getattr(n, f, None)) for f in fields]
        elif isinstance(p, list):
            for each, other in zip(p, n, strict=False):
                self.same(each, other, at)
            agree, p, n = len(p) == len(n), p[len(n) :], n[len(p) :]
        else:
            agree = p == n
        if not agree:
            raise _Differs(_text(n), _text(p), at)
        self.progress += 1
        for each, other in inner:
            self.same(each, other, at)

    def _means(self, wanted: str, name: str) -> bool:
        """Whether a name stands for what one in the pattern does."""
        of_pattern, of_method = self.locals
        if wanted in of_pattern:
            return name in of_method and _bound(self.variables, wanted, name)
        meaning = self.pattern.meaning(wanted)
        return name not in of_method and self.method.meaning(name) is meaning is not None


def _bound(table: dict[str, str], wanted: str, name: str) -> bool:
    """Whether a name can stand for ``wanted``, and from now on it does."""
    if wanted not in table and name in table.values():
        return False
    return table.setdefault(wanted, name) == name


def _owner(node: ast.Attribute) -> str | None:
    return node.value.id if isinstance(node.value, ast.Name) else None


def _calls_own(node: Any) -> str | None:
    """The attribute of ``self`` that is called, if one is."""
    own = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.attr if own and _owner(node.func) == "self" else None


def _by_name(keywords: list[ast.keyword]) -> list[ast.keyword]:
    return sorted(keywords, key=lambda keyword: keyword.arg or "")


def _text(node: Any) -> str:
    """Code as it is shown to a reader, in one short line."""
    if isinstance(node, list):
        return "; ".join(map(_text, node)) or "nothing"
    text = " ".join((ast.unparse(node) if isinstance(node, ast.AST) else repr(node)).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _was_compiled_from_its_file(code: CodeType) -> bool:
    """Whether the source at hand is that of the code: its file may have changed since."""
    return any(
        (other.co_qualname, other.co_code, other.co_names, other.co_firstlineno)
        == (code.co_qualname, code.co_code, code.co_names, code.co_firstlineno)
        for other in _codes("".join(linecache.getlines(code.co_filename)))
    )


@lru_cache(maxsize=8)
def _codes(text: str) -> list[CodeType]:
    codes = [compile(text, "<source>", "exec", dont_inherit=True)]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return codes


def inlined(body: list[ast.stmt]) -> list[ast.stmt]:
    """Put a value that only the next statement uses, once, in the place of its name."""
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        body = body[1:]  # the docstring
    done: list[ast.stmt] = []
    for i, statement in enumerate(body):
        while done and isinstance(last := done[-1], ast.Assign):
            name = last.targets[0].id if isinstance(last.targets[0], ast.Name) else ""
            plain = isinstance(statement, ast.Assign | ast.Return)
            if not (plain and _loads([statement], name) == 1 == _loads(body[i:], name)):
                break
            statement = _Inline(name, last.value).visit(statement)
            done.pop()
        done.append(statement)
    return done


def _loads(body: list[ast.stmt], name: str) -> int:
    """How often a name is read before it is assigned anew."""
    count = 0
    for statement in body:
        nodes = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == name]
        count += sum(isinstance(n.ctx, ast.Load) for n in nodes)
        if isinstance(statement, ast.Assign) and any(isinstance(n.ctx, ast.Store) for n in nodes):
            break
    return count


class _Inline(ast.NodeTransformer):
    def __init__(self, name: str, value: ast.expr) -> None:
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        load = node.id == self.name and isinstance(node.ctx, ast.Load)
        return self.value if load else node
