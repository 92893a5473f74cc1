"""Sampling in plain operators against PyTorch's golden values, forward and by plain autodiff."""

import mlx.core as mx
import pytest
from numerics import assert_accurate, assert_same_sums
from sampling import GROUPS, golden, options_of

from mlx_qlayers.options import Sampling
from mlx_qlayers.reference import grid_sample as reference


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


def test_chunks_cover_every_row():
    """Of more points than a CPU takes at once, which parts of them are not."""
    mx.random.seed(1)
    x, grid = mx.random.normal((2, 5, 7, 3)), mx.random.uniform(-1.2, 1.2, (2, 130, 150, 2))
    cotangent = mx.random.normal((2, 130, 150, 3))

    def run(grid, cotangent):
        options = Sampling("bicubic")
        out = reference.grid_sample(x, grid, options)
        return [out, *reference.grid_sample_vjp(x, grid, cotangent, options)]

    out, of_x, of_grid = run(grid, cotangent)
    parts = zip(*map(run, mx.split(grid, 10, 1), mx.split(cotangent, 10, 1)), strict=True)
    outs, of_xs, of_grids = map(list, parts)
    assert_same_sums(out, mx.concatenate(outs, 1))
    assert_same_sums(of_grid, mx.concatenate(of_grids, 1))
    assert_same_sums(of_x, sum(of_xs[1:], of_xs[0]))
