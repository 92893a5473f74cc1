"""gather_qmm in every format, on all paths, which path is taken, and what it refuses."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import explain, use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.ops import gather_qmm as operation
from mlx_qlayers.ops.gather_qmm import gather_qmm
from mlx_qlayers.runtime import BackendError, trace
from mlx_qlayers.runtime.backend import backend, current, epoch
from tests.examples import RANDOM
from tests.gpus import STAND_INS, on_gpus
from tests.numerics import random
from tests.ops.test_quantized_matmul import LAYOUTS
from tests.packed import (
    DTYPES,
    EACH_WIDTH,
    check_gathered,
    every_format_and_dtype,
    random_experts,
)
from tests.pairwise import in_turn, pairwise

SMALL = Format(32, 4)
E, N, K = 5, 40, 64
# Blocks, their rows, and whether their choices of six matrices are sorted: each by itself, tiles of
# rows that chose the same, and fewer rows than matrices.
BLOCKS = [(7, 1, False), (7, 3, False), (90, 1, True), (9, 3, True), (5, 1, True)]
# Rows of a matrix, and groups in each: no whole tiles, one of everything, more than a tile.
SIZES = [(41, 3), (1, 1), (72, 5)]


def options(fmt, **others):
    return fmt._asdict() | others


def check(path, fmt, transpose, dtype, blocks, size, layout):
    count, m, in_order = blocks
    sizes = {"shapes": ((count,), (6,), None, (count,)), "m": m, "n": size[0], "groups": size[1]}
    changes = {"fmt": fmt, "transpose": transpose, "dtypes": (dtype,) * 2} | sizes
    changes |= {"sorted": in_order, "layouts": (layout,) * 7}
    RANDOM["gather_qmm"].call(path, **changes).check(path, f"{fmt} {dtype} {blocks} {size}")


@pytest.mark.parametrize("path", ["host", "checked", *STAND_INS])
@pytest.mark.parametrize(
    ("fmt", "transpose", "dtype", "blocks", "size", "layout"),
    in_turn(pairwise(EACH_WIDTH, (True, False)), DTYPES, BLOCKS, SIZES, LAYOUTS),
    ids=str,
)
def test_every_width(path, fmt, transpose, dtype, blocks, size, layout):
    check(path, fmt, transpose, dtype, blocks, size, layout)


@on_gpus
@every_format_and_dtype
def test_on_gpus(gpu, fmt, dtype, transpose):
    for blocks, size, layout in zip(BLOCKS, SIZES * 2, LAYOUTS * 3, strict=False):
        check(gpu, fmt, transpose, dtype, blocks, size, layout)


def test_reference_large_enough_for_every_core(machine):
    machine.cores(3)
    rng = np.random.default_rng(4)
    packed, x = random_experts(rng, E, 400, 512, SMALL), random(rng, (5, 1, 512))
    right = mx.array([4, 0, 0, 2, 1])
    with use_backend("reference"):
        y = gather_qmm(x, *packed, None, right, **options(SMALL))
    check_gathered(y, x, packed, SMALL, None, right)


def test_only_gradients_that_are_asked_for_are_launched():
    rng = np.random.default_rng(10)
    w, *scales_and_biases = random_experts(rng, E, N, K, SMALL)
    x, right = random(rng, (4, 1, K)), mx.array([0, 3, 3, 1])

    def loss(x, *scales_and_biases):
        return gather_qmm(x, w, *scales_and_biases, None, right, **options(SMALL)).sum()

    expected = {0: ["gather_qmm_columns"], 1: ["quantized_gradients_groups"]}
    expected |= {(1, 2): ["quantized_gradients_groups"]}
    for asked, kernels in expected.items():
        with use_backend("host"), trace() as launches:
            mx.eval(mx.grad(loss, asked)(x, *scales_and_biases))
        assert [launch.kernel for launch in launches] == ["gather_qmm_rows", *kernels]


def test_explains_its_path():
    rng = np.random.default_rng(15)
    packed, right = random_experts(rng, E, N, K, SMALL), mx.array([1, 2])
    with use_backend("auto"):
        if backend() != "host":
            pytest.skip("a GPU is here")
        for rows, path, reason in ((1, "host", "times the speed"), (0, "reference", "empty")):
            explain(reset=True)
            gather_qmm(mx.ones((2, rows, K)), *packed, None, right, **options(SMALL))
            (decision,) = (d for d in explain() if d.op == "gather_qmm")
            assert decision.path == path and reason in decision.reason
    with use_backend("host"), pytest.raises(BackendError, match="no host kernel"):
        gather_qmm(mx.ones((2, 0, K)), *packed, None, right, **options(SMALL))


@pytest.mark.parametrize(
    ("device", "rows", "bits", "reason"),
    [
        ("metal", 512, 1, "not measured on an Apple GPU"),
        ("cuda", 7, 2, "as fast with so few rows"),
        ("cuda", 8, 2, None),
        ("cuda", 7, 1, None),  # MLX has no such product there
    ],
)
def test_when_auto_leaves_a_gpu_to_stock(machine, device, rows, bits, reason):
    machine(device)
    assert reason in (operation._stock_is_better(rows, bits, True) or [None])
    if device == "cuda":  # MLX compiles the product back for any rows
        assert operation._stock_is_better(rows, bits, False) is None


@pytest.mark.parametrize(
    ("path", "taken", "said"),
    [
        ("kernel", "metal", "auto, by sorted rows, measured here"),
        ("tensor", "metal", "auto, by tensor operations, measured here"),
        ("stock", "reference", "measured here"),
        (None, "reference", "the kernel was not measured on an Apple GPU"),
    ],
)
def test_sorted_rows_on_an_apple_gpu_go_by_what_was_measured(path, taken, said, machine):
    machine.apple()
    if path:
        form = "affine", SMALL.group_size, SMALL.bits
        machine.measured("gather_qmm", (64, E, N, K), mx.float16, form, **{path: 41e-6})
    packed = random_experts(np.random.default_rng(19), E, N, K, SMALL, mx.float16)
    x, right = mx.ones((64, 1, K), mx.float16), mx.arange(64) * E // 64
    explain(reset=True)
    with trace() as launches:
        y = gather_qmm(x, *packed, None, right, **options(SMALL, sorted_indices=True))
        mx.eval(y)
    (choice,) = (d for d in explain() if d.op == "gather_qmm")
    assert choice.path == taken and choice.reason.startswith(said)
    names = [launch.kernel for launch in launches]
    assert ("gather_qmm_tensor" in names) == (path == "tensor")
    check_gathered(y, x, packed, SMALL, None, right)
    for in_order in (True, False):  # a token's are stock's, without a look-up
        given = current.get(), epoch.number, 64, 4, in_order
        assert operation.leaves_to_stock(*given) is not in_order


def test_sorted_choices_that_are_repeated_as_a_whole_are_not_sorted():
    x, w, scales, biases = (
        mx.ones((6, 2, K)),
        *random_experts(np.random.default_rng(16), E, N, K, SMALL),
    )

    def pairs(left, right):
        arrays = x, w, scales, biases, left, right, None
        return operation._pairs(arrays, mx.broadcast_shapes(left.shape, right.shape), True)

    left, right = mx.array([[0], [1], [2]]), mx.array([0, 0, 3, 4])
    assert not pairs(left, right).in_order
    assert pairs(right, left).in_order
    y = gather_qmm(x, w, scales, biases, left, right, **options(SMALL, sorted_indices=True))
    check_gathered(y, x, (w, scales, biases), SMALL, left, right)
