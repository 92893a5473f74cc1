"""The product by tensor operations against float64, in every layout of lanes, and what it reads."""

from dataclasses import asdict, astuple, replace
from itertools import cycle

import mlx.core as mx
import numpy as np
import pytest
from runtime.host import mlx_kernels as mk

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.quantized_matmul.qmm_tensor import (
    codes_config,
    codes_registers,
    registers,
    tensor_config,
)
from mlx_qlayers.metal.quantized_matmul.qmv_config import packed_template
from mlx_qlayers.options import PackedMatrix
from mlx_qlayers.runtime import use_backend
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.host.compiled_kernel import LAYOUTS
from tests.launchers import in_registers, qmm_tensor
from tests.metal.quantized_matmul.test_qmv import check_fused, packed_matrices
from tests.numerics import random
from tests.packed import DTYPES, FORMATS, check_product, every_format, random_packed

AFFINE = Format(64, 4)
layouts = cycle(LAYOUTS)


def _product(
    rng, rows, outer, inner, fmt, dtype, transpose=True, biased=False, tall=0, staged=True
):
    packed = random_packed(rng, outer, inner, fmt, dtype)
    x = random(rng, (rows, inner if transpose else outer), dtype)
    bias = random(rng, (outer if transpose else inner,), dtype) if biased else None
    config = tensor_config(tall or rows, x.shape[1], dtype, fmt, transpose)
    config = config if staged else in_registers(config, x.shape[1])
    with use_backend("host"):
        y = qmm_tensor(x, *packed, bias, transpose, fmt, config)
    check_product(y, x, packed, fmt, transpose, bias)


@pytest.mark.tensors
@every_format
def test_every_format(fmt, dtype, transpose):
    _check_layouts(fmt, dtype, transpose)


@pytest.mark.parametrize(
    ("fmt", "dtype", "transpose"),
    [
        (Format(32, 3), mx.float32, False),
        (Format(128, 5), mx.bfloat16, True),
        (Format(64, 2), mx.float16, True),
        (Format(32, 4, "mxfp4"), mx.float16, False),
        (Format(32, 8, "mxfp8"), mx.bfloat16, True),
        (Format(16, 4, "nvfp4"), mx.float16, True),
    ],
    ids=str,
)
def test_some_formats(fmt, dtype, transpose):
    _check_layouts(fmt, dtype, transpose)


def _check_layouts(fmt, dtype, transpose):
    """Two kernels, unpacked once and by each SIMD group; a number of rows for each layout."""
    rng = np.random.default_rng(fmt.bits * 1000 + fmt.group_size)
    inner = max(3 * fmt.group_size, 64) + (16 if fmt.mode == "nvfp4" else 0)
    for rows, staged in ((65, True), (65, False), (100, True), (1, False)):
        with checks(tensor_layout=next(layouts)):
            _product(rng, rows, 41, inner, fmt, dtype, transpose, tall=200, staged=staged)


@pytest.mark.parametrize("transpose", [True, False], ids=["transposed", "plain"])
def test_every_number_of_rows(transpose):
    rng = np.random.default_rng(0)
    for rows in (1, 7, 16, 17, 32, 33, 64, 129, 200):
        with checks():
            _product(rng, rows, 64, 64, AFFINE, mx.float16, transpose)


@pytest.mark.tensors
@pytest.mark.parametrize("transpose", [True, False], ids=["transposed", "plain"])
def test_all_numbers_of_rows(transpose):
    """Each in one layout, all of them by turns; columns are no multiple of a tile."""
    rng = np.random.default_rng(6)
    for rows in range(1, 201):
        with checks(tensor_layout=next(layouts)):
            _product(rng, rows, 41 if transpose else 64, 64, AFFINE, mx.bfloat16, transpose)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("fmt", [AFFINE, Format(32, 3), *FORMATS[-3:]], ids=str)
def test_on_cuda(fmt, dtype):
    """Where no operation takes it: the same source on other matrix units."""
    rng = np.random.default_rng(2)
    for rows, outer, inner, transpose in ((70, 41, 192, True), (200, 192, 128, False)):
        packed = random_packed(rng, outer, inner, fmt, dtype)
        x = random(rng, (rows, inner if transpose else outer), dtype)
        if not transpose:  # from an element on at which no load of several begins
            x = mx.concatenate([x[0, :1], x.reshape(-1)])[1:].reshape(x.shape)
        config = in_registers(
            tensor_config(rows, x.shape[1], dtype, fmt, transpose, device="metal"), x.shape[1]
        )
        # By itself, and together: warps that share rows of x.
        for tile_k, simds in ((32, (2, 2)), (64, (1, 4))):
            tiling = {"tile_k": tile_k, "simds_m": simds[0], "simds_n": simds[1]}
            config = replace(config, resident=2, **tiling)
            with use_backend("cuda"):
                y = qmm_tensor(x, *packed, None, transpose, fmt, config)
            check_product(y, x, packed, fmt, transpose)


@pytest.mark.cuda
def test_gate_on_cuda():
    """Both matrices are multiplied with rows that are there already."""
    rng, n, k, dtype = np.random.default_rng(8), 41, 192, mx.bfloat16
    x, both = random(rng, (70, k), dtype), packed_matrices(rng, [n, n], k, dtype, AFFINE)
    alone = in_registers(tensor_config(70, k, dtype, AFFINE, True, True, "metal"), k)
    for config in (alone, replace(alone, tile_k=64, simds_m=1, simds_n=4)):
        with use_backend("cuda"):
            y = qmm_tensor(x, *both[0], True, AFFINE, config, other=both[1], gate="silu")
        check_fused([y], x, both, AFFINE, gate="silu")


