"""latent_attention beyond the table: launches, what no kernel takes, measured limits."""

import mlx.core as mx
import pytest

from mlx_qlayers import explain, use_backend
from mlx_qlayers.measurements.thresholds import threshold
from mlx_qlayers.ops import latent_attention as latent
from mlx_qlayers.runtime.spec import Spec
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


def test_long_caches_go_by_what_was_measured(on, monkeypatch):
    """So many rows for each sequence, on a GPU; on request the kernel takes more."""
    on("cuda")
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **_: lambda **__: None)
    most = threshold("latent_attention_rows", device="cuda")
    for batch in (1, 3):
        for rows, faster in ((batch * most, True), (batch * most + 1, False)):
            shapes = (batch, 8, 1, 128), (batch, 8, 1, 64), (batch, 1, rows, 128)
            q, r, c = (Spec(shape, mx.bfloat16) for shape in shapes)
            given = q, r, c, Spec((batch, 1, rows, 64), mx.bfloat16), Spec((), mx.int32), None
            reason = latent.LATENT_ATTENTION.plan([*given], 0.1).choice.reason
            assert (f"rows, more than {most} for each" not in reason) == faster, reason
