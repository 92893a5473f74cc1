"""Factorisations and solves: whole and ragged tiles, several blocks, batches."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_qlayers import linalg
from mlx_qlayers.ops.linalg import subtract_product

from . import Cases


def cases() -> Cases:
    for batch, n in ((3, 20), (2, 96), (1, 300)):
        yield f"linalg {batch} x {n}", partial(run, batch, n)


def run(batch: int, n: int) -> None:
    half = mx.random.normal((batch, n, n), key=mx.random.key(n))
    a = subtract_product(n * mx.eye(n), -half, half.swapaxes(1, 2))
    factor = linalg.cholesky(a)
    x = linalg.cho_solve(factor, mx.ones((n, 7)))
    residual = subtract_product(mx.ones((n, 7)), a, x)
    q, r = linalg.qr(half[:, :, : n // 2])
    assert mx.abs(subtract_product(half[:, :, : n // 2], q, r)).max().item() < 1e-4
    assert mx.abs(residual).max().item() < 1e-4
