"""Blocked QR: panels by ``qr.metal``, their reflections applied as products (compact WY).

The product of a panel's reflections is I - V T V^T (Schreiber and Van Loan, 1989), and T^-1 is the
upper triangle of V^T V with 1 / tau on its diagonal, so that T is applied by a solve. Kernels give
and take S = -T^-1, and products their negatives, so that no sign takes a launch.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ...runtime.launch import Bound
from ...runtime.spec import Spec
from ..common.kernels import strided_kernel
from .launch import product, solve_lower, subtract_product

# Rows that a thread reads ahead of their use: AHEAD in qr.metal.
_AHEAD = 8
_PANEL = strided_kernel(
    "qr_panel",
    "linalg/qr.metal",
    threadgroup_memory=lambda SIMDS, **_: 128 * (SIMDS + 1),
    registers=_AHEAD,
)
_WIDTH = 32
# Rows of a panel for each SIMD group of its threadgroup, and the most that there are.
_ROWS, _SIMDS = 16, 32
# V and S of a panel.
Reflections = tuple[mx.array, mx.array]


def qr(a: Spec) -> Callable[[mx.array], tuple[mx.array, mx.array, list[Reflections]]]:
    """Binds A (batch, m, n) to H and tau, as in LAPACK, and the reflections of each panel."""
    batch, m, n = a.shape
    panels = []
    for first in range(0, min(m, n), _WIDTH):
        rows, width = m - first, min(_WIDTH, n - first)
        count, rest = min(rows, width), n - first - width
        apply = _apply(Spec((batch, rows, rest), a.dtype), count, True) if rest else None
        panels.append((width, _panel(Spec((batch, rows, width), a.dtype)), apply))

    def run(a: mx.array) -> tuple[mx.array, mx.array, list[Reflections]]:
        done, taus, reflections = [], [], []
        above: mx.array = mx.zeros((batch, 0, n), a.dtype)
        for width, panel, apply in panels:
            h, tau, v, inverse = panel([a[:, :, :width]])
            rest = a[:, :, width:]
            rest = apply(rest, v, inverse) if apply is not None else rest
            done.append(mx.concatenate([above[:, :, :width], h], axis=1))
            above = mx.concatenate([above[:, :, width:], rest[:, :width]], axis=1)
            a = rest[:, width:]
            taus.append(tau)
            reflections.append((v, inverse))
        if above.shape[2]:  # columns beyond the last row of a wide matrix
            done.append(above)
        return mx.concatenate(done, axis=2), mx.concatenate(taus, axis=1), reflections

    return run


def q_of(a: Spec) -> Callable[[list[Reflections]], mx.array]:
    """The launches that form Q (batch, m, min(m, n)) from the reflections of A (batch, m, n)."""
    batch, m, n = a.shape
    k = min(m, n)
    steps = [
        _apply(Spec((batch, m - p, k - p), a.dtype), min(_WIDTH, k - p), False)
        for p in range(0, k, _WIDTH)
    ]

    def run(reflections: list[Reflections]) -> mx.array:
        size = k - (len(steps) - 1) * _WIDTH
        q = mx.broadcast_to(mx.eye(reflections[-1][0].shape[1], size), (batch, m - k + size, size))
        corner = mx.eye(_WIDTH)
        for i, (apply, (v, inverse)) in reversed(
            [*enumerate(zip(steps, reflections, strict=True))]
        ):
            if i < len(steps) - 1:
                q = mx.pad(q, [(0, 0), (_WIDTH, 0), (_WIDTH, 0)])
                q[:, :_WIDTH, :_WIDTH] = corner
            q = apply(q, v, inverse)
        return q

    return run


def _panel(a: Spec) -> Bound:
    batch, rows, width = a.shape
    count = min(rows, width)
    simds = min(_SIMDS, max(1, 1 << (-(-rows // _ROWS) - 1).bit_length()))
    return _PANEL.bind(
        [a],
        template={"SIMDS": simds, "FULL": width == _WIDTH},
        grid=(32 * simds * batch, 1, 1),
        threadgroup=(32 * simds, 1, 1),
        output_shapes=[a.shape, (batch, count), (batch, rows, count), (batch, count, count)],
    )


def _apply(
    c: Spec, count: int, transpose: bool
) -> Callable[[mx.array, mx.array, mx.array], mx.array]:
    """C - V T V^T C, or with T^T, for ``count`` reflections."""
    batch, rows, m = c.shape
    inner = product(batch, count, rows, m)
    small = Spec((batch, count, m), c.dtype)
    solve = solve_lower(Spec((batch, count, count), c.dtype), small, count)
    update = subtract_product(c, Spec((batch, rows, count), c.dtype), small)

    def run(c: mx.array, v: mx.array, inverse: mx.array) -> mx.array:
        w = inner(v.swapaxes(1, 2), c)
        if transpose:
            w = solve(inverse.swapaxes(1, 2), w)
        else:  # backwards, an upper triangle is a lower one
            w = solve(inverse[:, ::-1, ::-1], w[:, ::-1])[:, ::-1]
        return update([c, v, w])[0]

    return run
