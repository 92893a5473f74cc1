"""Which kernel ``auto`` takes where, without the devices."""

import time

import mlx.core as mx
import pytest
from machine import has_gpu

from mlx_qlayers import quantized_matmul, use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.measurements.entries import entries
from mlx_qlayers.metal.quantized_matmul.qmm_skinny import skinny_config
from mlx_qlayers.metal.quantized_matmul.tile import Tile
from mlx_qlayers.ops.quantized_route import (
    DENSE,
    QMM,
    QMV,
    SKINNY,
    dense_is_worse,
    in_one_launch,
    is_dense,
    route,
    skinny_spread,
    stock_is_better,
)
from mlx_qlayers.ops.tensor_choice import CODES, TENSOR
from mlx_qlayers.options import MatmulCall, PackedMatrix
from mlx_qlayers.runtime.spec import Spec

AFFINE = Format(64, 4)


@pytest.fixture
def on_cuda(machine):
    machine("cuda", "host")


def planned(rows, n, k, dtype=mx.bfloat16, transpose=True, fmt=AFFINE, **options):
    x, w = Spec((rows, k if transpose else n), dtype), Spec((n, k * fmt.bits // 32), mx.uint32)
    return route("test", MatmulCall(x, PackedMatrix(w, None), transpose, fmt), **options)


def chosen(*arguments, **options):
    to = planned(*arguments, **options)
    return (to.choice.path, to.kernel) if to.choice.path != "reference" else ("reference", "")


def test_qmv_in_a_graph(on_cuda):
    for rows, kernel in ((1, QMV), (8, QMV), (9, SKINNY), (16, SKINNY)):
        assert chosen(rows, 512, 512) == ("cuda", kernel)
    assert chosen(1, 37888, 3584, mx.float32) == ("reference", "")


def test_qmv_called_one_by_one(on_cuda):
    """A launch from Python must be worth its call; stock products of two to seven rows are slow."""
    for rows, n, path in (
        (1, 512, "reference"),
        (1, 37888, "cuda"),
        (7, 512, "reference"),
        (4, 3584, "cuda"),
    ):
        assert chosen(rows, n, 3584, single=True)[0] == path
    reason = planned(1, 512, 3584, single=True).choice.reason
    assert "takes less time than Python" in reason


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_many_rows(on_cuda, dtype):
    """qmm_skinny up to 128 rows; a dense product of a dequantized matrix above."""
    for rows, kernel in ((17, SKINNY), (128, SKINNY), (129, DENSE), (2048, DENSE)):
        assert chosen(rows, 37888, 3584, dtype) == ("cuda", kernel)
        assert in_one_launch(mx.zeros((rows, 64), dtype)) == (kernel == SKINNY)
        assert is_dense(mx.zeros((rows, 64), dtype)) == (kernel == DENSE)
    for rows, kernel in ((1, QMM), (64, QMM), (65, DENSE)):
        assert chosen(rows, 37888, 3584, dtype, transpose=False) == ("cuda", kernel)


def test_many_rows_of_float32_are_none_of_tf32(on_cuda):
    """MLX multiplies dense matrices of float32 in TF32."""
    for rows in (17, 2048):
        for transpose in (True, False):
            assert chosen(rows, 37888, 3584, mx.float32, transpose) == ("cuda", QMM)
        assert not is_dense(mx.zeros((rows, 64)))


@pytest.mark.parametrize("single", [True, False], ids=["called", "in a graph"])
def test_one_bit_is_never_left_to_stock_which_has_no_product_of_it(on_cuda, single):
    for rows in (1, 7, 16, 17, 900):
        for dtype in (mx.float32, mx.bfloat16):
            options = {"fmt": Format(64, 1), "single": single}
            assert chosen(rows, 64, 512, dtype, **options)[0] == "cuda"
            assert stock_is_better(dtype, Format(64, 1)) is None


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("single", [True, False], ids=["called", "in a graph"])
def test_no_product_that_mlx_would_compile(on_cuda, dtype, single):
    """MLX compiles its own from eight rows on, for 10 to 50 seconds when it is first asked."""
    for rows in (8, 16, 17, 100, 900):
        for n, k in ((64, 64), (512, 3584), (3584, 3584)):
            for transpose in (True, False):
                assert chosen(rows, n, k, dtype, transpose, single=single)[0] == "cuda"
    for rows, stays in ((17, True), (512, False), (2048, False)):
        x = mx.zeros((rows, 896), mx.bfloat16)
        assert bool(dense_is_worse(rows, 3 * 896, x, Format(64, 4))) == stays


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_64_rows_on_a_cpu_are_no_slower_than_the_reference(dtype):
    packed = mx.quantize(mx.random.normal((1024, 1024)).astype(dtype))
    x = mx.random.normal((64, 1024)).astype(dtype)
    seconds = {}
    for path in ("host", "reference"):
        with use_backend(path):
            seconds[path] = min(time_of(lambda: quantized_matmul(x, *packed)) for _ in range(4))
    assert seconds["host"] <= seconds["reference"]


def time_of(product):
    start = time.perf_counter()
    mx.eval(product())
    return time.perf_counter() - start


M4, M5 = "applegpu_g16s", "applegpu_g17s"
KEY = 512, 3584, 3584, mx.bfloat16, AFFINE, True


@pytest.mark.parametrize(
    ("path", "gpu", "system", "kernel", "said"),
    [
        ("tensor", M5, "25.4.0", TENSOR, "tensor operations, measured here: tensor 41.0 us"),
        ("tensor", M4, "25.4.0", QMM, "the kernel was not measured"),
        ("codes", M5, "25.4.0", CODES, "on packed codes, measured here: codes 41.0 us"),
        ("codes", M5, "25.2.0", QMM, "the kernel was not measured"),
        ("kernel", M5, "25.4.0", QMM, "tensor operations were slower"),
        ("kernel", M4, "25.4.0", QMM, "no tensor operations: the device is applegpu_g16s"),
    ],
)
def test_tensor_operations(path, gpu, system, kernel, said, machine):
    """Taken where they run and were measured to be fastest; the reason is there to be read."""
    machine.apple(gpu, system)
    machine.measured("qmm", *KEY, **{path: 41e-6} | {"tensor": 63e-6} | {path: 41e-6})
    to = planned(512, 3584, 3584)
    assert to.kernel == kernel
    assert said in to.choice.reason


@pytest.mark.parametrize(("path", "kernel"), [("tensor", TENSOR), ("codes", DENSE)])
def test_tensor_operations_on_cuda(path, kernel, machine):
    """The shim runs them, but not on packed codes."""
    machine.nvidia()
    machine.measured("qmm", 512, 37888, *KEY[2:], **{path: 41e-6})
    assert planned(512, 37888, 3584).kernel == kernel


def measured_tiles():
    """Rows, n, k and configuration of what ships for products of few rows."""
    for key, (entry, _) in entries("sm_90", 0).items():
        if key.startswith("qmm_skinny "):
            rows, n, k = map(int, key.split()[1].split("x"))
            yield rows, n, k, Tile(**entry.config)


def test_measured_tiles_are_taken_where_they_were_measured(on_cuda):
    """Each fits into threadgroup memory and runs of its K; a rule takes the rest."""
    found = [*measured_tiles()]
    assert len(found) > 10
    with use_backend("cuda"):
        for rows, n, k, config in found:
            assert config.shared or config.memory(AFFINE) <= 48 * 1024
            assert config.runs
            assert skinny_spread("cuda", rows, n, k, AFFINE) == config
            by_rule = skinny_config("cuda", rows, n + 16, k, AFFINE, True)
            assert skinny_spread("cuda", rows, n + 16, k, AFFINE) == by_rule


def test_rows_stay_where_they_fit(on_cuda, monkeypatch):
    """All of them, or parts of a single matrix; with as much shared memory as a GPU has."""
    gate, down = (16, 28672, 4096, AFFINE), (32, 4096, 14336, AFFINE, True)
    assert skinny_config("cuda", *gate).stages == 0
    assert skinny_config("cuda", *gate).parts(4096) == 1
    assert skinny_config("cuda", *down).parts(14336) > 1
    assert skinny_config("cuda", *down[:-1]).stages > 0
    assert skinny_config("cuda", 16, 4096, 14336, AFFINE, True).parts(14336) == 4
    with use_backend("cuda"):
        assert skinny_config("cuda", *down).runs
        has_gpu(monkeypatch, "sm_86")
        assert skinny_config("cuda", *gate).stages > 0
        assert all(skinny_spread("cuda", *size, AFFINE).runs for *size, _ in measured_tiles())


def test_several_matrices_have_no_parts(on_cuda):
    with use_backend("cuda"):
        assert skinny_spread("cuda", 24, 3584, 18944, AFFINE).parts(18944) > 1
        assert skinny_spread("cuda", 24, 3584, 18944, AFFINE, single=False).parts(18944) == 1
