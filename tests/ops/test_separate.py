"""Only the gradients that are asked for are computed."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_qlayers.ops.separate import separate_gradients


@pytest.fixture
def product():
    """a * b, and the list of the gradients that were computed."""
    computed = []

    def gradient(name, value):
        computed.append(name)
        return value

    function = separate_gradients(
        lambda a, b: a * b,
        lambda a, b, d: gradient("a", b * d),
        lambda a, b, d: gradient("b", a * d),
    )
    return function, computed


@pytest.mark.parametrize("asked, names", [(0, "a"), (1, "b"), ((0, 1), "ab")])
def test_one_by_one(product, asked, names):
    function, computed = product
    a, b = mx.array([2.0, 3.0]), mx.array([5.0, 7.0])
    found = mx.grad(lambda a, b: function(a, b).sum(), asked)(a, b)
    expected = mx.grad(lambda a, b: (a * b).sum(), asked)(a, b)
    assert sorted(computed) == list(names)
    assert str(found) == str(expected)


def test_an_argument_that_is_used_twice(product):
    function, _ = product
    a = mx.array([2.0, 3.0])
    assert mx.grad(lambda a: (function(a, a) + function(a, mx.exp(a)) * a).sum())(a).tolist() == (
        mx.grad(lambda a: (a * a + a * mx.exp(a) * a).sum())(a).tolist()
    )


def test_a_single_argument():
    square = separate_gradients(lambda a: a * a, lambda a, d: 2 * a * d)
    assert mx.grad(lambda a: square(a).sum())(mx.array([[1.0, 3.0]])).tolist() == [[2.0, 6.0]]
