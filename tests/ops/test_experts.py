"""Experts for few rows: what they read, and what a GPU of few registers runs."""

import mlx.core as mx

from mlx_qlayers import use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.ops.experts import experts_products
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.host import checks
from tests.examples import RANDOM
from tests.examples.experts import EXPERTS

PRODUCTS = RANDOM["experts_products"]


def test_fewer_outputs_at_once_where_registers_are_few():
    for path, outputs in (("checked", 4), ("as metal", 2)):
        call = PRODUCTS.call(path, fmt=Format(64, 4), rows=(6,), each=3, dtype="float16")
        with trace() as launches:
            call.check(path)
        assert [launch.template["outputs"] for launch in launches] == [outputs]


def test_rows_share_the_matrices_that_they_chose():
    """Eight rows read a matrix of each expert, and one where all chose the same."""
    read = []
    call = PRODUCTS.call("host", fmt=Format(64, 4), rows=(8,), each=1, dtype="bfloat16")
    x, matrices = call.arrays["x"], call.options["matrices"]
    for chosen in ([[0], [1], [2], [3]] * 2, [[3]] * 8):
        with use_backend("host"), checks() as report, trace() as calls:
            mx.eval(experts_products(x, mx.array(chosen), matrices, gate="silu"))
        assert len(calls) == 1
        read.append(report.total("bytes_read"))
    assert read[0] - read[1] >= 3 * sum(m.w.nbytes for m in matrices) // EXPERTS
