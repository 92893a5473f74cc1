"""Random calls of products that share an input, with their norm, activation and residual."""

from collections.abc import Callable
from math import erf, pi, sqrt
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers.formats import Format
from mlx_qlayers.ops.fused_products import fused_products
from mlx_qlayers.options import Clipped, PackedMatrix
from tests.examples import arrays
from tests.examples.arrays import DTYPES, dtype_of
from tests.examples.calls import Call, Numbers, Random
from tests.examples.products import FP4, ROWS
from tests.numerics import IN_FLOAT32, ROUNDINGS, random, round_to, to64
from tests.oracles import product, sums
from tests.packed import FORMATS, dequantize64, random_packed, terms64

ACTIVATIONS = {
    "silu": lambda x: x * np.exp(-np.logaddexp(x.dtype.type(0), -x)),
    "gelu": lambda x: x * (1 + np.vectorize(erf)(x / sqrt(2)).astype(x.dtype)) / 2,
    "gelu_approx": lambda x: x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2,
}


def gated64(
    gate: str | Clipped,
    products: list[np.ndarray],
    terms: list[np.ndarray],
    rounded: Callable[[np.ndarray], np.ndarray],
    unit: float,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The gated activation of two products, and its terms, from theirs."""
    g, up = products
    if isinstance(gate, Clipped):
        kind = g.dtype.type
        g, up = np.minimum(g, kind(gate.limit)), np.clip(up, -kind(gate.limit), kind(gate.limit))
        up, activation = up + kind(gate.shift), g * np.exp(-np.logaddexp(kind(0), -gate.alpha * g))
    else:
        activation = ACTIVATIONS[gate](g)
    activation = rounded(activation)
    # No activation is steeper than 1.13.
    behind = 1.13 * terms[0] * np.abs(up) + np.abs(activation) * terms[1]
    # Both products are rounded, the activation, and what is given; none is larger than this.
    behind = behind + 4 * unit * np.abs(g * up)
    return [activation * up], [behind]


def fused64(
    x: np.ndarray,
    matrices: list[PackedMatrix],
    fmt: Format,
    dtype: mx.Dtype | None = None,
    norm: tuple[mx.array | None, float] | None = None,
    gate: str | None = None,
    residual: mx.array | None = None,
    loose: float = 1.0,
    unit: float = 0.0,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Products of one input in its precision, and the sums of their absolute terms.

    With a dtype all that single operations give is rounded to it. Terms of products are ``loose``
    times as many, and ``unit`` is that of a product's rounding, in float32's, where one is gated.
    """
    kind, k = x.dtype.type, x.shape[-1]

    def rounded(y: np.ndarray) -> np.ndarray:
        return y if dtype is None else to64(round_to(y, dtype)).astype(kind)

    if norm is not None:
        weight, epsilon = norm
        size = np.sqrt(product(x**2, np.ones((k, 1), kind)) / kind(k) + kind(epsilon))
        x = rounded(x / size * (kind(1) if weight is None else to64(weight).astype(kind)))
    products, terms = [], []
    for *parts, bias in matrices:
        dense, added = dequantize64(*parts, fmt), 0 if bias is None else to64(bias)
        products.append(rounded(product(x, dense.T.astype(kind)) + kind(1) * added))
        terms.append(loose * (sums(x, dense.T, terms64(*parts, fmt).T) + np.abs(added)))
    if gate is not None:
        products, terms = gated64(gate, products, terms, rounded, unit)
    if residual is not None:
        added = to64(residual).astype(kind).reshape(len(x), -1)
        products, terms = [rounded(products[0]) + added], [terms[0] + np.abs(added)]
    return products, terms


def _fused_products(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    fmt, dtype = case.fmt, dtype_of(case.dtype)
    k = case.groups * fmt.group_size
    widths = case.widths[:1] * 2 if case.gate else case.widths
    alone = len(widths) == 1
    # Activations of large numbers are these, or zero.
    small = 1 / 16 if case.gate else 1.0
    x, weight = (random(rng, shape, dtype, small) for shape in ((*case.rows, k), (k,)))
    residual, after = (random(rng, (*some, widths[0]), dtype) for some in (case.rows, ()))
    x, weight, residual = (
        arrays.laid_out(a, to) for a, to in zip((x, weight, residual), case.layouts, strict=False)
    )
    matrices = []
    for n, biased in zip(widths, (*case.bias, False), strict=False):
        bias = random(rng, (n,), dtype) if biased else None
        operands = *random_packed(rng, n, k, fmt, dtype), bias
        matrices.append(PackedMatrix(*(arrays.laid_out(a, case.layouts[3]) for a in operands)))
    norm = (weight if case.norm == "weighted" else None, 1e-5) if case.norm else None
    added = residual if case.residual and alone else None
    many = int(np.prod(case.rows)) > 16
    # On CUDA not those of halves; those of float32 would be in TF32.
    on_cuda = case.backend in ("cuda", "as cuda")
    dense = many and not (on_cuda and dtype != mx.float32)
    # The norm is a launch of its own, whose results are rounded.
    rounds = norm and (many or dtype == mx.float16 or case.backend in ("host", "checked"))

    def expected(n: Numbers, up: list[np.ndarray], stock: bool) -> tuple[Numbers, Numbers]:
        rows, exact = n["x"].reshape(-1, k), n["x"].dtype == np.float64
        around = {"norm": norm, "gate": case.gate, "residual": added}
        rounded = None
        if stock or dense or rounds:
            # The norm is MLX's, and the matrix is rounded of which many rows are a dense product.
            unit, rounded = IN_FLOAT32[dtype], None if exact else dtype
            loose = 1 + unit * len(widths) * (ROUNDINGS[dtype] * bool(norm) + dense)
            around |= {"loose": loose, "unit": unit}
        both = fused64(rows, matrices, fmt, rounded, **around)
        found, terms = (
            {str(i): a.reshape(*case.rows, -1) for i, a in enumerate(each)} for each in both
        )
        return found, terms

    return Call(
        fused_products,
        {"x": x, "residual": added, "deferred_weight": after if case.next and alone else None},
        {"matrices": matrices, "norm": norm, "gate": case.gate, **fmt._asdict()},
        (*case.rows, widths[0]),
        expected,
        by_kernel=len(widths) <= 3 and x.size > 0 and not (dense and on_cuda),
        dtypes=[dtype, dtype, mx.float32] if case.next and alone else [dtype],
    )


_THREE = {"widths": (41, 8, 9), "bias": (True, False, True), "norm": "weighted"}
FUSED_PRODUCTS = Random(
    {
        "fmt": FORMATS,
        "rows": ROWS,
        "widths": (
            (41,),
            st.lists(st.sampled_from([1, 8, 9, 41, 64]), min_size=1, max_size=4).map(tuple),
        ),
        "groups": [3, 1, 2, 4, 5],
        "dtype": ("float32", DTYPES),
        "norm": ["", "plain", "weighted"],
        "gate": [None, None, "silu", "gelu", "gelu_approx"],
        "residual": [False, True],
        "next": [False, True],
        "bias": ((False,) * 3, st.tuples(*[st.booleans()] * 3)),
    },
    _fused_products,
    [
        *(
            {"fmt": fmt, "rows": (1, rows), "dtype": dtype} | change
            for fmt, rows, dtype in (
                (Format(64, 4), 1, "bfloat16"),
                (Format(32, 3), 7, "float32"),
                (FP4, 1, "float16"),
                (Format(64, 4), 16, "float16"),
                (Format(32, 8, "mxfp8"), 5, "bfloat16"),
                (Format(64, 4), 21, "bfloat16"),
            )
            for change in (
                _THREE,
                {"gate": "gelu", "norm": "plain"},
                {"gate": "gelu_approx", "bias": (True,) * 3},
                {"gate": "silu", "norm": "weighted", "bias": (False, True, False)},
                {"residual": True, "next": True},
            )
        ),
        {"widths": (8,) * 4},
        {"rows": (0,), "gate": "gelu", "norm": "weighted"},
        {"rows": (2, 0), "residual": True, "norm": "plain", "next": True},
    ],
)
