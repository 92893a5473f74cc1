"""Which path the gradients of scales and biases take, and that each is right."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import explain
from mlx_qlayers.formats import Format
from mlx_qlayers.ops.quantized_gradients import one_by_one, scales_and_biases
from mlx_qlayers.runtime import trace, use_backend
from mlx_qlayers.runtime.backend import backend
from tests.numerics import assert_same_sums, random
from tests.packed import random_packed

SMALL = Format(32, 4)


def sample(transpose, rows=5):
    rng = np.random.default_rng(rows)
    packed = random_packed(rng, 40, 64, SMALL)
    inner, outer = (64, 40) if transpose else (40, 64)
    return random(rng, (rows, inner)), random(rng, (rows, outer)), *packed


@pytest.mark.parametrize("transpose", [True, False], ids=["transposed", "plain"])
def test_paths_agree(transpose):
    arguments = (*sample(transpose), SMALL, transpose)
    found = []
    for path in ("host", "ops"):
        with use_backend(path), trace() as launches:
            found.append(scales_and_biases(*arguments))
        assert len(launches) == (path == "host")
    for a, b in zip(*found, strict=True):
        assert_same_sums(a, b)


def test_auto_takes_the_kernel_on_a_cpu():
    x, dy, *packed = sample(True)
    with use_backend("auto"):
        if backend() != "host":
            pytest.skip("a GPU is here")
        for rows, path in ((5, "host"), (0, "ops")):
            explain(reset=True)
            pair = scales_and_biases(x[:rows], dy[:rows], *packed, SMALL, True)
            assert [a.shape for a in pair] == [(40, 2)] * 2
            (decision,) = (d for d in explain() if d.op.startswith("quantized_matmul"))
            assert decision.path == path
            assert rows or not any(mx.any(a) for a in pair)


def test_a_pair_is_computed_once_for_the_same_arrays():
    calls = []

    def both(a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
        calls.append(None)
        return a, b

    first, second = one_by_one(both)
    a, b, c = (mx.array(float(i)) for i in range(3))
    assert first(a, b) is a and second(a, b) is b and len(calls) == 1
    assert second(a, c) is c and len(calls) == 2
