"""Methods with other statements, or other meanings of their names."""

from __future__ import annotations

import ast

import pytest

from mlx_qlayers.conversion.matcher import parse
from mlx_qlayers.conversion.rewriter import rebound, replaced, rewritten, statement


def method(self, x, y=2):
    """Documented."""
    y = y + 1
    return len(x) / y


method.mark = "kept"


def test_a_changed_method_keeps_what_the_first_had():
    parsed = parse(method)
    body = parsed.definition.body
    body.insert(1, statement("x = twice(x)", body[1]))
    twin = rewritten(parsed, twice=lambda x: x * 2)
    assert (method(None, "ab"), twin(None, "ab"), twin(None, "ab", 0)) == (2 / 3, 4 / 3, 4.0)
    for name in ("__name__", "__qualname__", "__doc__", "__defaults__", "__dict__"):
        assert getattr(twin, name) == getattr(method, name)
    assert "twice" not in method.__globals__


@pytest.mark.parametrize(("argument", "line"), [(None, 2), (0, 2), ("ab", 3)])
def test_errors_are_in_the_lines_of_the_file(argument, line):
    parsed = parse(method)
    body = parsed.definition.body
    body.insert(1, statement("x = checked(x)", body[1]))
    twin = rewritten(parsed, checked=lambda x: x + "")
    with pytest.raises((TypeError, ZeroDivisionError)) as error:
        twin(None, argument, -1)
    entry = error.traceback[1]
    assert entry.path.name == "test_rewriter.py"
    assert entry.lineno + 1 == method.__code__.co_firstlineno + line


def test_names_of_a_rebound_function_mean_something_else():
    def outer(n):
        return lambda x: len(x) + n

    function = outer(3)
    twin = rebound(function, {"len": lambda x: 100}, function.__code__)
    assert (function("ab"), twin("ab")) == (5, 103)


def test_expressions_are_replaced():
    tree = ast.parse("y = f(x) + g(f(x))").body[0]
    inner = tree.value.right.args[0]
    changed = replaced({inner: ast.Name("z", ast.Load())}).visit(tree)
    assert ast.unparse(changed) == "y = f(x) + g(z)"
