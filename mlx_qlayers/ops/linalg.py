"""Factorisations of batches of float32 matrices, and solves with triangular ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import mlx.core as mx

from ..dispatch import Gradient, Operation, Plan, choose, dispatch
from ..dispatch.mapped import always
from ..measurements.thresholds import gain, threshold
from ..metal.linalg import launch
from ..metal.linalg import qr as blocked
from ..reference import linalg as reference
from ..runtime.spec import Spec
from ..runtime.transformed import has_values
from .matmul import matmul
from .signature import Signature


def cholesky(a: mx.array, *, upper: bool = False, check: bool = True) -> mx.array:
    """The Cholesky factor of symmetric positive definite matrices.

    Args:
        a: (..., N, N) float32, of which one triangle is read: the lower, or the upper if ``upper``.
        upper: give R of A = R^T R instead of L of A = L L^T.
        check: wait for the result and raise where a matrix is not positive definite. Otherwise, and
            inside ``mx.compile`` or ``mx.vmap``, its factor is NaN from the row and column of the
            first leading minor that is not positive. NaN in A gives NaN, and no error.

    Returns:
        (..., N, N) float32, zero in the other triangle. It can be differentiated once.

    Raises:
        ValueError: ``a`` has another dtype or no square matrices, or one of them is not positive
            definite: the message names the matrix and the order of its leading minor.

    Example:
        >>> cholesky(mx.array([[4.0, 2.0], [2.0, 5.0]]))
        array([[2, 0],
               [1, 2]], dtype=float32)

    Source: Golub and Van Loan, Matrix Computations, 4.2.9; ``mx.linalg.cholesky``.
    """
    factor, info = dispatch(_CHOLESKY, (a,), (upper,))
    if check and info.size and has_values([info]) and (worst := int(info.max().item())):
        which = info.tolist().index(worst)
        index = [which // prod(a.shape[i + 1 : -2]) % n for i, n in enumerate(a.shape[:-2])]
        raise ValueError(
            f"a{index or ''} is not positive definite: its leading minor of order {worst} is not "
            "positive"
        )
    return factor


def solve_triangular(
    a: mx.array, b: mx.array, *, upper: bool = False, transpose: bool = False
) -> mx.array:
    """Solve A X = B, or A^T X = B, with triangular matrices.

    Args:
        a: (..., N, N) float32, of which one triangle is read.
        b: (..., N, M) float32, or (N,); leading axes are broadcast.
        upper: read the upper triangle of ``a``, not the lower.
        transpose: solve with A^T.

    Returns:
        X in the shape of ``b``, infinite or NaN where A is singular. It can be differentiated once.

    Raises:
        ValueError: a dtype or a shape does not fit.

    Example:
        >>> solve_triangular(mx.array([[2.0, 0.0], [1.0, 2.0]]), mx.array([2.0, 5.0]))
        array([1, 2], dtype=float32)

    Source: Golub and Van Loan, Matrix Computations, 3.1; ``scipy.linalg.solve_triangular``.
    """
    if getattr(b, "ndim", 0) == 1:
        return solve_triangular(a, b[:, None], upper=upper, transpose=transpose)[..., 0]
    return dispatch(_SOLVE, (a, b), (upper, transpose))


def cho_solve(l: mx.array, b: mx.array, *, upper: bool = False) -> mx.array:  # noqa: E741
    """Solve A X = B with the Cholesky factor of A.

    Args:
        l: (..., N, N) float32, what :func:`cholesky` gave.
        b: (..., N, M) float32, or (N,); leading axes are broadcast.
        upper: whether ``l`` is R of A = R^T R.

    Returns:
        X in the shape of ``b``.

    Raises:
        ValueError: a dtype or a shape does not fit.

    Example:
        >>> cho_solve(cholesky(mx.array([[4.0, 2.0], [2.0, 5.0]])), mx.array([8.0, 12.0]))
        array([1, 2], dtype=float32)

    Source: ``scipy.linalg.cho_solve``.
    """
    _FACTOR.check(l)
    half = solve_triangular(l, b, upper=upper, transpose=upper)
    return solve_triangular(l, half, upper=upper, transpose=not upper)


def cholesky_inv(l: mx.array, *, upper: bool = False) -> mx.array:  # noqa: E741
    """The inverse of A from its Cholesky factor.

    Args:
        l: (..., N, N) float32, what :func:`cholesky` gave.
        upper: whether ``l`` is R of A = R^T R.

    Returns:
        (..., N, N) float32.

    Raises:
        ValueError: a dtype or a shape does not fit.

    Example:
        >>> cholesky_inv(mx.array([[2.0, 0.0], [0.0, 1.0]]))
        array([[0.25, 0],
               [0, 1]], dtype=float32)

    Source: ``mx.linalg.cholesky_inv``.
    """
    _FACTOR.check(l)
    return cho_solve(l, mx.eye(l.shape[-1]), upper=upper)


def qr(a: mx.array, mode: str = "reduced") -> Any:
    """The QR factorisation of matrices, tall or wide.

    Args:
        a: (..., M, N) float32; squares of its columns' norms must not overflow.
        mode: ``"reduced"`` gives Q (..., M, K) and R (..., K, N) with K = min(M, N); ``"r"`` R
            alone; ``"raw"``, as in NumPy, LAPACK's H (..., N, M), transposed, and tau (..., K).

    Returns:
        The arrays that ``mode`` names. Q and R can be differentiated once, where the first K
        columns of A are independent; H and tau cannot.

    Raises:
        ValueError: ``a`` has another dtype or less than two axes, or there is no such mode.

    Example:
        >>> q, r = qr(mx.array([[3.0, 1.0], [4.0, 2.0]]))
        >>> print(mx.allclose(q @ r, mx.array([[3.0, 1.0], [4.0, 2.0]])))
        array(True, dtype=bool)

    Source: Golub and Van Loan, Matrix Computations, 5.2.3; ``numpy.linalg.qr``.
    """
    found = dispatch(_QR, (a,), (mode,))
    return found[0] if mode == "r" else tuple(found)


def subtract_product(b: mx.array, a: mx.array, x: mx.array) -> mx.array:
    """B - A X in float32: on a GPU never in TF32, to which ``mx.matmul`` rounds on some.

    Args:
        b: (..., N, M) float32.
        a: (..., N, K) float32.
        x: (..., K, M) float32. Leading axes are broadcast.

    Returns:
        (..., N, M) float32. It has no gradient.

    Raises:
        ValueError: a dtype or a shape does not fit.

    Example:
        >>> subtract_product(mx.ones((2, 2)), mx.eye(2), mx.eye(2))
        array([[0, 1],
               [1, 0]], dtype=float32)
    """
    return dispatch(_SUBTRACT, (b, a, x))


def _plan_cholesky(arrays: Sequence[Spec], upper: bool) -> Plan:
    (a,) = arrays
    _SQUARE.check(a)
    flat, choice = _flat(a), _choose("cholesky", a)
    compute: Callable[..., Any] = reference.cholesky
    if choice.path != "reference":
        compute = launch.cholesky(flat, threshold("linalg_block", "rows"))

    def forward(function: Callable[..., Any], a: mx.array) -> list[mx.array]:
        w = a.reshape(flat.shape)
        r, info = function(w if upper else w.swapaxes(1, 2))
        return [(r if upper else r.swapaxes(1, 2)).reshape(a.shape), info]

    def gradient(given: Any, cotangents: list[mx.array], outputs: list[mx.array]) -> list[mx.array]:
        factor, seed = (x.swapaxes(-1, -2) if upper else x for x in (outputs[0], cotangents[0]))
        inner = mx.tril(matmul(factor.swapaxes(-1, -2), mx.tril(seed)))
        inner = inner * (1 - 0.5 * mx.eye(a.shape[-1]))
        half = solve_triangular(factor, inner, transpose=True).swapaxes(-1, -2)
        whole = solve_triangular(factor, half, transpose=True)
        return [0.5 * (whole + whole.swapaxes(-1, -2))]

    if not a.size:
        return Plan(choice, lambda _: [mx.zeros(a.shape), mx.zeros(flat.shape[0], mx.int32)])
    run, stock = partial(forward, compute), partial(forward, reference.cholesky)
    return Plan(choice, run, (Gradient((0,), gradient),), stock)


def _plan_solve(arrays: Sequence[Spec], upper: bool, transpose: bool) -> Plan:
    a, b = arrays
    _SYSTEM.check(a, b)
    lead = _broadcast(a, b)
    shape = (*lead, *b.shape[-2:])
    flat_a, flat_b = (Spec((prod(lead), *s.shape[-2:]), s.dtype) for s in arrays)
    choice = _choose("solve_triangular", a, b)
    compute: Callable[..., mx.array] = reference.solve_lower
    if choice.path != "reference":
        compute = launch.solve_lower(flat_a, flat_b, threshold("linalg_block", "rows"))

    def forward(function: Callable[..., mx.array], a: mx.array, b: mx.array) -> mx.array:
        a, b = _expand(a, lead, flat_a), _expand(b, lead, flat_b)
        a = a.swapaxes(1, 2) if transpose else a
        if upper == transpose:
            return function(a, b).reshape(shape)
        # Backwards, an upper triangle is a lower one.
        return function(a[:, ::-1, ::-1], b[:, ::-1])[:, ::-1].reshape(shape)

    def gradient(given: Any, cotangents: list[mx.array], outputs: list[mx.array]) -> list[mx.array]:
        d_b = solve_triangular(given[0], cotangents[0], upper=upper, transpose=not transpose)
        left, right = (outputs[0], d_b) if transpose else (d_b, outputs[0])
        d_a = -matmul(left, right.swapaxes(-1, -2))
        d_a = mx.triu(d_a) if upper else mx.tril(d_a)
        return [_sum_to(d_a, given[0].shape), _sum_to(d_b, given[1].shape)]

    if not prod(shape):
        return Plan(choice, lambda a, b: mx.zeros(shape))
    run, stock = partial(forward, compute), partial(forward, reference.solve_lower)
    return Plan(choice, run, (Gradient((0, 1), gradient),), stock)


def _plan_qr(arrays: Sequence[Spec], mode: str) -> Plan:
    (a,) = arrays
    _MATRICES.check(a, mode)
    flat, choice = _flat(a), _choose("qr", a)
    *lead, m, n = a.shape
    k = min(m, n)

    def stock(a: mx.array) -> list[mx.array]:
        if mode == "raw":
            h, tau = reference.householder(a.reshape(flat.shape))
            return [h.swapaxes(1, 2).reshape(*lead, n, m), tau.reshape(*lead, k)]
        q, r = reference.qr(a)
        return [r] if mode == "r" else [q, r]

    if not a.size:
        shapes: list[tuple[int, ...]] = [(m, k), (k, n)]
        if mode != "reduced":
            shapes = [(k, n)] if mode == "r" else [(n, m), (k,)]
        return Plan(choice, lambda a: [mx.zeros((*lead, *shape)) for shape in shapes])
    if choice.path == "reference":
        run = stock
    else:
        factorise, form = blocked.qr(flat), blocked.q_of(flat)

        def run(a: mx.array) -> list[mx.array]:
            h, tau, reflections = factorise(a.reshape(flat.shape))
            if mode == "raw":
                return [h.swapaxes(1, 2).reshape(*lead, n, m), tau.reshape(*lead, k)]
            r = mx.triu(h[:, :k]).reshape(*lead, k, n)
            return [r] if mode == "r" else [form(reflections).reshape(*lead, m, k), r]

    def gradient(given: Any, cotangents: list[mx.array], outputs: list[mx.array]) -> list[mx.array]:
        if mode == "raw":
            raise ValueError("[qr] no gradient in mode 'raw'")
        whole = list(qr(given[0])) if mode == "r" else outputs
        return [_qr_gradient(given[0], whole[0], whole[1], cotangents)]

    return Plan(choice, run, (Gradient((0,), gradient),), stock)


def _qr_gradient(a: mx.array, q: mx.array, r: mx.array, seeds: list[mx.array]) -> mx.array:
    """Of A = Q R; a wide A is [X, Y] with X = Q U and R = [U, Q^T Y] (Walter and Lehmann, 2018)."""
    k = q.shape[-1]
    d_q, d_r = (mx.zeros_like(q), *seeds) if len(seeds) == 1 else seeds
    u, y, d_u, d_v = r[..., :k], a[..., k:], d_r[..., :k], d_r[..., k:]
    d_q = d_q + matmul(y, d_v.swapaxes(-1, -2))
    inner = matmul(u, d_u.swapaxes(-1, -2)) - matmul(d_q.swapaxes(-1, -2), q)
    symmetric = mx.tril(inner) + mx.tril(inner, -1).swapaxes(-1, -2)
    left = (d_q + matmul(q, symmetric)).swapaxes(-1, -2)
    d_x = solve_triangular(u, left, upper=True).swapaxes(-1, -2)
    return mx.concatenate([d_x, matmul(q, d_v)], axis=-1)


def _plan_subtract(arrays: Sequence[Spec]) -> Plan:
    _DIFFERENCE.check(*arrays)
    b, *_ = arrays
    lead = _broadcast(*arrays)
    shape = (*lead, *b.shape[-2:])
    flat = [Spec((prod(lead), *s.shape[-2:]), s.dtype) for s in arrays]
    choice = _choose("subtract_product", *arrays)
    if choice.path == "reference" or not prod(shape):
        return Plan(choice, reference.subtract_product)
    bound = launch.subtract_product(flat[0], flat[1], flat[2])

    def run(*arrays: mx.array) -> mx.array:
        (y,) = bound([_expand(s, lead, f) for s, f in zip(arrays, flat, strict=True)])
        return y.reshape(shape)

    return Plan(choice, run, (), reference.subtract_product)


def _sample(arrays: list[mx.array], *static: Any) -> list[mx.array]:
    """A matrix that is far from singular, and symmetric, and whatever comes with it."""
    a, *rest = arrays
    n = max(a.shape[-1], 1)
    symmetric = (a + a.swapaxes(-1, -2)) / (2 * n) + mx.eye(n)
    return [symmetric.astype(a.dtype), *rest]


_MATRICES = Signature("a: float32 (..., N, M)\nmode: 'reduced', 'r', 'raw'")
_SQUARE = Signature("a: float32 (..., N, N)")
_FACTOR = Signature("l: float32 (..., N, N)")
_SYSTEM = Signature("""
    a: float32 (..., N, N)
    b: float32 (..., N, M)
