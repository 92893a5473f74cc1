"""The tiled product with a quantized matrix against float64, and what it reads."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from runtime.host import mlx_kernels as mk

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.quantized_matmul.qmm import QmmConfig, qmm_config
from mlx_qlayers.runtime import trace, use_backend
from mlx_qlayers.runtime.host import checks
from tests.gpus import GPUS, HERE
from tests.launchers import qmm
from tests.numerics import random
from tests.packed import DTYPES, check_product, random_packed
from tests.pairwise import in_turn, pairwise

AFFINE = Format(64, 4)


def sample(rng, rows, outer, groups, fmt, dtype, transpose=True):
    inner = max(groups * fmt.group_size, 32)
    packed = random_packed(rng, outer, inner, fmt, dtype)
    return random(rng, (rows, inner if transpose else outer), dtype), packed


def by_kernel(x, packed, fmt, transpose=True, bias=None, device="metal", **changes):
    n = packed[0].shape[0] if transpose else fmt.dims(packed[0])
    config = replace(qmm_config(device, len(x), n, x.shape[1], x.dtype, fmt, transpose), **changes)
    with use_backend(HERE):
        return qmm(x, *packed, bias, transpose, fmt, config)


@pytest.mark.parametrize("path", ["host", *GPUS])
@pytest.mark.parametrize("rows", [32, 64, 96, 128])
def test_tiles_of_wide_products(rows, path):
    """The configurations that a GPU takes where there is work for all of it."""
    rng = np.random.default_rng(rows)
    x, packed = sample(rng, rows - 7, 150, 3, AFFINE, mx.bfloat16)
    config = qmm_config("cuda", rows, 1 << 17, 192, x.dtype, AFFINE, True)
    with use_backend(path), checks() as report:
        check_product(qmm(x, *packed, None, True, AFFINE, config), x, packed, AFFINE)
    if path == "host":
        assert max(counters.bank_ways for _, counters in report.launches) <= 2


@pytest.mark.parametrize("transpose", [True, False], ids=["transposed", "plain"])
@pytest.mark.parametrize("parts", [2, 5])
def test_parts_share_the_depth(parts, transpose):
    rng = np.random.default_rng(parts)
    x, packed = sample(rng, 33, 328, 5, AFFINE, mx.float16, transpose)
    bias = random(rng, (328 if transpose else 320,), mx.float16)
    with trace() as launches:
        y = by_kernel(x, packed, AFFINE, transpose, bias, parts=parts)
    check_product(y, x, packed, AFFINE, transpose, bias)
    assert [launch.kernel for launch in launches] == [
        "qmm",
        "qmm_sum",
    ]


@pytest.mark.parametrize(
    ("dtype", "device", "transpose"),
    in_turn(pairwise(DTYPES, ("metal", "cuda")), (True, False)),
    ids=str,
)
def test_banks(dtype, device, transpose):
    """No threads of a SIMD group wait for each other's banks more than once."""
    rng = np.random.default_rng(6)
    x, packed = sample(rng, 64, 128, 2, AFFINE, dtype, transpose)
    with checks() as report:
        by_kernel(x, packed, AFFINE, transpose, device=device)
    assert max(counters.bank_ways for _, counters in report.launches) <= 2


def test_moves_no_more_than_stock():
    """Device memory at 64 rows, beside MLX's own tiled kernel on the same machine."""
    m, n, k = 64, 128, 512
    x, packed = sample(np.random.default_rng(9), m, n, k // 64, AFFINE, mx.float16)
    launch = "false, false", (n // 32, m // 32, 1), (32, 2, 2)
    _, theirs = mk.affine_product("qmm_t", x, packed, n, (64, 4), *launch)
    # A GPU of NVIDIA's takes the second where the result has columns for all of its cores.
    for device, columns in (("metal", n), ("cuda", 1 << 17)):
        config = qmm_config(device, m, columns, k, x.dtype, AFFINE, True)
        with use_backend("host"), checks() as report:
            qmm(x, *packed, None, True, AFFINE, config)
        moved = report.total("bytes_read") + report.total("bytes_written")
        assert moved <= theirs.bytes_read + theirs.bytes_written


def test_every_weight_is_read_once_for_a_tile_of_rows():
    rng = np.random.default_rng(7)
    x, packed = sample(rng, 17, 128, 2, AFFINE, mx.bfloat16)
    config = qmm_config("metal", 17, 128, 128, mx.bfloat16, AFFINE, True)
    with checks() as report:
        y = by_kernel(x, packed, AFFINE, device="metal")
    runs = AFFINE.group_size // config.run
    of_matrix = packed[0].nbytes + runs * (packed[1].nbytes + packed[2].nbytes)
    of_rows = x.nbytes * (128 // config.tile_n)
    assert report.total("bytes_read") == of_matrix + of_rows
    assert report.total("bytes_written") == y.nbytes


def test_refuses_tiles_that_threads_cannot_share():
    x, packed = sample(np.random.default_rng(8), 17, 41, 3, AFFINE, mx.float32)
    for config in (QmmConfig(48, 64, 32, 2, 2, 16), QmmConfig(64, 40, 32, 2, 2, 16)):
        with pytest.raises(ValueError, match="cannot share"):
            qmm(x, *packed, None, True, AFFINE, config)
