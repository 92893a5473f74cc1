"""Gradients of launches: only those that are asked for on host, and errors for what has none."""

import mlx.core as mx
import pytest

from mlx_qlayers import use_backend
from mlx_qlayers.dispatch import Gradient, gradient_of
from mlx_qlayers.dispatch.gradients import differentiable
from mlx_qlayers.ops.exp import exp


def product(computed):
    """a * b, and a list to which the gradients that are computed add their names."""

    def gradient(name, value):
        computed.append(name)
        return [value]

    return differentiable(
        "product",
        lambda a, b: a * b,
        [
            Gradient((0,), lambda arrays, d, _: gradient("a", arrays[1] * d[0])),
            Gradient((1,), lambda arrays, d, _: gradient("b", arrays[0] * d[0])),
        ],
        [mx.ones(2), mx.ones(2)],
    )


@pytest.mark.parametrize("backend", ["host", "reference"])
@pytest.mark.parametrize("asked, names", [(0, "a"), (1, "b"), ((0, 1), "ab")])
def test_one_by_one(backend, asked, names):
    computed = []
    with use_backend(backend):
        function = product(computed)
        a, b = mx.array([2.0, 3.0]), mx.array([5.0, 7.0])
        found = mx.grad(lambda a, b: function(a, b).sum(), asked)(a, b)
    expected = mx.grad(lambda a, b: (a * b).sum(), asked)(a, b)
    # Where everything is lazy, what nobody asks for is never evaluated.
    assert sorted(computed) == (list(names) if backend == "host" else ["a", "b"])
    assert str(found) == str(expected)


@pytest.mark.parametrize("backend", ["host", "reference"])
@pytest.mark.parametrize("asked", [1, 2])
def test_every_argument_of_integers_refuses(backend, asked):
    arrays = mx.array([1.0, 2.0]), mx.array([5, 6], mx.uint32), mx.array([True, False])
    with use_backend(backend):
        run = differentiable("codes", lambda x, a, b: x * a * b, gradient_of(mx.add, []), arrays)
        with pytest.raises(ValueError, match=r"\[codes\] no gradient .* array of .*uint32"):
            mx.grad(lambda *given: run(*given).sum(), asked)(*arrays)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_cotangents_of_another_dtype(dtype):
    """A function of the caller's may give one, and a launch reads bytes as they are."""
    x, weights = mx.arange(8).astype(dtype) / 8, mx.arange(8, dtype=mx.float32)

    def scaled(cast):
        function = mx.custom_function(lambda y: y * weights)
        function.vjp(lambda y, cotangent, _: (cotangent * weights).astype(cast))
        return lambda x: function(exp(x)).sum()

    with use_backend("host"):
        found, wanted = (mx.grad(scaled(cast))(x) for cast in (mx.float32, dtype))
    assert found.dtype == dtype and mx.array_equal(found, wanted)
