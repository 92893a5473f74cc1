"""Gathering products of one input changes which calls are made together, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlx_qlayers.conversion.grouping import grouped

LAYERS = frozenset("abcd")


def consecutive(self, x):
    """Documented."""
    first = self.a(x)
    second = self.b(x).upper()
    third = self.other(x)
    return first + second + third + self.c(x)


def at_once(self, x, *, times=2):
    return x


def tuples(self, x, y="y"):
    p, q = self.a(x), self.b(x)
    x = self.c(y) + self.d(y)
    return p + q + x


def branches(self, x):
    if self.other(x):
        y = self.a(x) + self.b(x)
        y = y + "?"
    else:
        y = self.c(x) + self.d(x)
    for _ in range(2):
        y = y + self.a(y) + self.b(y)
    return y


def chain(self, x):
    x = self.a(x)
    y = self.b(x)
    return y


def changed(self, x):
    y = self.a(x)
    x = x + "!"
    return y + self.b(x)


def changed_between(self, x):
    p = self.a(x)
    x = p
    q = self.b(x)
    r = self.c(x)
    return q + r


def conditional(self, x):
    p = self.a(x) if self.other(x) else self.b(x)
    q = self.other(x) and self.c(x)
    return p, q, [self.d(x) for _ in range(2)]


def twice(self, x):
    return self.a(x) + self.a(x)


def keywords(self, x):
    return self.a(x=x) + self.b(x, 1)


def foreign(self, x):
    other = self
    return other.a(x) + other.b(x)


def inner(self, x):
    return [f(x) for f in (lambda x: self.a(x) + self.b(x),)]


class Recorder(SimpleNamespace):
    """Layers that say their name and what they got, and keep the order of the calls."""

    def __init__(self) -> None:
        super().__init__(log=[])
        for name in "abcd":
            setattr(self, name, lambda x, *rest, name=name: self.called(name, x))
        self.other = lambda x: self.called("o", x)

    def called(self, name: str, x: object) -> str:
        self.log.append((name, x))
        return f"{name}({x})"


def together(x, *layers):
    return [layer(x) for layer in layers]


@pytest.mark.parametrize(
    ("function", "groups"),
    [
        (consecutive, (("a", "b"),)),
        (tuples, (("a", "b"), ("c", "d"))),
        (branches, (("a", "b"), ("c", "d"), ("a", "b"))),
    ],
)
def test_gathers(function, groups):
    found = grouped(function, LAYERS, together)
    assert sorted(found.groups) == sorted(groups)
    stock, ours = Recorder(), Recorder()
    assert found.function(ours, "x") == function(stock, "x")
    assert sorted(ours.log) == sorted(stock.log)
    assert found.function.__defaults__ == function.__defaults__
    assert found.function.__doc__ == function.__doc__
    assert found.function.__code__.co_filename == function.__code__.co_filename


@pytest.mark.parametrize(
    "function",
    [
        at_once,
        chain,
        changed,
        changed_between,
        conditional,
        twice,
        keywords,
        foreign,
        inner,
        Recorder.called,
    ],
)
def test_leaves(function):
    mismatch = grouped(function, LAYERS, together)
    assert not mismatch and mismatch.reason


def test_only_the_named_layers_are_gathered():
    assert not grouped(consecutive, frozenset("ac"), together)
    assert grouped(branches, frozenset("cd"), together).groups == (("c", "d"),)


def test_the_rewritten_method_fails_where_the_other_does():
    found = grouped(tuples, LAYERS, together)
    broken = Recorder()
    broken.d = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError) as error:
        found.function(broken, "x")
    # Both products are made in front of the first assignment.
    assert error.traceback[1].lineno + 1 == tuples.__code__.co_firstlineno + 1
