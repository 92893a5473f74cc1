"""The one place for tolerances.

The truth is float64. A result passes if its error is at most ``FACTOR`` times that of ``rounded``:
the same computation with inputs in the dtype, float32 accumulation and one rounding to the dtype at
the end. Results that miss that have a constant here, with the reason. No test has a tolerance
of its own.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

FACTOR = 2.0
# Spacing of floating-point numbers above 1.
EPSILON = {mx.float64: 2.0**-52, mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
# The same in units of float32's, in which sums of terms count roundings.
IN_FLOAT32 = {dtype: unit / EPSILON[mx.float32] for dtype, unit in EPSILON.items()}
# Roundings that an element of a float32 function may carry into a finite difference.
_ROUNDINGS = 8
# Units in the last place by which two float32 models of a few layers may differ that add up in
# another order: each layer carries the roundings of those before it.
_MODEL_ROUNDINGS = 256
# Units in the last place of the largest element by which two float32 sums of the same terms, added
# in another order, may differ.
_SUM_ROUNDINGS = 16
# Roundings of the largest element by which MLX's own kernels may be off. In float32 the error of a
# sum shows, about the square root of its length.
ROUNDINGS = {mx.float16: FACTOR, mx.bfloat16: FACTOR, mx.float32: 12.0}
# Share by which losses of training may differ: each step carries the roundings of those before it.
_LOSSES = 1e-3
# The same on GPUs, whose atomics add in any order, as a number.
TRAINING = 1e-5
# Share of what a step changes by which two of them may change something else.
TRAINED = 1e-4
# The share of a value by which no rounding changes it: the point is on another side of a jump.
JUMP = 1e-3
# The share by which keys and values of 8 bits may change the result of attention: two digits.
EIGHT_BITS = 0.05
# A part of the held-out text is not as hard as the whole: shares of perplexity and of bits.
TEXT, TEXT_BITS = 0.15, 0.05
# The share by which weights of 4 bits may raise the perplexity of a model trained for them.
QUANTIZED = 0.05


def to64(array: mx.array | np.ndarray) -> np.ndarray:
    """Any array as float64, exactly; bfloat16 has no numpy dtype of its own."""
    if isinstance(array, mx.array) and array.dtype in (mx.bfloat16, mx.float16):
        array = array.astype(mx.float32)
    return np.array(array, dtype=np.float64)


def round_to(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Round to ``dtype`` once; float64 arrays go through float32, as accumulators do."""
    return mx.array(np.asarray(array, np.float32)).astype(dtype)


def random(
    rng: np.random.Generator, shape: Sequence[int], dtype: mx.Dtype = mx.float32, scale: float = 1.0
) -> mx.array:
    """Normal numbers that ``dtype`` holds exactly, so that :func:`to64` gives the very inputs."""
    return round_to(scale * rng.normal(size=shape), dtype)


def behind_one(array: mx.array) -> mx.array:
    """A contiguous view of the same elements that begins one element into its buffer."""
    flat = array.flatten()
    view = mx.concatenate([flat[:1], flat])
    mx.eval(view)
    return view[1:].reshape(array.shape)


def assert_accurate(
    actual: mx.array,
    truth: np.ndarray,
    rounded: mx.array | np.ndarray,
    *,
    terms: float | np.ndarray = 0.0,
    what: str = "result",
) -> None:
    """Assert that ``actual`` is as accurate as the numerics policy asks.

    Args:
        actual: the result under test.
        truth: the same in float64, by another way.
        rounded: the same by float32 accumulation and one rounding to the dtype of ``actual``.
        terms: sums of the absolute terms that the accumulator adds up, where they cancel. Half a
            float32 unit in the last place of the largest is granted, and half a unit of the dtype
            for the largest of ``truth``: the rounding of a few numbers may happen to be exact.
        what: a name for the message.

    Raises:
        AssertionError: shapes differ, other elements are not finite, or the error is too large.
    """
    dtype = actual.dtype
    found, base = to64(actual), to64(rounded)
    assert found.shape == truth.shape == base.shape, (
        f"{what}: {found.shape}, {truth.shape}, {base.shape}"
    )
    finite = np.isfinite(truth)
    np.testing.assert_array_equal(found[~finite], truth[~finite], err_msg=what)
    if not finite.any():
        return
    assert np.isfinite(found[finite]).all(), f"{what}: not finite where the truth is"
    error, allowed = np.abs(found - truth)[finite], np.abs(base - truth)[finite].max()
    unit = np.abs(truth[finite]).max() * EPSILON[dtype] / 2
    allowed = FACTOR * max(allowed, unit, np.max(terms) * EPSILON[mx.float32] / 2)
    worst = error.max()
    assert worst <= allowed, (
        f"{what} ({dtype}): error {worst:.3e}, allowed {allowed:.3e}, "
        f"in {np.mean(error > allowed):.1%} of {error.size} elements"
    )


