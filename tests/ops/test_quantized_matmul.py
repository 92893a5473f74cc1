"""quantized_matmul in every format, on all paths, and which path is taken."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import explain, quantized_matmul, use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.runtime import BackendError, trace
from mlx_qlayers.runtime.backend import backend
from tests.examples import RANDOM
from tests.examples.calls import BACKENDS
from tests.gpus import STAND_INS, on_gpus
from tests.numerics import random
from tests.packed import DTYPES, FORMATS, check_product, every_format_and_dtype, random_packed
from tests.pairwise import in_turn, pairwise

AFFINE, SMALL = Format(64, 4), Format(32, 4)
# Rows on both sides of every crossover between kernels, and of the packed and the dense product.
FEW, MANY = (1, 3, 7, 16), (17, 41, 64, 129)
# Rows of a matrix, and groups in each: no whole tiles, one of everything, long rows, many tiles.
SIZES = [(41, 3), (1, 1), (8, 16), (520, 1), (33, 5)]
# As they are, and beginning one element into their buffers.
LAYOUTS = ["dense", "behind one"]


@pytest.fixture(autouse=True)
def reference_path():
    with use_backend("reference"):
        yield


def check(path, fmt, transpose, dtype, rows, size, gradient, layout):
    sizes = {"rows": (rows,), "n": size[0], "groups": size[1]}
    changes = {"fmt": fmt, "transpose": transpose, "dtypes": (dtype,) * 3} | sizes
    changes |= {"bias": gradient, "gradient": gradient, "layouts": (layout,) * 5}
    call = RANDOM["quantized_matmul"].call(path, **changes)
    call.check(path, f"{fmt} {dtype} {rows} {size} {layout}")


@pytest.mark.parametrize("path", ["reference", "host", "checked", *STAND_INS])
@pytest.mark.parametrize(
    ("fmt", "transpose", "dtype", "few", "many", "size", "gradient", "layout"),
    in_turn(pairwise(FORMATS, (True, False)), DTYPES, FEW, MANY, SIZES, (False, True), LAYOUTS),
    ids=str,
)
def test_every_format(path, fmt, transpose, dtype, few, many, size, gradient, layout):
    for rows in (few, many) if path in BACKENDS else (*FEW, 41):
        check(path, fmt, transpose, dtype, rows, size, gradient, layout)


@on_gpus
@every_format_and_dtype
def test_on_gpus(gpu, fmt, dtype, transpose):
    each = zip((1, 7, 16, 17, 64, 97, 129), SIZES * 2, LAYOUTS * 4, strict=False)
    for rows, size, layout in each:
        check(gpu, fmt, transpose, dtype, rows, size, rows > 16, layout)


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
