"""Operations go by measurements: the route of a product, a step's configuration."""

import mlx.core as mx
import pytest
from stored_results import FMT, KEY, OTHER, TIMES, keep

from mlx_qlayers import explain, use_backend
from mlx_qlayers.dispatch.choice import choose_measured
from mlx_qlayers.dispatch.measurements import collected_records, configure
from mlx_qlayers.measurements.thresholds import Measured
from mlx_qlayers.metal.attention.step import Split
from mlx_qlayers.metal.attention.step import key_of as step_key
from mlx_qlayers.ops.attention_step import attention_step
from mlx_qlayers.ops.quantized_route import DENSE, QMV, dense_is_worse, route
from mlx_qlayers.options import MatmulCall, PackedMatrix, Rotation
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.spec import Spec

pytestmark = pytest.mark.usefixtures("forgetful_gpu")


def chosen(rows=1):
    """The route of a product where auto stands for CUDA."""
    x, w = Spec((rows, 3584), mx.bfloat16), Spec((3584, 448), mx.uint32)
    return route("product", MatmulCall(x, PackedMatrix(w, None), True, FMT))[:2]


@pytest.mark.parametrize(
    ("rows", "won", "path", "kernel", "says"),
    [
        (1, "kernel", "cuda", QMV, f"by qmv, measured here: {TIMES}"),
        (1, "stock", "reference", None, f"measured here: {TIMES}"),
        (64, "dequantized", "cuda", DENSE, "measured here"),
    ],
)
def test_products_take_what_won_and_say_so(rows, won, path, kernel, says):
    keep(*(("qmv", KEY) if rows == 1 else ("qmm", (rows, *KEY[1:], True))), path=won)
    choice, found = chosen(rows)
    assert (choice.path, choice.evidence) == (path, "measured") and says in choice.reason
    assert kernel in (None, found)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", ("cuda", "auto", "rule")),
        ("stock", ("reference", f"measured here: {TIMES}", "measured")),
        ("kernel", ("cuda", f"auto, by its kernel, measured here: {TIMES}", "measured")),
    ],
)
def test_an_operation_of_one_kernel_goes_by_what_won(path, expected):
    key = (512, 1, 4, 64, 32), mx.float16, ()
    if path:
        keep("latent_attention", key, path=path)
    asked = "latent_attention", (200, *key[0][1:]), *key[1:]
    assert choose_measured("op", ("cuda",), *asked)[1:] == expected
    assert choose_measured("op", (), *asked).path == "reference"


@pytest.mark.parametrize("path", ["dequantized", "kernel", "stock"])
def test_several_matrices_at_once_go_by_what_won(path):
    keep("qmm", (512, 7168, 3584, mx.bfloat16, FMT, True), path=path)
    why = dense_is_worse(512, 7168, Spec((512, 3584), mx.bfloat16), FMT)
    assert isinstance(why, Measured)
    assert not why if path == "dequantized" else "measured here" in why


def test_a_step_of_decoding_takes_what_was_found_for_its_buffers():
    key = (mx.bfloat16, 1, 28, 4, 1024, 128, 128)
    assert configure("attention_step", "cuda", *key) == Split(1, 4, 1, 32, 8)
    config = keep("attention_step", key, Split(1, 8, 1, 16, 4))
    assert configure("attention_step", "cuda", *key) == config
    q, buffer = mx.zeros((1, 1, 3584), mx.bfloat16), mx.zeros((1, 4, 768, 128))
    assert configure("attention_step", "cuda", *step_key(q, buffer, 128)) == config


def test_a_stored_configuration_that_an_m1_has_no_registers_for(machine):
    """The heuristic's runs in its place, and a note says why."""
    machine.apple("applegpu_g13g")
    key = (mx.float32, 1, 8, 2, 256, 64, 64)
    config = keep("attention_step", key, Split(1, 4, 2, 16), "Apple_M5")
    assert configure("attention_step", "metal", *key) == config
    rows = [mx.zeros((1, 1, n * 64)) for n in (8, 2, 2)]
    buffers = [mx.zeros((1, 2, 256, 64))] * 4
    positions = mx.zeros(8, mx.int32)
    explain(reset=True)
    with use_backend("metal"), trace() as launches:
        attention_step(*rows, *buffers, positions, scale=1.0, rotation=Rotation(64))
    assert [dict(launch.template)["blocks"] for launch in launches] == [1]
    assert "M1 and M2 have registers for 0" in str(explain())


def test_a_search_that_ended_early_is_no_verdict_on_stock():
    before = chosen()
    keep(config=OTHER, path="uncompared")
    assert configure("qmv", "cuda", *KEY) == OTHER
    assert chosen() == before


def test_no_question_is_asked_about_kernels_that_a_cpu_does_not_choose():
    x, w = Spec((64, 3584), mx.bfloat16), Spec((3584, 448), mx.uint32)
    with use_backend("host"), collected_records() as asked:
        route("product", MatmulCall(x, PackedMatrix(w, None), True, FMT))
    # Which takes more than sixteen rows sixteen after sixteen, by qmv.
    assert [(record.family, record.size) for record in asked] == [("qmv", 16)]
