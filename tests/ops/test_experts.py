"""Experts for few rows on the checked build against float64, and what they read."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.ops.experts import experts_chosen, experts_combined, experts_products
from mlx_qlayers.options import PackedMatrix
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.host import checks
from tests.experts import check_gathered, gathered64, random_experts
from tests.gpus import on_gpus
from tests.numerics import EPSILON, random, to64

E, N, K = 5, 41, 192
# Rows and choices of each: alone, and several of which some choose the same.
CASES = [
    (Format(64, 4), mx.bfloat16, 1, 3),
    (Format(32, 3), mx.float32, 7, 2),
    (Format(32, 4, "mxfp4"), mx.float16, 1, 4),
]


def given(fmt, dtype, rows, each):
    """Rows, choices and two matrices."""
    rng = np.random.default_rng(fmt.bits)
    matrices = [PackedMatrix(*random_experts(rng, (E,), N, K, fmt, dtype)) for _ in range(2)]
    chosen = np.stack([rng.permutation(E)[:each] for _ in range(rows)])
    return random(rng, (rows, K), dtype), mx.array(chosen.astype(np.int32)), matrices


def check(fmt, dtype, rows, each):
    x, chosen, matrices = given(fmt, dtype, rows, each)
    biased = matrices[0]._replace(bias=random(np.random.default_rng(1), (E, N), dtype))
    products = experts_products(x, chosen, matrices, fmt)
    left = mx.broadcast_to(mx.arange(rows)[:, None], chosen.shape)
    for y, matrix in zip(products, matrices, strict=True):
        blocks = y.reshape(rows, each, 1, N)
        check_gathered(blocks, x[:, None], matrix[:3], fmt, left, chosen)
    (gated,) = experts_products(x, chosen, matrices, fmt, gate="silu")
    (plain,) = experts_products(x, chosen, [biased], fmt)
    a, b = map(to64, products)
    unit = 8 * EPSILON[dtype]
    assert np.abs(to64(gated) - a / (1 + np.exp(-a)) * b).max() <= unit * max(
        1, np.abs(a * b).max()
    )
    expected = a + to64(biased.bias)[np.array(chosen)]
    assert np.abs(to64(plain) - expected).max() <= unit * np.abs(expected).max()

    rng = np.random.default_rng(2)
    h, scores = random(rng, (rows, each, K), dtype), random(rng, (rows, each), mx.float32)
    y = experts_combined(h, chosen, scores, biased, fmt)
    (terms,) = experts_products(h, chosen, [biased], fmt)
    dense = gathered64(matrices[0][:3], fmt, chosen)
    exact = np.einsum("rjnk,rjk->rjn", dense, to64(h)) + to64(biased.bias)[np.array(chosen)]
    assert np.abs(to64(terms) - exact).max() <= unit * np.abs(exact).max()
    total = (exact * to64(scores)[..., None]).sum(1)
    assert (
        np.abs(to64(y) - total).max() <= unit * np.abs(exact * to64(scores)[..., None]).sum(1).max()
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_checked_build(case):
    with use_backend("host"), checks():
        check(*case)


@on_gpus
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_gpus(gpu, case):
    with use_backend(gpu):
        check(*case)


@pytest.mark.parametrize(
    ("rows", "experts", "count", "normed"), [(1, 40, 3, True), (7, 512, 10, False), (2, 9, 9, True)]
)
def test_chosen_are_the_largest(rows, experts, count, normed):
    logits = random(np.random.default_rng(experts), (rows, 1, experts), mx.float32)
    with use_backend("host"), checks():
        chosen, found = experts_chosen(logits, count, normed=normed, dtype=mx.float32)
        mx.eval(chosen, found)
    numbers = np.exp(to64(logits))
    expected = np.argsort(-numbers, axis=-1)[..., :count]
    assert (np.array(chosen) == expected).all()
    exact = np.take_along_axis(numbers, expected, -1)
    exact /= (exact if normed else numbers).sum(-1, keepdims=True)
    assert np.abs(to64(found) - exact).max() <= 4 * EPSILON[mx.float32]


def test_numbers_that_are_none_choose_an_expert_that_there_is():
    with use_backend("host"), checks():
        chosen, _ = experts_chosen(mx.full((1, 40), mx.nan), 3, normed=True, dtype=mx.float32)
        assert mx.all(chosen < 40).item()


def test_rows_share_the_matrices_that_they_chose():
    """Four rows read a matrix of each expert, and one where all chose the same."""
    read = []
    x, _, matrices = given(Format(64, 4), mx.bfloat16, 4, 1)
    for chosen in ([[0], [1], [2], [3]], [[3], [3], [3], [3]]):
        with use_backend("host"), checks() as report, trace() as calls:
            mx.eval(experts_products(x, mx.array(chosen), matrices, gate="silu"))
        assert len(calls) == 1
        read.append(report.total("bytes_read"))
    assert read[0] - read[1] >= 3 * sum(m.w.nbytes for m in matrices) // E


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"gate": "tanh"}, "gate"),
        ({"experts": mx.array([[0.5]])}, "experts"),
        ({"x": mx.ones((2, K))}, "x of shape"),
        ({"x": mx.ones((1, 64))}, "columns"),
    ],
)
def test_what_does_not_fit_is_named(change, named):
    x, chosen, matrices = given(Format(64, 4), mx.float32, 1, 1)
    arguments = {"x": x, "experts": chosen, "matrices": matrices} | change
    with pytest.raises(ValueError, match=named):
        experts_products(**arguments)
