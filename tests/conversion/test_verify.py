"""Layers that disagree with the stock ones are refused, and the model stays as it was."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import activations, base
from small_qwen import qwen, snapshot

from mlx_qlayers import convert_model, explain


def test_a_layer_that_overflows_is_no_contradiction():
    model = nn.Sequential(nn.QuantizedLinear(64, 32))
    model.set_dtype(mx.float16)
    model.layers[0].scales = mx.full((32, 1), 6e4, mx.float16)
    assert convert_model(model).counts == {"swapped": 1}


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (nn.QuantizedLinear, "__call__"),
        (base, "scaled_dot_product_attention"),
        (activations, "swiglu"),
    ],
)
def test_a_layer_that_disagrees(monkeypatch, place, name):
    right = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *a, **kw: right(*a, **kw) * 1.01)
    model = qwen()
    before = snapshot(model)
    with pytest.raises(ValueError, match="disagrees with the stock layer by"):
        convert_model(model)
    assert snapshot(model) == before
    assert convert_model(model, verify=False).counts == {"swapped": 19}


def test_verification_uses_no_random_state_and_counts_no_calls():
    explain(reset=True)
    mx.random.seed(3)
    expected = mx.random.normal((4,))
    model = qwen()
    mx.random.seed(3)
    convert_model(model)
    assert mx.array_equal(mx.random.normal((4,)), expected) and not explain()
