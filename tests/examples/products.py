"""Random products with quantized matrices, and their results in float64."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers.formats import Format
from mlx_qlayers.ops.gather_qmm import gather_qmm
from mlx_qlayers.ops.linalg import subtract_product
from mlx_qlayers.ops.quantized_matmul import quantized_matmul
from tests.examples import arrays
from tests.examples.arrays import DTYPES, dtype_of, filled
from tests.examples.calls import BACKENDS, Call, Numbers, Random
from tests.numerics import IN_FLOAT32, random, round_to, to64
from tests.oracles import product, summed, sums
from tests.packed import FORMATS, codes, dequantize64, terms64

ROWS = [(7,), (), (1,), (1,), (0,), (2,), (3, 1), (2, 5), (16,), (17,), (1, 40)]
# The unit of a global scale: the largest number of E4M3 times that of E2M1.
GLOBAL_UNIT = 448 * 6
SMALL, FP4 = Format(32, 4), Format(16, 4, "nvfp4")


def packed(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    fmt: Format,
    dtype: mx.Dtype,
    values: str = "normal",
) -> tuple[mx.array, mx.array, mx.array | None]:
    """A matrix of any codes, (..., rows, columns), with scales and biases of a kind."""
    *leading, columns = shape
    words = rng.integers(0, 2**32, (*leading, columns * fmt.bits // 32), np.uint32)
    groups = (*leading, columns // fmt.group_size)
    if fmt.mode == "affine":
        kind = values if values != "special" else "normal"
        return mx.array(words), *(filled(rng, groups, dtype, kind) for _ in range(2))
    if fmt.bits == 8:  # 0x7f is no number in E4M3
        parts = words.view(np.uint8)
        parts[parts & 0x7F == 0x7F] = 0x38
    least, most = (0, 0x7E) if fmt.mode == "nvfp4" else (110, 131)
    return mx.array(words), mx.array(rng.integers(least, most, groups, np.uint8)), None


def _quantized_matmul(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    fmt, kinds = case.fmt, [dtype_of(d) for d in case.dtypes]
    wide = case.groups * fmt.group_size
    inner, outer = (wide, case.n) if case.transpose else (case.n, wide)
    batch = case.batch if len(case.rows) > 1 or not case.batch else ()
    if batch and case.rows[:-1][-1:] not in (batch, (1,)):
        batch = (1,)
    names = "x", "w", "scales", "biases", "bias"
    x = filled(rng, (*case.rows, inner), kinds[0], case.values)
    parts = packed(rng, (*batch, case.n, wide), fmt, kinds[1], case.values)
    bias = random(rng, (outer,), kinds[2]) if case.bias else None
    given = arrays.placed(names, (x, *parts, bias), case.layouts)
    w, scales, biases = (given[name] for name in names[1:4])
    # It is applied to sums, which hold no more without it.
    scaled = case.scaled and case.values not in ("huge", "special")
    scaled = scaled and fmt.mode == "nvfp4" and not batch
    given["global_scale"] = factor = random(rng, ()) + 1 if scaled else None
    dense, large = dequantize64(w, scales, biases, fmt), terms64(w, scales, biases, fmt)
    if factor is not None:
        dense, large = (a * (to64(factor) / GLOBAL_UNIT) for a in (dense, large))
    if case.transpose:
        dense, large = dense.swapaxes(-1, -2), large.swapaxes(-1, -2)
    dtype = kinds[0] if biases is None else mx.result_type(kinds[0], kinds[1])
    out = (*np.broadcast_shapes(case.rows[:-1], batch), *case.rows[-1:], outer)

    def expected(n: Numbers, up: list[np.ndarray], _: bool) -> tuple[Numbers, Numbers]:
        kind, bias = n["x"].dtype, n.get("bias", np.zeros(1))
        lead = case.rows[:-1] if batch else ()
        rows, matrix = n["x"].reshape(*lead, -1, inner), dense.astype(kind)
        y = product(rows, matrix)
        if kind == np.float32 and "bias" in n and kinds[2] != dtype:  # added to what was rounded
            y = to64(round_to(y, dtype)).astype(kind)
        found = {"0": (y + bias).reshape(out)}
        if up:
            dy = up[0].reshape(-1, outer)
            of = _gradients(case, dy, rows, matrix, w, scales, biases)
            found |= {n: a.reshape(given[n].shape) for n, a in of.items() if given[n] is not None}
        if kind == np.float32:
            return found, {}
        terms = sums(rows, dense, large) + np.abs(bias)
        if fmt.mode != "affine":
            terms = _where_float32_holds(terms, rows, w, scales, case)
        # Kernels may unpack the weights, which float32 has to hold then; so must the bias's sum.
        terms = np.where((large < 1e37).all(axis=-2, keepdims=True), terms, np.inf)
        most = float(mx.finfo(dtype).max) * (1 - 2.0**-6) - np.abs(bias).max()
        terms = {"0": np.where(np.abs(y) < most, terms, np.inf).reshape(out)}
        if up:
            of = _gradients(case, np.abs(dy), np.abs(rows), large, w, scales, biases)
            of["x"] = sums(dy, dense.T, large.T)
            # The cotangent was rounded to the product's dtype.
            mixed = 1 + IN_FLOAT32[dtype] * (len(set(case.dtypes)) > 1)
            terms |= {name: a.max(initial=0) * mixed for name, a in of.items()}
        return found, terms

    differentiated = case.gradient and not batch and case.values == "normal" and x.size
    return Call(
        quantized_matmul,
        given,
        fmt._asdict() | {"transpose": case.transpose},
        out,
        expected,
        [n for n in ("x", "scales", "biases", "bias") if n != "scales" or biases is not None]
        if differentiated
        else (),
        not batch and x.size * case.n > 0,
        [dtype if bias is None else mx.result_type(dtype, kinds[2])],
    )


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


def _gradients(
    case: SimpleNamespace,
    up: np.ndarray,
    rows: np.ndarray,
    dense: np.ndarray,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
) -> Numbers:
    """Those of x, scales, biases and bias, in the dtype of what is given."""
    found = {"x": product(up, dense.T), "bias": up.sum(0)}
    if biases is not None:
        d_w = product(rows.T, up).T if case.transpose else product(rows.T, up)
        found |= dict(zip(("scales", "biases"), by_groups(d_w, w, case.fmt), strict=True))
    return found


def by_groups(d_w: np.ndarray, w: mx.array, fmt: Format) -> list[np.ndarray]:
    """The gradients of scales and biases, from those of the numbers that they stand for."""
    d_w = d_w.reshape(*d_w.shape[:-1], -1, fmt.group_size)
    q = codes(w, fmt.bits).reshape(d_w.shape)
    return [summed(a) for a in (d_w * q.astype(d_w.dtype), d_w)]


# Few rows: GPUs unpack codes one by one or in pairs, Apple's from runs within words, too.
FEW = [(fmt, "float32", m) for fmt in (FP4, Format(32, 3)) for m in (1, 3, 16)]
FEW += [(Format(32, 8, "mxfp8"), "float32", 1), (Format(32, 4, "mxfp4"), "float16", 1)]
FEW += [(fmt, "bfloat16", 1) for fmt in (Format(64, 8), Format(32, 8, "mxfp8"))]
FEW += [(fmt, "float16", 8) for fmt in (FP4, Format(32, 4, "mxfp4"), Format(32, 8, "mxfp8"))]
FEW += [(Format(32, bits), "bfloat16", 8) for bits in (2, 3, 5, 6)]
FEW += [(Format(64, bits), "bfloat16", 8) for bits in (3, 5, 8)]
_MIXED = [("float16", "float32", "float16"), ("float16", "float16", "float32")]
_MIXED += [("float32", "float16", "float16"), ("float32", "bfloat16", "float16")]
QUANTIZED_MATMUL = Random(
    {
        "fmt": FORMATS,
        "rows": ROWS,
        "n": [41, 1, 2, 7, 8, 9, 33, 64, 130],
        "groups": [3, 1, 2, 4, 5],
        "batch": [()] * 6 + [(1,), (2,)],
        "transpose": [True, False],
        "dtypes": (
            ("float32",) * 3,
            st.one_of(DTYPES.map(lambda d: (d, d, d)), st.tuples(DTYPES, DTYPES, DTYPES)),
        ),
        "bias": [False, True],
        "scaled": [False, True],
        "values": ("normal", arrays.VALUES),
        "gradient": [False, True],
    },
    _quantized_matmul,
    [
        {"fmt": SMALL, "n": 24, "groups": 2, "rows": (), "bias": True},
        {"fmt": SMALL, "n": 24, "groups": 2, "rows": (0,)},
        *({"fmt": Format(64, 4), "n": 24, "rows": (m,), "values": "special"} for m in (6, 40)),
        {"fmt": SMALL, "n": 24, "groups": 2, "rows": (2, 0)},
        # MLX divides by the number of rows of a matrix on a CPU, which ends the process.
        *({"fmt": fmt, "n": 0} for fmt in (SMALL, FP4, *FORMATS[-3:-1])),
        {"fmt": SMALL, "n": 24, "groups": 2, "rows": (1, 1, 5), "bias": True, "gradient": True},
        {"fmt": SMALL, "n": 16, "rows": (2, 5), "batch": (2,), "bias": True},
        *({"fmt": SMALL, "n": 16, "rows": (2,), "dtypes": d, "bias": True} for d in _MIXED),
        *(
            {"fmt": fmt, "rows": (m,), "dtypes": (d,) * 3, "groups": 1 + m // 8}
            for fmt, d, m in FEW
        ),
        *(
            {"fmt": FP4, "n": 48, "transpose": t, "scaled": True, "bias": True, "dtypes": (d,) * 3}
            for t, d in ((True, "float32"), (False, "bfloat16"))
        ),
        *(
            {"fmt": Format(64, 4), "n": 72, "rows": (m,), "bias": True, "transpose": t}
            | {"dtypes": ("float16",) * 3, "gradient": m == 33}
            for m in (17, 33, 64, 129)
            for t in (True, False)
        ),
    ],
)

# Leading dimensions of x and of the matrices, and the shapes of both indices.
GATHERED = [
    ((6, 1), (5,), None, (6, 2)),
    ((2, 3, 1), (5,), None, (2, 3, 2)),
    ((7,), (5,), None, (7,)),
    ((), (5,), None, (4,)),
    ((6,), (5,), (3, 1), (1, 4)),
    ((6,), (5,), (5,), None),
    ((5,), (5,), None, None),
    ((2, 1), (2, 3), None, None),
    ((4,), (), None, (4,)),
    ((3,), (1,), (0,), (0,)),
    ((3,), (2, 2), (9,), (1,)),
    ((1, 3), (4,), (2, 1, 1), (2, 3)),
    ((40,), (3,), None, (40,)),
]
# Choices in order: each of one block of x, of any block, and two of each.
SORTED = [((10,), (6,), None, (10,)), ((10,), (6,), (10,), (10,)), ((5, 1), (6,), None, (5, 2))]


def _gather_qmm(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    fmt, kinds, kind = case.fmt, [dtype_of(d) for d in case.dtypes], dtype_of(case.index)
    lead, batch, left, right = case.shapes
    wide = case.groups * fmt.group_size
    inner, outer = (wide, case.n) if case.transpose else (case.n, wide)
    blocks, matrices = int(np.prod(lead)), int(np.prod(batch))
    indices: list[Any] = [
        None if shape is None else rng.integers(0, count, shape)
        for shape, count in ((left, blocks), (right, matrices))
    ]
    if case.sorted and right is not None:  # many choose the first, and few or none the last
        chosen = (rng.random(right) ** 3 * matrices).astype(int)
        indices[1] = np.sort(chosen, axis=None).reshape(right)
    indices = [None if i is None else mx.array(i, kind) for i in indices]
    x = random(rng, (*lead, case.m, inner), kinds[0])
    parts = packed(rng, (*batch, case.n, wide), fmt, kinds[1])
    scaled = case.scaled and fmt.mode == "nvfp4"
    factors = mx.abs(random(rng, (matrices,))) + 1 if scaled else None
    names = "x", "w", "scales", "biases", "lhs_indices", "rhs_indices", "global_scale"
    given = arrays.placed(names, (x, *parts, *indices, factors), case.layouts)
    matrix = [given[name] for name in names[1:4]]
    at = [
        np.arange(count).reshape(shape) if i is None else np.array(i).astype(int)
        for i, count, shape in zip(
            (given["lhs_indices"], given["rhs_indices"]),
            (blocks, matrices),
            (lead, batch),
            strict=True,
        )
    ]
    at_left, at_right = np.broadcast_arrays(*at)
    unit = 1.0 if factors is None else to64(given["global_scale"])[:, None, None] / GLOBAL_UNIT
    dense, large = (
        (a.reshape(matrices, *a.shape[-2:]) * unit)[at_right]
        for a in (dequantize64(*matrix, fmt), terms64(*matrix, fmt))
    )
    if case.transpose:
        dense, large = dense.swapaxes(-1, -2), large.swapaxes(-1, -2)
    dtype = kinds[0] if matrix[2] is None else mx.result_type(*kinds)

    # MLX has no gradients of scales in a product that is not transposed.
    of_all = matrix[2] is not None and (case.transpose or case.backend in BACKENDS)

    def of_scales(rows: np.ndarray, up: np.ndarray) -> list[np.ndarray]:
        """The gradients of scales and biases: sums over all that chose each, then over groups."""
        rows, up = (rows, up) if case.transpose else (up, rows)
        each = product(up.swapaxes(-1, -2), rows)
        d_w = np.zeros((matrices, *each.shape[-2:]), each.dtype)
        np.add.at(d_w, at_right, each)  # one after the other
        found = by_groups(d_w, given["w"].reshape(*d_w.shape[:-1], -1), fmt)
        return [a.reshape(given["scales"].shape) for a in found]

    def expected(n: Numbers, up: list[np.ndarray], _: bool) -> tuple[Numbers, Numbers]:
        kind = n["x"].dtype
        rows, chosen = n["x"].reshape(blocks, case.m, inner)[at_left], dense.astype(kind)
        found, terms = {"0": product(rows, chosen)}, {}
        exact = kind == np.float64
        if exact:
            terms["0"] = sums(rows, dense, large)
        if up:
            back, total = chosen.swapaxes(-1, -2), np.zeros((blocks, case.m, inner), kind)
            np.add.at(total, at_left, product(up[0], back))
            found["x"] = total.reshape(n["x"].shape)
            if exact:
                lost = np.zeros_like(total)
                np.add.at(lost, at_left, sums(up[0], back, large.swapaxes(-1, -2)))
                # The cotangent was rounded to the product's dtype.
                terms["x"] = lost.max(initial=0) * (1 + IN_FLOAT32[dtype] * (len({*kinds}) > 1))
            if of_all:
                found |= dict(zip(names[2:4], of_scales(rows, up[0]), strict=True))
                lost = of_scales(np.abs(rows), np.abs(up[0])) if exact else ()
                terms |= {n: a.max(initial=0) for n, a in zip(names[2:4], lost, strict=False)}
        return found, terms

    return Call(
        gather_qmm,
        given,
        # A broadcast view of sorted indices is sorted too.
        fmt._asdict() | {"transpose": case.transpose, "sorted_indices": case.sorted},
        (*at_left.shape, case.m, outer),
        expected,
        ["x", *names[2:4] * of_all] if case.gradient else (),
        0 not in (*at_left.shape, case.n),
        [dtype],
    )


GATHER_QMM = Random(
    {
        "fmt": FORMATS,
        "shapes": GATHERED,
        "m": [1, 1, 1, 2, 5],
        "n": [33, 1, 8, 64],
        "groups": range(1, 5),
        "transpose": [True, False],
        "dtypes": (("float32",) * 2, DTYPES.map(lambda d: (d, d)) | st.tuples(DTYPES, DTYPES)),
        "scaled": [False, True],
        "index": ["uint32", "int32", "int64", "uint8"],
        "sorted": [False, True],
        "gradient": [False, True],
    },
    _gather_qmm,
    [
        *(
            {"fmt": SMALL, "shapes": shapes, "m": m, "n": 40, "groups": 2, "transpose": i % 2 == 0}
            | {"index": ("int32", "int64", "uint8")[i % 3], "gradient": True}
            for i, (shapes, m) in enumerate(
                zip(GATHERED, (1, 1, 1, 3, 2, 1, 2, 2) * 2, strict=False)
            )
        ),
        {"fmt": SMALL, "shapes": ((2, 1), (5,), None, (2, 16)), "dtypes": ("bfloat16",) * 2}
        | {"gradient": True, "groups": 2},
        {"fmt": Format(64, 4), "shapes": GATHERED[-1], "dtypes": ("float16",) * 2, "sorted": True},
        *(
            {"fmt": SMALL, "shapes": shapes, "m": 2, "n": 64, "sorted": True, "gradient": True}
            for shapes in SORTED
        ),
        *(
            {"fmt": SMALL, "shapes": GATHERED[0], "dtypes": d, "groups": 2, "gradient": True}
            for d in (("float16", "bfloat16"), ("float16", "float32"), ("float32", "bfloat16"))
        ),
        {"fmt": FP4, "shapes": GATHERED[0], "dtypes": ("bfloat16",) * 2, "scaled": True},
        {"fmt": FP4, "shapes": GATHERED[1], "scaled": True, "transpose": False},
        {"fmt": FP4, "shapes": SORTED[0], "scaled": True, "sorted": True},
        {"fmt": FP4, "shapes": ((5,), (6,), None, (5,)), "scaled": True, "sorted": True}
        | {"transpose": False},
        *({"fmt": SMALL, "shapes": GATHERED[2], "n": 0, "transpose": t} for t in (True, False)),
        {"fmt": SMALL, "shapes": ((2,), (0,), (0,), (0,)), "n": 40},
    ],
)


_SIZE = st.sampled_from([*range(8), 31, 32, 33, 64, 70])


def _subtract_product(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    n, m, k = case.sizes
    b, a, x = case.leading
    names, shapes = "bax", ((*b, n, m), (*a, n, k), (*x, k, m))
    given = arrays.placed(names, [random(rng, shape) for shape in shapes], case.layouts)

    def expected(n: Numbers, up: list[np.ndarray], _: bool) -> tuple[Numbers, Numbers]:
        terms = sums(-n["a"], n["x"], np.abs(n["x"]), n["b"])
        return {"0": product(-n["a"], n["x"], n["b"])}, {"0": terms}

    lead = np.broadcast_shapes(b, a, x)
    full = np.prod(lead) * n * m * k > 0
    return Call(subtract_product, given, {}, (*lead, n, m), expected, (), full)


SUBTRACT_PRODUCT = Random(
    {
        "sizes": ((7, 9, 5), st.tuples(*[_SIZE] * 3)),
        "leading": [((),) * 3, ((3, 1), (2,), ()), ((2,), (), (2,)), ((), (3,), ())],
    },
    _subtract_product,
    [{"sizes": (41, 135, 37), "leading": ((3, 1), (2,), ())}],
)