def test_bias_is_added_before_rounding():
    for outer in (1, 33, 150):
        with checks():
            _product(np.random.default_rng(1), 19, outer, 64, AFFINE, mx.bfloat16, biased=True)


@pytest.mark.parametrize(
    ("group", "dtype", "layout"),
    [(32, mx.float16, "m5"), (64, mx.bfloat16, "random"), (128, mx.bfloat16, "strips")],
)
def test_packed_codes(group, dtype, layout):
    """Edges of rows and columns, one group and more than are brought at once."""
    rng, fmt = np.random.default_rng(group), Format(group, 4)
    for rows, outer, inner in ((65, 150, 5 * group), (20, 41, group), (1, 16, 2 * group)):
        packed, x = random_packed(rng, outer, inner, fmt, dtype), random(rng, (rows, inner), dtype)
        with use_backend("host"), checks(tensor_layout=layout):
            y = qmm_tensor(x, *packed, None, True, fmt, codes_config(rows))
        check_product(y, x, packed, fmt)


@pytest.mark.parametrize("codes", [False, True], ids=["", "codes"])
@pytest.mark.parametrize("gate", ["silu", "gelu", "gelu_approx", None])
def test_epilogues(gate, codes):
    """Of a gate the second matrix has a bias; without one a residual is added behind the bias."""
    dtype = mx.float32 if gate == "gelu" and not codes else mx.bfloat16
    rng, rows, n, k = np.random.default_rng(3), 37, 41, 80 if gate == "gelu_approx" else 64
    fmt = AFFINE if codes or k % 32 == 0 else Format(16, 4, "nvfp4")
    k = 64 if codes else k
    x, both = random(rng, (rows, k), dtype), packed_matrices(rng, [n, n], k, dtype, fmt)
    config = codes_config(rows) if codes else tensor_config(rows, k, dtype, fmt, True, bool(gate))
    matrices, options = (both, {"gate": gate}) if gate else (both[1:], {})
    residual = None if gate else random(rng, (rows, n), dtype)
    with use_backend("host"), checks(tensor_layout=next(layouts)):
        more = {"residual": residual, "other": both[1] if gate else None}
        y = qmm_tensor(x, *matrices[0], True, fmt, config, **options, **more)
    check_fused([y], x, matrices, fmt, **options, residual=residual)


@pytest.mark.parametrize(
    ("fmt", "dtype", "transpose", "said"),
    [
        (Format(64, 3), mx.float16, True, "not of 4 bits"),
        (Format(32, 4, "mxfp4"), mx.float16, True, "not of 4 bits"),
        (AFFINE, mx.float32, True, "rows are of float32"),
        (AFFINE, mx.float16, False, "not transposed"),
    ],
)
def test_what_packed_codes_do_not_take(fmt, dtype, transpose, said):
    x, packed = mx.ones((20, 64), dtype), random_packed(np.random.default_rng(0), 64, 64, fmt)
    with use_backend("host"), pytest.raises(ValueError, match=said):
        qmm_tensor(x, *packed, None, transpose, fmt, codes_config(20))


def test_registers():
    """The values of a thread leave room: every Apple GPU has 128 words."""
    for m in (1, 20, 40, 100):
        for dtype in DTYPES:
            for fmt in FORMATS:
                for k in (64, 48, 41):
                    for transpose in (True, False):
                        for gate in (0, 1):
                            config = tensor_config(m, k, dtype, fmt, transpose, gate > 0)
                            values = packed_template(fmt, dtype, dtype) | asdict(config)
                            assert registers(**values, transposed=transpose, gate=gate) < 128
                            values |= asdict(in_registers(config, k))
                            assert registers(**values, transposed=transpose, gate=gate) < 128
        for gate in (0, 1):
            assert codes_registers(*astuple(codes_config(m)), gate) < 128


@pytest.mark.parametrize("codes", [False, True], ids=["", "codes"])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_moves_no_more_than_stock(gate, codes):
    """Device memory at 128 rows, beside MLX's kernel for the M5, or two of them and the gate."""
    m, n, k, dtype = 128, 128, 256, mx.float16
    rng = np.random.default_rng(9)
    x, packed = random(rng, (m, k), dtype), random_packed(rng, n, k, AFFINE, dtype)
    launch = "true, false", (n // 64, m // 64, 1), (32, 2, 2)
    _, theirs = mk.affine_product("qmm_t_nax", x, packed, n, (64, 4), *launch)
    other = PackedMatrix(*packed) if gate else None
    config = codes_config(m) if codes else tensor_config(m, k, dtype, AFFINE, True, bool(gate))
    with use_backend("host"), checks() as report:
        qmm_tensor(x, *packed, None, True, AFFINE, config, other=other, gate=gate)
    moved = report.total("bytes_read") + report.total("bytes_written")
    stock_moved = theirs.bytes_read + theirs.bytes_written
    # Stock operators write both products, and read them for the activation and the product.
    allowed = 2 * stock_moved + 3 * x.dtype.size * m * n if gate else stock_moved
    assert moved <= allowed
    if not gate and not codes:  # a matrix is unpacked once for a threadgroup, as there
        assert report.total("alu_cycles") <= theirs.alu_cycles
