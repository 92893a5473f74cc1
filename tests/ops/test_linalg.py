"""Factorisations and triangular solves against float64, on every backend that is here."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import linalg
from mlx_qlayers.metal.linalg import launch
from mlx_qlayers.ops.linalg import subtract_product
from mlx_qlayers.runtime.backend import use_backend
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.spec import Spec
from mlx_qlayers.runtime.tracing import trace
from tests.gpus import on_gpus
from tests.numerics import EPSILON, to64

EPS = EPSILON[mx.float32]


def definite(n, condition=1e3, batch=(), seed=0):
    """Symmetric positive definite matrices of norm 1."""
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.normal(size=(*batch, n, n)))
    values = np.logspace(0, -np.log10(condition), n)
    return mx.array((q * values @ q.swapaxes(-1, -2)).astype(np.float32))


def triangle(a, upper):
    return (np.triu if upper else np.tril)(to64(a))


def norm(a):
    return np.linalg.norm(a, 2, axis=(-1, -2))


def assert_factor(factor, a, upper=False):
    """||A - L L^T|| is at most ||A|| n eps, and the other triangle zero."""
    found, truth = to64(factor), to64(a)
    np.testing.assert_array_equal(found, triangle(found, upper))
    product = found.swapaxes(-1, -2) @ found if upper else found @ found.swapaxes(-1, -2)
    assert (norm(product - truth) <= norm(truth) * truth.shape[-1] * EPS).all()


def assert_solved(x, triangular, b):
    """|T X - B| is at most n eps |T| |X|, element by element (Higham, theorem 8.5)."""
    found, right = to64(x), to64(b)
    assert found.shape == np.broadcast_shapes(found.shape, right.shape)
    allowed = triangular.shape[-1] * EPS * (np.abs(triangular) @ np.abs(found))
    assert (np.abs(triangular @ found - right) <= allowed).all()


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 1, 33), (64,)], ids=str)
@pytest.mark.parametrize("upper", [False, True])
def test_cholesky(backend, shape, upper):
    *batch, n = shape
    a = definite(n, batch=tuple(batch))
    with trace() as launches:
        factor = linalg.cholesky(a, upper=upper)
        mx.eval(factor)
    assert_factor(factor, a, upper)
    kernels = [] if backend == "reference" else ["cholesky_block"]
    assert [run.kernel for run in launches] == kernels


@pytest.mark.parametrize("condition", [1e1, 1e6])
def test_blocks(condition):
    """A small block takes the path of large matrices: last block and last tile are not whole."""
    a = definite(75, condition, (2,))
    with use_backend("host"), checks():
        r, info = launch.cholesky(Spec.of(a), 32)(a)
        assert_factor(r, a, upper=True)
        assert info.tolist() == [0, 0]
        b = mx.random.normal((2, 75, 3), key=mx.random.key(0))
        lower = r.swapaxes(1, 2)
        x = launch.solve_lower(Spec.of(a), Spec.of(b), 32)(lower, b)
        assert_solved(x, to64(lower), b)
        bad = mx.array(to64(a) - 0.5 * np.eye(75)[:, 70:71] * np.eye(75)[70:71]).astype(mx.float32)
        r, info = launch.cholesky(Spec.of(a), 32)(bad)
    assert info.tolist() == [71, 71]
    assert np.isnan(to64(r)[:, 70:, 70:][:, *np.triu_indices(5)]).all()


@on_gpus
@pytest.mark.parametrize("n", [128, 1000, 3584])
def test_large_on_gpus(gpu, n):
    a, b = definite(n, 1e6), mx.random.normal((n, 300))
    with use_backend(gpu):
        factor = linalg.cholesky(a)
        assert_factor(factor, a)
        assert_solved(linalg.solve_triangular(factor, b), to64(factor), b)


def test_only_one_triangle_is_read(backend):
    a = definite(40)
    with_nan = mx.where(mx.tri(40, dtype=mx.bool_), a, mx.nan)
    assert_factor(linalg.cholesky(with_nan), a)
    assert_factor(linalg.cholesky(with_nan.T, upper=True), a, upper=True)
    b = mx.ones((40, 1))
    factor = mx.where(mx.tri(40, dtype=mx.bool_), linalg.cholesky(a), mx.nan)
    assert_solved(linalg.solve_triangular(factor, b), triangle(linalg.cholesky(a), False), b)


def test_not_positive_definite(backend):
    a = mx.stack([definite(40, seed=seed) for seed in range(6)]).reshape(2, 3, 40, 40)
    a[1, 0, 36, 36] = -1.0
    a[1, 2, 3, 3] = 0.0
    with pytest.raises(
        ValueError, match=r"a\[1, 0\] is not positive definite: its leading minor of order 37"
    ):
        linalg.cholesky(a)
    factor = to64(linalg.cholesky(a, check=False))
    assert np.isnan(factor[1, 0][36:, 36:][np.tril_indices(4)]).all()
    assert np.isfinite(factor[0]).all() and np.isfinite(factor[1, 0, :36]).all()
    with pytest.raises(ValueError, match=r"a is not positive definite.* order 1 "):
        linalg.cholesky(-mx.eye(2))


def test_nan_gives_nan(backend):
    a = definite(40)
    a[20, 5] = mx.nan
    factor = to64(linalg.cholesky(a))
    assert np.isnan(factor[20, 5:21]).all() and np.isnan(np.diag(factor)[20:]).all()
    assert np.isfinite(factor[:20]).all()


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
def test_solve_triangular(backend, upper, transpose):
    a = mx.array(triangle(linalg.cholesky(definite(70)), False)).astype(mx.float32)
    a = a.T if upper else a
    b = mx.random.normal((2, 70, 45), key=mx.random.key(1))
    x = linalg.solve_triangular(a, b, upper=upper, transpose=transpose)
    if backend == "reference":  # MLX multiplies by an inverse
        assert mx.allclose((a.T if transpose else a) @ x, b, atol=1e-3)
    else:
        assert_solved(x, to64(a.T if transpose else a), b)
    vector = linalg.solve_triangular(a, b[0, :, 0], upper=upper, transpose=transpose)
    assert vector.shape == (70,) and mx.allclose(vector, x[0, :, 0])


def test_singular_triangles(backend):
    """What depends on a row of which the diagonal is zero is not finite; what does not is right."""
    a, b = mx.tril(mx.ones((2, 35, 35))), mx.ones((2, 35, 3))
    a[1, 33, 33] = 0
    x = to64(linalg.solve_triangular(a, b))
    assert np.isfinite(x[0]).all() and np.isfinite(x[1, :33]).all()
    assert not np.isfinite(x[1, 33:]).any()


@pytest.mark.parametrize("upper", [False, True])
def test_solutions_and_inverses_of_definite_matrices(backend, upper):
    a = definite(33, 10, (2,))
    factor = linalg.cholesky(a, upper=upper)
    allowed = 33 * EPS * 100
    b = mx.ones((33, 2))
    assert norm(to64(a) @ to64(linalg.cho_solve(factor, b, upper=upper)) - 1).max() < allowed
    inverse = to64(linalg.cholesky_inv(factor, upper=upper))
    assert norm(to64(a) @ inverse - np.eye(33)).max() < allowed


def test_subtract_product(backend):
    b, a, x = (
        mx.random.normal(shape, key=mx.random.key(i))
        for i, shape in enumerate([(3, 1, 41, 135), (2, 41, 37), (135, 37)])
    )
    found = to64(subtract_product(b, a, x.T))
    sizes = np.abs(to64(b)) + np.abs(to64(a)) @ np.abs(to64(x.T))
    assert found.shape == (3, 2, 41, 135)
    assert (np.abs(found - (to64(b) - to64(a) @ to64(x.T))) <= 40 * EPS * sizes).all()


def unblocked_cholesky(a):
    """Golub and Van Loan, 4.2.5, in operators that MLX differentiates."""
    columns = []
    for _ in range(a.shape[0]):
        column = a[:, :1] / mx.sqrt(a[:1, :1])
        columns.append(mx.pad(column, [(len(columns), 0), (0, 0)]))
        a = (a - column @ column.T)[1:, 1:]
    return mx.concatenate(columns, axis=1)


def forward_substitution(a, b):
    rows = []
    for i in range(a.shape[0]):
        before = sum((a[i, j] * rows[j] for j in range(i)), mx.zeros(b.shape[1:], b.dtype))
        rows.append((b[i] - before) / a[i, i])
    return mx.stack(rows)


def gradients(function, *arrays, wide):
    """Of a sum with fixed weights, in float64 on a CPU or as it comes."""
    dtype = mx.float64 if wide else mx.float32

    def loss(*arrays):
        y = function(*arrays)
        return (
            y * mx.sin(mx.arange(y.size, dtype=mx.float32).reshape(y.shape)).astype(dtype)
        ).sum()

    with mx.stream(mx.cpu if wide else mx.default_device()):
        given = [a.astype(dtype) for a in arrays]
        _, found = mx.vjp(loss, given, [mx.array(1.0, dtype)])
        mx.eval(found)
    return [to64(a) for a in found]


def assert_same_gradients(ours, oracle, *arrays):
    found, truth = gradients(ours, *arrays, wide=False), gradients(oracle, *arrays, wide=True)
    for one, other in zip(found, truth, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=100 * EPS * np.abs(other).max())


@pytest.mark.parametrize("upper", [False, True])
def test_gradient_of_cholesky(backend, upper):
    half = mx.random.normal((7, 7), key=mx.random.key(0))

    def of(factor):
        return lambda half: factor(half @ half.T + 7 * mx.eye(7).astype(half.dtype))

    def ours(a):
        return linalg.cholesky(a, upper=upper)

    def oracle(a):
        factor = unblocked_cholesky(a)
        return factor.T if upper else factor

    assert_same_gradients(of(ours), of(oracle), half)


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
def test_gradients_of_solves(backend, upper, transpose):
    a, b = (mx.random.normal((6, k), key=mx.random.key(k)) for k in (6, 3))
    a = a + 4 * mx.eye(6)

    def oracle(a, b):
        a = mx.triu(a) if upper else mx.tril(a)
        a = a.T if transpose else a
        if upper == transpose:
            return forward_substitution(a, b)
        return forward_substitution(a[::-1, ::-1], b[::-1])[::-1]

    def ours(a, b):
        return linalg.solve_triangular(a, b, upper=upper, transpose=transpose)

    assert_same_gradients(ours, oracle, a, b)


QR_SHAPES = [(1, 1), (5, 3), (3, 5), (70, 70), (40, 75), (90, 33)]


@pytest.mark.parametrize("shape", QR_SHAPES, ids=str)
def test_qr(backend, shape):
    a = mx.random.normal((2, *shape), key=mx.random.key(0))
    a[1, :, 0] = 0.0  # a column that has no reflection
    q, r = linalg.qr(a)
    wide, k = to64(q), min(shape)
    allowed = max(shape) * EPS
    assert (norm(wide @ to64(r) - to64(a)) <= norm(to64(a)) * allowed).all()
    assert (norm(wide.swapaxes(1, 2) @ wide - np.eye(k)) <= allowed).all()
    np.testing.assert_array_equal(to64(r), triangle(r, True))
    assert mx.allclose(linalg.qr(a, "r"), r, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (40, 37)], ids=str)
def test_reflections_of_qr_are_those_of_lapack(backend, shape):
    a = mx.random.normal(shape, key=mx.random.key(0))
    with trace() as launches:
        found = linalg.qr(a, "raw")
        mx.eval(found)
    for one, other in zip(found, np.linalg.qr(to64(a), "raw"), strict=True):
        np.testing.assert_allclose(to64(one), other, rtol=0, atol=100 * EPS * np.abs(other).max())
    panels = 0 if backend == "reference" else -(-min(shape) // 32)
    assert [run.kernel for run in launches].count("qr_panel") == panels


@on_gpus
@pytest.mark.parametrize("shape", [(64, 256, 256), (1, 1500, 1000)], ids=str)
def test_large_qr_on_gpus(gpu, shape):
    a = mx.random.normal(shape, key=mx.random.key(0))
    with use_backend(gpu):
        q, r = map(to64, linalg.qr(a))
    allowed = shape[-1] * EPS
    assert (norm(q @ r - to64(a)) <= norm(to64(a)) * allowed).all()
    assert (norm(q.swapaxes(1, 2) @ q - np.eye(shape[-1])) <= allowed).all()


def gram_schmidt(a, signs):
    """Of the first columns of a matrix, as far as it has rows, in operators with a gradient."""
    columns = []
    for j in range(min(a.shape)):
        left = a[:, j]
        for q in columns:
            left = left - (q @ left) * q
        columns.append(left * signs[j] / mx.sqrt(left @ left))
    q = mx.stack(columns, axis=1)
    return q, mx.triu(q.T @ a)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)], ids=str)
@pytest.mark.parametrize("mode", ["reduced", "r"])
def test_gradient_of_qr(backend, shape, mode):
    a = mx.random.normal(shape, key=mx.random.key(3))
    signs = np.sign(np.diag(to64(linalg.qr(a, "r"))))

    def flat(q, r):
        return mx.concatenate([q.flatten(), r.flatten()]) if mode == "reduced" else r.flatten()

    def ours(a):
        return flat(*linalg.qr(a)) if mode == "reduced" else linalg.qr(a, "r").flatten()

    assert_same_gradients(ours, lambda a: flat(*gram_schmidt(a, signs.tolist())), a)


def test_gradient_of_what_was_broadcast(backend):
    a, b = definite(5), mx.random.normal((3, 5, 2), key=mx.random.key(0))
    a = mx.tril(a) + mx.eye(5)
    whole = mx.grad(lambda a: linalg.solve_triangular(a, b).sum())(a)
    parts = sum(mx.grad(lambda a, i=i: linalg.solve_triangular(a, b[i]).sum())(a) for i in range(3))
    assert mx.allclose(whole, parts, rtol=1e-5, atol=1e-5)


def test_empty(backend):
    assert linalg.cholesky(mx.zeros((0, 3, 3))).shape == (0, 3, 3)
    assert linalg.cholesky(mx.zeros((2, 0, 0))).shape == (2, 0, 0)
    assert linalg.solve_triangular(mx.eye(3), mx.zeros((3, 0))).shape == (3, 0)
    assert [x.shape for x in linalg.qr(mx.zeros((0, 3, 2)))] == [(0, 3, 2), (0, 2, 2)]
    assert [x.shape for x in linalg.qr(mx.zeros((3, 0)), "raw")] == [(0, 3), (0,)]
