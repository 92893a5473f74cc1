"""The kernel that unpacks quantized matrices against their formats' definitions."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.formats import Format
from mlx_qlayers.options import PackedMatrix
from mlx_qlayers.runtime import trace, use_backend
from mlx_qlayers.runtime.host import checks
from tests.gpus import on_gpus
from tests.launchers import dequantize
from tests.numerics import assert_accurate, random, round_to
from tests.packed import EACH_WIDTH, FORMATS, dequantize64, random_packed, terms64
from tests.pairwise import pairwise

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def check(fmt, dtype, heights=(5,), columns=384, path="host"):
    rng = np.random.default_rng(fmt.bits)
    packed = [random_packed(rng, rows, columns, fmt, dtype) for rows in heights]
    with use_backend(path):
        y = dequantize([PackedMatrix(*arrays) for arrays in packed], fmt, dtype)
    dense = np.concatenate([dequantize64(*arrays, fmt) for arrays in packed])
    terms = max(terms64(*arrays, fmt).max() for arrays in packed)
    assert_accurate(y, dense, round_to(dense, dtype), terms=terms)


@pytest.mark.parametrize(("fmt", "dtype"), pairwise(EACH_WIDTH, DTYPES), ids=str)
def test_every_width_and_dtype(fmt, dtype):
    check(fmt, dtype)


@on_gpus
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_on_a_gpu(gpu, fmt):
    for dtype in DTYPES:
        check(fmt, dtype, (41, 1, 8), path=gpu)


@pytest.mark.parametrize("fmt", [Format(64, 4), Format(32, 3), Format(16, 4, "nvfp4")], ids=str)
@pytest.mark.parametrize("heights", [(1, 7), (8, 41, 1)], ids=str)
def test_matrices_of_one_launch(heights, fmt):
    with checks(), trace() as launches:
        check(fmt, mx.bfloat16, heights, 192)
    assert len(launches) == 1


def test_is_exact_where_scales_have_few_bits():
    """Codes are offset by 2^7 on the way: with scales of half precision that loses nothing."""
    rng, fmt = np.random.default_rng(0), Format(64, 4)
    w = mx.array(rng.integers(0, 2**32, (64, 8), np.uint32))
    for dtype in DTYPES[1:]:
        scales = random(rng, (64, 1), dtype)
        biases = (scales.astype(mx.float32) * random(rng, (64, 1), scale=8)).astype(dtype)
        with use_backend("host"):
            y = dequantize([PackedMatrix(w, scales, biases)], fmt, dtype)
        assert mx.array_equal(y, round_to(dequantize64(w, scales, biases, fmt), dtype))
