"""Math functions, with the units in the last place that each may be off."""

from collections.abc import Iterator

import numpy as np

from .case import Case, Rows, case

N = 256

# Units in the last place allowed to plain and precise:: functions. The least of what libm on the
# host, CUDA's single-precision functions and the Metal specification promise would be 4 for most.
_PLAIN = 4.0
_PRECISE = {"sqrt": 0.5, "divide": 0.5, "rsqrt": 2.0}
# fast:: promises an absolute error where results are near zero; the inputs keep away from there.
_FAST = {
    "exp": 8.0,
    "exp2": 4.0,
    "log": 64.0,
    "log2": 64.0,
    "sin": 64.0,
    "cos": 64.0,
    "tanh": 8.0,
    "sqrt": 4.0,
    "rsqrt": 4.0,
    "pow": 64.0,
    "divide": 4.0,
}


def cases() -> Iterator[Case]:
    """Every math function in each precision, exact ones, and special values."""
    rng = np.random.default_rng(20)
    a = rng.uniform(-2, 2, N).astype(np.float32)
    b = rng.uniform(0.1, 4, N).astype(np.float32)
    x, y = a.astype(np.float64), b.astype(np.float64)
    plain = {
        "exp": np.exp(x),
        "exp2": np.exp2(x),
        "exp10": 10.0**x,
        "log": np.log(y),
        "log2": np.log2(y),
        "log10": np.log10(y),
        "sin": np.sin(x),
        "cos": np.cos(x),
        "tan": np.tan(x),
        "sinh": np.sinh(x),
        "cosh": np.cosh(x),
        "tanh": np.tanh(x),
        "asin": np.arcsin(x / 2),
        "acos": np.arccos(x / 2),
        "atan": np.arctan(x),
        "asinh": np.arcsinh(x),
        "acosh": np.arccosh((b + np.float32(1)).astype(np.float64)),
        "atanh": np.arctanh((a / np.float32(2.1)).astype(np.float64)),
        "atan2": np.arctan2(x, y),
        "pow": y**x,
        "powr": y**x,
        "sqrt": np.sqrt(y),
        "rsqrt": 1 / np.sqrt(y),
        "sinpi": np.sin(np.pi * x),
        "cospi": np.cos(np.pi * x),
        "/": x / y,
        "fmod": np.fmod(x, y),
    }
    yield _case("math_plain", [a, b], plain, dict.fromkeys(plain, _PLAIN) | {"/": 0.5, "fmod": 0})
    rows = _in_two_precisions(x, y)
    yield _case("math_precise", [a, b], rows, {name: _PRECISE.get(name, _PLAIN) for name in rows})
    # Keep the results of log, sin and cos away from zero.
    c = np.where(np.abs(a) < 0.25, np.float32(0.5), a)
    c = np.where(np.abs(np.abs(c) - np.pi / 2) < 0.2, np.float32(1.0), c).astype(np.float32)
    d = np.where(np.abs(b - 1) < 0.25, np.float32(2.5), b).astype(np.float32)
    rows = _in_two_precisions(c.astype(np.float64), d.astype(np.float64))
    yield _case("math_fast", [c, d], rows, _FAST)
    yield _exact()
    yield _special()


def _in_two_precisions(x: np.ndarray, y: np.ndarray) -> Rows:
    """Functions that are in ``fast::`` and in ``precise::``."""
    return {
        "exp": np.exp(x),
        "exp2": np.exp2(x),
        "log": np.log(y),
        "log2": np.log2(y),
        "sin": np.sin(x),
        "cos": np.cos(x),
        "tanh": np.tanh(x),
        "sqrt": np.sqrt(y),
        "rsqrt": 1 / np.sqrt(y),
        "pow": y**x,
        "divide": x / y,
    }


def _case(name: str, inputs: list[np.ndarray], rows: Rows, ulp: dict[str, float]) -> Case:
    names = "x y" if len(inputs) == 2 else "x"
    return case("math.metal", name, names, inputs, rows, inputs[0].size, ulp=ulp)


def _exact() -> Case:
    rng = np.random.default_rng(21)
    a = rng.uniform(-9, 9, N).astype(np.float32)
    b = rng.uniform(0.1, 4, N).astype(np.float32)
    a[:9] = [0, -0.5, 0.5, 1.5, -2.5, 3, -3, 0.75, 100]
    b[:9] = [1, 0.5, 0.5, 2, 2.5, 3, 1, 0.75, 4]
    f32 = np.float32
    whole = np.trunc(a)
    mantissa, exponent = np.frexp(a)
    rounded = np.copysign(np.floor(np.abs(a) + f32(0.5)), a)
    rows = {
        "floor": np.floor(a),
        "ceil": np.ceil(a),
        "trunc": whole,
        "rint": np.rint(a),
        "round": rounded,
        "fabs": np.abs(a),
        "sign": np.sign(a),
        "fract": np.minimum(a - np.floor(a), np.nextafter(f32(1), f32(0))),
        "copysign": np.copysign(b, a),
        "fdim": np.where(a > b, a - b, 0),
        "fmin": np.minimum(a, b),
        "fmax": np.maximum(a, b),
        "min": np.minimum(a, b),
        "max": np.maximum(a, b),
        "clamp": np.clip(a, -1, 1),
        "saturate": np.clip(a, 0, 1),
        "step": np.where(a < b, 0, 1),
        "fma": (a.astype(np.float64) * b + 1).astype(f32),
        "ldexp": a * 8,
        "min3": np.minimum(np.minimum(a, b), 1),
        "max3": np.maximum(np.maximum(a, b), 1),
        "median3": np.median(np.stack([a, b, np.ones_like(a)]), axis=0),
        "modf": a - whole,
        "modf whole": whole,
        "frexp": mantissa,
        "frexp exponent": exponent,
        "ilogb": np.frexp(b)[1] - 1,
        "nextafter": np.nextafter(a, b),
        "mix": a.astype(np.float64) + (b - a).astype(np.float64) * 0.5,
        "select": np.where(a < b, b, a),
    }
    return _case("math_exact", [a, b], rows, {"mix": 1})


def _special() -> Case:
    inf, nan = np.inf, np.nan
    a = np.array([inf, -inf, nan, 0.0, -1.0, 1e30, -1e30, 2.0] * 4, np.float32)
    with np.errstate(all="ignore"):
        x = a.astype(np.float64)
        grown = np.exp(x).astype(np.float32)
        rows = {
            "exp": grown,
            "fast::exp": grown,
            "tanh": np.tanh(x),
            "max with NaN": np.fmax(a, 1),
            "min with NaN": np.fmin(a, 1),
            "isnan, isinf, isfinite": np.isnan(a) + 2 * np.isinf(a) + 4 * np.isfinite(a),
            "times 0": a * np.float32(0),
            "fast::exp2": np.exp2(x).astype(np.float32),
            "sqrt": np.sqrt(a),
            "reciprocal": np.float32(1) / a,
        }
    ulp = dict.fromkeys(("exp", "fast::exp", "tanh", "fast::exp2"), 4.0)
    return _case("math_special", [a], rows, ulp | {"sqrt": 0.5})
