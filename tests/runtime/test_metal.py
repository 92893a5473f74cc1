"""The metal backend hands MLX what it needs, through whatever mx.fast.metal_kernel is now."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.quantized_matmul.qmm import qmm_config
from mlx_qlayers.runtime import host
from mlx_qlayers.runtime.backend import BackendError, use_backend
from mlx_qlayers.runtime.launch import Launch
from mlx_qlayers.runtime.program import Program
from tests.launchers import qmm
from tests.machine import has_gpu
from tests.numerics import assert_accurate, assert_same_sums, random, round_to
from tests.packed import check_product, random_packed

from .kernels import AFFINE, HISTOGRAM, ROW_SUMS

X = mx.zeros(16, mx.uint8)
CALL = {"grid": (16, 1, 1), "threadgroup": (16, 1, 1), "output_shapes": [(16,)]}


def to_float64(x):
    return np.array(x.astype(mx.float32), np.float64)


def test_the_function_is_looked_up_at_every_call(metal, monkeypatch):
    HISTOGRAM([X], **CALL)
    second = type(metal)()
    monkeypatch.setattr(mx.fast, "metal_kernel", second)
    HISTOGRAM([X], **CALL)
    assert (len(metal.called), len(second.made), len(second.called)) == (1, 1, 1)


@pytest.fixture
def forwarded(metal):
    """The stand-in hands what it was given to the checked build of the host backend."""

    def compute(call):
        program = Program(**metal.made[-1])
        return host.bind(Launch(program, **call))(list(call["inputs"]))

    metal.compute = compute
    with host.checks():
        yield metal


@pytest.mark.parametrize(("few", "multiplied"), [(True, "float"), (False, "bfloat")])
def test_parts_of_bfloat_are_widened_before_the_m3(forwarded, monkeypatch, few, multiplied):
    has_gpu(monkeypatch, "applegpu_g14s" if few else "applegpu_g15s")
    rng, fmt, dtype = np.random.default_rng(0), Format(64, 4), mx.bfloat16
    packed, x = random_packed(rng, 41, 128, fmt, dtype), random(rng, (37, 128), dtype)
    config = qmm_config("metal", 37, 41, 128, dtype, fmt, True)
    with use_backend("metal"):
        y = qmm(x, *packed, None, True, fmt, config)
    check_product(y, x, packed, fmt)
    header = forwarded.made[-1]["header"]
    assert f"#define BFLOAT_PRODUCTS {multiplied}\n" in header and forwarded.called


@pytest.mark.parametrize("n", [1, 7, 8, 41])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_what_it_passes_on_is_enough_to_compute(forwarded, dtype, n):
    x = mx.random.normal((n,), key=mx.random.key(n)).astype(dtype)
    bias = mx.array([1.0, -2.0, 0.5])
    (y,) = AFFINE(
        [x, mx.array(3.0), bias],
        template={"T": dtype, "N": 3, "NEGATE": True},
        grid=(n, 1, 1),
        threadgroup=(16, 1, 1),
        output_shapes=[(n,)],
    )
    exact = -(3 * to_float64(x) + np.resize([1.0, -2.0, 0.5], n))
    assert y.dtype == dtype
    assert_accurate(y, exact, round_to(exact, dtype))


def test_atomic_outputs_and_simd_functions_compute(forwarded):
    x = mx.random.randint(0, 16, (333,), key=mx.random.key(0)).astype(mx.uint8)
    sizes = {"grid": (333, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(16,)]}
    (counts,) = HISTOGRAM([x], init_value=0, **sizes)
    assert counts.tolist() == np.bincount(np.array(x), minlength=16).tolist()

    rows = mx.random.normal((7, 32), key=mx.random.key(1))
    sizes = {"grid": (224, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(7,)]}
    (sums,) = ROW_SUMS([rows], **sizes)
    assert_same_sums(sums, rows.sum(1))


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_without_metal_it_cannot_be_forced():
    with pytest.raises(BackendError, match=r"metal .* mx.metal.is_available\(\) is false"):
        use_backend("metal")
