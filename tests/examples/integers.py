"""Random products in 8-bit integers, and rows of quantized matrices, by float64."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.int8.launch import DEPTH
from mlx_qlayers.ops.embedding import quantized_rows
from mlx_qlayers.ops.int8_matmul import int8_matmul
from tests.examples.arrays import DTYPES, dtype_of, filled, placed
from tests.examples.calls import Call, Numbers, Random
from tests.examples.products import ROWS, packed
from tests.numerics import random, round_to, to64
from tests.oracles import product, summed, sums
from tests.packed import FORMATS, codes, dequantize64, terms64


def _int8_matmul(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    dtype, (n, k) = dtype_of(case.dtype), (case.n, case.k)
    names = "x", "w", "scales", "bias"
    operands = (
        filled(rng, (*case.rows, k), dtype, case.values),
        mx.array(rng.integers(-127, 128, (n, k)), mx.int8),
        mx.array(rng.uniform(0.01, 0.02, n), mx.float32),
        random(rng, (n,), dtype) if case.bias else None,
    )
    given = placed(names, operands, case.layouts)

    def expected(numbers: Numbers, up: list[np.ndarray], _: bool) -> tuple[Numbers, Numbers]:
        """Exact but for the rounding of rows, which is float32's here too, and the last one."""
        x, w, scales = (numbers[name].astype(np.float64) for name in names[:3])
        most = np.abs(x).max(-1, keepdims=True).astype(np.float32)
        inverse = np.where(most > 0, np.float32(127) / most, np.float32(0))
        rounded = np.rint((x * inverse).astype(np.float32)).astype(np.float64)
        y = rounded @ w.T * (most / np.float32(127)).astype(np.float64) * scales
        bias = numbers.get("bias", np.zeros(1))
        # Float32 has to hold the first products.
        large = np.abs(rounded) @ np.abs(w).T * most
        sure = np.where(large < 1e37, 2 * (np.abs(y) + np.abs(bias)), np.inf)
        found, terms = {"0": y + bias}, {"0": sure}
        if up:  # as without rounding
            scaled, dense = (up[0] * numbers["scales"]).reshape(-1, n), numbers["w"]
            found["x"] = product(scaled, dense).reshape(x.shape)
            terms["x"] = sums(scaled, dense, np.abs(dense)).max(initial=0)
        return found, terms

    return Call(
        int8_matmul,
        given,
        {},
        (*case.rows, n),
        expected,
        ["x"] if case.gradient and case.values == "normal" else (),
        # Of Apple's GPUs an M5 has it.
        dtype != mx.float32
        and k % DEPTH == 0
        and given["x"].size > 0
        and case.backend != "as metal",
    )


INT8_MATMUL = Random(
    {
        "rows": ROWS,
        "n": [41, 1, 8, 24, 150],
        "k": [64, 16, 32, 48, 272, 33],
        "dtype": ("float16", DTYPES),
        "bias": [False, True],
        "values": ["normal", "normal", "zeros", "special"],
        "gradient": [False, True],
    },
    _int8_matmul,
    [
        {"rows": (1,), "dtype": "bfloat16", "bias": True, "gradient": True},
        {"rows": (130,), "n": 150, "k": 272, "bias": True},
        {"rows": (17,), "n": 1, "k": 16, "dtype": "bfloat16"},
        *(
            {"rows": (40,), "n": 24, "k": 48, "values": v, "bias": True}
            for v in ("zeros", "special")
        ),
        {"dtype": "float32", "gradient": True},
        {"rows": (2, 5), "k": 33, "bias": True},
        {"rows": (0,)},
    ],
)


def _quantized_rows(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    fmt, dtype, kind = case.fmt, dtype_of(case.dtype), dtype_of(case.index)
    least = -case.n if kind in (mx.int32, mx.int64) else 0
    numbers = mx.array(rng.integers(least, case.n, case.shape), kind)
    parts = packed(rng, (case.n, case.groups * fmt.group_size), fmt, dtype)
    names = "numbers", "w", "scales", "biases"
    given = placed(names, (numbers, *parts), case.layouts)
    at, matrix = np.array(given["numbers"]).astype(int), [given[name] for name in names[1:]]

    def expected(n: Numbers, up: list[np.ndarray], stock: bool) -> tuple[Numbers, Numbers]:
        kind, (w, scales, biases) = n["scales"].dtype, matrix
        rows = dequantize64(w, scales, biases, fmt)[at]
        if stock and kind == np.float32 and biases is not None:  # rounded before the bias, too
            scaled = dequantize64(w, scales, mx.zeros_like(biases), fmt)[at]
            rows = rows - scaled + to64(round_to(scaled, dtype))
        found = {"0": rows.astype(kind)}
        terms = {"0": terms64(*matrix, fmt)[at]}
        if up:
            groups = up[0].reshape(*at.shape, -1, fmt.group_size)
            q = codes(given["w"], fmt.bits)[at].reshape(groups.shape).astype(kind)
            for name, each in (("scales", groups * q), ("biases", groups)):
                found[name], large = np.zeros(given[name].shape, kind), np.zeros(given[name].shape)
                np.add.at(found[name], at, summed(each))
                np.add.at(large, at, np.abs(each).sum(-1))
                terms[name] = large.max(initial=0) * (1 if dtype == mx.float32 else np.inf)
        return found, terms

    covered = "metal" not in case.backend and case.index in ("int32", "uint32") and numbers.size > 0
    affine = case.gradient and fmt.mode == "affine"
    return Call(
        quantized_rows,
        given,
        fmt._asdict(),
        (*case.shape, case.groups * fmt.group_size),
        expected,
        names[2:] if affine else (),
        covered,
        [mx.bfloat16 if fmt.mode != "affine" else dtype],
    )


QUANTIZED_ROWS = Random(
    {
        "fmt": FORMATS,
        "n": [41, 1, 8],
        "groups": [3, 1, 2],
        "shape": [(2, 5), (), (1,), (9,), (1, 8), (0,), (3, 1, 2)],
        "dtype": ("float32", DTYPES),
        "index": ["int32", "uint32", "int64", "uint8"],
        "gradient": [False, True],
    },
    _quantized_rows,
    [
        {"fmt": Format(64, 4), "dtype": "bfloat16"},
        {"fmt": Format(32, 3), "dtype": "float16", "index": "uint32", "shape": (1, 8), "groups": 6},
        {"fmt": Format(32, 4, "mxfp4"), "index": "uint32", "shape": (9,), "groups": 6},
        {"fmt": Format(64, 4), "dtype": "bfloat16", "shape": (1, 1), "groups": 80},
        {"fmt": Format(32, 4), "gradient": True},
        {"shape": ()},
        {"shape": (0,)},
    ],
)
