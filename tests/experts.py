"""Stacked quantized matrices, and the products that rows have with those they choose."""

import mlx.core as mx
import numpy as np

from mlx_qlayers.formats import Format
from tests.numerics import assert_accurate, round_to, to64
from tests.oracles import product
from tests.packed import dequantize64, random_packed, terms64

Packed = tuple[mx.array, mx.array, mx.array | None]


def random_experts(
    rng: np.random.Generator,
    batch: tuple[int, ...],
    rows: int,
    columns: int,
    fmt: Format,
    dtype: mx.Dtype = mx.float32,
) -> Packed:
    """Random quantized matrices in the leading dimensions ``batch``."""
    count = int(np.prod(batch))
    w, scales, biases = random_packed(rng, count * rows, columns, fmt, dtype)
    shaped = [a.reshape(*batch, rows, -1) for a in (w, scales)]
    return *shaped, None if biases is None else biases.reshape(*batch, rows, -1)


def check_gathered(
    y: mx.array,
    x: mx.array,
    packed: Packed,
    fmt: Format,
    left: mx.array | None,
    right: mx.array | None,
    transpose: bool = True,
    factors: mx.array | None = None,
) -> None:
    """Hold gathered products against float64 and against float32 sums rounded once."""
    dense, terms = dequantize64(*packed, fmt), terms64(*packed, fmt)
    if factors is not None:
        dense, terms = (a * to64(factors)[:, None, None] / (448 * 6) for a in (dense, terms))
    left = np.arange(np.prod(x.shape[:-2])).reshape(x.shape[:-2]) if left is None else left
    right = (
        np.arange(np.prod(dense.shape[:-2])).reshape(dense.shape[:-2]) if right is None else right
    )
    left, right = np.broadcast_arrays(np.array(left).astype(int), np.array(right).astype(int))
    rows = to64(x).reshape(-1, *x.shape[-2:])[left]
    dense, terms = (_flat(a)[right] for a in (dense, terms))
    if transpose:
        dense, terms = dense.swapaxes(-1, -2), terms.swapaxes(-1, -2)
    rounded = product(rows.astype(np.float32), dense.astype(np.float32))
    terms = np.abs(rows) @ terms
    assert_accurate(y, rows @ dense, round_to(rounded, y.dtype), terms=terms.max(initial=0))


def _flat(matrices: np.ndarray) -> np.ndarray:
    return matrices.reshape(-1, *matrices.shape[-2:])
