"""Deformable attention as users call it, on every path."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from deformable import NAMES, golden, inputs
from numerics import assert_accurate, assert_gradient, assert_same_sums, round_to

from mlx_qlayers import deformable_attention, use_backend
from tests.gpus import GPUS

SHAPES = ((5, 7), (3, 2))


@pytest.fixture(autouse=True, params=["reference", "host", *GPUS])
def backend(request):
    with use_backend(request.param):
        yield request.param


def attend(values, locations, weights):
    return deformable_attention(values, SHAPES, locations, weights)


@pytest.mark.parametrize("group", ["levels", "level", "border", "special"])
def test_golden(group):
    given = golden(group)
    *primals, cotangent = (mx.array(given[name]) for name in (*NAMES, "cotangent"))
    padding, shapes = "border" if group == "border" else "zeros", mx.array(given["shapes"])

    def run(values, *others):
        return [deformable_attention(values, shapes, *others, padding_mode=padding)]

    outputs, gradients = mx.vjp(run, primals, [cotangent])
    names = "out", *(f"d_{name}" for name in NAMES)
    for name, found in zip(names, [*outputs, *gradients], strict=True):
        assert_accurate(found, given[name], given[name + "32"], what=f"{group} {name}")


def test_gradients_by_finite_differences_away_from_kinks():
    values, locations, weights, _ = inputs(1)
    rng = np.random.default_rng(2)
    sizes = np.array([(w, h) for h, w in SHAPES])[:, None]
    pixel = rng.integers(-1, 7, locations.shape) + rng.uniform(0.2, 0.8, locations.shape)
    locations = round_to((pixel + 0.5) / sizes, mx.float32)
    assert_gradient(attend, [values, locations, weights], rng, step=0.005)


@pytest.mark.parametrize("backend", ["reference", *GPUS], indirect=True)
def test_compiled(backend):
    arrays = inputs(3)[:3]

    def gradients(*arrays):
        return mx.grad(lambda *a: (attend(*a) ** 2).sum(), (0, 1, 2))(*arrays)

    # On a CPU MLX compiles a C++ program for each handful of operators.
    function = (lambda *a: [attend(*a)]) if backend == "reference" else gradients
    for one, two in zip(function(*arrays), mx.compile(function)(*arrays), strict=True):
        assert_same_sums(one, two)


@pytest.mark.parametrize(
    ("batch", "queries", "width", "points"),
    [(0, 5, 4, 2), (2, 0, 4, 2), (2, 5, 0, 2), (2, 5, 4, 0)],
)
def test_nothing_to_add_up(batch, queries, width, points):
    values = mx.ones((batch, 41, 3, width))
    weights = mx.ones((batch, queries, 3, 2, points))
    arrays = [values, mx.ones((*weights.shape, 2)), weights]
    with use_backend("auto"):
        (y,), gradients = mx.vjp(
            lambda *a: [attend(*a)], arrays, [mx.ones((batch, queries, 3 * width))]
        )
    assert y.shape == (batch, queries, 3 * width) and not y.any().item()
    assert [g.shape for g in gradients] == [a.shape for a in arrays]


def test_strided_values():
    values, locations, weights, _ = inputs(4)
    mine = mx.contiguous(values.swapaxes(1, 2)).swapaxes(1, 2)
    assert mx.array_equal(attend(mine, locations, weights), attend(values, locations, weights))


V, L, W, _ = inputs(5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": V[0]}, r"values must be \(B, S, H, D\).*\(41, 3, 8\)"),
        ({"values": V.astype(mx.int32)}, "values must be float32.*int32"),
        ({"values": np.ones(V.shape)}, "values must be an mx.array, not ndarray"),
        ({"shapes": [(5, 7)]}, r"locations must be \(2, L, 3, 1, P, 2\).* is \(2, 6, 3, 2, 2, 2\)"),
        ({"shapes": [5, 7]}, "shapes must be pairs of height and width"),
        ({"shapes": [(5, 7, 3), (2,)]}, "shapes must be pairs of height and width"),
        ({"shapes": [(5, 7), (3.0, 2)]}, "shapes must be positive"),
        ({"shapes": [(5, 7), (-3, -2)]}, "shapes must be positive"),
        ({"shapes": [(5, 7), (3, 2), (0, 1)]}, "shapes must be positive"),
        (
            {"locations": L[..., 0]},
            r"locations must be \(2, L, 3, 2, P, 2\).* is \(2, 6, 3, 2, 2\)",
        ),
        ({"locations": L[:1]}, r"locations must be .*\(1, 6, 3, 2, 2, 2\)"),
        ({"locations": L[:, :, :1]}, "locations must be"),
        ({"locations": L[:, :, :, :1]}, "locations must be"),
        ({"weights": W[:, :3]}, r"weights must be \(2, 6, 3, 2, 2\).*\(2, 3, 3, 2, 2\)"),
        ({"weights": W.astype(mx.int32)}, "weights must be float32.*int32"),
        ({"padding_mode": "reflection"}, "padding_mode must be zeros or border"),
    ],
)
def test_bad_input(changes, message):
    given = {"values": V, "shapes": SHAPES, "locations": L, "weights": W} | changes
    with pytest.raises(ValueError, match=message):
        deformable_attention(**given)
