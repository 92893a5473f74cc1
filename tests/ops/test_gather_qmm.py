"""gather_qmm on both paths against float64: indices, gradients, what it promises and refuses."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import explain, use_backend
from mlx_qlayers.dispatch.measurements import Found
from mlx_qlayers.formats import Format
from mlx_qlayers.measurements.thresholds import Evidence
from mlx_qlayers.ops import gather_qmm as operation
from mlx_qlayers.ops.gather_qmm import gather_qmm
from mlx_qlayers.reference import cores
from mlx_qlayers.runtime import BackendError, metal, tensor_ops, trace
from mlx_qlayers.runtime.backend import backend, current, epoch
from tests.experts import check_gathered, gathered64, random_experts
from tests.machine import has_gpu
from tests.numerics import (
    EPSILON,
    assert_accurate,
    assert_gradient,
    assert_same_sums,
    random,
    round_to,
    to64,
)
from tests.packed import FORMATS

SMALL = Format(32, 4)
NVFP4 = Format(16, 4, "nvfp4")
PATHS = ["host", "reference"]
E, N, K = 5, 40, 64


@pytest.fixture(params=PATHS)
def path(request):
    with use_backend(request.param):
        yield request.param


def options(fmt, **others):
    return fmt._asdict() | others


# Shapes of x and of the matrices' leading dimensions, and indices: None, or a shape.
INDICES = {
    "tokens choose": ((6, 1, 1, K), (E,), None, (6, 2)),
    "tokens in batches": ((2, 3, 1, 1, K), (E,), None, (2, 3, 2)),
    "one each": ((7, 1, K), (E,), None, (7,)),
    "more rows": ((4, 3, K), (E,), None, (4,)),
    "one block, many matrices": ((3, K), (E,), None, (4,)),
    "both": ((6, 2, K), (E,), (3, 1), (1, 4)),
    "rows alone": ((6, 1, K), (E,), (5,), None),
    "neither": ((E, 2, K), (E,), None, None),
    "matrices in two dimensions": ((2, 1, 2, K), (2, 3), None, None),
    "one matrix": ((4, 1, K), (), None, (4,)),
}


@pytest.mark.parametrize("transpose", [True, False], ids=["transposed", "plain"])
@pytest.mark.parametrize("case", INDICES)
def test_indices(case, transpose, path):
    x_shape, batch, left, right = INDICES[case]
    rng = np.random.default_rng(len(case))
    packed = random_experts(rng, batch, N if transpose else K, 64, SMALL)
    x = random(rng, x_shape)
    blocks, matrices = int(np.prod(x_shape[:-2])), int(np.prod(batch))
    left = None if left is None else mx.array(rng.integers(0, blocks, left))
    right = None if right is None else mx.array(rng.integers(0, matrices, right))
    y = gather_qmm(x, *packed, left, right, **options(SMALL, transpose=transpose))
    stock = mx.gather_qmm(x, *packed, left, right, transpose, 32, 4)
    assert y.shape == stock.shape and y.dtype == stock.dtype
    check_gathered(y, x, packed, SMALL, left, right, transpose)


@pytest.mark.parametrize("kind", [mx.int32, mx.int64, mx.uint8, mx.uint32])
def test_integers_of_any_kind(kind, path):
    rng = np.random.default_rng(1)
    packed, x = random_experts(rng, (E,), N, K, SMALL), random(rng, (3, 1, K))
    right = mx.array([4, 0, 3]).astype(kind)
    y = gather_qmm(x, *packed, None, right, **options(SMALL))
    check_gathered(y, x, packed, SMALL, None, right)


def test_sorted_or_not_is_a_matter_of_speed(path):
    rng = np.random.default_rng(2)
    packed, x = random_experts(rng, (E,), N, K, SMALL), random(rng, (23, 1, K))
    right = np.sort(rng.integers(0, E, 23))
    found = [
        gather_qmm(x, *packed, None, mx.array(right), **options(SMALL, sorted_indices=in_order))
        for in_order in (True, False)
    ]
    assert mx.array_equal(*found)


@pytest.mark.parametrize("fmt", [*FORMATS[::3], NVFP4], ids=str)
def test_reference_in_half_precision(fmt):
    rng = np.random.default_rng(3)
    packed = random_experts(rng, (E,), N, 3 * max(fmt.group_size, 32), fmt, mx.float16)
    x = random(rng, (6, 1, 1, 3 * max(fmt.group_size, 32)), mx.float16)
    right = mx.array(rng.integers(0, E, (6, 2)))
    with use_backend("reference"):
        y = gather_qmm(x, *packed, None, right, **options(fmt))
    assert y.dtype == mx.float16
    check_gathered(y, x, packed, fmt, None, right)


def test_reference_large_enough_for_every_core(monkeypatch):
    monkeypatch.setattr(cores, "_cores", lambda: 3)
    rng = np.random.default_rng(4)
    packed, x = random_experts(rng, (E,), 400, 512, SMALL), random(rng, (5, 1, 512))
    right = mx.array([4, 0, 0, 2, 1])
    with use_backend("reference"):
        y = gather_qmm(x, *packed, None, right, **options(SMALL))
    check_gathered(y, x, packed, SMALL, None, right)


def test_empty():
    rng = np.random.default_rng(6)
    packed = random_experts(rng, (E,), N, K, SMALL)
    for x, right in (
        (mx.zeros((0, 1, K)), mx.zeros((0,), mx.uint32)),
        (mx.zeros((2, 0, K)), mx.array([0, 1])),
    ):
        y = gather_qmm(x, *packed, None, right, **options(SMALL))
        assert y.shape == (*x.shape[:-1], N)


@pytest.mark.parametrize("path", ["reference", "auto"])
def test_nothing_to_add_up(path):
    """Where MLX's operator divides by zero, which ends the process."""
    w, scales, biases = random_experts(np.random.default_rng(6), (E,), N, K, SMALL)
    right, indices = mx.array([0, 1]), mx.zeros((0,), mx.uint32)
    with use_backend(path):
        rows = [a[:, :0] for a in (w, scales, biases)]
        y = gather_qmm(mx.zeros((2, 1, K)), *rows, None, right, **options(SMALL))
        assert y.shape == (2, 1, 0)
        plain = options(SMALL, transpose=False)
        y = gather_qmm(mx.ones((2, 1, 0)), *rows, None, right, **plain)
        assert y.shape == (2, 1, K) and not y.any().item()
        none = [a[:0] for a in (w, scales, biases)]
        y = gather_qmm(mx.zeros((2, 1, K)), *none, indices, indices, **options(SMALL))
        assert y.shape == (0, 1, N)


