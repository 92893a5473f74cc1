"""The tiled kernels of sorted gathered products against float64, and their list of tiles."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.gather_qmm.gather_qmm import gather_qmm_config, gather_qmm_sorted
from mlx_qlayers.metal.gather_qmm.gather_qmv import Pairs
from mlx_qlayers.metal.quantized_matmul.qmm_tensor import tensor_config
from mlx_qlayers.options import MatmulCall, PackedMatrix
from mlx_qlayers.runtime import trace, use_backend
from mlx_qlayers.runtime.host import checks
from tests.launchers import in_registers
from tests.numerics import random
from tests.packed import check_gathered, every_format, random_experts

SMALL = Format(32, 4)
E = 6
# Sorted choices: matrices without any row, with one, with more than a tile.
RIGHT = [0] * 3 + [2] * 37 + [3] + [5] * 9


def by_kernel(x, packed, right, fmt, transpose, factors=None, tensors=False):
    config = gather_qmm_config(len(right) * x.shape[1], packed[0].shape[0], x.dtype, fmt)
    pairs = Pairs((len(right),), 1, True)
    if tensors:
        config = tensor_config(40, x.shape[2], x.dtype, fmt, transpose)
        config = in_registers(config, x.shape[2]) if tensors == "registers" else config
    call = MatmulCall(x, PackedMatrix(*packed[:2]), transpose, fmt)
    with use_backend("host"):
        scaled = factors is not None
        launch = gather_qmm_sorted(call, pairs, config, scaled)
        return launch(x, *packed, None, mx.array(right, mx.uint32), factors)


def check_all(fmt, dtype, transpose, tensors):
    rng, columns = np.random.default_rng(fmt.bits * 1000 + fmt.group_size), 3 * fmt.group_size
    packed = random_experts(rng, E, 72, columns, fmt, dtype)
    x = random(rng, (len(RIGHT), 1, columns if transpose else 72), dtype)
    y = by_kernel(x, packed, RIGHT, fmt, transpose, tensors=tensors)
    check_gathered(y, x, packed, fmt, None, mx.array(RIGHT), transpose)


@pytest.mark.parametrize(
    ("fmt", "dtype", "transpose"),
    [(SMALL, mx.float16, True), (Format(16, 4, "nvfp4"), mx.bfloat16, False)],
    ids=str,
)
def test_tensor_operations(fmt, dtype, transpose):
    for tensors in (True, "registers"):
        with checks():
            check_all(fmt, dtype, transpose, tensors=tensors)


@pytest.mark.tensors
@every_format
def test_tensor_operations_in_every_format(fmt, dtype, transpose):
    with checks():
        check_all(fmt, dtype, transpose, tensors=True)


@pytest.mark.parametrize("matrices", [1, 5, 64, 1500])
def test_list_of_any_number_of_matrices(matrices):
    """More matrices than a threadgroup has threads; each tile once, and no row left out."""
    rng = np.random.default_rng(matrices)
    packed = random_experts(rng, matrices, 8, 32, SMALL)
    right = np.sort(rng.integers(0, matrices, 50))
    x = random(rng, (50, 1, 32))
    with trace() as launches:
        y = by_kernel(x, packed, right, SMALL, True)
    check_gathered(y, x, packed, SMALL, None, mx.array(right))
    assert [launch.kernel for launch in launches] == ["gather_qmm_list", "gather_qmm_tiles"]


def test_global_scale():
    fmt = Format(16, 4, "nvfp4")
    rng = np.random.default_rng(2)
    packed, x = random_experts(rng, E, 40, 64, fmt), random(rng, (len(RIGHT), 1, 64))
    factors = mx.abs(random(rng, (E,))) * 2688
    y = by_kernel(x, packed, RIGHT, fmt, True, factors=factors, tensors=True)
    check_gathered(y, x, packed, fmt, None, mx.array(RIGHT), factors=factors)
