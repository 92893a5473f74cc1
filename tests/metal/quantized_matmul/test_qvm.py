"""qvm, the product of vectors with a plain quantized matrix: what it reads."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import quantized_matmul, use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.runtime.host import checks
from tests.numerics import random
from tests.packed import random_packed


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_reads_the_matrix_once(rows):
    rng = np.random.default_rng(rows)
    x = random(rng, (rows, 41), mx.float16)
    packed = random_packed(rng, 41, 512, Format(64, 4), mx.float16)
    with use_backend("host"), checks() as report:
        mx.eval(quantized_matmul(x, *packed, transpose=False))
    of_matrix = packed[0].nbytes + 2 * (packed[1].nbytes + packed[2].nbytes)  # runs of 32 in 64
    assert report.total("bytes_read") == of_matrix + 512 // 32 * x.nbytes
