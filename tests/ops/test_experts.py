"""Experts for few rows on the checked build against float64, and what they read."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.metal.gather_qmm import experts as kernels
from mlx_qlayers.ops.experts import experts_chosen, experts_combined, experts_products
from mlx_qlayers.options import Clipped, PackedMatrix, Router
from mlx_qlayers.reference import experts as reference
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


def check_products(x, chosen, matrices, fmt):
    """Those of both matrices."""
    products = experts_products(x, chosen, matrices, fmt)
    left = mx.broadcast_to(mx.arange(len(chosen))[:, None], chosen.shape)
    for y, matrix in zip(products, matrices, strict=True):
        blocks = y.reshape(*chosen.shape, 1, N)
        check_gathered(blocks, x[:, None], matrix[:3], fmt, left, chosen)
    return products


def check(fmt, dtype, rows, each):
    x, chosen, matrices = given(fmt, dtype, rows, each)
    biased = matrices[0]._replace(bias=random(np.random.default_rng(1), (E, N), dtype))
    products = check_products(x, chosen, matrices, fmt)
    (gated,) = experts_products(x, chosen, matrices, fmt, gate="silu")
    (plain,) = experts_products(x, chosen, [biased], fmt)
    a, b = map(to64, products)
    unit = 8 * EPSILON[dtype]
    assert np.abs(to64(gated) - a / (1 + np.exp(-a)) * b).max() <= unit * max(
        1, np.abs(a * b).max()
    )
    for rule in (Clipped(0.7, 1.702, 1.0), Clipped(shift=0.5)):
        both = [biased, matrices[1]]
        (clipped,) = experts_products(x, chosen, both, fmt, gate=rule)
        (first,) = experts_products(x, chosen, both[:1], fmt)
        g, up = np.minimum(to64(first), rule.limit), np.clip(b, -rule.limit, rule.limit)
        exact = (up + rule.shift) * g / (1 + np.exp(-rule.alpha * g))
        assert np.abs(to64(clipped) - exact).max() <= unit * max(1, np.abs(exact).max())
    expected = a + to64(biased.bias)[np.array(chosen)]
    assert np.abs(to64(plain) - expected).max() <= unit * np.abs(expected).max()
    squares = mx.abs(random(np.random.default_rng(3), (rows, -(-K // 16)), mx.float32))
    both = experts_products(x, chosen, matrices, fmt, norm=(squares, 0.5))
    factors = 1 / np.sqrt(to64(squares).sum(-1) / K + 0.5)[:, None, None]
    for y, z in zip(both, (a, b), strict=True):
        assert np.abs(to64(y) - factors * z).max() <= unit * np.abs(factors * z).max()

    rng = np.random.default_rng(2)
    h, scores = random(rng, (rows, each, K), dtype), random(rng, (rows, each), mx.float32)
    y = experts_combined(h, chosen, scores, biased, fmt)
    (terms,) = experts_products(h, chosen, [biased], fmt)
    dense = gathered64(matrices[0][:3], fmt, chosen)
    exact = np.einsum("rjnk,rjk->rjn", dense, to64(h)) + to64(biased.bias)[np.array(chosen)]
    assert np.abs(to64(terms) - exact).max() <= unit * np.abs(exact).max()
    total = (exact * to64(scores)[..., None]).sum(1)
    allowed = unit * np.abs(exact * to64(scores)[..., None]).sum(1).max()
    assert np.abs(to64(y) - total).max() <= allowed
    y = experts_combined(h, chosen, scores, biased, fmt, residual=y)
    assert np.abs(to64(y) - 2 * total).max() <= 3 * allowed


# What a router is, how many experts there are, and whether there is a bias and a factor of each.
ROUTERS = [
    (Router(3), 40, False),
    (Router(10, normed=False), 512, False),
    (Router(9, last=True, dtype=mx.bfloat16), 9, False),
    (Router(6, "sigmoid", 8, 4, scale=2.5, epsilon=1e-20), 256, True),
    (Router(4, "sigmoid", 4, 1, last=True, fill=-float("inf"), floor=1e-12), 40, True),
    (Router(3, "softmax", 4, 2, False, masked=True, normed=False, scale=16.0), 64, False),
    (Router(4, "logits", last=True), 32, False),
    (Router(4, "logits"), 32, False),
    (Router(2, "sqrtsoftplus", last=True, epsilon=1e-6), 33, True),
    (Router(3, "sparsemixer", normed=False, epsilon=0.25), 40, False),
]


def sparsemixer64(logits, chosen, epsilon):
    """Shares of a row's experts in turn: none where one that is left is no number."""
    left, shares = logits.copy(), []
    for at in chosen.T[..., None]:
        top = np.take_along_axis(left, at, -1)
        with np.errstate(invalid="ignore"):
            far = (top - logits) / np.maximum(np.abs(logits), top) > epsilon
        band = np.exp(np.where(far, -np.inf, left) - top)
        shares.append(1 / band.sum(-1, keepdims=True))
        np.put_along_axis(left, at, -np.inf, -1)
    return np.concatenate(shares, -1)


