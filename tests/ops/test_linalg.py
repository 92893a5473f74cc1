"""Factorisations and solves of large, of singular and of odd matrices, on every backend here."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import linalg
from mlx_qlayers.metal.linalg import launch
from mlx_qlayers.runtime.backend import use_backend
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.spec import Spec
from tests.examples import RANDOM
from tests.examples.factors import (
    EPS,
    assert_factor,
    assert_product,
    assert_solved,
    definite,
    triangle,
)
from tests.gpus import on_gpus
from tests.numerics import to64


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


def test_singular_triangles(backend):
    """Results that depend on a row with a zero diagonal are not finite; all others are right."""
    a, b = mx.tril(mx.ones((2, 35, 35))), mx.ones((2, 35, 3))
    a[1, 33, 33] = 0
    x = to64(linalg.solve_triangular(a, b))
    assert np.isfinite(x[0]).all() and np.isfinite(x[1, :33]).all()
    assert not np.isfinite(x[1, 33:]).any()


# Blocks, panels and products of a launch each.
LAUNCHES = [
    ("cholesky", {"size": 64}, ["cholesky_block"]),
    ("qr", {"size": (40, 37), "mode": "r"}, ["qr_panel"] * 2),
]


@pytest.mark.parametrize(("name", "change", "expected"), LAUNCHES)
def test_launches(name, change, expected):
    _, kernels = RANDOM[name].call("host", **change).check("host")
    assert [kernel for kernel in kernels if kernel == expected[0]] == expected


@on_gpus
@pytest.mark.parametrize("shape", [(64, 256, 256), (1, 1500, 1000)], ids=str)
def test_large_qr_on_gpus(gpu, shape):
    a = mx.random.normal(shape, key=mx.random.key(0))
    with use_backend(gpu):
        q, r = map(to64, linalg.qr(a))
    allowed = shape[-1] * EPS
    assert_product(q @ r, to64(a), allowed)
    assert_product(q.swapaxes(1, 2) @ q, np.eye(shape[-1]), allowed)
