"""gated_delta beyond the table: tokens in turn, launches, and what no kernel takes."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import explain, use_backend
from mlx_qlayers.ops.gated_delta import gated_delta
from mlx_qlayers.runtime import trace
from tests.examples.recurrent import GATED_DELTA
from tests.gpus import GPUS
from tests.numerics import behind_one, to64


@pytest.mark.parametrize("path", ["reference", "host", *GPUS])
def test_views_and_a_token_after_the_other(path):
    """As all at once, wherever the arrays begin, in one launch each."""
    given = GATED_DELTA.call(path, width=32).arrays
    given.pop("mask")
    state, rows = given.pop("state"), []
    with use_backend(path), trace() as launches:
        whole, last = gated_delta(**given, state=state)
        for t in range(4):
            token = {name: behind_one(a[:, t : t + 1]) for name, a in given.items()}
            y, state = gated_delta(**token, state=behind_one(state))
            rows.append(y)
        mx.eval(rows, whole)
    assert len(launches) == 5 * (path != "reference")
    for found, wanted in ((mx.concatenate(rows, 1), whole), (state, last)):
        np.testing.assert_allclose(to64(found), to64(wanted), rtol=0, atol=1e-5)


@pytest.mark.parametrize("changes", [{"width": 24}, {"length": 0}], ids=str)
def test_what_the_kernel_does_not_take(changes):
    call = GATED_DELTA.call("auto", values=8, **changes)
    with use_backend("auto"):
        explain(reset=True)
        y, state = gated_delta(**call.arrays)
        assert (y.shape, state.shape) == (call.arrays["v"].shape, call.arrays["state"].shape)
        assert explain()[0].path == "reference"
