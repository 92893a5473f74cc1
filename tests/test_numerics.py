"""The policy accepts what rounds once and refuses what does not."""

import mlx.core as mx
import numpy as np
import pytest
from numerics import assert_accurate, assert_gradient, random, round_to, to64


def product(dtype):
    rng = np.random.default_rng(1)
    a, b = random(rng, (33, 700), dtype), random(rng, (700, 9), dtype)
    truth = to64(a) @ to64(b)
    return a, b, truth, round_to(truth, dtype)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_one_rounding_passes_and_a_narrow_accumulator_does_not(dtype):
    a, b, truth, rounded = product(dtype)
    exact = (a.astype(mx.float32) @ b.astype(mx.float32)).astype(dtype)
    assert_accurate(exact, truth, rounded)
    narrow = mx.zeros(truth.shape, dtype)
    for i in range(0, 700, 50):
        narrow = narrow + a[:, i : i + 50] @ b[i : i + 50]
    with pytest.raises(AssertionError, match=r"error .* allowed"):
        assert_accurate(narrow, truth, rounded)


def test_poison_wrong_shapes_and_infinities_fail():
    _, _, truth, rounded = product(mx.float32)
    for bad in (float("nan"), float("inf")):
        spoiled = mx.array(rounded)
        spoiled[3, 4] = bad
        with pytest.raises(AssertionError, match="not finite"):
            assert_accurate(spoiled, truth, rounded)
    with pytest.raises(AssertionError):
        assert_accurate(rounded[:1], truth, rounded)
    truth[0, 0] = np.inf
    with pytest.raises(AssertionError):
        assert_accurate(rounded, truth, rounded)


def test_a_gradient_that_is_off_by_a_thousandth_fails():
    rng = np.random.default_rng(2)
    x = random(rng, (5, 7))

    @mx.custom_function
    def wrong(x):
        return mx.sin(x)

    @wrong.vjp
    def _(x, cotangent, _):
        return 1.001 * mx.cos(x) * cotangent

    assert_gradient(mx.sin, [x], rng)
    with pytest.raises(AssertionError, match="gradient of argument 0"):
        assert_gradient(wrong, [x], rng)
