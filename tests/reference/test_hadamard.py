"""The Hadamard transform of heads against its matrix in float64."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.reference.hadamard import rotated_heads
from tests.numerics import random, to64


@pytest.mark.parametrize(("width", "block"), [(64, 64), (128, 128), (96, 32), (80, 16), (7, 1)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_by_blocks_of_a_power_of_two(width, block, dtype):
    x = random(np.random.default_rng(width), (2, 3, 5, width), dtype)
    signs = [[(-1.0) ** (i & j).bit_count() for i in range(block)] for j in range(block)]
    matrix = np.kron(np.eye(width // block), np.array(signs) / block**0.5)
    found = rotated_heads(x)
    assert found.dtype == dtype and found.shape == x.shape
    wanted = to64(x) @ matrix
    # One rounding to the dtype, of sums in float32.
    error = np.abs(to64(found) - wanted)
    assert (error <= np.abs(wanted) * 0.51 * float(mx.finfo(dtype).eps) + 1e-6).all()
    again = to64(rotated_heads(found.astype(mx.float32)))
    assert np.abs(again - to64(x)).max() < 8 * float(mx.finfo(dtype).eps)
