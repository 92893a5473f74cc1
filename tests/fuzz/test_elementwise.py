"""exp and the rotary embedding: random calls against float64, and calls as they should not be."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers.ops.exp import Exp, exp
from mlx_qlayers.ops.rotary import rotary_embedding
from tests.fuzz import arrays
from tests.fuzz.target import fuzz
from tests.numerics import IN_FLOAT32, ROUNDINGS, assert_accurate, random, round_to, to64
from tests.ops.test_rotary import turned

SHAPES = st.one_of(
    st.sampled_from([(), (0,), (1,), (0, 3), (3, 0, 2), (7, 41), (257,), (2, 3, 4, 5)]),
    st.lists(st.integers(0, 9), max_size=6).map(tuple),
)


@fuzz(
    st.builds(
        SimpleNamespace,
        seed=arrays.SEEDS,
        shape=SHAPES,
        dtype=arrays.DTYPES,
        values=arrays.VALUES,
        layout=arrays.LAYOUTS,
        strided=st.booleans(),
        layer=st.booleans(),
        backend=arrays.BACKENDS,
    )
)
def test_exp(case: SimpleNamespace) -> None:
    rng, dtype = np.random.default_rng(case.seed), arrays.dtype_of(case.dtype)
    x = arrays.laid_out(arrays.filled(rng, case.shape, dtype, case.values), case.layout)
    function: Any = Exp() if case.layer else partial(exp, strided=case.strided)
    backend = case.backend if x.size else "auto"
    dy = random(rng, x.shape, dtype)
    with arrays.running(backend):
        (y,), (dx,) = mx.vjp(lambda x: [function(x)], [x], [dy])
        mx.eval(y, dx)
    with np.errstate(all="ignore"):
        truth, rough = np.exp(to64(x)), np.exp(to64(x).astype(np.float32))
        up = to64(dy)
        # MLX's own operator is not as exact as a kernel of this package.
        stock = ROUNDINGS[mx.float32] if backend in ("reference", "auto") else 0.0
        arrays.compare(y, truth, rough, truth * stock, f"y of {case}")
        rounded = to64(round_to(truth, dtype)) * up
        sure = np.isfinite(truth) & (np.abs(truth) < float(mx.finfo(dtype).max) * 0.99)
        sure &= np.abs(truth * up) < float(mx.finfo(dtype).max) * 0.99
    assert dx.shape == x.shape and dx.dtype == dtype
    if sure.any():
        found = mx.array(to64(dx)[sure].astype(np.float32)).astype(dtype)
        base, exact = round_to(rounded[sure], dtype), (truth * up)[sure]
        terms = np.abs(exact).max() * stock
        assert_accurate(found, exact, base, terms=terms, what=f"gradient of {case}")


@fuzz(
    st.builds(
        SimpleNamespace,
        seed=arrays.SEEDS,
        batch=st.integers(0, 4),
        length=st.one_of(st.integers(0, 5), st.just(70)),
        heads=st.tuples(st.integers(0, 5), st.integers(0, 5)),
        width=st.one_of(st.integers(0, 41), st.sampled_from([64, 128])),
        dims=st.integers(0, 64).map(lambda n: 2 * n),
        offsets=st.lists(
            st.one_of(st.integers(0, 50), st.just(100_000)), min_size=4, max_size=4
        ).map(tuple),
        kind=st.sampled_from(["int32", "int64", "uint32", "one"]),
        traditional=st.booleans(),
        base=st.sampled_from([None, 1.5, 500.0, 10000.0, 1e6]),
        scale=st.sampled_from([1.0, 0.25, 4.0, -1.0, 0.0]),
        dtype=arrays.DTYPES,
        layouts=st.tuples(arrays.LAYOUTS, arrays.LAYOUTS, arrays.LAYOUTS),
        backend=arrays.BACKENDS,
        gradient=st.booleans(),
    )
)
def test_rotary_embedding(case: SimpleNamespace) -> None:
    rng, dtype = np.random.default_rng(case.seed), arrays.dtype_of(case.dtype)
    shapes = [(case.batch, case.length, n, case.width) for n in case.heads]
    dims = min(case.dims, case.width // 2 * 2)
    q, k = (random(rng, shape, dtype) for shape in shapes)
    freqs = None if case.base is not None else mx.abs(random(rng, (dims // 2,))) * 50 + 1
    q, k, freqs = (
        arrays.laid_out(a, to) for a, to in zip((q, k, freqs), case.layouts, strict=True)
    )
    starts = case.offsets[0] if case.kind == "one" else [*case.offsets[: case.batch]]
    offset = mx.array(starts, mx.int32 if case.kind == "one" else arrays.dtype_of(case.kind))
    options: Any = {"dims": dims, "traditional": case.traditional, "scale": case.scale}
    options |= {"base": case.base, "freqs": freqs}
    empty = 0 in (*q.shape, *k.shape, dims)
    with arrays.running("auto" if empty else case.backend):
        run = partial(rotary_embedding, **options)
        dy = [random(rng, a.swapaxes(1, 2).shape, dtype) for a in (q, k)]
        if case.gradient:
            found, gradients = mx.vjp(lambda q, k: run(q, k, offset), [q, k], dy)
        else:
            found, gradients = run(q, k, offset), []
        mx.eval(found, gradients)
    for x, y in zip((q, k), found, strict=True):
        assert y.shape == x.swapaxes(1, 2).shape and y.dtype == dtype
        if dims and y.size:
            stock = empty or case.backend in ("reference", "auto")
            _same(y, x, starts, options, f"{case}", stock)
        elif not dims:
            np.testing.assert_array_equal(to64(y), to64(x).swapaxes(1, 2))
    back = options | {"scale": -case.scale}
    for up, gradient in zip(dy, gradients, strict=False):
        assert gradient.shape == up.swapaxes(1, 2).shape
        if dims and up.size:  # the rotation by the opposite angle
            given = up.swapaxes(1, 2), starts, back, f"gradient of {case}"
            _same(gradient.swapaxes(1, 2), *given, True)


def _same(
    y: mx.array, x: mx.array, starts: Any, options: dict[str, Any], what: str, stock: bool
) -> None:
    truth, rough = (turned(x, starts, **options, dtype=d) for d in (np.float64, np.float32))
    # MLX's own operator computes angles in float32, and some roundings more.
    angle = (np.max(starts) + x.shape[1]) * abs(options["scale"])
    roundings = ROUNDINGS[y.dtype] * IN_FLOAT32[y.dtype]
    terms = np.abs(to64(x)).max() * (roundings + 4 * angle) * stock
    assert_accurate(y, truth, round_to(rough, y.dtype), terms=terms, what=what)
