"""quantized_matmul on MLX's operators in every format, and which path is taken."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import explain, quantized_matmul, use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.runtime import BackendError, trace
from mlx_qlayers.runtime.backend import backend
from tests.examples import RANDOM
from tests.numerics import random
from tests.packed import check_product, every_format, random_packed

AFFINE, SMALL = Format(64, 4), Format(32, 4)
# Rows on both sides of every crossover between the packed and the dense product.
ROWS = [1, 3, 7, 16, 41]


@pytest.fixture(autouse=True)
def reference_path():
    with use_backend("reference"):
        yield


@every_format
def test_against_float64(fmt, dtype, transpose):
    dtypes = (str(dtype).removeprefix("mlx.core."),) * 3
    for rows in ROWS:
        changes = {"fmt": fmt, "rows": (rows,), "transpose": transpose, "dtypes": dtypes}
        RANDOM["quantized_matmul"].call("reference", **changes).check("reference")


@pytest.mark.parametrize("rows", [1, 40])
def test_large_enough_for_every_core(rows, machine):
    machine.cores(3)
    rng = np.random.default_rng(rows)
    for transpose in (True, False):
        packed = random_packed(rng, 1000, 1024, AFFINE)
        x = random(rng, (rows, 1024 if transpose else 1000))
        y = quantized_matmul(x, *packed, transpose=transpose)
        check_product(y, x, packed, AFFINE, transpose)


def test_only_gradients_asked_for_are_computed():
    packed = mx.quantize(random(np.random.default_rng(8), (40, 64)), group_size=32)

    def loss(x, scales):
        return quantized_matmul(x, packed[0], scales, packed[2], group_size=32).sum()

    for asked, kernel in ((0, "qvm"), ((0, 1), "quantized_gradients")):
        with use_backend("host"), trace() as launches:
            mx.eval(mx.grad(loss, asked)(mx.ones((3, 64)), packed[1]))
        assert kernel in launches[-1].kernel or kernel in launches[-2].kernel
        assert len(launches) == (2 if asked == 0 else 3)


def test_auto_takes_the_kernel_where_it_is_faster():
    packed = mx.quantize(mx.ones((40, 64)))
    fp4 = mx.quantize(mx.ones((40, 64)), mode="mxfp4")
    with use_backend("auto"):
        if backend() != "host":
            pytest.skip("a GPU is here")
        for rows, arguments, options, path, reason in (
            (1, packed, {}, "host", "auto: 4.4 times"),
            (16, packed, {}, "host", "auto: 10 times"),
            (17, packed, {}, "host", "by qmv"),
            (1, packed, {"transpose": False}, "host", "auto: "),
            (1, fp4, {"mode": "mxfp4"}, "reference", "0.9 times"),
            (2, fp4, {"mode": "mxfp4"}, "host", "auto: 1.5 times"),
        ):
            explain(reset=True)
            x = mx.ones((rows, 40 if "transpose" in options else 64))
            quantized_matmul(x, *arguments, **options)
            (decision,) = (d for d in explain() if d.op == "quantized_matmul")
            assert decision.path == path and reason in decision.reason


def test_forced_kernel_refuses_what_it_does_not_take():
    packed = mx.quantize(mx.ones((2, 64, 64)))
    with use_backend("host"), pytest.raises(BackendError, match="no host kernel"):
        quantized_matmul(mx.ones((2, 3, 64)), *packed)
