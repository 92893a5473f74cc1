"""fused_products against float64: matrices, norm, gates, residual, and gradients."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import explain, use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.ops.fused_products import fused_products
from mlx_qlayers.options import PackedMatrix
from mlx_qlayers.runtime import BackendError, trace
from tests.examples import RANDOM
from tests.examples.fused import fused64
from tests.numerics import (
    assert_accurate,
    assert_gradient,
    assert_same_sums,
    random,
    round_to,
    to64,
)
from tests.packed import random_packed

FORMATS = [Format(64, 4), Format(32, 3), Format(16, 4, "nvfp4")]
EPS = 1e-5


def matrices(rng, widths, k, fmt, dtype, biased):
    return [
        PackedMatrix(*random_packed(rng, n, k, fmt, dtype), random(rng, (n,), dtype) if b else None)
        for n, b in zip(widths, biased, strict=True)
    ]


def check(found, x, packed, fmt, **options):
    rows = to64(x).reshape(-1, x.shape[-1])
    for y, exact, terms in zip(found, *fused64(rows, packed, fmt, **options), strict=True):
        assert y.dtype == x.dtype
        exact = exact.reshape(y.shape)
        assert_accurate(y, exact, round_to(exact, y.dtype), terms=terms.max())


@pytest.mark.parametrize("fastest", ["tensor", "codes", "stock"])
def test_many_rows_by_tensor_operations(fastest, machine):
    """On a stand-in for an M5, where they were measured: what follows a product is part of it."""
    rng, fmt = np.random.default_rng(2), Format(64, 4)
    machine.apple(), explain(reset=True)
    machine.measured("qmm", 18, 41, 64, mx.float16, fmt, True, **{fastest: 41e-6})
    x, weight, residual = (random(rng, s, mx.float16) for s in ((2, 9, 64), (64,), (2, 9, 41)))
    pair = matrices(rng, (41, 41), 64, fmt, mx.float16, (False, True))
    gated, added = {"gate": "silu", "norm": (weight, EPS)}, {"residual": residual}
    for packed, options in ((pair, gated), (pair[1:], added)):
        with trace() as launches:
            found = fused_products(x, packed, **options)
            check(found, x, packed, fmt, **options)
        kernels = [launch.kernel for launch in launches]
        names = {"tensor": ["qmm_tensor"], "codes": ["group_sums", "qmm_codes"]}.get(fastest, [])
        assert [name.rpartition("_")[0] if name[0] == "q" else name for name in kernels] == names
    said = next(d for d in explain() if d.op == "fused_products").reason
    assert ("by tensor operations" in said) == (fastest != "stock")


@pytest.mark.parametrize("path", ["reference", "host"])
def test_deferred_norm_of_the_next_product(path):
    """A deferred norm gives the same values, with no launch between the products."""
    rng, fmt = np.random.default_rng(9), Format(64, 4)
    for rows, n in ((1, 64), (7, 192)):
        x, residual, weight = (random(rng, shape) for shape in ((rows, 64), (rows, n), (n,)))
        first = matrices(rng, (n,), 64, fmt, mx.float32, (True,))
        pair = matrices(rng, (41, 41), n, fmt, mx.float32, (True, False))
        with use_backend(path):
            y, scaled, squares = fused_products(x, first, residual=residual, deferred_weight=weight)
            check([y], x, first, fmt, residual=residual)
            given = {"norm": (None, EPS), "partial_squares": squares}
            for options in ({}, {"gate": "silu"}):
                found = fused_products(scaled, pair, **given, **options)
                check(found, y, pair, fmt, norm=(weight, EPS), **options)


def test_gradient_through_a_deferred_norm():
    rng, fmt = np.random.default_rng(10), Format(64, 4)
    first = matrices(rng, (64,), 64, fmt, mx.float32, (True,))
    second = matrices(rng, (8,), 64, fmt, mx.float32, (True,))

    def handed(x, residual, weight):
        _, z, squares = fused_products(x, first, residual=residual, deferred_weight=weight)
        return fused_products(z, second, norm=(None, EPS), partial_squares=squares)[0]

    given = random(rng, (3, 64)), random(rng, (3, 64)), random(rng, (64,))
    for path in ("reference", "host"):
        with use_backend(path):
            assert_gradient(handed, list(given), rng)


def test_what_no_kernel_takes_is_composed_and_explained():
    rng, fmt = np.random.default_rng(5), Format(64, 4)
    packed = matrices(rng, (8, 8, 8, 8), 64, fmt, mx.float32, (False,) * 4)
    x, half = random(rng, (2, 64)), random(rng, (2, 64), mx.float16)
    for rows, chosen, reason in (
        (x, packed, "4 matrices; the kernel takes 1 to 3"),
        (half, packed[:1], "x is mlx.core.float16, other arrays are mlx.core.float32"),
        (x[:0], packed[:1], "there are no rows"),
    ):
        explain(reset=True)
        with trace() as launches:
            found = fused_products(rows, chosen)
        assert [y.shape for y in found] == [(len(rows), 8)] * len(chosen)
        (decision,) = [d for d in explain() if d.op == "fused_products"]
        assert (decision.path, decision.reason) == ("reference", reason)
        assert not [launch for launch in launches if len(launch.output_shapes) > 1]
        why = f"fused_products has no host kernel for these arguments: {reason}"
        with use_backend("host"), pytest.raises(BackendError, match=why):
            fused_products(rows, chosen)


def test_many_rows_of_float32_are_named_where_cuda_is_asked_for(machine):
    machine("cuda")
    packed = matrices(np.random.default_rng(5), (8,), 64, Format(64, 4), mx.float32, (False,))
    with use_backend("cuda"), pytest.raises(BackendError, match="64 rows in float32, whose"):
        fused_products(mx.ones((2, 32, 64)), packed)


@pytest.mark.parametrize(
    ("biased", "gate"),
    [
        ((True, True), "gelu"),
        ((True, False), "silu"),
        ((False, False), "gelu_approx"),
        ((False, False), "silu"),
    ],
    ids=str,
)
@pytest.mark.parametrize("norm", ["", "weighted"])
def test_many_rows_are_one_dense_product(norm, biased, gate):
    many_rows(65, norm, biased, "dequantize_{}_affine", gate, len({*biased}) == 1)


def test_up_to_128_rows_are_one_launch():
    many_rows(9, "weighted", (True, False), "qmm_skinny_", "silu", False)


def many_rows(rows, norm, biased, kernel, gate, gated):
    """All there is in one launch, with as many rows twice; or with one for the gate behind it."""
    given = {"fmt": Format(64, 4), "groups": 1, "dtype": "bfloat16", "rows": (2, rows)}
    given |= {"norm": norm, "bias": (*biased, False)}
    pair = (24, 24)
    for widths, more in ((pair, {}), (pair, {"gate": gate}), (pair[:1], {"residual": True})):
        call = RANDOM["fused_products"].call("host", widths=widths, **given, **more)
        first, *others = call.check("host")[1]
        assert first.startswith(kernel.format(len(widths)))
        assert others == ["gated_rows"] * (gated and "gate" in more)


def test_gradients_of_all_but_packed_words():
    rng = np.random.default_rng(6)
    ((w, *floats),) = matrices(rng, (8,), 64, Format(64, 4), mx.float32, (True,))
    x = random(rng, (2, 64))

    def total(w, *floats):
        return fused_products(x, [PackedMatrix(w, *floats)])[0].sum()

    with use_backend("host"):
        *_, of_bias = mx.grad(total, argnums=(1, 2, 3))(w, *floats)
        with pytest.raises(ValueError, match="no gradient wrt the quantized weights"):
            mx.grad(total)(w, *floats)
    assert_same_sums(of_bias, mx.full((8,), 2.0))
