"""Kernels of any configuration on arrays that begin anywhere in a buffer: the same bits."""

from functools import partial
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import quantized_matmul, use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.options import PackedMatrix
from mlx_qlayers.runtime.host import checks
from tests import launchers
from tests.gpus import on_gpus
from tests.metal.attention import test_decode
from tests.metal.gather_qmm import test_gather_qmm, test_gather_qmv
from tests.metal.quantized_matmul import test_gradients, test_qmm, test_qmv
from tests.numerics import behind_one, random
from tests.packed import random_experts, random_packed

# Words of a run are read four at once, two at once, and one by one.
FORMATS = [Format(64, 4), Format(32, 2), Format(32, 3), Format(32, 8, "mxfp8")]
RIGHT = [0, 0, 2, 5, 5]


def matrix(fmt=FORMATS[0], n=48, k=256, dtype=mx.float16):
    return random_packed(np.random.default_rng(0), n, k, fmt, dtype)


def rows(*shape, dtype=mx.float16):
    return random(np.random.default_rng(1), shape, dtype)


def by(launch, *others, **options):
    """A function of x and the parts of a matrix."""
    return lambda x, *packed: launch(x, packed, *others, **options)


def attended(q, *parts):
    keys, values = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    options = dict.fromkeys(("mask", "window", "softcap", "sinks")) | {"scale": 0.1}
    return test_decode.by_kernel([q, keys, values], options)


def cases():
    """Names, functions of arrays, and the arrays."""
    qmv = [("host", 1), ("metal", 3), ("cuda", 5), ("cuda", 1)]
    for fmt, (device, m) in [*zip(FORMATS, qmv, strict=True), *product(FORMATS[:1], qmv[1:])]:
        function = by(test_qmv.by_kernel, fmt, device=device)
        yield f"qmv {device} {m} {fmt}", function, rows(m, 256), *matrix(fmt)
    fmt = FORMATS[0]
    packed = matrix(fmt)
    experts = random_experts(np.random.default_rng(0), 6, 48, 256, fmt, mx.float16)
    for device in ("metal", "cuda"):
        for transpose in (True, False):
            x = rows(33, 256 if transpose else 48)
            function = by(test_qmm.by_kernel, fmt, transpose, device=device)
            yield f"qmm {device} {transpose}", function, x, *packed
    yield "qvm", partial(quantized_matmul, transpose=False), rows(3, 48), *packed
    for device in ("host", "metal"):
        for transpose in (True, False):
            x = rows(5, 1, 256 if transpose else 48)
            function = by(test_gather_qmv.by_kernel, RIGHT, fmt, transpose, device=device)
            yield f"gather_qmv {device} {transpose}", function, x, *experts
    function = by(test_gather_qmm.by_kernel, RIGHT, fmt, True)
    yield "gather_qmm", function, rows(5, 1, 256), *experts
    yield (
        "dequantize",
        lambda *p: launchers.dequantize([PackedMatrix(*p)], fmt, mx.float16),
        *packed,
    )
    yield (
        "gradients",
        lambda x, dy, *p: test_gradients.by_kernel(x, dy, p, fmt, "metal"),
        *(rows(20, 48), rows(20, 256), *packed),
    )
    q, k = rows(1, 4, 3, 64), rows(1, 2, 70, 64)
    yield "attention_decode", attended, q, k, k
    packed = mx.quantize(k, 64, 4)
    yield "attention_decode packed", attended, q, *packed, *packed


def test_views_begin_anywhere():
    for name, function, *arrays in cases():
        given = [None if a is None else behind_one(a) for a in arrays]
        with use_backend("host"), checks():
            expected, found = function(*arrays), function(*given)
            mx.eval(expected, found)
        several = isinstance(found, (list, tuple))
        for a, b in zip(*((found, expected) if several else ([found], [expected])), strict=True):
            assert mx.array_equal(a, b, equal_nan=True), name


@on_gpus
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("m", [1, 5, 40])
def test_on_gpus(gpu, fmt, m):
    for transpose in (True, False):
        arrays = rows(m, 256 if transpose else 48), *matrix(fmt)
        given = [None if a is None else behind_one(a) for a in arrays]
        options = {**fmt._asdict(), "transpose": transpose}
        with use_backend(gpu):
            found = [quantized_matmul(*a, **options) for a in (arrays, given)]
        assert mx.array_equal(*found)
