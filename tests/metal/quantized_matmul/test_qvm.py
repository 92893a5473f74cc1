"""qvm, the product of vectors with a plain quantized matrix, against float64."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.formats import Format
from mlx_qlayers.runtime import use_backend
from mlx_qlayers.runtime.host import checks
from tests.launchers import qvm
from tests.numerics import random
from tests.packed import DTYPES, EACH_WIDTH, check_product, random_packed
from tests.pairwise import in_turn, pairwise

AFFINE = Format(64, 4)
# Rows of x and of the matrix, and groups of columns.
SHAPES = [(1, 41, 3), (3, 8, 1), (7, 520, 1), (16, 1, 3)]


def sample(rng, rows, k, groups, fmt, dtype):
    packed = random_packed(rng, k, max(groups * fmt.group_size, 32), fmt, dtype)
    return random(rng, (rows, k), dtype), packed


def by_kernel(x, packed, fmt, bias=None):
    with use_backend("host"):
        return qvm(x, *packed, bias, fmt)


def check_all(fmt, dtype, shapes=SHAPES):
    rng = np.random.default_rng(fmt.bits * 1000 + fmt.group_size)
    for shape in shapes:
        x, packed = sample(rng, *shape, fmt, dtype)
        check_product(by_kernel(x, packed, fmt), x, packed, fmt, False)


@pytest.mark.parametrize(
    ("fmt", "dtype", "shapes"),
    in_turn(pairwise(EACH_WIDTH), DTYPES, (SHAPES[:2], SHAPES[2:])),
    ids=str,
)
def test_every_width(fmt, dtype, shapes):
    check_all(fmt, dtype, shapes)


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(AFFINE, mx.bfloat16), (Format(32, 3), mx.float32), (Format(16, 4, "nvfp4"), mx.float16)],
    ids=str,
)
def test_clean_with_checks(fmt, dtype):
    with checks():
        check_all(fmt, dtype, [(3, 300, 3), (1, 41, 1)])


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_reads_the_matrix_once(rows):
    rng = np.random.default_rng(rows)
    x, packed = sample(rng, rows, 41, 8, AFFINE, mx.float16)
    with checks() as report:
        by_kernel(x, packed, AFFINE)
    of_matrix = packed[0].nbytes + 2 * (packed[1].nbytes + packed[2].nbytes)  # runs of 32 in 64
    assert report.total("bytes_read") == of_matrix + 512 // 32 * x.nbytes
