"""Factorisations by MLX's own operators, which run on the CPU."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def cholesky(w: mx.array) -> tuple[mx.array, mx.array]:
    """R and info, as :func:`mlx_qlayers.metal.linalg.launch.cholesky` gives them.

    MLX does not give LAPACK's code, but it stops at a pivot and leaves it on the diagonal.
    """
    n = w.shape[1]
    with mx.stream(mx.cpu):
        r = mx.linalg.cholesky(w.swapaxes(1, 2)).swapaxes(1, 2)
        pivots = mx.diagonal(r, axis1=1, axis2=2)
        good = mx.cumprod((pivots > 0).astype(mx.int32), axis=1).sum(axis=1, keepdims=True)
        last = mx.take_along_axis(pivots, mx.minimum(good, n - 1), axis=1)
        info = mx.where((good < n) & (last <= 0), good + 1, 0)[:, 0]
        rows = mx.arange(n)[:, None]
        bad = (rows >= good[:, :, None]) & (rows <= mx.arange(n))
        return mx.where(bad, mx.array(mx.nan), r), info


def _solve_lower(a: mx.array, b: mx.array) -> mx.array:
    """L^-1 B by the lower triangle of L; NaN from the first zero pivot on, where MLX raises."""
    singular = mx.eye(a.shape[1], dtype=mx.bool_) & (a == 0)
    lower = mx.where(singular, mx.array(mx.nan, a.dtype), mx.tril(a))
    return mx.linalg.solve_triangular(lower, b, stream=mx.cpu)


solve_lower: Any = mx.custom_function(_solve_lower)


@solve_lower.vjp  # MLX has none
def _solve_lower_gradient(
    given: tuple[mx.array, mx.array], cotangent: mx.array, x: mx.array
) -> tuple[mx.array, mx.array]:
    # Backwards, an upper triangle is a lower one.
    d_b = solve_lower(given[0].swapaxes(1, 2)[:, ::-1, ::-1], cotangent[:, ::-1])[:, ::-1]
    return -mx.tril(d_b @ x.swapaxes(1, 2)), d_b


def subtract_product(b: mx.array, a: mx.array, x: mx.array) -> mx.array:
    """B - A X, in as many bits as ``mx.matmul`` has: on some GPUs it rounds float32 to TF32."""
    return b - a @ x


def qr(a: mx.array) -> tuple[mx.array, mx.array]:
    """Q (batch, m, k) and R (batch, k, n) of (batch, m, n)."""
    q, r = mx.linalg.qr(a, stream=mx.cpu)
    return q, r


def householder(a: mx.array) -> tuple[mx.array, mx.array]:
    """H and tau of (batch, m, n), as LAPACK's geqrf has them."""
    _, m, n = a.shape
    rows, columns, taus = mx.arange(m)[:, None], mx.arange(n), []
    for j in range(min(m, n)):
        column = mx.where(rows > j, a[:, :, j : j + 1], 0)
        alpha = a[:, j : j + 1, j : j + 1]
        below = column.square().sum(axis=1, keepdims=True)
        norm = mx.sqrt(alpha.square() + below)
        beta = mx.where(below == 0, alpha, mx.where(alpha > 0, -norm, norm))
        tau = mx.where(below == 0, 0, (beta - alpha) / beta)
        v = mx.where(below == 0, 0, column / (alpha - beta)) + (rows == j)
        a = a - tau * v * mx.where(columns > j, (v * a).sum(axis=1, keepdims=True), 0)
        a = mx.where(columns == j, mx.where(rows == j, beta, mx.where(rows > j, v, a)), a)
        taus.append(tau[:, 0])
    return a, mx.concatenate(taus, axis=1)
