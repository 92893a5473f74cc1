"""qvm, the product of vectors with a plain quantized matrix, by the table on the checked build."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import quantized_matmul, use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.runtime.host import checks
from tests.examples import RANDOM
from tests.numerics import random
from tests.packed import EACH_WIDTH, random_packed
from tests.pairwise import in_turn, pairwise

# Rows of x and of the matrix, and groups of columns.
SHAPES = [(1, 41, 3), (3, 8, 1), (7, 520, 1), (16, 1, 3)]


@pytest.mark.parametrize(
    ("fmt", "dtype", "shapes"),
    in_turn(pairwise(EACH_WIDTH), ("float32", "float16", "bfloat16"), (SHAPES[:2], SHAPES[2:])),
    ids=str,
)
def test_every_width(fmt, dtype, shapes):
    for rows, n, groups in shapes:
        sizes = {"rows": (rows,), "n": n, "groups": max(groups, 32 // fmt.group_size)}
        options = {"transpose": False, "dtypes": (dtype,) * 3}
        call = RANDOM["quantized_matmul"].call("checked", fmt=fmt, **sizes, **options)
        (kernel,) = call.check("checked")[1]
        assert kernel.startswith("qvm")


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_reads_the_matrix_once(rows):
    rng = np.random.default_rng(rows)
    x = random(rng, (rows, 41), mx.float16)
    packed = random_packed(rng, 41, 512, Format(64, 4), mx.float16)
    with use_backend("host"), checks() as report:
        mx.eval(quantized_matmul(x, *packed, transpose=False))
    of_matrix = packed[0].nbytes + 2 * (packed[1].nbytes + packed[2].nbytes)  # runs of 32 in 64
    assert report.total("bytes_read") == of_matrix + 512 // 32 * x.nbytes
