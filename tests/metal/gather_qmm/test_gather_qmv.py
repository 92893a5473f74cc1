"""The kernels of gathered products against float64, and what they read."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.gather_qmm.gather_qmv import Pairs, configuration, gather_qmv
from mlx_qlayers.options import MatmulCall, PackedMatrix
from mlx_qlayers.runtime import use_backend
from mlx_qlayers.runtime.host import checks
from tests.numerics import random
from tests.packed import random_experts

AFFINE, SMALL = Format(64, 4), Format(32, 4)
E = 6


def by_kernel(x, packed, right, fmt, transpose=True, in_order=False, device="host"):
    """Products of the blocks of x, one each, with the matrices that ``right`` lists."""
    config = configuration(device, x.shape[-2], in_order, transpose, fmt)
    pairs = Pairs((len(right),), 1, in_order)
    call = MatmulCall(x, PackedMatrix(*packed[:2]), transpose, fmt)
    with use_backend("host"):
        launch = gather_qmv(call, pairs, config)
        return launch(x, *packed, None, mx.array(right, mx.uint32), None)


@pytest.mark.parametrize("device", ["host", "metal"])
def test_sorted_rows_share_what_they_read(device):
    rng = np.random.default_rng(1)
    packed = random_experts(rng, E, 24, 256, AFFINE, mx.float16)
    right = [0] * 16 + [3] * 8 + [5] * 8
    x = random(rng, (32, 1, 256), mx.float16)
    read = {}
    for in_order in (True, False):
        with checks() as report:
            by_kernel(x, packed, right, AFFINE, in_order=in_order, device=device)
        read[in_order] = report.total("bytes_read")
    each = sum(a.nbytes for a in packed) // E
    config = configuration(device, 1, True, True, AFFINE)
    x_reads = 24 // config.outputs * x.nbytes
    # A matrix once for each tile of rows in which it is chosen; a scale by each of its threads.
    tiles = len({(r, i // config.rows) for i, r in enumerate(right)})
    scales = (AFFINE.group_size // config.run - 1) * sum(a.nbytes for a in packed[1:]) // E
    indices = 4 * len(right) * 8 * 24 // config.outputs * (config.lanes + 1)
    assert 0 <= read[True] - x_reads - tiles * (each + scales) <= indices
    assert read[False] - read[True] >= (32 - tiles) * each - indices


@pytest.mark.parametrize("transpose", [True, False], ids=["transposed", "plain"])
@pytest.mark.parametrize("in_order", [True, False])
def test_nan_and_infinity_stay_in_their_row(in_order, transpose):
    rng = np.random.default_rng(3)
    packed = random_experts(rng, E, 64, 64, SMALL)
    values = np.array(random(rng, (31, 1, 64)))
    values[2, 0, 5], values[22, 0, 7] = np.nan, np.inf
    right = [0] * 21 + [2] + [5] * 9  # runs longer than a tile of rows
    y = by_kernel(mx.array(values), packed, right, SMALL, transpose, in_order)
    good = np.isfinite(values).all((1, 2))
    finite = np.isfinite(np.array(y))
    assert finite[good].all() and not finite[~good].any()
