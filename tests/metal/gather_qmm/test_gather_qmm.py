"""The tiled kernels of sorted gathered products against float64, and their list of tiles."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.gather_qmm.gather_qmm import gather_qmm_config, gather_qmm_sorted
from mlx_qlayers.metal.gather_qmm.gather_qmv import Pairs
from mlx_qlayers.metal.quantized_matmul.qmm_tensor import tensor_config
from mlx_qlayers.ops.gather_qmm import gather_qmm
from mlx_qlayers.options import MatmulCall, PackedMatrix
from mlx_qlayers.runtime import trace, use_backend
from mlx_qlayers.runtime.host import checks
from tests.gpus import on_gpus
from tests.launchers import in_registers
from tests.numerics import assert_same_sums, random
from tests.packed import (
    DTYPES,
    EACH_WIDTH,
    check_gathered,
    every_format,
    every_format_and_dtype,
    random_experts,
)
from tests.pairwise import in_turn, pairwise

SMALL = Format(32, 4)
E = 6
# Sorted choices: matrices without any row, with one, with more than a tile.
RIGHT = [0] * 3 + [2] * 37 + [3] + [5] * 9


def by_kernel(
    x, packed, right, fmt, transpose, backend="host", factors=None, tensors=False, **changes
):
    config = gather_qmm_config(len(right) * x.shape[1], packed[0].shape[0], x.dtype, fmt)
    config, pairs = replace(config, **changes), Pairs((len(right),), 1, True)
    if tensors:
        config = tensor_config(40, x.shape[2], x.dtype, fmt, transpose)
        config = in_registers(config, x.shape[2]) if tensors == "registers" else config
    call = MatmulCall(x, PackedMatrix(*packed[:2]), transpose, fmt)
    with use_backend(backend):
        scaled = factors is not None
        launch = gather_qmm_sorted(call, pairs, config, scaled)
        return launch(x, *packed, None, mx.array(right, mx.uint32), factors)


def check_all(fmt, dtype, transpose, rows=72, groups=3, each=1, right=RIGHT, **others):
    rng = np.random.default_rng(fmt.bits * 1000 + fmt.group_size)
    columns = max(groups * fmt.group_size, 32)
    packed = random_experts(rng, E, rows, columns, fmt, dtype)
    x = random(rng, (len(right), each, columns if transpose else rows), dtype)
    y = by_kernel(x, packed, right, fmt, transpose, **others)
    check_gathered(y, x, packed, fmt, None, mx.array(right), transpose)


@pytest.mark.parametrize(
    ("fmt", "transpose", "dtype"), in_turn(pairwise(EACH_WIDTH), (True, False), DTYPES), ids=str
)
def test_every_width(fmt, transpose, dtype):
    check_all(fmt, dtype, transpose)


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


@pytest.mark.parametrize("transpose", [True, False], ids=["transposed", "plain"])
def test_clean_with_checks(transpose):
    """Nothing out of bounds, unset, misaligned or raced for; blocks of three rows."""
    with checks():
        check_all(SMALL, mx.float16, transpose, each=3, right=RIGHT[:8])


@on_gpus
@every_format_and_dtype
def test_on_gpus(gpu, fmt, dtype, transpose):
    for right in (RIGHT, RIGHT * 9):
        check_all(fmt, dtype, transpose, right=sorted(right), backend=gpu)


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


@pytest.mark.parametrize("tensors", [False, True])
def test_global_scale(tensors):
    fmt = Format(16, 4, "nvfp4")
    rng = np.random.default_rng(2)
    packed, x = random_experts(rng, E, 40, 64, fmt), random(rng, (len(RIGHT), 1, 64))
    factors = mx.abs(random(rng, (E,))) * 2688
    y = by_kernel(x, packed, RIGHT, fmt, True, factors=factors, tensors=tensors)
    check_gathered(y, x, packed, fmt, None, mx.array(RIGHT), factors=factors)


@on_gpus
@pytest.mark.parametrize("choice", ["blocks", "listed", "shared"])
def test_operation_on_gpus(gpu, choice):
    """Sorted choices of any rows of x, and the gradient of x."""
    rng = np.random.default_rng(3)
    packed = random_experts(rng, E, 64, 64, SMALL)
    shape = (5, 1, 2, 64) if choice == "shared" else (10, 2, 64)
    x, right = random(rng, shape), np.sort(rng.integers(0, E, 10))
    left = mx.array(rng.integers(0, 10, 10)) if choice == "listed" else None
    right = mx.array(right.reshape(5, 2) if choice == "shared" else right)

    def function(x, **options):
        return gather_qmm(x, *packed, left, right, group_size=32, **options)

    with use_backend(gpu):
        y, dx = (
            f(x, sorted_indices=True)
            for f in (function, mx.grad(lambda *a, **b: function(*a, **b).sum()))
        )
        plain = mx.grad(lambda x: function(x).sum())(x)
    check_gathered(y, x, packed, SMALL, left, right)
    assert_same_sums(dx, plain)
