"""The product of 17 to 128 rows against float64, what stands around it, and what it reads."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.metal.quantized_matmul.qmm_skinny import skinny_config
from mlx_qlayers.options import PackedMatrix
from mlx_qlayers.runtime import use_backend
from mlx_qlayers.runtime.host import checks
from tests.gpus import HERE, on_gpus
from tests.launchers import qmv, skinny
from tests.metal.quantized_matmul.test_deferred_norm import gives_squares, takes_squares
from tests.metal.quantized_matmul.test_qmv import AFFINE
from tests.numerics import random
from tests.packed import check_product, random_packed

# Shares of K of which some have no window, tiles of which some lie beyond the matrix, both stages.
SMALL = skinny(16, fragments=3, tiles=1, simds_n=2, simds_k=4, stages=1, stage_tiles=2)
WIDE = skinny(32, fragments=4, tiles=2, simds_n=3, simds_k=1, ahead=1, chunk=2, block_tiles=2)
# x stays in threadgroup memory: all of it, or what each of the threadgroups has that share K.
RESIDENT = {"fragments": 3, "simds_n": 3, "simds_k": 2, "stages": 0}
PERSISTENT = skinny(16, **RESIDENT, tiles=2, ahead=3, chunk=2, block_tiles=4, stage_tiles=5)
SHARED = skinny(16, **RESIDENT, ahead=1)


def by_kernel(x, packed, config, bias=None):
    with use_backend(HERE):
        return qmv(x, [PackedMatrix(*packed, bias)], AFFINE, config)[0]


def sample(rows, n=41, k=192):
    rng = np.random.default_rng(rows)
    return random(rng, (rows, k), mx.bfloat16), random_packed(rng, n, k, AFFINE, mx.bfloat16)


@pytest.mark.parametrize(
    "config", [SMALL, replace(WIDE, fragments=3, stage_tiles=2), PERSISTENT, SHARED], ids=str
)
def test_configurations(config):
    """No whole window at the end of K, an odd number of them, rows and columns at edges."""
    for rows, n, k in ((17, 8, 64), (24, 130, 320)):
        x, packed = sample(rows, n, k)
        bias = random(np.random.default_rng(k), (n,), x.dtype)
        with checks():
            y = by_kernel(x, packed, config, bias=bias)
        check_product(y, x, packed, AFFINE, bias=bias)


def test_rows_of_several_threadgroups():
    x, packed = sample(57)
    with use_backend("host"), checks():
        check_product(by_kernel(x, packed, WIDE), x, packed, AFFINE)
        gives_squares(57, 200, WIDE)


def test_deferred_norms():
    with use_backend("host"), checks():
        takes_squares(37, [41, 41], "silu", config=WIDE)
        takes_squares(23, [41, 41], "silu", config=PERSISTENT)
        takes_squares(23, [41], None, config=SHARED)
        gives_squares(20, 200, SHARED)


def test_threadgroups_share_k_of_one_matrix():
    x, packed = sample(24)
    matrix = PackedMatrix(*packed)
    with use_backend("host"), pytest.raises(ValueError, match="takes no rows of 192 elements"):
        qmv(x, [matrix, matrix], AFFINE, SHARED)


@on_gpus
def test_deferred_norms_on_gpus(gpu):
    with use_backend(gpu):
        gives_squares(64, 200, skinny_config(gpu, 64, 200, 128, AFFINE))
        takes_squares(33, [41, 8, 24], None, config=skinny_config(gpu, 33, 73, 192, AFFINE))
        takes_squares(23, [41, 41], "silu", config=PERSISTENT)
        gives_squares(20, 200, SHARED)


@on_gpus
def test_rows_that_stay_on_gpus(gpu):
    """Small, by parts, and as much as CUDA's shared memory holds."""
    largest = skinny(
        32, fragments=4, tiles=1, simds_n=18, stages=0, chunk=2, block_tiles=2, stage_tiles=28
    )
    cases = [(PERSISTENT, 23, 130, 320), (SHARED, 20, 130, 320)]
    for config, rows, n, k in cases + [(largest, 31, 300, 3584)] * (gpu == "cuda"):
        x, packed = sample(rows, n, k)
        check_product(by_kernel(x, packed, config), x, packed, AFFINE)


def test_reads_the_matrix_once():
    x, packed = sample(32, 192, 512)
    with checks() as report:
        y = by_kernel(x, packed, WIDE)
    of_matrix = sum(a.nbytes for a in packed)
    assert report.total("bytes_read") == of_matrix + 192 // 96 * x.nbytes
    assert report.total("bytes_written") == y.nbytes


def test_a_row_does_not_depend_on_the_others():
    x, packed = sample(24)
    with checks():
        whole = by_kernel(x, packed, WIDE)
        assert mx.array_equal(by_kernel(x[:17], packed, WIDE), whole[:17])
