"""Sampling in plain operators against PyTorch's golden values, forward and by plain autodiff."""

import mlx.core as mx
import pytest
from numerics import assert_accurate, assert_same_sums
from sampling import GROUPS, golden, options_of

from mlx_qlayers.options import Sampling
from mlx_qlayers.reference import grid_sample as reference
from mlx_qlayers.reference import weighted_rows


@pytest.mark.parametrize("group", GROUPS)
def test_vjp_is_autodiff_of_the_forward(group):
    values = golden(group)
    x, grid, cotangent = (mx.array(values[name]) for name in ("x", "grid", "cotangent"))
    for _, options in options_of(values):

        def plain(*args, options=options):
            return [reference.grid_sample(*args, options)]

        expected = mx.vjp(plain, [x, grid], [cotangent])[1]
        found = reference.grid_sample_vjp(x, grid, cotangent, options)
        for actual, plain_gradient in zip(found, expected, strict=True):
            assert_same_sums(actual, plain_gradient)


@pytest.mark.parametrize("ndim", [2, 3])
@pytest.mark.parametrize("align_corners", [False, True])
def test_golden_affine_grid(ndim, align_corners):
    values = golden(f"{ndim}d_affine")
    size = tuple(values["size"].tolist())
    actual = reference.affine_grid(mx.array(values["theta"]), size, align_corners)
    index = int(align_corners)
    assert_accurate(actual, values["out"][index], values["out32"][index])


def test_chunks_cover_every_row(monkeypatch):
    mx.random.seed(1)
    x, grid = mx.random.normal((2, 5, 7, 3)), mx.random.uniform(-1.2, 1.2, (2, 9, 11, 2))
    cotangent = mx.random.normal((2, 9, 11, 3))

    def run():
        options = Sampling("bicubic")
        return [
            reference.grid_sample(x, grid, options),
            *reference.grid_sample_vjp(x, grid, cotangent, options),
        ]

    whole = run()
    mx.eval(whole)
    monkeypatch.setattr(weighted_rows, "_CHUNK", {mx.cpu: 16 * 3 * 13, mx.gpu: 16 * 3 * 13})
    for one, many in zip(whole, run(), strict=True):
        assert_same_sums(one, many)
