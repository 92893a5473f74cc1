"""Deferred norms between products: one product gives the squares, the next divides by them."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.metal.quantized_matmul.qmv_config import qmv_config
from tests.examples.fused import fused64
from tests.launchers import matrix, persistent, qmv
from tests.metal.quantized_matmul.test_qmv import AFFINE, packed_matrices
from tests.numerics import assert_accurate, random, round_to, to64
from tests.pairwise import in_turn, pairwise

# Tiles at the edge of a matrix, whole threadgroups beyond it, more tiles of each.
GIVEN = [
    (200, None),
    (24, matrix(16, fragments=2, tiles=4, simds_k=1)),
    (72, persistent(16, fragments=2, tiles=2, simds_k=3)),
]
TAKEN = [
    ([41, 8, 24], None, None),
    ([41, 41], "silu", None),
    ([41, 8, 24], None, persistent(16, fragments=2, tiles=3, simds_k=3)),
    ([41, 41], "silu", persistent(16, fragments=2, tiles=4, simds_k=3, ahead=2)),
]


def gives_squares(rows: int, n: int, config: Any, dtype: mx.Dtype = mx.bfloat16) -> None:
    """The result is that of a launch without; times the weight and its squares are right."""
    rng = np.random.default_rng(rows)
    x, residual = random(rng, (rows, 128), dtype), random(rng, (rows, n), dtype)
    (matrix,), weight = packed_matrices(rng, [n], 128, dtype), random(rng, (n,), dtype)
    config = config or qmv_config("cuda", rows, n, 128, dtype, AFFINE, "residual")
    given = (x, [matrix], AFFINE, config)
    y, scaled, squares = qmv(*given, residual=residual, deferred_weight=weight)
    (plain,) = qmv(*given, residual=residual)
    assert mx.array_equal(y, plain)
    both = to64(y) * to64(weight)
    assert_accurate(scaled, both, round_to(both, dtype))
    tiles = np.pad(to64(y) ** 2, [(0, 0), (0, -n % 16)]).reshape(rows, -1, 16).sum(-1)
    assert_accurate(squares, tiles, round_to(tiles, mx.float32), terms=tiles.max())


def takes_squares(
    rows: int,
    sizes: list[int],
    gate: str | None,
    config: Any = None,
    dtype: mx.Dtype = mx.bfloat16,
) -> None:
    """Products of normed rows, from the rows times the weight and the squares of tiles."""
    rng, k = np.random.default_rng(rows), 192
    before, weight = random(rng, (rows, k), dtype), random(rng, (k,), dtype)
    scaled = (before.astype(mx.float32) * weight.astype(mx.float32)).astype(dtype)
    squares = mx.array((to64(before) ** 2).reshape(rows, -1, 16).sum(-1).astype(np.float32))
    matrices = packed_matrices(rng, sizes, k, dtype)
    config = config or qmv_config("cuda", rows, sum(sizes), k, dtype, AFFINE)
    options = {"norm": (None, 1e-3), "partial_squares": squares, "gate": gate}
    found = qmv(scaled, matrices, AFFINE, config, **options)
    normed = to64(scaled) / np.sqrt((to64(before) ** 2).mean(-1, keepdims=True) + 1e-3)
    truth, terms = fused64(normed, matrices, AFFINE, gate=gate)
    for y, true, large in zip(found, truth, terms, strict=True):
        assert_accurate(y, true, round_to(true, dtype), terms=large.max())


@pytest.mark.parametrize(("given", "rows"), in_turn(pairwise(GIVEN), (1, 7, 16)), ids=str)
def test_squares_of_tiles(backend, given, rows):
    gives_squares(rows, *given)


@pytest.mark.parametrize(("taken", "rows"), in_turn(pairwise(TAKEN), (1, 5, 16)), ids=str)
def test_products_of_deferred_norms(backend, taken, rows):
    takes_squares(rows, *taken)


@pytest.mark.parametrize("rows", [1, 7])
def test_in_float16(backend, rows):
    gives_squares(rows, *GIVEN[0], mx.float16)
    takes_squares(rows, *TAKEN[0], dtype=mx.float16)
