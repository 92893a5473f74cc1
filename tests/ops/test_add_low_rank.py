"""Which kernels compute products of a small rank and their gradients."""

import mlx.core as mx
import pytest

from mlx_qlayers.ops.add_low_rank import add_low_rank
from mlx_qlayers.runtime.backend import use_backend
from mlx_qlayers.runtime.tracing import trace
from tests.gpus import GPUS


def _call(rank):
    arrays = mx.ones((40, 1032)), mx.ones((40, 70)), mx.ones((70, rank)), mx.ones((rank, 1032))
    return mx.vjp(lambda *given: [add_low_rank(*given)], arrays, [mx.ones((40, 1032))])


@pytest.mark.parametrize("backend", ["host", *GPUS])
def test_launches(backend):
    """Large arrays are read as they are: two launches, and four of the gradients."""
    with use_backend(backend), trace() as launches:
        mx.eval(_call(9))
    found = [(run.kernel.split("_")[2], run.grid) for run in launches]
    down, up, of_x = ("down", (256, 5, 1)), ("up", (384, 3, 1)), ("up", (128, 3, 1))
    outer = [("outer", (768, 1, 2)), ("outer", (2304, 1, 2))]
    assert sorted(found) == sorted([down, up, down, of_x, *outer])


def test_a_rank_that_is_not_small():
    """None of these kernels is launched; on a CPU a product may have one of another operation."""
    with trace() as launches:
        mx.eval(_call(33))
    assert not [run for run in launches if "low_rank" in run.kernel]


@pytest.mark.parametrize("path", ["reference", "host"])
def test_a_scale_that_is_a_large_integer(path):
    """Of more than 64 bits, which MLX's operators do not take."""
    one = mx.ones((1, 1))
    with use_backend(path):
        assert add_low_rank(one, one, one, one, scale=2**70).item() == 2**70
