"""``mx.vmap`` of operations beside a loop, and among other transformations."""

from functools import partial

import mlx.core as mx
import pytest

from mlx_qlayers import QLinear, quantized_matmul, use_backend
from mlx_qlayers.runtime import trace
from tests.numerics import assert_same_sums

ITEMS = 3


@pytest.fixture(autouse=True)
def the_same_numbers():
    mx.random.seed(0)


@pytest.fixture(params=["host", "reference"])
def backend(request):
    with use_backend(request.param):
        yield request.param


def matrices() -> list[mx.array]:
    """So many packed matrices."""
    return list(mx.quantize(mx.random.normal((ITEMS, 40, 64))))


def test_any_axes(backend):
    x, (w, scales, biases) = mx.random.normal((2, ITEMS, 64)), matrices()
    each = [quantized_matmul(x[:, i], w[i], scales[i], biases[i]) for i in range(ITEMS)]
    found = mx.vmap(quantized_matmul, in_axes=(1, 0, 0, 0), out_axes=1)(x, w, scales, biases)
    assert_same_sums(found, mx.stack(each, axis=1))
    one = [a[0] for a in (w, scales, biases)]
    found = mx.vmap(quantized_matmul, in_axes=(1, None, None, None))(x, *one)
    assert_same_sums(found, mx.stack([quantized_matmul(x[:, i], *one) for i in range(ITEMS)]))
    found = mx.vmap(quantized_matmul, in_axes=(None, 0, 0, 0))(x, w, scales, biases)
    each = [quantized_matmul(x, *some) for some in zip(w, scales, biases, strict=True)]
    assert_same_sums(found, mx.stack(each))
    nothing = mx.vmap(quantized_matmul, in_axes=(0, None, None, None))(x[:0], *one)
    assert nothing.shape == (0, ITEMS, 40)


def test_one_launch_does_for_all_rows():
    with use_backend("host"), trace() as launches:
        mx.eval(mx.vmap(QLinear(64, 40))(mx.ones((ITEMS, 2, 64))))
    assert len(launches) == 1


def test_inside_and_outside_of_gradients(backend):
    """Of x, scales and biases, of which each item has its own, or all share one."""
    x, (w, *packed) = mx.random.normal((ITEMS, 2, 64)), matrices()
    up = mx.random.normal((2, 40))

    def loss(x, scales, biases, w):
        return (quantized_matmul(x, w, scales, biases) * up).sum()

    of = mx.grad(loss, argnums=(0, 1, 2))
    each = [of(x[i], packed[0][i], packed[1][i], w[i]) for i in range(ITEMS)]
    for found, exact in zip(mx.vmap(of)(x, *packed, w), zip(*each, strict=True), strict=True):
        assert_same_sums(found, mx.stack(exact))
    (scales, biases), first = (a[0] for a in packed), w[0]
    mapped = mx.vmap(loss, in_axes=(0, None, None, None))
    outside = mx.grad(lambda *a: mapped(*a, first).sum(), argnums=(0, 1, 2))
    plain = mx.grad(lambda *a: sum(loss(row, *a[1:], first) for row in a[0]), argnums=(0, 1, 2))
    for found, exact in zip(outside(x, scales, biases), plain(x, scales, biases), strict=True):
        assert_same_sums(found, exact)


def test_nested_and_compiled():
    x, some = mx.random.normal((ITEMS, 2, 64)), [a[0] for a in matrices()]
    product = lambda row: quantized_matmul(row, *some)  # noqa: E731
    assert_same_sums(mx.vmap(mx.vmap(product))(x), product(x))
    assert_same_sums(mx.compile(mx.vmap(product))(x), product(x))
    assert_same_sums(mx.vmap(mx.compile(product))(x), product(x))


def test_what_is_not_mapped_is_computed_where_a_compiled_function_maps_another():
    """A placeholder of such a call would be zeros in the compiled graph."""
    x, some = mx.random.normal((2, 64)), [a[0] for a in matrices()]

    def function(x, t):
        return mx.vmap(lambda each: quantized_matmul(x, *some) * each)(t)

    for run in (function, mx.compile(function)):
        found = run(x, mx.array([1.0, 2.0]))
        assert_same_sums(found, mx.stack([quantized_matmul(x, *some) * i for i in (1, 2)]))


def test_what_has_no_derivative_is_refused():
    x, (w, scales, biases) = mx.random.normal((ITEMS, 2, 64)), [a[0] for a in matrices()]
    of_w = mx.grad(lambda w, x: quantized_matmul(x, w, scales, biases).sum())
    with pytest.raises(ValueError, match="no gradient wrt the quantized weights"):
        mx.vmap(partial(of_w, w))(x)
    first = mx.grad(lambda x: quantized_matmul(x, w, scales, biases).square().sum())
    second = mx.grad(lambda x: first(x).square().sum())
    with pytest.raises(ValueError, match="derivative"):
        mx.vmap(second)(x)
    with pytest.raises(ValueError, match="x must be"):
        mx.vmap(quantized_matmul, in_axes=(0, None, None, None))(
            x.astype(mx.int32), w, scales, biases
        )