def test_promotes_as_stock_does(path):
    rng = np.random.default_rng(7)
    w, *scales_and_biases = random_experts(rng, (E,), N, K, SMALL)
    right = mx.array([0, 3])
    for a in (mx.float32, mx.float16, mx.bfloat16):
        for b in (mx.float32, mx.float16, mx.bfloat16):
            x, packed = mx.ones((2, 1, K), a), (w, *(n.astype(b) for n in scales_and_biases))
            y = gather_qmm(x, *packed, None, right, **options(SMALL))
            assert y.dtype == mx.gather_qmm(x, *packed, None, right, True, 32, 4).dtype


# Which blocks of x and which matrices; the first as mixtures of experts have them.
CHOICES = {
    "tokens choose": ((6, 1, 2, K), None, [[0, 4], [4, 1], [1, 1], [3, 0], [0, 1], [4, 4]]),
    "sorted": ((7, 1, K), None, [0, 0, 1, 1, 1, 4, 4]),
    "listed": ((3, 2, K), [2, 0, 2, 2, 1], [0, 3, 3, 1, 4]),
}


@pytest.mark.parametrize("transpose", [True, False], ids=["transposed", "plain"])
@pytest.mark.parametrize("case", CHOICES)
def test_gradients(case, transpose, path):
    shape, left, right = CHOICES[case]
    rng = np.random.default_rng(8)
    w, *scales_and_biases = random_experts(rng, (E,), N if transpose else K, 64, SMALL)
    x, left = random(rng, shape), None if left is None else mx.array(left)
    fixed = {"lhs_indices": left, "rhs_indices": mx.array(right)}
    fixed |= options(SMALL, transpose=transpose, sorted_indices=case == "sorted")

    def ours(x, scales, biases):
        return gather_qmm(x, w, scales, biases, **fixed)

    if path == "reference" and not transpose:  # stock operators have no gradient of plain scales
        assert_gradient(lambda x: ours(x, *scales_and_biases), [x], rng)
        return
    assert_gradient(ours, [x, *scales_and_biases], rng)
    if transpose:
        stock = lambda *a: mx.gather_qmm(a[0], w, *a[1:], left, mx.array(right), True, 32, 4)  # noqa: E731
        d = random(rng, ours(x, *scales_and_biases).shape)
        found, expected = (mx.vjp(f, [x, *scales_and_biases], [d])[1] for f in (ours, stock))
        for a, b in zip(found, expected, strict=True):
            assert_same_sums(a, b)


