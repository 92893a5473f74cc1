"""The kernels of deformable attention on every backend that is here."""

import mlx.core as mx
import numpy as np
import pytest
from deformable import inputs
from numerics import assert_accurate, behind_one, to64
from pairwise import pairwise

from mlx_qlayers.metal.common import kernels as common
from mlx_qlayers.metal.deformable import launch as kernels
from mlx_qlayers.metal.deformable.launch import DeformableConfig, heuristic
from mlx_qlayers.options import Deformable
from mlx_qlayers.reference import deformable_attention as reference
from mlx_qlayers.runtime.backend import backend as current_backend
from mlx_qlayers.runtime.backend import use_backend
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.spec import Spec
from mlx_qlayers.runtime.tracing import trace

SHAPES = ((5, 7), (3, 2))


def run(arrays, options, config=None):
    """The output, and the gradients of values, locations and weights."""
    values, locations, *_ = arrays
    own = heuristic(values.shape[3], locations.shape[4], values.dtype, current_backend())
    plan = [Spec.of(a) for a in arrays[:3]], options, config or own
    return [kernels.forward(*plan)(*arrays[:3]), *kernels.gradient(*plan)(*arrays)]


def check(found, arrays, options):
    """Compare with plain operators in float32; sums may be taken in another order."""
    exact = [a.astype(mx.float32) for a in arrays]
    outputs, gradients = mx.vjp(lambda *a: [reference.attender(options)(*a)], exact[:3], [exact[3]])
    values, _, weights, dy = (np.abs(to64(a)) for a in arrays)
    rows, size = dy.reshape(-1, values.shape[3]), max(map(max, options.shapes))
    dots = 4 * rows.sum(1).max() * values.max()
    weighted = weights.reshape(len(rows), -1).sum(1)
    terms = 4 * weighted.max() * values.max(), (weighted[:, None] * rows).sum(0).max()
    terms = *terms, 2 * size * dots * weights.max(), dots
    for array, actual, truth, most in zip(
        (arrays[0], *arrays[:3]), found, [*outputs, *gradients], terms, strict=True
    ):
        assert actual.dtype == array.dtype and actual.shape == truth.shape
        assert_accurate(actual, to64(truth), truth.astype(actual.dtype), terms=most)


# As on a GPU: several threads a head, wide loads, atomics; then what neither chooses.
CONFIGS = [
    DeformableConfig(4, 16, 2, 2, 1, 1, 8, threads=64),
    DeformableConfig(2, 8, 8, 1, 4, 2, 2, threads=32),
    DeformableConfig(1, 4, 1, 2, 5, 8, 1, atomic=False, threads=7),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration(backend, config):
    arrays, options = inputs(1), Deformable(SHAPES)
    check(run(arrays, options, config), arrays, options)
    arrays[0] = behind_one(arrays[0])  # no pack may begin there
    check(run(arrays, options, config), arrays, options)


@pytest.mark.parametrize(
    ("dtype", "of_locations", "of_weights", "padding", "width", "config"),
    pairwise(
        (mx.float16, mx.bfloat16),
        (mx.float32, mx.bfloat16),
        (mx.float32, mx.float16),
        ("zeros", "border"),
        (8, 3),
        ("host", "cuda"),
    ),
    ids=str,
)
def test_half_precision(backend, dtype, of_locations, of_weights, padding, width, config):
    dtypes, options = (dtype, of_locations, of_weights), Deformable(SHAPES, padding)
    arrays = inputs(2, width=width, dtypes=dtypes)
    check(run(arrays, options, heuristic(width, 2, dtype, config)), arrays, options)


def test_pixels_as_locations(backend):
    arrays, options = inputs(3, ((6, 4),), width=40), Deformable(((6, 4),), pixels=True)
    arrays[1] = 7 * arrays[1] - 1.5
    check(run(arrays, options), arrays, options)


def test_more_threads_than_a_row_and_one_launch_each_way(backend, monkeypatch):
    monkeypatch.setattr(common, "_ROW", 128)
    arrays, options = inputs(4, rows=(2, 33, 3)), Deformable(SHAPES)
    with trace() as launches:
        found = run(arrays, options, CONFIGS[0])
        mx.eval(found)
    names = ["deformable_forward", "deformable_gradient"]
    assert [(launch.kernel, launch.backend) for launch in launches] == [(n, backend) for n in names]
    check(found, arrays, options)


def test_forward_reads_what_it_needs_and_writes_once():
    """All memory around the values is NaN, and as many bytes are read as there are pixels."""
    shapes, (batch, queries, heads, width) = ((4, 4),), (1, 3, 2, 8)
    values, _, weights, _ = inputs(5, shapes, (batch, queries, heads), width, 1)
    around = mx.full((3, *values.shape[1:]), float("nan"))
    around[1:2] = values
    # A pixel in a corner, four in the middle, none.
    where = mx.array([[0.0, 0.0], [0.5, 0.5], [1.5, 0.5]]).reshape(1, queries, 1, 1, 1, 2)
    locations = mx.contiguous(mx.broadcast_to(where, (1, queries, heads, 1, 1, 2)))
    config = heuristic(width, 1, mx.float32, "cuda")
    plan = [Spec.of(a) for a in (values, locations, weights)], Deformable(shapes), config
    with use_backend("host"), checks() as report:
        out = kernels.forward(*plan)(around[1:2], locations, weights)
    assert mx.isfinite(out).all()
    written = out.nbytes
    assert report.total("bytes_written") == report.total("distinct_written") == written
    pixels = (1 + 4) * heads * width * 4
    small = locations.nbytes + weights.nbytes
    assert report.total("distinct_read") == pixels + small + 3 * 4


def test_what_kernels_number_with_32_bits():
    many = Spec((2**10, 2**11, 2**10, 32), mx.float16)
    few = Spec((1, 7, 8, 1, 4, 2), mx.float32)
    assert not kernels.covers(many, few) and kernels.covers(Spec((1, 9, 8, 32), mx.float16), few)
