"""Random factorisations and triangular solves: what their results are factors of, in float64.

Bounds are Higham's (Accuracy and Stability of Numerical Algorithms): n units of float32 of the
matrices' sizes. Of matrices with odd values only the shapes of results are compared.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers import linalg
from tests.examples import arrays
from tests.examples.arrays import filled, laid_out
from tests.examples.calls import BACKENDS, Call, Numbers, Random
from tests.numerics import EPSILON, random, to64

EPS = EPSILON[mx.float32]
_SIZE = st.sampled_from([*range(8), 31, 32, 33, 64, 70])
_SQUARE = {"size": (40, _SIZE), "batch": [(), (), (1,), (3,), (2, 0), (2, 2)]}
_VALUES = {"values": ("normal", arrays.VALUES)}
# Those that keep the values.
_KEPT = ["dense", "lazy", "behind one", "every second", "backwards", "part"]


def definite(
    n: int, condition: float = 1e3, batch: tuple[int, ...] = (), seed: int = 0
) -> mx.array:
    """Symmetric positive definite matrices of norm 1."""
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(*batch, n, n)))
    values = np.logspace(0, -np.log10(condition), n)
    return mx.array((q * values @ q.swapaxes(-1, -2)).astype(np.float32))


def triangle(a: Any, upper: bool) -> np.ndarray:
    """One triangle of matrices, in float64."""
    found: np.ndarray = (np.triu if upper else np.tril)(to64(a))
    return found


def transposed(a: Any) -> np.ndarray:
    """Matrices the other way round, in float64."""
    return to64(a).swapaxes(-1, -2)


def assert_product(product: np.ndarray, truth: np.ndarray, allowed: float | np.ndarray) -> None:
    """Factors give a matrix, by the 2-norm."""
    wrong, large = (np.linalg.norm(a, 2, axis=(-1, -2)) for a in (product - truth, truth))
    assert (wrong <= allowed * large).all(), f"error {wrong.max()} of {large.max()}"


def assert_factor(factor: mx.array, a: mx.array, upper: bool = False) -> None:
    """||A - L L^T|| is at most ||A|| n eps, and the other triangle zero."""
    found = to64(factor)
    np.testing.assert_array_equal(found, triangle(found, upper), err_msg="error")
    back = transposed(found) @ found if upper else found @ transposed(found)
    assert_product(back, to64(a), a.shape[-1] * EPS)


def assert_solved(x: Any, matrix: np.ndarray, b: Any, by_inverse: bool = False) -> None:
    """|T X - B| is at most n eps |T| |X|, element by element (theorem 8.5).

    Args:
        x: the solution.
        matrix: T in float64, or several that are solved with one after the other.
        b: the right side.
        by_inverse: MLX's operators multiply by an inverse, and lose its size too.
    """
    found, right = to64(x), to64(b)
    allowed = matrix.shape[-1] * EPS * (np.abs(matrix) @ np.abs(found))
    if by_inverse:
        inverse = np.abs(np.linalg.inv(matrix))
        allowed = 4 * np.abs(matrix) @ inverse @ np.broadcast_to(allowed, found.shape)
    wrong = np.abs(matrix @ found - right)
    assert (wrong <= allowed).all(), f"error {wrong.max()}"


def differentiated(
    oracle: Callable[..., Any], given: list[np.ndarray], up: list[np.ndarray]
) -> list[np.ndarray]:
    """The gradients of an algorithm in MLX's operators, by MLX, in float64."""
    with mx.stream(mx.cpu):
        cotangents, primals = ([mx.array(a, mx.float64) for a in each] for each in (up, given))
        _, found = mx.vjp(oracle, primals, cotangents)
        mx.eval(found)
    return [to64(a) for a in found]


def _gradients(
    oracle: Callable[..., Any], names: str, condition: float = 1.0
) -> Callable[[Numbers, list[np.ndarray], bool], tuple[Numbers, Numbers]]:
    """The expected gradients of a call; its results must be right, too."""

    def expected(n: Numbers, up: list[np.ndarray], _: bool) -> tuple[Numbers, Numbers]:
        found = differentiated(oracle, [n[name] for name in names], up) if up else []
        terms = [100 * condition * np.abs(a).max(initial=0) for a in found]
        return tuple(dict(zip(names, each, strict=bool(up))) for each in (found, terms))  # type: ignore[return-value]

    return expected


