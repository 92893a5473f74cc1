"""Fused products of batch-invariant models: the bits of operators that are launched one by one."""

import mlx.core as mx
import numpy as np
import pytest
from batches import rules_of

from mlx_qlayers import quantized_matmul, use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.metal.quantized_matmul.qmv import QmvArrays
from mlx_qlayers.ops.fused_products import fused_products
from mlx_qlayers.ops.products_invariant import gated_pair, joined_config, normed_rows
from mlx_qlayers.options import PackedMatrix
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.backend import Context, current, within
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.spec import Spec
from tests.numerics import assert_accurate, random, round_to, to64
from tests.packed import random_packed

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
ROWS = (1, 2, 7, 16, 33, 64)
INVARIANT = Context(invariant=True)


def matrices(rng, sizes, k, fmt, dtype, biased):
    packed = (random_packed(rng, n, k, fmt, dtype) for n in sizes)
    return [
        PackedMatrix(*each, random(rng, (n,), dtype) if biased else None)
        for each, n in zip(packed, sizes, strict=True)
    ]


def by_gpu(device, call):
    """What a call gives by the kernels of a GPU, and the kernels."""
    with rules_of(device), use_backend("host"), within(current, INVARIANT), trace() as records:
        found = call()
        mx.eval(found)
    return found, [each.kernel for each in records]


def alone(x, matrix, fmt):
    *packed, bias = matrix
    return quantized_matmul(x, *packed, True, *fmt, bias=bias)


@pytest.mark.parametrize("device", ["cuda", "metal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_products_side_by_side(device, dtype, rows):
    rng, fmt = np.random.default_rng(rows), Format(64, 4)
    x = random(rng, (rows, 1, 320), dtype)
    some = matrices(rng, (41, 16, 23), 320, fmt, dtype, biased=rows % 2 == 1)
    wanted, several = by_gpu(device, lambda: [alone(x, each, fmt) for each in some])
    found, one = by_gpu(device, lambda: fused_products(x, some, group_size=64, bits=4))
    blocks = -(-rows // 16)
    assert (len(several), len(one)) == (3 * blocks, blocks)
    assert all(map(mx.array_equal, found, wanted)) and found[0].shape == (rows, 1, 41)


@pytest.mark.parametrize("device", ["cuda", "metal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_a_residual_is_added_to_what_was_rounded(device, dtype, rows):
    rng, fmt = np.random.default_rng(rows), Format(32, 8)
    x, residual = (random(rng, (1, rows, n), dtype) for n in (288, 57))
    (matrix,) = matrices(rng, (57,), 288, fmt, dtype, biased=rows % 2 == 0)
    wanted, _ = by_gpu(device, lambda: residual + alone(x, matrix, fmt))
    options = {"group_size": 32, "bits": 8, "residual": residual}
    (found,), kernels = by_gpu(device, lambda: fused_products(x, [matrix], **options))
    assert len(kernels) == -(-rows // 16) and mx.array_equal(found, wanted)
    with checks():
        assert mx.array_equal(
            by_gpu(device, lambda: fused_products(x, [matrix], **options))[0][0], found
        )


def test_columns_in_other_orders_are_launched_apart():
    """Matrices of few columns have other tiles than those of many, and so another order."""
    rng, fmt, dtype = np.random.default_rng(5), Format(64, 4), mx.bfloat16
    x, sizes = random(rng, (3, 128), dtype), (8208, 48, 32)
    some = matrices(rng, sizes, 128, fmt, dtype, biased=False)
    wanted, _ = by_gpu("cuda", lambda: [alone(x, each, fmt) for each in some])
    found, kernels = by_gpu("cuda", lambda: fused_products(x, some, group_size=64, bits=4))
    assert len(kernels) == 3 and all(map(mx.array_equal, found, wanted))


@pytest.mark.parametrize("device", ["cuda", "metal"])
@pytest.mark.parametrize(
    "fmt", [Format(64, 4), Format(32, 8), Format(128, 2), Format(16, 4, "nvfp4")]
)
def test_the_order_is_that_of_each_matrix_for_all_rows(device, fmt):
    """Whether products have one launch, and in which order they are added up."""
    for dtype in DTYPES:
        for sizes in ((3584, 512, 512), (18944, 18944), (4096, 1024), (8192, 64), (9216, 64)):
            orders = set()
            for rows in (*range(1, 18), 64):
                w = [Spec((n, 1024 * fmt.bits // 32), mx.uint32) for n in sizes]
                packed = [PackedMatrix(each, Spec(each.shape, dtype), None, None) for each in w]
                specs = QmvArrays(Spec((rows, 1024), dtype), matrices=packed)
                with rules_of(device):
                    config = joined_config("host", specs, fmt, None)
                orders.add(config and config.order)
            assert len(orders) == 1


@pytest.mark.parametrize("device", ["cuda", "metal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_a_gate_has_the_bits_of_a_launch_of_its_own(device, dtype, rows):
    """Tiles of one, which a gate joins in pairs, keep the order of SIMD groups along K."""
    rng, fmt = np.random.default_rng(rows), Format(64, 4)
    x = random(rng, (rows, 320), dtype)
    some = matrices(rng, (72, 72), 320, fmt, dtype, biased=rows % 2 == 1)
    wanted, apart = by_gpu(device, lambda: gated_pair(*(alone(x, each, fmt) for each in some)))
    assert apart[-1] == "gated_pair"
    options = {"group_size": 64, "bits": 4, "gate": "silu"}
    (found,), kernels = by_gpu(device, lambda: fused_products(x, some, **options))
    assert len(kernels) == -(-rows // 16) and mx.array_equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_a_norm_between_products_has_the_bits_of_a_launch_of_its_own(dtype, rows):
    """On the matrix units the product ahead gives squares, and the one behind norms its rows."""
    rng, fmt = np.random.default_rng(rows), Format(32, 8)
    x, residual, weight = (random(rng, s, dtype) for s in ((rows, 96), (rows, 160), (160,)))
    (ahead,) = matrices(rng, (160,), 96, fmt, dtype, biased=False)
    behind = matrices(rng, (41, 24), 160, fmt, dtype, biased=True)
    options = {"group_size": 32, "bits": 8}

    def one_by_one():
        y = residual + alone(x, ahead, fmt)
        normed = normed_rows(y, weight, 1e-5)
        return [y, *(alone(normed, each, fmt) for each in behind)]

    def joined():
        y, _, squares = fused_products(
            x, [ahead], residual=residual, deferred_weight=weight, **options
        )
        norm = weight, 1e-5
        return [y, *fused_products(y, behind, norm=norm, partial_squares=squares, **options)]

    wanted, _ = by_gpu("cuda", one_by_one)
    found, kernels = by_gpu("cuda", joined)
    assert all(map(mx.array_equal, found, wanted))
    assert len(kernels) == 2 * -(-rows // 16) or dtype == mx.float32
    with checks():
        assert all(map(mx.array_equal, by_gpu("cuda", joined)[0], wanted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 41, 128, 3584])
def test_norms(dtype, width):
    rng = np.random.default_rng(width)
    x, weight = random(rng, (3, 2, width), dtype), random(rng, (width,), dtype)
    with checks():
        found, kernels = by_gpu("cuda", lambda: normed_rows(x, weight, 1e-5))
    assert kernels == ["norm_rows"] and found.shape == x.shape
    rows, wide = to64(x), to64(weight)
    wanted = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5) * wide
    assert_accurate(found, wanted, round_to(wanted, dtype))
