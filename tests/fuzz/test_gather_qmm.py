"""Gathered products: random calls against float64, and calls that are wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers.ops.gather_qmm import gather_qmm
from tests.fuzz import arrays
from tests.fuzz.packing import FORMAT, packed
from tests.fuzz.target import fuzz
from tests.numerics import assert_accurate, random, round_to, to64
from tests.oracles import product, sums
from tests.packed import dequantize64, terms64

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


@fuzz(
    st.builds(
        SimpleNamespace,
        seed=arrays.SEEDS,
        fmt=FORMAT,
        shapes=st.sampled_from(GATHERED),
        m=st.sampled_from([1, 1, 1, 2, 5]),
        n=st.sampled_from([1, 8, 33, 64]),
        groups=st.integers(1, 4),
        transpose=st.booleans(),
        dtype=arrays.DTYPES,
        index=st.sampled_from(["int32", "uint32", "int64", "uint8"]),
        sorted=st.booleans(),
        layouts=st.tuples(*[arrays.LAYOUTS] * 6),
        backend=arrays.BACKENDS,
        gradient=st.booleans(),
    )
)
def test_gather_qmm(case: SimpleNamespace) -> None:
    rng, fmt, dtype = np.random.default_rng(case.seed), case.fmt, arrays.dtype_of(case.dtype)
    lead, batch, left_shape, right_shape = case.shapes
    wide = case.groups * fmt.group_size
    inner = wide if case.transpose else case.n
    w, scales, biases = packed(rng, (*batch, case.n, wide), fmt, dtype)
    x = random(rng, (*lead, case.m, inner), dtype)
    blocks, matrices = int(np.prod(lead)), int(np.prod(batch))
    kind = arrays.dtype_of(case.index)
    left = None if left_shape is None else mx.array(rng.integers(0, blocks, left_shape), kind)
    right = None
    if right_shape is not None:
        chosen = rng.integers(0, matrices, right_shape)
        right = mx.array(
            np.sort(chosen, axis=None).reshape(chosen.shape) if case.sorted else chosen
        )
        right = right.astype(kind)
    x, w, scales, biases, left, right = (
        arrays.laid_out(a, layout)
        for a, layout in zip((x, w, scales, biases, left, right), case.layouts, strict=True)
    )
    # A broadcast view of sorted indices is sorted too.
    options: Any = {**fmt._asdict(), "transpose": case.transpose, "sorted_indices": case.sorted}
    at_left = np.arange(blocks).reshape(lead) if left is None else np.array(left).astype(int)
    at_right = np.arange(matrices).reshape(batch) if right is None else np.array(right).astype(int)
    at_left, at_right = np.broadcast_arrays(at_left, at_right)
    dense, parts = dequantize64(w, scales, biases, fmt), terms64(w, scales, biases, fmt)
    dense, parts = (a.reshape(-1, *a.shape[-2:]) for a in (dense, parts))
    if case.transpose:
        dense, parts = dense.swapaxes(-1, -2), parts.swapaxes(-1, -2)
    rows = to64(x).reshape(-1, *x.shape[-2:])

    def call(x: mx.array) -> mx.array:
        return gather_qmm(x, w, scales, biases, left, right, **options)

    # No kernel takes nothing.
    with arrays.running("auto" if 0 in at_left.shape else case.backend):
        y = call(x)
        mx.eval(y)
        dy = random(rng, y.shape, y.dtype)
        d_x = None
        if case.gradient:
            _, (d_x,) = mx.vjp(lambda x: [call(x)], [x], [dy])
            mx.eval(d_x)
    truth = rows[at_left] @ dense[at_right]
    terms = sums(rows[at_left], dense[at_right], parts[at_right])
    rough = product(rows[at_left].astype(np.float32), dense[at_right].astype(np.float32))
    arrays.compare(y, truth, rough, terms, f"y of {case}")
    if d_x is None:
        return
    up, back = to64(dy), dense[at_right].swapaxes(-1, -2)
    large = sums(up, back, parts[at_right].swapaxes(-1, -2))
    truth, rough, lost = np.zeros_like(rows), np.zeros(rows.shape, np.float32), np.zeros_like(rows)
    np.add.at(truth, at_left, up @ back)
    np.add.at(rough, at_left, product(up.astype(np.float32), back.astype(np.float32)))
    np.add.at(lost, at_left, large)
    truth, rounded = truth.reshape(x.shape), round_to(rough.reshape(x.shape), d_x.dtype)
    what, most = f"gradient of x of {case}", lost.max(initial=0)
    assert_accurate(d_x, truth, rounded, terms=most, what=what)
