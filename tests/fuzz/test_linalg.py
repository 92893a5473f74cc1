"""Factorisations, solves and GPTQ: random matrices against float64, and spoilt ones."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers import linalg
from mlx_qlayers.formats import Format
from mlx_qlayers.ops.gptq import gptq
from tests.examples import arrays
from tests.fuzz.target import fuzz
from tests.numerics import EPSILON, to64

EPS = EPSILON[mx.float32]
SIZE = st.sampled_from([*range(8), 31, 32, 33, 64, 70])
# Those that keep the values.
LAYOUTS = st.sampled_from(["dense", "lazy", "behind one", "every second", "backwards", "part"])
CALLS = st.builds(
    SimpleNamespace,
    seed=arrays.SEEDS,
    operation=st.sampled_from(["cholesky", "solve_triangular", "cho_solve", "qr"]),
    batch=st.sampled_from([(), (), (1,), (3,), (2, 0), (2, 2)]),
    size=st.tuples(SIZE, SIZE),
    upper=st.booleans(),
    transpose=st.booleans(),
    mode=st.sampled_from(["reduced", "r", "raw"]),
    values=arrays.VALUES,
    layouts=st.tuples(LAYOUTS, LAYOUTS),
    backend=arrays.BACKENDS,
)


def definite(rng: np.random.Generator, batch: tuple[int, ...], n: int) -> np.ndarray:
    half = rng.normal(size=(*batch, n, n))
    return half @ half.swapaxes(-1, -2) / max(n, 1) + np.eye(n)


def close(product: np.ndarray, truth: np.ndarray, units: float) -> None:
    """Within so many units of float32 of the matrix, by the Frobenius norm."""
    axes = (-2, -1)
    wrong = np.linalg.norm(product - truth, axis=axes)
    assert (wrong <= units * EPS * np.linalg.norm(truth, axis=axes)).all()


@fuzz(CALLS)
def test_factorisations(case: SimpleNamespace) -> None:
    """Odd values only have to end in results of the right shape."""
    rng, (m, n) = np.random.default_rng(case.seed), case.size
    normal = case.values == "normal"
    b = arrays.laid_out(
        arrays.filled(rng, (*case.batch, m, n), mx.float32, case.values), case.layouts[0]
    )
    a = mx.array(definite(rng, case.batch, m).astype(np.float32))
    if not normal and m:
        a[..., -1, 0] = b.reshape(-1)[0] if b.size else 0.0
    a = arrays.laid_out(a, case.layouts[1])
    with arrays.running(case.backend):
        if case.operation == "qr":
            found = linalg.qr(b, case.mode)
            mx.eval(found)
            if normal and case.mode == "reduced":
                close(to64(found[0]) @ to64(found[1]), to64(b), max(m, n, 1) * 4)
            return
        if case.operation == "cholesky":
            factor = linalg.cholesky(a, upper=case.upper, check=False)
            mx.eval(factor)
            assert factor.shape == a.shape
            if normal:
                left = to64(factor).swapaxes(-1, -2) if case.upper else to64(factor)
                close(left @ left.swapaxes(-1, -2), to64(a), max(m, 1) ** 1.5)
            return
        if case.operation == "cho_solve":
            x = linalg.cho_solve(linalg.cholesky(a, check=False), b)
            whole = to64(a)
        else:
            x = linalg.solve_triangular(a, b, upper=case.upper, transpose=case.transpose)
            whole = (np.triu if case.upper else np.tril)(to64(a))
            whole = whole.swapaxes(-1, -2) if case.transpose else whole
        mx.eval(x)
    assert x.shape == b.shape
    if normal and case.backend != "reference":  # where MLX multiplies by an inverse
        terms = np.abs(whole) @ np.abs(to64(x)) + np.abs(to64(b))
        allowed = 8 * (m + 1) ** 2 * EPS * terms.max(initial=0)
        assert (np.abs(whole @ to64(x) - to64(b)) <= allowed).all()


WEIGHTS = st.builds(
    SimpleNamespace,
    seed=arrays.SEEDS,
    shape=st.tuples(st.sampled_from([(), (2,)]), st.integers(1, 9), st.integers(1, 5)),
    fmt=st.builds(
        Format,
        st.sampled_from([32, 64, 128]),
        st.sampled_from([2, 3, 4, 5, 6, 8]),
        st.just("affine"),
    ),
    act_order=st.booleans(),
    unseen=st.booleans(),
    dtype=arrays.DTYPES,
    layout=LAYOUTS,
    backend=arrays.BACKENDS,
)


@fuzz(WEIGHTS, examples=8)
def test_gptq(case: SimpleNamespace) -> None:
    """It loses no more than by MLX's operators, but for roundings that fall another way."""
    rng, (lead, n, groups) = np.random.default_rng(case.seed), case.shape
    k = groups * case.fmt.group_size
    dtype = arrays.dtype_of(case.dtype)
    w = arrays.laid_out(arrays.filled(rng, (*lead, n, k), dtype, "normal"), case.layout)
    h = definite(rng, lead, k)
    if case.unseen:
        h[..., 0, :] = h[..., :, 0] = 0
    hessian = mx.array(h.astype(np.float32))

    def loss(backend: str) -> float:
        with arrays.running(backend):
            found = gptq(w, hessian, case.fmt, act_order=case.act_order)
            mx.eval(found)
        assert found[1].dtype == found[2].dtype == dtype
        wrong = to64(mx.dequantize(*found, *case.fmt)) - to64(w)
        assert wrong.shape == w.shape
        return float(((wrong @ h) * wrong).sum())

    assert loss(case.backend) <= 1.2 * loss("reference") + 1e-6 * k
