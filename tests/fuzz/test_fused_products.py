"""Products of one input: random calls against float64, and calls that are wrong."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.quantized_matmul.qmv import PackedMatrix
from mlx_qlayers.ops.fused_products import fused_products
from tests.fuzz.arrays import (
    BACKENDS,
    DTYPES,
    LAYOUTS,
    SEEDS,
    changes,
    compare,
    dtype_of,
    laid_out,
    running,
    same_answers,
    spoilt,
)
from tests.fuzz.packing import FORMAT, ROWS, Spoilt, packed
from tests.fuzz.target import fuzz
from tests.numerics import EPSILON, random, round_to, to64
from tests.oracles import product
from tests.packed import dequantize64, terms64


@dataclass(frozen=True)
class Fused:
    """A call of fused_products."""

    seed: int
    fmt: Format
    rows: tuple[int, ...]
    widths: tuple[int, ...]
    groups: int
    dtype: str
    norm: str
    gate: str | None
    residual: bool
    next: bool
    bias: tuple[bool, bool, bool]
    layouts: tuple[str, str]
    backend: str


@fuzz(
    st.builds(
        Fused,
        SEEDS,
        FORMAT,
        ROWS,
        st.lists(st.sampled_from([1, 8, 9, 41, 64]), min_size=1, max_size=4).map(tuple),
        st.integers(1, 5),
        DTYPES,
        st.sampled_from(["", "plain", "weighted"]),
        st.sampled_from([None, None, "silu", "gelu", "gelu_approx"]),
        st.booleans(),
        st.booleans(),
        st.tuples(*[st.booleans()] * 3),
        st.tuples(LAYOUTS, LAYOUTS),
        BACKENDS,
    )
)
def test_fused_products(case: Fused) -> None:
    from tests.ops.test_fused_products import ACTIVATIONS

    rng, fmt, dtype = np.random.default_rng(case.seed), case.fmt, dtype_of(case.dtype)
    k = case.groups * fmt.group_size
    widths = case.widths[:1] * 2 if case.gate else case.widths
    alone = len(widths) == 1
    x = laid_out(random(rng, (*case.rows, k), dtype), case.layouts[0])
    matrices = [
        PackedMatrix(*packed(rng, (n, k), fmt, dtype), random(rng, (n,), dtype) if b else None)
        for n, b in zip(widths, (*case.bias, False), strict=False)
    ]
    weight = random(rng, (k,), dtype) if case.norm == "weighted" else None
    residual = laid_out(random(rng, (*case.rows, widths[0]), dtype), case.layouts[1])
    options: dict[str, Any] = {
        "norm": (weight, 1e-5) if case.norm else None,
        "gate": case.gate,
        "residual": residual if case.residual and alone else None,
        "next_weight": random(rng, (widths[0],), dtype) if case.next and alone else None,
    }
    # No kernel takes so many matrices, or no row.
    backend = "ops" if len(widths) > 3 or not x.size else case.backend
    with running(backend):
        found = fused_products(x, matrices, **fmt._asdict(), **options)
        mx.eval(found)
    for precision in (np.float64, np.float32):
        rows = to64(x).astype(precision)
        if case.norm:
            rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + precision(1e-5))
            rows = rows * (1 if weight is None else to64(weight).astype(precision))
            if precision == np.float32:  # composed operations round the norm
                rows = to64(round_to(rows, dtype)).astype(precision)
        products, terms = [], []
        for m in matrices:
            dense, parts = dequantize64(*m[:3], fmt), terms64(*m[:3], fmt)
            bias = 0 if m.bias is None else to64(m.bias)
            y = product(rows.reshape(-1, k), dense.T.astype(precision)) + precision(bias)
            products.append(
                y.reshape(*case.rows, -1) if y.size else np.zeros((*case.rows, len(dense)))
            )
            terms.append(np.abs(rows) @ parts.T + np.abs(bias))
            if rows.size > 16 * k:  # many rows are a dense product, of a matrix that was rounded
                terms[-1] *= 1 + EPSILON[dtype] / EPSILON[mx.float32]
        if precision == np.float32:
            products = [to64(round_to(y, dtype)) for y in products]
        if case.gate:
            products = [ACTIVATIONS[case.gate](products[0]) * products[1]]
            terms = [terms[0] * terms[1]]
            # The activation is rounded, and the product.
            terms = [
                t + 2 * np.abs(y) * EPSILON[dtype] / EPSILON[mx.float32]
                for t, y in zip(terms, products, strict=True)
            ]
        if options["residual"] is not None:
            products = [products[0] + to64(residual)]
            terms = [terms[0] + np.abs(to64(residual))]
        if precision == np.float64:
            truths, larges = products, terms
    assert len(found) == len(truths) + 2 * (options["next_weight"] is not None)
    for y, truth, rough, large in zip(found, truths, products, larges, strict=False):
        assert y.dtype == dtype
        if x.size:
            compare(y, truth, rough, large, f"{case}")


FUSED_NAMES = ["x", "matrices", "group_size", "bits", "mode", "norm", "gate", "residual"]
FUSED_NAMES += ["tile_squares", "next_weight"]


@fuzz(st.builds(Spoilt, FORMAT, ROWS, st.booleans(), changes(FUSED_NAMES)), examples=40)
def test_fused_products_refuses(case: Spoilt) -> None:
    k = 2 * case.fmt.group_size
    m = PackedMatrix(*packed(np.random.default_rng(0), (8, k), case.fmt, mx.float32), None)
    arguments = {
        "x": mx.ones((*case.rows, k)),
        "matrices": [m],
        "norm": (mx.ones(k), 1e-5),
        **case.fmt._asdict(),
        "gate": None,
        "residual": None,
        "tile_squares": None,
        "next_weight": mx.ones(8),
    }
    if case.transpose:
        arguments |= {"matrices": [m, m], "gate": "silu", "next_weight": None}
    same_answers(partial(fused_products, **spoilt(arguments, case.changes)))
