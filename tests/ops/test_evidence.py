"""The evidence of choices: measurements decide on a CPU, rules where nothing was measured."""

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
from mlx_qlayers.ops.exp import exp
from mlx_qlayers.ops.fused_products import fused_products
from mlx_qlayers.ops.gather_qmm import gather_qmm
from mlx_qlayers.ops.int8_matmul import int8_matmul
from mlx_qlayers.ops.latent_attention import latent_attention
from mlx_qlayers.ops.rotary import rotary_embedding
from mlx_qlayers.ops.swiglu import swiglu
from mlx_qlayers.options import PackedMatrix
from tests.machine import has_gpu, zeros

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
    latent_attention(heads, heads, cache, cache, mx.array(0), scale=1.0)


def attended(queries, dtype=mx.float16, bits=None, **options):
    q, k = (mx.zeros((1, 1, rows, 64), dtype) for rows in (queries, 64))
    k = k if bits is None else mx.quantize(k, 64, bits)
    return lambda: attention(q, k, k, scale=1.0, **options)


def multiplied(rows, dtype):
    packed = mx.quantize(mx.zeros((64, 64), dtype))
    return lambda: quantized_matmul(mx.zeros((rows, 64), dtype), *packed)


def rounded():
    int8_matmul(mx.zeros((200, 64), mx.float16), mx.zeros((3, 64), mx.int8), mx.ones(3))


@pytest.mark.parametrize(
    "call, reason, expected",
    [
        (attended(1), "the cache is short", "measured"),
        (attended(5, bits=5), "tiles of them would be mostly empty", "rule"),
        (attended(64), "the stock operator was measured faster", "measured"),
        (attended(64, softcap=30.0), "auto", "rule"),
        (attended(64, dtype=mx.float32), "faster in float32", "rule"),
        (multiplied(1, mx.float16), "less time than Python", "measured"),
        (multiplied(1, mx.float32), "which the matrix units do not take", "rule"),
        (multiplied(64, mx.float32), "auto, by qmm", "rule"),
        (multiplied(64, mx.float16), "auto, by qmm", "measured"),
        (rounded, "auto", "rule"),
        (latent, "more than 8192", "measured"),
        (MEASURED["rotary_embedding"], "as fast", "measured"),
    ],
)
def test_on_an_h200_the_evidence_is_of_the_branch_that_decides(
    call, reason, expected, machine, monkeypatch
):
    """Thresholds that it has and nothing compared with are none."""
    has_gpu(monkeypatch, "sm_90")
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **_: zeros)
    machine("cuda")
    call()
    (decision,) = (each for each in explain() if not each.op.startswith(("kernel", "tuning")))
    assert reason in decision.reason and decision.evidence == expected
