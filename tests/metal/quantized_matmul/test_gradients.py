"""The gradients of scales and biases by kernel, against float64 and what autodiff gives."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.formats import Format
from mlx_qlayers.runtime import use_backend
from mlx_qlayers.runtime.host import checks
from tests.examples.products import by_groups
from tests.gpus import GPUS
from tests.launchers import scales_and_biases_gradient
from tests.numerics import assert_accurate, random, round_to, to64
from tests.oracles import product
from tests.packed import random_packed

SMALL = Format(32, 4)


def oracle(left, right, w, dtype):
    """Both gradients in ``dtype`` arithmetic."""
    d_w = product(np.swapaxes(left.astype(dtype), 0, 1), right.astype(dtype))
    return by_groups(d_w, w, SMALL)


def check(found, left, right, w):
    left, right = to64(left), to64(right)
    truth, plain = (oracle(left, right, w, dtype) for dtype in (np.float64, np.float32))
    terms = oracle(np.abs(left), np.abs(right), w, np.float64)
    names = ("scales", "biases")
    for name, y, exact, rounded, sums in zip(names, found, truth, plain, terms, strict=True):
        assert_accurate(y, exact, round_to(rounded, y.dtype), terms=sums.max(), what=name)


def sample(rng, m, rows, groups):
    columns = groups * SMALL.group_size
    return random(rng, (m, rows)), random(rng, (m, columns))


@pytest.mark.parametrize(
    ("device", "path"),
    [
        ("host", "host"),
        ("metal", "host"),
        *(pytest.param(*gpu.values, *gpu.values, marks=gpu.marks) for gpu in GPUS),
    ],
)
def test_rows_by_matrix(device, path):
    """Lists of rows, one matrix without any; the same in every run and on poisoned memory."""
    rng = np.random.default_rng(7)
    left, right = sample(rng, 30, 24, 2)
    matrices = [random_packed(rng, 24, 64, SMALL) for _ in range(4)]
    w, scales = (mx.stack([m[i] for m in matrices]) for i in range(2))
    lists = [[3, 3, 29, 0, 11], [], [*range(17)], [8]]
    others = [rng.permutation(30)[: len(rows)].tolist() for rows in lists]
    chosen = (np.concatenate(lists), np.concatenate(others), np.cumsum([0, *map(len, lists)]))
    chosen = tuple(mx.array(a.astype(np.uint32)) for a in chosen)
    runs = []
    for _ in range(3):
        poison = mx.full(scales.shape, float("nan"))
        mx.eval(poison)
        del poison
        with use_backend(path):
            runs.append(
                scales_and_biases_gradient(right, left, w, scales, SMALL, True, device, chosen)
            )
    for pair in runs:
        assert all(mx.array_equal(a, b) for a, b in zip(pair, runs[0], strict=True))
    for e, (rows, other) in enumerate(zip(lists, others, strict=True)):
        pair = [a[e] for a in runs[0]]
        if not rows:
            assert not any(mx.any(a) for a in pair)
            continue
        check(pair, left[mx.array(other)], right[mx.array(rows)], w[e])


@pytest.mark.parametrize("device", ["host", "metal"])
def test_neither_matrix_nor_gradient_is_in_memory(device):
    """A launch writes the gradients; a tile reads its codes, once, and its rows."""
    rng = np.random.default_rng(8)
    left, right = sample(rng, 32, 64, 4)
    packed = random_packed(rng, 64, 128, SMALL)
    with use_backend("host"), checks() as report:
        found = scales_and_biases_gradient(right, left, *packed[:2], SMALL, True, device)
    assert report.total("bytes_written") == sum(a.nbytes for a in found)
    assert report.total("same_value_writes") == 0
    assert report.total("distinct_read") <= left.nbytes + right.nbytes + packed[0].nbytes
