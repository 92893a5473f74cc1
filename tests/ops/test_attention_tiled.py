"""What the tiled attention kernels take, and where stock is left in place."""

from unittest import mock

import mlx.core as mx
import pytest
from attention_cases import expect, make
from numerics import assert_accurate

from mlx_qlayers import attention, explain
from mlx_qlayers.metal.attention.forward import Scores
from mlx_qlayers.ops import attention_tiled
from mlx_qlayers.ops.differentiable import without_gradients


def why_stock(device, *, keys=2048, length=2048, width=128, v_width=None, **options):
    dtype = options.pop("dtype", mx.bfloat16)
    q = mx.zeros((1, 4, length, width), dtype)
    k, v = mx.zeros((1, 2, keys, width), dtype), mx.zeros((1, 2, keys, v_width or width), dtype)
    mask, sinks = options.pop("mask", "causal"), options.pop("sinks", None)
    scores = Scores(0.1, isinstance(mask, str), **options)
    with mock.patch.object(attention_tiled, "backend", lambda: device):
        return attention_tiled.stock_is_better(q, k, v, mask, sinks, scores)


@pytest.mark.parametrize(
    "options, kernel",
    [
        ({}, False),
        ({"softcap": 30.0}, True),
        ({"window": 1024}, True),
        ({"window": 1025}, False),
        ({"width": 192, "v_width": 128}, True),
        ({"width": 256}, True),
        ({"width": 160}, False),
        ({"softcap": 30.0, "dtype": mx.float32}, False),
        ({"window": 8, "mask": mx.zeros((2048, 2048))}, False),
        ({"window": 8, "sinks": mx.zeros(4)}, False),
        ({"window": 8, "length": 8}, False),
        ({"softcap": 30.0, "length": 300}, True),
        ({"window": 8, "length": 2047}, False),
        ({"keys": 512, "length": 512}, False),
    ],
)
def test_on_cuda_only_what_was_measured(options, kernel):
    assert (why_stock("cuda", **options) is None) == kernel


@pytest.mark.parametrize(
    "options, kernel",
    [
        ({}, False),
        ({"window": 8, "length": 2047}, True),
        ({"keys": 512, "length": 512}, True),
        ({"keys": 512, "length": 2048}, True),
        ({"keys": 512, "length": 2049}, False),
        ({"keys": 512, "length": 2048, "mask": None}, False),
        ({"keys": 513, "length": 512}, False),
        ({"keys": 512, "length": 512, "dtype": mx.float32}, False),
        ({"keys": 512, "length": 512, "width": 160}, False),
        ({"keys": 512, "length": 8}, False),
    ],
)
def test_on_cuda_short_sequences_are_for_kernels_where_they_are_traced_ahead(options, kernel):
    with without_gradients():
        assert (why_stock("cuda", **options) is None) == kernel


def test_on_apple_gpus_all_but_few_queries():
    assert why_stock("metal") is None
    assert "8 queries" in why_stock("metal", length=8)


@pytest.mark.parametrize(
    "width, v_width, scale, why",
    [
        (36, 40, 1.0, "heads of 36 and 40"),
        (24, 24, 1.0, "heads of 24"),
        (264, 64, 1.0, "heads of 264"),
        (64, 0, 1.0, "nothing to compute"),
        (64, 64, 0.0, "a scale of 0"),
        (64, 64, 1.0, None),
    ],
)
def test_lacking(width, v_width, scale, why):
    q, v = mx.zeros((1, 1, 9, width)), mx.zeros((1, 1, 9, v_width))
    found = attention_tiled.lacking(q, q, v, scale)
    assert found is None if why is None else why in found


@pytest.mark.cuda
@pytest.mark.parametrize("extra", [{}, {"window": 30}])
@pytest.mark.parametrize("length", [64, 201])
def test_short_sequences_that_are_traced_ahead_run_on_kernels(length, extra):
    dtype = mx.bfloat16
    _, arrays, options = make(0, (2, 8, 2, length, length, 128, 128), dtype, "causal", extra)
    exact, rounded, terms = expect(arrays, options, dtype)["out"]
    explain(reset=True)
    with without_gradients():
        run = mx.compile(lambda *a: attention(*a, **options))
        for _ in range(2):
            assert_accurate(run(*arrays), exact, rounded, terms=terms)
    assert [d.path for d in explain() if d.op == "attention"] == ["cuda"]