def unblocked_cholesky(a: mx.array) -> mx.array:
    """Golub and Van Loan, 4.2.5."""
    columns: list[mx.array] = []
    for _ in range(a.shape[0]):
        column = a[:, :1] / mx.sqrt(a[:1, :1])
        columns.append(mx.pad(column, [(len(columns), 0), (0, 0)]))
        a = (a - column @ column.T)[1:, 1:]
    return mx.concatenate(columns, axis=1)


def _symmetric(a: mx.array) -> mx.array:
    return (a + a.swapaxes(-1, -2)) / 2


def _matrices(case: SimpleNamespace, rng: np.random.Generator, condition: float = 1e3) -> mx.array:
    a = definite(case.size, condition, case.batch, case.seed)
    if case.values != "normal" and a.size:
        a[..., -1, 0] = filled(rng, (1,), mx.float32, case.values)[0]
    return laid_out(a, case.kept[0])


def _cholesky(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    upper, normal = case.upper, case.values == "normal"
    differentiable = case.gradient and normal and not case.batch and 0 < case.size < 10
    a = _matrices(case, rng, 10 if differentiable else 1e3)

    def oracle(a: mx.array) -> list[mx.array]:
        factor = unblocked_cholesky(_symmetric(a))
        return [factor.T if upper else factor]

    def function(a: mx.array) -> mx.array:
        given = _symmetric(a) if differentiable else a
        return linalg.cholesky(given, upper=upper, check=False)

    return Call(
        function,
        {"a": a},
        {},
        a.shape,
        _gradients(oracle, "a"),
        ["a"] if differentiable else (),
        a.size > 0,
        holds=lambda found: assert_factor(found[0], a, upper) if normal else None,
    )


KEPT = {"kept": (("dense",) * 2, st.tuples(*[st.sampled_from(_KEPT)] * 2))}
CHOLESKY = Random(
    _SQUARE | _VALUES | KEPT | {"upper": [False, True], "gradient": [False, True]},
    _cholesky,
    [
        *(
            {"size": n, "batch": b, "upper": u}
            for n, b in ((1, ()), (33, (2, 1)), (64, ()))
            for u in (0, 1)
        ),
        *({"size": 7, "upper": u, "gradient": True} for u in (False, True)),
        {"size": 3, "batch": (0,)},
        {"size": 0, "batch": (2,)},
    ],
)


def substituted(a: mx.array, b: mx.array) -> mx.array:
    """Forward substitution in matrices that may be broadcast."""
    rows: list[mx.array] = []
    for i in range(a.shape[-1]):
        row = b[..., i, :]
        for j, before in enumerate(rows):
            row = row - a[..., i, j, None] * before
        rows.append(row / a[..., i, i, None])
    return mx.stack(rows, axis=-2)


def _solve_triangular(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    n, (upper, transpose), (of_a, of_b) = case.size, case.way, case.leading
    a = _matrices(SimpleNamespace(**vars(case) | {"batch": of_a}), rng)
    a = laid_out(a + 0.5 * mx.eye(n), case.kept[0])
    vector = case.columns is None
    b = filled(rng, (*of_b, n, 1 if vector else case.columns), mx.float32, case.values)
    b = laid_out(b[..., 0].reshape(-1)[:n] if vector and not of_b else b, case.kept[1])
    columns, normal = b[:, None] if b.ndim == 1 else b, case.values == "normal"

    def oracle(a: mx.array, b: mx.array) -> list[mx.array]:
        a, b = mx.triu(a) if upper else mx.tril(a), b[:, None] if b.ndim == 1 else b
        a = a.swapaxes(-1, -2) if transpose else a
        if upper == transpose:
            x = substituted(a, b)
        else:
            x = substituted(a[..., ::-1, ::-1], b[..., ::-1, :])[..., ::-1, :]
        return [x[..., 0] if vector and not of_b else x]

    matrix = triangle(a, upper)
    matrix = transposed(matrix) if transpose else matrix
    alone = _gradients(oracle, "ab")

    def expected(n: Numbers, up: list[np.ndarray], plain: bool) -> tuple[Numbers, Numbers]:
        found, terms = alone(n, up, plain)
        if up:  # a's are sums of columns, and of all that it was broadcast to, which may cancel
            x = np.linalg.solve(matrix, to64(columns))
            d_b = np.linalg.solve(matrix.mT, up[0].reshape(x.shape))
            each = np.abs(d_b) @ np.abs(x).mT
            each = each if of_a else each.reshape(-1, *each.shape[-2:]).sum(0)
            terms["a"] = max(terms["a"], each.max())
        return found, terms

    def holds(found: list[mx.array]) -> None:
        x = found[0][..., None] if b.ndim == 1 else found[0]
        assert_solved(x, matrix, columns, case.backend not in BACKENDS)

    lead = np.broadcast_shapes(of_a, columns.shape[:-2])
    shape = (*lead, *columns.shape[-2:])
    if b.ndim == 1:
        shape = (*lead, n)
    full = a.size * b.size > 0
    return Call(
        linalg.solve_triangular,
        {"a": a, "b": b},
        {"upper": upper, "transpose": transpose},
        shape,
        expected,
        ["a", "b"] if case.gradient and normal and full and n < 10 else (),
        full,
        holds=holds if normal else lambda _: None,
    )


_WAYS = [(upper, transpose) for upper in (False, True) for transpose in (False, True)]
SOLVE_TRIANGULAR = Random(
    _VALUES
    | KEPT
    | {
        "size": (7, _SIZE),
        "columns": (5, st.none() | _SIZE),
        "leading": [((), ()), ((), (2,)), ((3,), ()), ((3,), (3,)), ((3, 1), (2,)), ((0,), (0,))],
        "way": _WAYS,
        "gradient": [False, True],
    },
    _solve_triangular,
    [
        *({"size": 70, "columns": 45, "leading": ((), (2,)), "way": way} for way in _WAYS),
        *({"size": 6, "columns": 3, "way": way, "gradient": True} for way in _WAYS),
        {"size": 5, "columns": 2, "leading": ((), (3,)), "gradient": True},
        {"size": 70, "columns": None, "way": (False, True)},
        {"columns": 0},
    ],
)


def _of_factor(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    """A solution, or the inverse, from a Cholesky factor."""
    a = to64(definite(case.size, 10, case.batch, case.seed))
    factor = np.linalg.cholesky(a) if a.size else a
    given = {"l": mx.array(transposed(factor) if case.upper else factor, mx.float32)}
    shape = (*case.batch, case.size, case.size if case.inverse else case.columns)
    if not case.inverse:
        given["b"] = random(rng, shape)

    def holds(found: list[mx.array]) -> None:
        factor = to64(given["l"])
        both = (factor, transposed(factor))[:: -1 if case.upper else 1]
        x, b = to64(found[0]), to64(given.get("b", mx.eye(case.size)))
        inverses = [np.abs(np.linalg.inv(each)) for each in both]
        large = np.abs(both[0]) @ np.abs(both[1]) @ np.abs(x) + np.abs(b)
        if case.backend not in BACKENDS:  # where MLX multiplies by inverses
            large = np.abs(both[0]) @ np.abs(both[1]) @ inverses[1] @ inverses[0] @ np.abs(b) * 4
        wrong = np.abs(both[0] @ both[1] @ x - b)
        assert (wrong <= 4 * case.size * EPS * large).all(), f"error {wrong.max()}"

    function = linalg.cholesky_inv if case.inverse else linalg.cho_solve
    full = np.prod(shape) * case.size > 0
    return Call(
        function, given, {"upper": case.upper}, shape, lambda *_: ({}, {}), (), full, holds=holds
    )


CHO_SOLVE = Random(
    _SQUARE | {"columns": (2, _SIZE), "upper": [False, True], "inverse": [False, True]},
    _of_factor,
    [
        {"size": 33, "batch": (2,), "upper": u, "inverse": i}
        for u in (False, True)
        for i in (False, True)
    ],
)


def gram_schmidt(a: mx.array, signs: list[float]) -> tuple[mx.array, mx.array]:
    """Of the first columns of a matrix, as far as it has rows."""
    columns: list[mx.array] = []
    for j in range(min(a.shape)):
        left = a[:, j]
        for q in columns:
            left = left - (q @ left) * q
        columns.append(left * signs[j] / mx.sqrt(left @ left))
    q = mx.stack(columns, axis=1)
    return q, mx.triu(q.T @ a)


def _qr(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    (m, n), mode = case.size, case.mode
    a = filled(rng, (*case.batch, m, n), mx.float32, case.values)
    if case.dependent and a.size:  # a column that has no reflection
        a[..., 0] = 0.0
    a, k = laid_out(a, case.layouts[0]), min(m, n)
    wide, normal = to64(a), case.values == "normal"
    allowed = 2 * (max(m, n) + 4) * EPS

    def holds(found: list[mx.array]) -> None:
        if mode == "raw":  # as LAPACK's, where the columns are independent
            if case.dependent:
                return
            for one, other in zip(found, np.linalg.qr(wide, "raw"), strict=True):
                wrong = np.abs(to64(one) - other)
                bound = 8 * allowed * np.linalg.cond(wide) * np.abs(other).max()
                assert (wrong.reshape(*case.batch, -1).max(-1) <= bound).all(), (
                    f"error {wrong.max()}"
                )
            return
        r = to64(found[-1])
        np.testing.assert_array_equal(r, triangle(r, True), err_msg="error")
        assert_product(transposed(r) @ r, transposed(wide) @ wide, 2 * allowed)
        if mode == "reduced":
            q = to64(found[0])
            assert_product(q @ r, wide, allowed)
            # Of columns that are made of others rounding leaves what has no squares in float32.
            if "broadcast" not in case.layouts[0]:
                assert_product(transposed(q) @ q, np.eye(k), allowed)

    def oracle(a: mx.array) -> list[mx.array]:
        signs = np.sign(np.diag(np.linalg.qr(wide, "r"))).tolist()
        return [*gram_schmidt(a, signs)][mode == "r" :]

    plain = case.gradient and mode != "raw" and normal and not (case.batch or case.dependent)
    condition = np.linalg.cond(wide[:, :k]) if plain and k > 0 and max(m, n) < 10 else np.inf
    first = {"raw": (n, m), "reduced": (m, k), "r": (k, n)}[mode]
    return Call(
        lambda a: linalg.qr(a, mode),
        {"a": a},
        {},
        (*case.batch, *first),
        _gradients(oracle, "a", condition),
        ["a"] if condition < 100 else (),
        a.size > 0,
        holds=holds if normal and a.size else lambda _: None,
    )


QR = Random(
    _VALUES
    | {
        "size": ((40, 33), st.tuples(_SIZE, _SIZE)),
        "batch": _SQUARE["batch"],
        "mode": ["reduced", "r", "raw"],
        "dependent": [False, True],
        "gradient": [False, True],
    },
    _qr,
    [
        *(
            {"size": size, "batch": (2,), "dependent": size == (5, 3), "mode": mode}
            for size, mode in (
                ((1, 1), "reduced"),
                ((5, 3), "reduced"),
                ((3, 5), "r"),
                ((70, 70), "reduced"),
                ((40, 75), "reduced"),
                ((90, 33), "r"),
            )
        ),
        *({"size": size, "mode": "raw"} for size in ((5, 3), (3, 5), (40, 37))),
        *(
            {"size": size, "mode": mode, "gradient": True}
            for size in ((6, 4), (4, 6), (5, 5))
            for mode in ("reduced", "r")
        ),
        {"size": (3, 2), "batch": (0,)},
        {"size": (3, 0), "mode": "raw"},
    ],
)