def assert_gradient(
    function: Callable[..., mx.array],
    inputs: Sequence[mx.array],
    rng: np.random.Generator,
    *,
    step: float = 1e-2,
) -> None:
    """Compare the gradients of ``sum(function(*inputs) * r)`` with central differences.

    ``inputs`` are float32. Each is moved along two random directions whose largest element is 1, by
    ``step`` and twice that: Richardson's extrapolation leaves an error of fourth order, which the
    difference of the two estimates, with the rounding of the function, bounds.

    Raises:
        AssertionError: a directional derivative disagrees.
    """
    inputs = list(inputs)
    weight = random(rng, function(*inputs).shape)

    def loss(*args: mx.array) -> float:
        return float((to64(function(*args)) * to64(weight)).sum())

    outputs, gradients = mx.vjp(
        lambda *args: [function(*args).astype(mx.float32)], inputs, [weight]
    )
    noise = _ROUNDINGS * EPSILON[mx.float32] * np.abs(to64(outputs[0]) * to64(weight)).sum()
    for number, gradient in enumerate(gradients):
        for _ in range(2):
            way = random(rng, inputs[number].shape)
            way = way / mx.abs(way).max()

            def slope(size: float, number: int = number, way: mx.array = way) -> float:
                ahead, behind = [*inputs], [*inputs]
                ahead[number] = inputs[number] + size * way
                behind[number] = inputs[number] - size * way
                return (loss(*ahead) - loss(*behind)) / (2 * size)

            fine, coarse = slope(step), slope(2 * step)
            expected = fine + (fine - coarse) / 3
            found = float((to64(gradient) * to64(way)).sum())
            allowed = abs(fine - coarse) / 3 + noise / step
            assert abs(found - expected) <= allowed, (
                f"gradient of argument {number}: {found:.6e}, by differences {expected:.6e}, "
                f"allowed {allowed:.1e}"
            )


def assert_function(
    actual: mx.array, function: Callable[[np.ndarray], np.ndarray], x: mx.array
) -> None:
    """Assert that ``actual`` is a function of numpy's of each element of ``x``, rounded once."""
    rounded = round_to(function(to64(x).astype(np.float32)), actual.dtype)
    assert_accurate(actual, function(to64(x)), rounded)


def assert_same_sums(found: mx.array, stock: mx.array) -> None:
    """Assert that two results are the same float32 sums, added in another order, rounded once."""
    allowed = _SUM_ROUNDINGS * EPSILON[mx.float32] * np.abs(to64(stock)).max()
    once = 0 if stock.dtype == mx.float32 else EPSILON[stock.dtype]
    np.testing.assert_allclose(to64(found), to64(stock), rtol=once, atol=allowed)


def assert_same_losses(found: float | Sequence[float], stock: float | Sequence[float]) -> None:
    """Assert that training in float32 had the same losses, from sums in another order."""
    np.testing.assert_allclose(found, stock, rtol=_LOSSES)


def assert_same_model(found: mx.array, stock: mx.array, *, bits: int | None, what: str) -> None:
    """Assert that two small float32 models give the same logits and greedy tokens.

    Args:
        found: logits of the model under test.
        stock: logits of the model that it should equal.
        bits: of a quantized cache, where an element may fall to the next step; else None.
        what: a name for the message.

    Raises:
        AssertionError: ``stock`` is not finite, logits differ by more, or a token differs.
    """
    assert_same_states(found, stock, bits=bits, what=what)
    tokens, others = (to64(logits).argmax(-1) for logits in (found, stock))
    np.testing.assert_array_equal(tokens, others, err_msg=f"{what}: greedy tokens")


def assert_same_states(found: mx.array, stock: mx.array, *, bits: int | None, what: str) -> None:
    """Assert the same of what is within two models, as their keys and values, without tokens."""
    a, b = to64(found), to64(stock)
    assert a.shape == b.shape, f"{what}: {a.shape}, {b.shape}"
    assert np.isfinite(b).all(), f"{what}: the stock model is not finite"
    unit = _MODEL_ROUNDINGS * EPSILON[mx.float32] if bits is None else 2.0**-bits
    error, allowed = np.abs(a - b).max(), unit * np.abs(b).max()
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e}"
