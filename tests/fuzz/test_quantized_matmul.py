"""Products with quantized matrices: random calls against float64, and calls that are wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers import quantized_matmul
from mlx_qlayers.formats import GLOBAL_UNIT
from mlx_qlayers.metal.quantized_matmul.qmv import PackedMatrix
from tests.fuzz import arrays
from tests.fuzz.packing import FORMAT, ROWS, packed
from tests.fuzz.target import fuzz
from tests.launchers import dequantize
from tests.numerics import IN_FLOAT32, assert_accurate, random, round_to, to64
from tests.oracles import product, sums
from tests.packed import codes, dequantize64, terms64

LAID_OUT = st.tuples(*[arrays.LAYOUTS] * 5)


PRODUCTS = st.builds(
    SimpleNamespace,
    seed=arrays.SEEDS,
    fmt=FORMAT,
    rows=ROWS,
    n=st.sampled_from([1, 2, 7, 8, 9, 33, 41, 64, 130]),
    groups=st.integers(1, 5),
    batch=st.sampled_from([()] * 6 + [(1,), (2,)]),
    transpose=st.booleans(),
    dtypes=st.one_of(
        arrays.DTYPES.map(lambda d: (d, d, d)),
        st.tuples(arrays.DTYPES, arrays.DTYPES, arrays.DTYPES),
    ),
    bias=st.booleans(),
    scaled=st.booleans(),
    values=arrays.VALUES,
    layouts=LAID_OUT,
    backend=arrays.BACKENDS,
    gradient=st.booleans(),
)


@fuzz(PRODUCTS)
def test_quantized_matmul(case: SimpleNamespace) -> None:
    rng, fmt = np.random.default_rng(case.seed), case.fmt
    x_dtype, packed_dtype, bias_dtype = map(arrays.dtype_of, case.dtypes)
    wide = case.groups * fmt.group_size
    inner, outer = (wide, case.n) if case.transpose else (case.n, wide)
    batch = case.batch if len(case.rows) > 1 or not case.batch else ()
    if batch and case.rows[:-1][-1:] not in (batch, (1,)):
        batch = (1,)
    w, scales, biases = packed(rng, (*batch, case.n, wide), fmt, packed_dtype, case.values)
    x = arrays.filled(rng, (*case.rows, inner), x_dtype, case.values)
    bias = random(rng, (outer,), bias_dtype) if case.bias else None
    operands = [
        arrays.laid_out(a, layout)
        for a, layout in zip((x, w, scales, biases, bias), case.layouts, strict=True)
    ]
    x, w, scales, biases, bias = operands
    factor = None
    # It is applied to sums, which hold no more without it.
    scaled = case.scaled and case.values not in ("huge", "special")
    if scaled and fmt.mode == "nvfp4" and not batch:
        factor = random(rng, (), mx.float32) + 1
    options = {**fmt._asdict(), "transpose": case.transpose, "global_scale": factor}
    dense, parts = dequantize64(w, scales, biases, fmt), terms64(w, scales, biases, fmt)
    if factor is not None:
        dense, parts = (a * (to64(factor) / GLOBAL_UNIT) for a in (dense, parts))
    if case.transpose:
        dense, parts = dense.swapaxes(-1, -2), parts.swapaxes(-1, -2)
    rows = to64(x).reshape(*x.shape[:-2], -1, inner)
    added = 0.0 if bias is None else to64(bias)
    out_dtype = x.dtype if biases is None else mx.result_type(x.dtype, scales.dtype)
    with np.errstate(all="ignore"):
        truth = rows @ dense + added
        terms = sums(rows, dense, parts) + np.abs(added)
        if fmt.mode != "affine":
            terms = _where_float32_holds(terms, rows, w, scales, case)
        # Kernels may unpack the weights, which float32 has to hold then.
        terms = np.where((parts < 1e37).all(axis=-2, keepdims=True), terms, np.inf)
        rough = product(rows.astype(np.float32), dense.astype(np.float32))
        if bias is not None and bias.dtype != out_dtype:  # added to what was rounded
            rough = to64(round_to(rough, out_dtype))
        rough = rough + np.float32(added)

    def call(x: mx.array, scales: mx.array, biases: Any = None, bias: Any = None) -> mx.array:
        return quantized_matmul(x, w, scales, biases, bias=bias, **options)

    # No kernel takes several matrices, or no row.
    backend = "auto" if batch or not x.size else case.backend
    with arrays.running(backend):
        y = call(x, scales, biases, bias)
        mx.eval(y)
    out = np.broadcast_shapes(case.rows[:-1], batch) + case.rows[-1:]
    expected = (truth, rough, terms)
    most = float(mx.finfo(out_dtype).max) * (1 - 2.0**-6) - float(np.max(np.abs(added)))
    arrays.compare(y, *(np.reshape(a, (*out, outer)) for a in expected), f"y of {case}", most)
    if case.gradient and not batch and case.values == "normal" and x.size:
        _check_gradients(case, rng, call, operands, dense, parts)


def _where_float32_holds(
    terms: np.ndarray, rows: np.ndarray, w: mx.array, scales: mx.array, case: SimpleNamespace
) -> np.ndarray:
    """The terms of sums of small floats; infinity where what some path multiplies first is."""
    fmt = case.fmt

    def magnitudes(w: mx.array, scales: mx.array) -> np.ndarray:
        terms = terms64(w, scales, None, fmt)
        return np.abs(rows) @ (terms.swapaxes(-1, -2) if case.transpose else terms)

    # Sums of a group may be multiplied by its scale behind.
    once = mx.full(scales.shape, 0x38 if fmt.mode == "nvfp4" else 127, mx.uint8)
    # Or x by the scale, as stock operators do it, whatever the code is then.
    units = mx.full(w.shape, 0x22222222 if fmt.bits == 4 else 0x38383838, mx.uint32)
    holds = (magnitudes(w, once) < 1e37) & (magnitudes(units, scales) < 1e37)
    return np.where(holds, terms, np.inf)


def _check_gradients(
    case: SimpleNamespace,
    rng: np.random.Generator,
    call: Any,
    operands: list[Any],
    dense: np.ndarray,
    parts: np.ndarray,
) -> None:
    x, _, scales, biases, bias = operands
    given = [x, scales, biases] if biases is not None else [x]
    names = ["x", "scales", "biases"][: len(given)]
    if bias is not None:
        given, names = [*given, bias], [*names, "bias"]

    def run(*varied: mx.array) -> list[mx.array]:
        by_name = {"scales": scales, "biases": biases, "bias": bias}
        by_name |= dict(zip(names, varied, strict=True))
        return [call(**by_name)]

    with arrays.running(case.backend):
        (y,), _ = mx.vjp(run, given, [mx.zeros(run(*given)[0].shape, run(*given)[0].dtype)])
        dy = random(rng, y.shape, y.dtype)
        _, found = mx.vjp(run, given, [dy])
        mx.eval(found)
    sides = to64(dy).reshape(-1, dense.shape[1]), to64(x).reshape(-1, dense.shape[0])
    exact = _gradients(case, operands, *sides, dense)
    rough = _gradients(case, operands, *(a.astype(np.float32) for a in (*sides, dense)))
    large = _gradients(case, operands, *map(np.abs, sides), parts)
    large["x"] = sums(sides[0], dense.T, parts.T)
    for name, gradient, array in zip(names, found, given, strict=True):
        truth, base, terms = (a[name].reshape(array.shape) for a in (exact, rough, large))
        if len(set(case.dtypes)) > 1:  # the cotangent was rounded to the product's dtype
            out = x.dtype if biases is None else mx.result_type(x.dtype, scales.dtype)
            terms = terms * (1 + IN_FLOAT32[out])
        assert gradient.dtype == array.dtype
        what = f"gradient of {name} of {case}"
        # One that half precision does not hold is infinite.
        arrays.compare(gradient, truth, base, terms.max(initial=0), what)


def _gradients(
    case: SimpleNamespace, operands: list[Any], up: np.ndarray, rows: np.ndarray, dense: np.ndarray
) -> dict[str, np.ndarray]:
    """Those of x, scales, biases and bias, in the dtype of what is given."""
    _, w, scales, biases, _ = operands
    found = {"x": product(up, dense.T), "bias": up.sum(0)}
    if biases is not None:
        d_w = product(rows.T, up).T if case.transpose else product(rows.T, up)
        groups = (*scales.shape, case.fmt.group_size)
        d_w, q = d_w.reshape(groups), codes(w, case.fmt.bits).reshape(groups)
        found |= {"scales": _added(d_w * q.astype(d_w.dtype)), "biases": _added(d_w)}
    return found


def _added(terms: np.ndarray) -> np.ndarray:
    """Sums over the last axis, one term after the other."""
    return np.cumsum(terms, axis=-1, dtype=terms.dtype)[..., -1]


@fuzz(
    st.builds(
        SimpleNamespace,
        seed=arrays.SEEDS,
        fmt=FORMAT,
        heights=st.lists(st.sampled_from([1, 2, 7, 8, 41]), min_size=1, max_size=3).map(tuple),
        groups=st.integers(1, 7),
        dtypes=st.tuples(arrays.DTYPES, arrays.DTYPES),
        layout=arrays.LAYOUTS.filter(lambda name: name.startswith(("dense", "behind"))),
        checked=st.booleans(),
    ),
    examples=10,
)
def test_dequantize(case: SimpleNamespace) -> None:
    rng, fmt, (dtype, kind) = (
        np.random.default_rng(case.seed),
        case.fmt,
        map(arrays.dtype_of, case.dtypes),
    )
    wide = case.groups * fmt.group_size
    matrices = [
        [arrays.laid_out(a, case.layout) for a in packed(rng, (n, wide), fmt, kind)]
        for n in case.heights
    ]
    with arrays.running("checked" if case.checked else "host"):
        y = dequantize([PackedMatrix(*m) for m in matrices], fmt, dtype)
    dense = np.concatenate([dequantize64(*m, fmt) for m in matrices])
    terms = max(terms64(*m, fmt).max() for m in matrices)
    assert_accurate(y, dense, round_to(dense, dtype), terms=terms, what=f"{case}")
