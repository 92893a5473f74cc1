"""Operations take the arguments of MLX's operators: the same order, the same names."""

from __future__ import annotations

import ast
import inspect

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import attention, quantized_matmul
from mlx_qlayers.ops.gather_qmm import gather_qmm
from tests.numerics import assert_same_sums

OURS = {
    mx.quantized_matmul: quantized_matmul,
    mx.gather_qmm: gather_qmm,
    mx.fast.scaled_dot_product_attention: attention,
}
# Where an operator runs, and whether it must not be composed of others: ours have use_backend.
NOT_TAKEN = {"stream", "force_fused"}


@pytest.mark.parametrize("stock", OURS, ids=lambda function: function.__name__)
def test_the_same_arguments(stock):
    definition = ast.parse(f"def {stock.__doc__.splitlines()[0]}: ...").body[0].args
    positional = [a.arg for a in (*definition.posonlyargs, *definition.args)]
    ours = inspect.signature(OURS[stock]).parameters
    taken = [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert taken == positional
    assert {a.arg for a in definition.kwonlyargs} - NOT_TAKEN <= set(ours)
    for name, default in zip(positional[::-1], definition.defaults[::-1], strict=False):
        assert ours[name].default == ast.literal_eval(default)


@pytest.mark.parametrize("transpose", [True, False])
def test_quantized_matmul_by_position(transpose):
    x, packed = mx.random.normal((3, 64)), mx.quantize(mx.random.normal((64, 64)), 32, 8)
    given = x, *packed, transpose, 32, 8, "affine"
    assert_same_sums(quantized_matmul(*given), mx.quantized_matmul(*given))


def test_gather_qmm_by_position():
    x, packed = mx.random.normal((6, 1, 64)), mx.quantize(mx.random.normal((4, 64, 64)), 32, 8)
    rows, matrices = mx.array([0, 5, 5]), mx.array([3, 1, 0])
    given = x, *packed, rows, matrices, False, 32, 8, "affine", None
    assert_same_sums(gather_qmm(*given), mx.gather_qmm(*given))


def test_attention_by_position():
    rng = np.random.default_rng(0)
    q, k, v = (mx.array(rng.normal(size=(1, 2, n, 32)), mx.float32) for n in (3, 5, 5))
    options = {"scale": 0.2, "mask": "causal", "sinks": mx.ones(2)}
    stock = mx.fast.scaled_dot_product_attention(q, k, v, **options)
    assert_same_sums(attention(q, k, v, **options), stock)