def test_only_gradients_that_are_asked_for_are_launched():
    rng = np.random.default_rng(10)
    w, *scales_and_biases = random_experts(rng, (E,), N, K, SMALL)
    x, right = random(rng, (4, 1, K)), mx.array([0, 3, 3, 1])

    def loss(x, *scales_and_biases):
        return gather_qmm(x, w, *scales_and_biases, None, right, **options(SMALL)).sum()

    expected = {0: ["gather_qmm_columns"], 1: ["quantized_gradients_groups"]}
    expected |= {(1, 2): ["quantized_gradients_groups"]}
    for asked, kernels in expected.items():
        with use_backend("host"), trace() as launches:
            mx.eval(mx.grad(loss, asked)(x, *scales_and_biases))
        assert [launch.kernel for launch in launches] == ["gather_qmm_rows", *kernels]


def test_half_precision_gradient_adds_before_it_rounds():
    """An expert's many rows and a row's many experts are summed in float32."""
    rng = np.random.default_rng(11)
    packed = random_experts(rng, (E,), N, K, SMALL, mx.bfloat16)
    x, right = random(rng, (2, 1, 1, K), mx.bfloat16), mx.array(rng.integers(0, E, (2, 16)))
    d = random(rng, (2, 16, 1, N), mx.bfloat16)
    with use_backend("host"):
        f = lambda x: gather_qmm(x, *packed, None, right, **options(SMALL))  # noqa: E731
        (found,) = mx.vjp(f, [x], [d])[1]
    dense = gathered64(packed, SMALL, right)
    truth = (to64(d) @ dense).sum(1, keepdims=True)
    terms = (np.abs(to64(d)) @ np.abs(dense)).sum(1).max()
    once = mx.array(truth.astype(np.float32)).astype(mx.bfloat16)
    assert_accurate(found, truth, once, terms=terms)


def test_global_scale(path):
    rng = np.random.default_rng(12)
    dense = random(rng, (E, N, K), scale=3.0)
    factors = mx.abs(dense).max((1, 2))
    packed = [mx.quantize(a, mode="nvfp4", global_scale=f) for a, f in zip(dense, factors)]  # noqa: B905
    w, scales = (mx.stack(parts) for parts in zip(*packed, strict=True))
    x, right = random(rng, (6, 1, 1, K), mx.bfloat16), mx.array(rng.integers(0, E, (6, 2)))
    y = gather_qmm(x, w, scales, None, None, right, mode="nvfp4", global_scale=factors)
    check_gathered(y, x, (w, scales, None), NVFP4, None, right, factors=factors)
    # What it stands for: the very values that the stock operator dequantizes.
    for e in range(E):
        stock = mx.dequantize(w[e], scales[e], mode="nvfp4", global_scale=factors[e])
        one = gather_qmm(
            mx.eye(K), w, scales, None, None, mx.array([e]), mode="nvfp4", global_scale=factors
        )
        rounding = EPSILON[stock.dtype] * mx.abs(stock)
        assert (mx.abs(one[0].T - stock) <= rounding).all()


def test_compiled():
    rng = np.random.default_rng(14)
    packed, x = random_experts(rng, (E,), N, K, SMALL), random(rng, (3, 1, 1, K))
    right = mx.array([[4, 0], [1, 2], [0, 1]])
    with use_backend("auto"):
        f = mx.compile(lambda x, i: gather_qmm(x, *packed, None, i, **options(SMALL)))
        check_gathered(f(x, right), x, packed, SMALL, None, right)


def test_explains_its_path():
    rng = np.random.default_rng(15)
    packed, right = random_experts(rng, (E,), N, K, SMALL), mx.array([1, 2])
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
    ("device", "rows", "dtype", "fmt", "reason"),
    [
        ("metal", 512, mx.bfloat16, SMALL, "not measured on an Apple GPU"),
        ("cuda", 7, mx.bfloat16, SMALL, "as fast with so few rows"),
        ("cuda", 512, mx.float16, SMALL, "not tested with this dtype and format"),
        ("cuda", 512, mx.bfloat16, Format(32, 5), "not tested with this dtype and format"),
        ("cuda", 8, mx.bfloat16, SMALL, None),
    ],
)
def test_when_auto_leaves_a_gpu_to_stock(machine, device, rows, dtype, fmt, reason):
    machine(device)
    found = operation._stock_is_better(rows) or operation._untested(dtype, True, fmt)
    assert reason in (found or [None])
    if reason is None:  # plain products in 4 bits alone
        assert operation._untested(dtype, False, SMALL) is None
        assert operation._untested(dtype, False, Format(32, 8)) is not None


