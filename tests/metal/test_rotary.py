"""The launch of the rotary kernels: every share of heads gives the same numbers."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import use_backend
from mlx_qlayers.metal.rotary.launch import rotary_embedding
from mlx_qlayers.options import Rotation
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.host import checks
from tests.numerics import random

ROTATION = Rotation(24)


@pytest.mark.parametrize("offset", [3, [3, 8]], ids=["at", "each"])
def test_shares(offset):
    rng = np.random.default_rng(0)
    q, k = random(rng, (2, 3, 5, 41)), random(rng, (2, 3, 2, 41))
    found = []
    with use_backend("host"), checks(), trace() as launches:
        for share in (1, 2, 3, 7, 50):
            launch = rotary_embedding(q, k, mx.array(offset), ROTATION, share)
            found.append(launch(q, k, mx.array(offset)))
    assert [run.grid for run in launches] == [(12, n, 6) for n in (7, 4, 3, 1, 1)]
    assert {run.kernel for run in launches} == {"rotary_each" if offset != 3 else "rotary_at"}
    for each in found:
        assert all(mx.array_equal(a, b) for a, b in zip(each, found[0], strict=True))
