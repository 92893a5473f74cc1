"""latent_attention beyond the table: launches, what no kernel takes, measured limits."""

import mlx.core as mx
import pytest

from mlx_qlayers import explain, use_backend
from mlx_qlayers.ops import latent_attention as latent
from tests.examples.recurrent import LATENT_ATTENTION
from tests.gpus import GPUS


def arrays(**changes):
    call = LATENT_ATTENTION.call("auto", heads=2, **changes)
    return [*(call.arrays[name] for name in ("q", "r", "c", "p")), mx.array(3)]


@pytest.mark.parametrize("path", ["host", *GPUS])
@pytest.mark.parametrize(("rows", "launches"), [(20, 1), (140, 2)])
def test_launches(rows, launches, path):
    assert len(LATENT_ATTENTION.call(path, rows=rows).check(path)[1]) == launches


@pytest.mark.parametrize(
    ("rows", "widths"), [(9, (40, 32)), (5, (32, 32)), (9, (544, 32))], ids=str
)
def test_what_the_kernel_does_not_take(rows, widths):
    given = arrays(rows=rows, widths=widths)
    with use_backend("auto"):
        explain(reset=True)
        y = latent.latent_attention(*given, scale=0.1)
        assert y.shape == given[0].shape and explain()[0].path == "reference"


def test_long_caches_go_by_what_was_measured(monkeypatch):
    """So many rows for each sequence, on a GPU; on request the kernel takes more."""
    monkeypatch.setattr(latent, "threshold", lambda name: 8)
    with use_backend("auto"):
        for batch, rows, faster in ((1, 8, True), (1, 9, False), (3, 24, True), (3, 25, False)):
            plan = latent.LATENT_ATTENTION.plan([*arrays(batch=batch, rows=rows), None], 0.1)
            assert ("rows, more than 8 for each" not in plan.choice.reason) == faster