@pytest.mark.parametrize(
    ("path", "taken", "said"),
    [
        ("kernel", "metal", "auto, by sorted rows, measured here"),
        ("tensor", "metal", "auto, by tensor operations, measured here"),
        ("stock", "reference", "measured here"),
        (None, "reference", "the kernel was not measured on an Apple GPU"),
    ],
)
def test_sorted_rows_on_an_apple_gpu_go_by_what_was_measured(
    path, taken, said, machine, monkeypatch
):
    machine("metal")
    names = []
    monkeypatch.setattr(metal, "bind", lambda launch: names.append(launch.program.name))
    has_gpu(monkeypatch, "applegpu_g16s")
    monkeypatch.setattr(tensor_ops, "missing", lambda: None)
    best = path and Found(path, None, Evidence("measured here", "M5", seconds={path: 41e-6}))
    monkeypatch.setattr(operation, "found", lambda *_: best)
    packed = random_experts(np.random.default_rng(19), (E,), N, K, SMALL, mx.float16)
    arrays = mx.ones((64, 1, K), mx.float16), *packed, None, mx.arange(64) * E // 64, None
    plan = operation._plan(arrays, True, SMALL.group_size, SMALL.bits, SMALL.mode, True)
    assert plan.choice.path == taken and plan.choice.reason.startswith(said)
    assert ("gather_qmm_tensor" in names) == (path == "tensor")
    for in_order in (True, False):  # a token's are stock's, without a question
        given = current.get(), epoch.number, 64, in_order
        assert operation.leaves_to_stock(*given) is not in_order


def test_sorted_choices_that_are_repeated_as_a_whole_are_not_sorted():
    x, w, scales, biases = (
        mx.ones((6, 2, K)),
        *random_experts(np.random.default_rng(16), (E,), N, K, SMALL),
    )

    def pairs(left, right):
        arrays = x, w, scales, biases, left, right, None
        return operation._pairs(arrays, mx.broadcast_shapes(left.shape, right.shape), True)

    left, right = mx.array([[0], [1], [2]]), mx.array([0, 0, 3, 4])
    assert not pairs(left, right).in_order
    assert pairs(right, left).in_order
    y = gather_qmm(x, w, scales, biases, left, right, **options(SMALL, sorted_indices=True))
    check_gathered(y, x, (w, scales, biases), SMALL, left, right)


def test_gradients_in_the_dtypes_of_their_arguments():
    """What is promoted for the product is cast back, in half precision too."""
    rng = np.random.default_rng(17)
    w, scales, biases = random_experts(rng, (E,), N, K, SMALL)
    arrays = random(rng, (3, 1, K), mx.float16), scales.astype(mx.bfloat16), biases
    right = mx.array([[4, 0, 0], [1, 2, 4]])

    def function(x, scales, biases):
        return gather_qmm(x, w, scales, biases, None, right, **options(SMALL))

    d = random(rng, (2, 3, 1, N))
    with use_backend("host"):
        (y,), found = mx.vjp(lambda *a: [function(*a)], arrays, [d])
    with use_backend("reference"):
        expected = mx.vjp(lambda *a: [function(*a)], [a.astype(mx.float32) for a in arrays], [d])[1]
    assert y.dtype == mx.float32
    for a, b, argument in zip(found, expected, arrays, strict=True):
        assert a.dtype == argument.dtype
        assert_same_sums(a.astype(mx.float32), b.astype(a.dtype).astype(mx.float32))


def test_one_block_of_many_matrices_has_a_gradient(path):
    packed, x = random_experts(np.random.default_rng(4), (E,), N, K, SMALL), mx.ones((3, K))
    right = mx.array([0, 4, 4, 1])
    _, (d_x,) = mx.vjp(
        lambda x: [gather_qmm(x, *packed, None, right, **options(SMALL))], [x], [mx.ones((4, 3, N))]
    )
    dense = gathered64(packed, SMALL, right).sum(0)
    truth = np.broadcast_to(dense.sum(0), (3, K))
    assert_accurate(d_x, truth, round_to(truth, mx.float32), terms=np.abs(dense).sum(0).max() * 4)


def test_packed_weights_have_no_gradient(path):
    rng = np.random.default_rng(18)
    w, scales, biases = random_experts(rng, (E,), N, K, SMALL)
    x, right = random(rng, (3, 1, K)), mx.array([4, 0, 3])
    with pytest.raises((ValueError, RuntimeError), match="no gradient wrt the quantized weights"):
        mx.grad(lambda w: gather_qmm(x, w, scales, biases, None, right, **options(SMALL)).sum())(w)