""")
_DIFFERENCE = Signature("""
    b: float32 (..., N, M)
    a: float32 (..., N, K)
    x: float32 (..., K, M)
""")
_CHOLESKY = Operation("cholesky", _plan_cholesky, sample=_sample, batched=always)
_SOLVE = Operation("solve_triangular", _plan_solve, sample=_sample)
_QR = Operation("qr", _plan_qr, batched=always)
_SUBTRACT = Operation("subtract_product", _plan_subtract)


def _choose(op: str, *arrays: Spec) -> Any:
    faster = gain("linalg_gain", arrays[0].shape[-1], op)
    empty = next((f"{a.shape} is empty" for a in arrays if not a.size), None)
    return choose(op, empty=empty, host_gain=faster)


def _flat(a: Spec) -> Spec:
    return Spec((prod(a.shape[:-2]), *a.shape[-2:]), a.dtype)


def _expand(a: mx.array, lead: tuple[int, ...], flat: Spec) -> mx.array:
    return mx.broadcast_to(a, (*lead, *a.shape[-2:])).reshape(flat.shape)


def _sum_to(a: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Add up the leading axes along which an array of that shape was broadcast."""
    a = a.sum(axis=tuple(range(a.ndim - len(shape))))
    axes = tuple(i for i, (n, m) in enumerate(zip(a.shape, shape, strict=True)) if n != m)
    return a.sum(axis=axes, keepdims=True)


def _broadcast(*arrays: Spec) -> tuple[int, ...]:
    shapes = [a.shape[:-2] for a in arrays]
    try:
        return tuple(mx.broadcast_shapes(*shapes))
    except ValueError as error:
        given = " and ".join(str(a.shape) for a in arrays)
        raise ValueError(f"leading axes of {given} cannot be broadcast") from error
