"""Rows of a quantized matrix are those of the whole matrix, unpacked."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.metal.quantized_matmul.dequantize import dequantize_rows
from mlx_qlayers.ops.embedding import quantized_rows
from mlx_qlayers.options import PackedMatrix
from mlx_qlayers.runtime.spec import Spec
from tests.gpus import GPUS, on_gpus
from tests.numerics import assert_accurate, assert_same_sums, round_to
from tests.packed import dequantize64, random_packed, terms64

CASES = [
    (Format(64, 4), mx.bfloat16, mx.int32, (2, 5)),
    (Format(32, 3), mx.float16, mx.uint32, (1, 8)),
    (Format(32, 4, "mxfp4"), mx.bfloat16, mx.uint32, (9,)),
]


def check(rows, case):
    fmt, dtype, kind, shape = case
    rng = np.random.default_rng(0)
    w, scales, biases = packed = random_packed(rng, 41, 192, fmt, dtype)
    numbers = rng.integers(-41 if kind == mx.int32 else 0, 41, shape)
    y = rows(mx.array(numbers).astype(kind), w, scales, biases, fmt)
    dense, terms = dequantize64(*packed, fmt)[numbers], terms64(*packed, fmt)[numbers]
    assert y.dtype == dtype
    assert_accurate(y, dense, round_to(dense, dtype), terms=terms.max())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_unpacked_and_rounded_once(case):
    """By the kernel that runs on CUDA."""

    def rows(numbers, w, scales, biases, fmt):
        matrix = PackedMatrix(w, scales, biases, None)
        given = [a for a in (w, scales, biases) if a is not None]
        launch = dequantize_rows(Spec.of(numbers), matrix, fmt, case[1])
        return launch(numbers, *given)

    with use_backend("host"):
        check(rows, case)


@on_gpus
@pytest.mark.parametrize("case", [*CASES, (*CASES[0][:3], (1, 1))], ids=str)
def test_on_a_gpu(gpu, case):
    with use_backend(gpu):
        check(lambda *arrays: quantized_rows(*arrays[:4], **arrays[4]._asdict()), case)


@pytest.mark.parametrize("path", ["reference", *GPUS])
def test_gradients_are_those_of_the_scales(path):
    w, scales, biases = mx.quantize(mx.random.normal((16, 64)), 32, 4)
    numbers, fmt = mx.array([[3, 3, 15]]), {"group_size": 32, "bits": 4}

    def ours(scales):
        return (quantized_rows(numbers, w, scales, biases, **fmt) ** 2).sum()

    def stock(scales):
        rows = mx.dequantize(w[numbers], scales[numbers], biases[numbers], **fmt)
        return (rows**2).sum()

    with use_backend(path):
        assert_same_sums(mx.grad(ours)(scales), mx.grad(stock)(scales))
