"""Derivatives of launches that run at once: none that is silently zero."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import attention, grid_sample, quantized_matmul, use_backend
from mlx_qlayers.ops.exp import FORWARD, exp
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.transformed import has_values, is_traced, is_transformed
from tests.numerics import assert_function, assert_same_sums

Function = Callable[[mx.array], mx.array]


@pytest.fixture(autouse=True)
def on_host():
    with use_backend("host"):
        yield


def bare(x: mx.array) -> mx.array:
    """A launch that nobody gave a gradient."""
    sizes = {"grid": (x.size, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [x.shape]}
    return FORWARD([x], template={"T": x.dtype}, **sizes)[0]


def random(*shape: int) -> mx.array:
    x = mx.random.uniform(-1, 1, shape, key=mx.random.key(sum(shape)))
    mx.eval(x)
    return x


def operations() -> dict[str, tuple[Function, mx.array]]:
    q, k, v = random(1, 2, 9, 32), random(1, 2, 11, 32), random(1, 2, 11, 32)
    packed = mx.quantize(random(24, 64), 64, 4)
    image, grid = random(1, 5, 6, 3), random(1, 4, 3, 2)
    return {
        "attention": (lambda q: attention(q, k, v, scale=0.2), q),
        "quantized_matmul": (lambda x: quantized_matmul(x, *packed), random(3, 64)),
        "grid_sample": (lambda g: grid_sample(image, g), grid),
        "exp": (exp, random(7)),
    }


def forwards(function: Function) -> Function:
    return lambda x: mx.jvp(function, [x], [mx.ones_like(x)])[1][0]


@pytest.mark.parametrize("derive", [mx.grad, mx.value_and_grad, forwards])
def test_a_launch_alone_raises(derive):
    with pytest.raises(ValueError, match=r"has no derivative of its own.*mx\.custom_function"):
        derive(lambda x: bare(x).sum())(random(5))


def test_what_needs_no_gradient_of_it_is_left_alone():
    x, weight = random(5), random(5)
    found = mx.grad(lambda w: (bare(x) * w).sum())(weight)
    assert_function(found, np.exp, x)


def test_what_is_not_differentiated_has_its_values_at_once():
    """In a thread that has not launched before too: another thread can evaluate it."""
    x = random(3, 4, 5)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(bare, x).result()
    assert_function(found, np.exp, x)


def test_without_compilation_launches_run_on():
    x = random(5)
    mx.disable_compile()
    try:
        found = bare(x)
        gradient = mx.grad(lambda x: exp(x).sum())(x)
    finally:
        mx.enable_compile()
    for y in (found, gradient):
        assert_function(y, np.exp, x)


@pytest.mark.parametrize("name", operations())
def test_operations_have_first_derivatives_and_no_second(name):
    function, x = operations()[name]
    gradient = mx.grad(lambda x: (function(x) ** 2).sum())
    with trace() as launches:
        found = gradient(x)
        mx.eval(found)
    assert len(launches) >= 2
    plain = mx.exp if name == "exp" else function
    with use_backend("auto" if name == "exp" else "reference"):
        truth = mx.grad(lambda x: (plain(x) ** 2).sum())(x)
    assert_same_sums(found, truth)
    with pytest.raises(ValueError, match="For second derivatives"):
        mx.eval(mx.grad(lambda x: gradient(x).sum())(x))
    with pytest.raises(ValueError, match=r"mx\.jvp"):
        mx.eval(mx.jvp(function, [x], [mx.ones_like(x)]))


def test_arrays_have_values_except_under_compile_and_vmap():
    seen: dict[str, tuple[bool, bool]] = {}

    def look(name: str, arrays: list[mx.array]) -> None:
        seen[name] = is_transformed(arrays), has_values(arrays)

    @mx.custom_function
    def function(x: mx.array) -> mx.array:
        look("forward", [x])
        return x * 1

    @function.vjp
    def vjp(x: mx.array, dy: mx.array, y: mx.array) -> mx.array:
        look("vjp", [x, dy, y])
        return dy

    x, loss = mx.ones(3), mx.grad(lambda x: function(x * 2).sum())
    function(x)
    assert seen == {"forward": (False, True)}
    loss(x)
    assert seen == {"forward": (True, True), "vjp": (True, True)}
    mx.grad(mx.checkpoint(lambda x: function(x).sum()))(x)
    assert seen == {"forward": (True, True), "vjp": (True, True)}
    mx.compile(loss)(x)
    assert seen == {"forward": (True, False), "vjp": (True, False)}
    mx.vmap(function)(mx.ones((2, 3)))
    assert seen["forward"] == (True, False)


def test_indices_that_a_transformation_follows():
    seen: list[bool] = []

    def function(x: mx.array, indices: mx.array) -> mx.array:
        seen.append(is_traced(indices))
        return (x * indices).sum()

    given = mx.array([1.0, 2.0]), mx.array([1, 2])
    for transform in (mx.compile, mx.grad, lambda f: mx.vmap(f, (None, 0))):
        transform(function)(*given)
        transform(lambda x, i: function(x, i + 1))(*given)
        function(*given)
        assert seen == [True, True, False]
        seen.clear()