def chosen64(logits, router, bias, factors):
    """What a stable sort chooses, and the shares."""
    with np.errstate(invalid="ignore"):
        exact = np.exp(logits - logits.max(-1, keepdims=True))
        scores = {
            "softmax": exact / exact.sum(-1, keepdims=True),
            "sigmoid": 1 / (1 + np.exp(-logits)),
            "logits": logits,
            "sparsemixer": logits,
            "sqrtsoftplus": np.sqrt(np.logaddexp(0, logits)),
        }[router.score]
    numbers = (scores + bias).reshape(len(logits), router.groups, -1)
    largest = np.sort(numbers, -1)[..., -2 if router.pairs else -1 :].sum(-1)
    lowest = np.argsort(largest, -1, kind="stable")[:, : router.dropped]
    np.put_along_axis(numbers, lowest[..., None], router.fill, axis=1)
    numbers = numbers.reshape(logits.shape)
    order = np.argsort(numbers if router.last else -numbers, -1, kind="stable")
    chosen = order[:, -router.top_k :] if router.last else order[:, : router.top_k]
    shares = np.take_along_axis(numbers if router.masked else scores, chosen, -1)
    if router.score == "sparsemixer":
        shares = sparsemixer64(logits, chosen, router.epsilon)
    elif router.score == "logits":
        shares = np.exp(shares) / np.exp(shares).sum(-1, keepdims=True)
    elif router.normed:
        shares = shares / np.maximum(shares.sum(-1, keepdims=True) + router.epsilon, router.floor)
    return chosen, shares * router.scale * factors[chosen]


def check_router(router, experts, extra):
    """Rows of different numbers, of many equal ones, and with some that are none."""
    rng = np.random.default_rng(experts)
    rows = [rng.permutation(experts) / experts * 8 - 4, rng.integers(-2, 2, experts)]
    rows += [rows[0].copy(), np.full(experts, np.nan)]
    rows[2][rng.permutation(experts)[:2]] = np.nan
    logits = np.stack(rows).astype(np.float32)
    bias = rng.integers(-2, 3, experts) / 4 * extra
    factors = 1 + rng.integers(0, 3, experts) / 4 * extra
    more = [mx.array(a.astype(np.float32)) for a in (bias, factors)] if extra else [None, None]
    chosen, shares = experts_chosen(mx.array(logits)[:, None], router, *more)
    wanted, exact = chosen64(logits.astype(np.float64), router, bias, factors)
    at, places = np.argsort(np.array(chosen)[:, 0], -1), np.argsort(wanted, -1)
    assert (np.take_along_axis(np.array(chosen)[:, 0], at, -1) == np.sort(wanted, -1)).all()
    error = np.abs(
        np.take_along_axis(to64(shares)[:, 0], at, -1) - np.take_along_axis(exact, places, -1)
    )
    least = 8 * EPSILON[router.dtype] * np.abs(exact).max(-1, keepdims=True, initial=1e-30)
    assert ((error <= least) | np.isnan(error) & np.isnan(exact)).all()


CHECKS = [*((check, case) for case in CASES), *((check_router, case) for case in ROUTERS)]


@pytest.mark.parametrize(
    ("checked", "case"), CHECKS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_on_the_checked_build(checked, case):
    with use_backend("host"), checks():
        checked(*case)


@on_gpus
@pytest.mark.parametrize(
    ("checked", "case"), CHECKS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_on_gpus(gpu, checked, case):
    with use_backend(gpu):
        checked(*case)


@pytest.mark.parametrize("fmt", [Format(64, 4), Format(32, 3)], ids=str)
def test_fewer_rows_at_once_where_registers_are_few(fmt, monkeypatch):
    launch = kernels.experts_products
    monkeypatch.setattr(kernels, "experts_products", lambda *given: launch(*given[:-1], True))
    x, chosen, matrices = given(fmt, mx.float16, 6, 3)
    with use_backend("host"), checks():
        check_products(x, chosen, matrices, fmt)


def test_the_gradient_of_shares():
    """With respect to logits, bias (none) and factors, beside that of the stock operators."""
    router = Router(3, "sigmoid", 2, 1, epsilon=1e-20, scale=2.5)
    rng = np.random.default_rng(0)
    given = [random(rng, shape, mx.float32) for shape in ((4, 8), (8,), (8,))]
    weights = random(rng, (4, 3), mx.float32)

    def gradients(chosen):
        return mx.grad(lambda *arrays: (chosen(*arrays)[1] * weights).sum(), (0, 1, 2))(*given)

    with use_backend("host"):
        found = gradients(lambda x, *more: experts_chosen(x, router, *more))
    wanted = gradients(partial(reference.experts_chosen, router=router))
    assert np.abs(to64(wanted[0])).max() > 0.01
    for one, other in zip(found, wanted, strict=True):
        assert np.abs(to64(one) - to64(other)).max() <= 1e-6


def test_rows_share_the_matrices_that_they_chose():
    """Eight rows read a matrix of each expert, and one where all chose the same."""
    read = []
    x, _, matrices = given(Format(64, 4), mx.bfloat16, 8, 1)
    for chosen in ([[0], [1], [2], [3]] * 2, [[3]] * 8):
        with use_backend("host"), checks() as report, trace() as calls:
            mx.eval(experts_products(x, mx.array(chosen), matrices, gate="silu"))
        assert len(calls) == 1
        read.append(report.total("bytes_read"))
    assert read[0] - read[1] >= 3 * sum(m.w.nbytes for m in matrices) // E
