"""What choices rest on: the measurements that decide on a CPU, rules where nothing was measured."""

import mlx.core as mx
import pytest

from mlx_qlayers import (
    attention,
    deformable_attention,
    explain,
    grid_sample,
    quantized_matmul,
    use_backend,
)
from mlx_qlayers.measurements.thresholds import are_measured, evidence_of
from mlx_qlayers.ops.exp import exp
from mlx_qlayers.ops.fused_products import fused_products
from mlx_qlayers.ops.gather_qmm import gather_qmm
from mlx_qlayers.ops.latent_attention import latent_attention
from mlx_qlayers.ops.rotary import rotary_embedding
from mlx_qlayers.ops.swiglu import swiglu
from mlx_qlayers.options import PackedMatrix
from tests.machine import has_gpu

X, PACKED = mx.ones((1, 64)), mx.quantize(mx.ones((64, 64)))
IMAGE, HEADS = mx.ones((1, 2, 2, 1)), mx.ones((1, 2, 4, 64))
EXPERTS = mx.quantize(mx.ones((2, 64, 64)))


def deform(queries):
    samples = (1, queries, 1, 1, 1)
    return deformable_attention(
        mx.ones((1, 4, 1, 1)), [(2, 2)], mx.ones((*samples, 2)), mx.ones(samples)
    )


MEASURED = {
    "quantized_matmul": lambda: quantized_matmul(X, *PACKED),
    "fused_products": lambda: fused_products(X, [PackedMatrix(*PACKED)]),
    "gather_qmm": lambda: gather_qmm(mx.ones((2, 1, 64)), *EXPERTS),
    "grid_sample": lambda: grid_sample(IMAGE, mx.zeros((1, 1, 1, 2))),
    "deformable_attention": lambda: deform(4),
    "attention": lambda: attention(HEADS, HEADS, HEADS, scale=1.0),
    "rotary_embedding": lambda: rotary_embedding(HEADS, HEADS, mx.array(0), dims=64),
    "swiglu": lambda: swiglu(X, X),
}
RULES = {
    "deformable_attention": lambda: deform(0),
    "exp": lambda: exp(X),
    "gather_qmm": lambda: gather_qmm(mx.ones((2, 0, 64)), *EXPERTS),
    "grid_sample": lambda: grid_sample(IMAGE, mx.zeros((1, 0, 1, 2))),
}


@pytest.fixture(autouse=True)
def on_a_cpu(machine):
    machine("host")
    explain(reset=True)
    with use_backend("auto"):
        yield


def evidence(op):
    return {decision.evidence for decision in explain() if decision.op == op}


@pytest.mark.parametrize("op", MEASURED)
def test_measurements(op):
    MEASURED[op]()
    assert evidence(op) == {"measured"}


@pytest.mark.parametrize("op", RULES)
def test_rules(op):
    RULES[op]()
    assert evidence(op) == {"rule"}


def latent():
    heads, cache = mx.zeros((1, 2, 1, 64)), mx.zeros((1, 1, 8193, 64))
    return latent_attention(heads, heads, cache, cache, mx.array(0), scale=1.0)


@pytest.mark.parametrize(
    "op, call",
    [("rotary_embedding", MEASURED["rotary_embedding"]), ("latent_attention", latent)],
)
def test_verdicts_on_an_h200_name_their_measurement(op, call, machine, monkeypatch):
    has_gpu(monkeypatch, "sm_90")
    machine("cuda")
    call()
    assert evidence(op) == {"measured"}


def test_what_counts_as_measured_is_any_that_this_device_has():
    assert are_measured(["qmm_max_rows", "rotary_gain"]) and not are_measured(["qmm_max_rows"])
    assert are_measured([evidence_of("qmm_max_rows", device="cuda")]) and not are_measured([])
