"""Products of one input: random calls against float64, and calls that are wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers.metal.quantized_matmul.qmv import PackedMatrix
from mlx_qlayers.ops.fused_products import fused_products
from tests.fuzz import arrays
from tests.fuzz.packing import FORMAT, ROWS, packed
from tests.fuzz.target import fuzz
from tests.numerics import IN_FLOAT32, ROUNDINGS, random, round_to, to64
from tests.ops.test_fused_products import ACTIVATIONS
from tests.oracles import product, sums
from tests.packed import dequantize64, terms64


@fuzz(
    st.builds(
        SimpleNamespace,
        seed=arrays.SEEDS,
        fmt=FORMAT,
        rows=ROWS,
        widths=st.lists(st.sampled_from([1, 8, 9, 41, 64]), min_size=1, max_size=4).map(tuple),
        groups=st.integers(1, 5),
        dtype=arrays.DTYPES,
        norm=st.sampled_from(["", "plain", "weighted"]),
        gate=st.sampled_from([None, None, "silu", "gelu", "gelu_approx"]),
        residual=st.booleans(),
        next=st.booleans(),
        bias=st.tuples(*[st.booleans()] * 3),
        layouts=st.tuples(*[arrays.LAYOUTS] * 4),
        backend=arrays.BACKENDS,
    )
)
def test_fused_products(case: SimpleNamespace) -> None:
    rng, fmt, dtype = np.random.default_rng(case.seed), case.fmt, arrays.dtype_of(case.dtype)
    k = case.groups * fmt.group_size
    widths = case.widths[:1] * 2 if case.gate else case.widths
    alone = len(widths) == 1
    x = arrays.laid_out(random(rng, (*case.rows, k), dtype), case.layouts[0])
    matrices = []
    for n, biased in zip(widths, (*case.bias, False), strict=False):
        operands = *packed(rng, (n, k), fmt, dtype), random(rng, (n,), dtype) if biased else None
        matrices.append(PackedMatrix(*(arrays.laid_out(a, case.layouts[2]) for a in operands)))
    weight = random(rng, (k,), dtype) if case.norm == "weighted" else None
    weight = arrays.laid_out(weight, case.layouts[3])
    residual = arrays.laid_out(random(rng, (*case.rows, widths[0]), dtype), case.layouts[1])
    options: dict[str, Any] = {
        "norm": (weight, 1e-5) if case.norm else None,
        "gate": case.gate,
        "residual": residual if case.residual and alone else None,
        "next_weight": random(rng, (widths[0],), dtype) if case.next and alone else None,
    }
    # No kernel takes so many matrices, or no row.
    backend = "reference" if len(widths) > 3 or not x.size else case.backend
    with arrays.running(backend):
        found = fused_products(x, matrices, **fmt._asdict(), **options)
        mx.eval(found)
    if not x.size:
        assert found[0].shape[:-1] == case.rows
        return
    given = case, x, matrices, weight, options["residual"]
    truths, larges = _expected(*given, np.float64)
    roughs, _ = _expected(*given, np.float32)
    assert len(found) == len(truths) + 2 * (options["next_weight"] is not None)
    for y, truth, rough, large in zip(found, truths, roughs, larges, strict=False):
        assert y.dtype == dtype
        arrays.compare(y, truth, rough, large, f"{case}")


def _expected(
    case: SimpleNamespace,
    x: mx.array,
    matrices: list[PackedMatrix],
    weight: mx.array | None,
    residual: mx.array | None,
    precision: type,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The results and their absolute terms; in float32 rounded as single operations round them."""
    exact, k = precision == np.float64, x.shape[-1]

    def rounded(y: np.ndarray) -> np.ndarray:
        return y if exact else to64(round_to(y, x.dtype)).astype(precision)

    rows = to64(x).astype(precision).reshape(-1, k)
    if case.norm:
        squares = product(rows**2, np.ones((k, 1), precision))
        rows = rows / np.sqrt(squares / precision(k) + precision(1e-5))
        rows = rounded(rows * (1 if weight is None else to64(weight).astype(precision)))
    products, terms = [], []
    for m in matrices:
        dense, bias = dequantize64(*m[:3], case.fmt), 0 if m.bias is None else to64(m.bias)
        products.append(rounded(product(rows, dense.T.astype(precision)) + precision(bias)))
        terms.append(sums(rows, dense.T, terms64(*m[:3], case.fmt).T) + np.abs(bias))
    # The norm is MLX's, and the matrix is rounded of which many rows are a dense product.
    unit = IN_FLOAT32[x.dtype]
    roundings = ROUNDINGS[x.dtype] * bool(case.norm) + (len(rows) > 16)
    loose = 1 + len(products) * unit * roundings
    terms = [t * loose for t in terms]
    if case.gate:
        activation = rounded(ACTIVATIONS[case.gate](products[0]))
        # Both products are rounded, the activation, and what is given; none is larger than this.
        large = np.abs(products[0] * products[1])
        # No activation is steeper than 1.13.
        behind = 1.13 * terms[0] * np.abs(products[1]) + np.abs(activation) * terms[1]
        products, terms = [activation * products[1]], [behind + 4 * large * unit]
    if residual is not None:
        given = to64(residual).reshape(len(rows), -1)
        products, terms = [rounded(products[0]) + given], [terms[0] + np.abs(given)]
    found = [
        [a.reshape(*x.shape[:-1], a.shape[-1]) for a in operands] for operands in (products, terms)
    ]
    return found[0], found[1]
