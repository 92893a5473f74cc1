"""QLinear and QEmbedding are their stock layers, but for how they compute."""

import copy

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_qlayers import QLinear
from mlx_qlayers.layers.qlinear import QEmbedding
from tests.numerics import assert_same_sums, random


def same_arrays(a: nn.Module, b: nn.Module) -> bool:
    left, right = dict(tree_flatten(a.parameters())), dict(tree_flatten(b.parameters()))
    return left.keys() == right.keys() and all(mx.array_equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "fmt",
    [{}, {"group_size": 32, "bits": 3}, {"mode": "mxfp8"}, {"mode": "nvfp4"}, {"mode": "mxfp4"}],
    ids=str,
)
def test_constructor_is_that_of_the_stock_layer(fmt, bias):
    mx.random.seed(0)
    stock = nn.QuantizedLinear(128, 40, bias, **fmt)
    mx.random.seed(0)
    ours = QLinear(128, 40, bias, **fmt)
    assert same_arrays(ours, stock) and isinstance(ours, nn.QuantizedLinear)
    assert repr(ours) == repr(stock).replace("QuantizedLinear", "QLinear")
    assert f"bits={ours.bits}" in repr(ours) and f"mode={ours.mode}" in repr(ours)
    assert ours.trainable_parameters() == {}
    x = random(np.random.default_rng(0), (3, 128))
    assert_same_sums(ours(x), stock(x))


def test_from_linear():
    linear = nn.Linear(128, 24)
    ours, stock = (cls.from_linear(linear, 32, 8) for cls in (QLinear, nn.QuantizedLinear))
    assert type(ours) is QLinear and same_arrays(ours, stock)


def test_from_quantized_shares_everything():
    stock = nn.QuantizedLinear(128, 24)
    stock.unfreeze(keys=["bias"])
    stock.eval()
    ours = QLinear.from_quantized(stock)
    assert type(ours) is QLinear and ours["weight"] is stock["weight"]
    assert list(ours.trainable_parameters()) == ["bias"] and not ours.training
    ours.freeze()
    assert list(stock.trainable_parameters()) == ["bias"]
    with pytest.raises(ValueError, match="must be a QuantizedLinear, not a Linear"):
        QLinear.from_quantized(nn.Linear(4, 4))


FORMATS = [(64, 4, "affine"), (32, 3, "affine"), (32, 8, "mxfp8"), (16, 4, "nvfp4")]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_to_quantized_without_arguments_is_the_inverse_of_from_quantized(fmt):
    stock = nn.QuantizedLinear(128, 24, True, *fmt)
    stock.unfreeze(keys=["bias"])
    stock.eval()
    back = QLinear.from_quantized(stock).to_quantized()
    assert type(back) is nn.QuantizedLinear and repr(back) == repr(stock)
    assert back.keys() == stock.keys() and all(back[key] is stock[key] for key in stock)
    assert vars(back) == vars(stock)
    back.freeze()
    assert list(stock.trainable_parameters()) == ["bias"]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("own", FORMATS, ids=str)
def test_to_quantized_gives_the_format_that_is_asked_for(own, fmt):
    layer = QLinear(128, 24, True, *own)
    layer.bias = random(np.random.default_rng(0), (24,))
    layer.eval()
    found = layer.to_quantized(*fmt)
    assert type(found) is nn.QuantizedLinear and not found.training
    assert (found.group_size, found.bits, found.mode) == fmt
    assert list(found.trainable_parameters()) == list(layer.trainable_parameters())
    dense = nn.Linear(128, 24)
    biases = layer.get("biases")
    dense.weight = mx.dequantize(layer.weight, layer.scales, biases, *own)
    dense.bias = layer.bias
    expected: nn.Module = dense  # which quantized once more may have other scales
    if own == fmt:
        assert found["weight"] is layer["weight"] and found["scales"] is layer["scales"]
    else:
        expected = nn.QuantizedLinear.from_linear(dense, *fmt)
        assert same_arrays(found, expected)
    x = random(np.random.default_rng(0), (3, 128))
    assert_same_sums(found(x), expected(x))


def test_to_quantized_takes_the_defaults_of_nn_linear():
    layer = QLinear(128, 24, group_size=32, bits=8)
    for asked in ({"bits": 3}, {"group_size": 128}, {"mode": "mxfp8"}, {"mode": "affine"}):
        found, stock = layer.to_quantized(**asked), nn.Linear(128, 24).to_quantized(**asked)
        assert repr(found) == repr(stock)
    with pytest.raises(ValueError, match=r"bits must be 1, 2, 3, 4, 5, 6, 8 .* not 9"):
        layer.to_quantized(bits=9)
    with pytest.raises(ValueError, match="group_size must divide the width 96, not 64"):
        QLinear(96, 24, group_size=32).to_quantized(64, 4)


def test_nn_quantize_changes_the_format():
    model = nn.Sequential(QLinear(128, 64), nn.Linear(64, 64))
    nn.quantize(model, group_size=32, bits=8)
    assert [type(layer) for layer in model.layers] == [nn.QuantizedLinear] * 2
    assert [layer.bits for layer in model.layers] == [8, 8]


def test_deepcopy_is_independent():
    layer = QLinear(128, 24)
    twin = copy.deepcopy(layer)
    twin.bias = twin.bias + 1
    assert type(twin) is QLinear and mx.all(layer.bias == 0)


def test_gradient_of_a_bias_that_is_trained():
    layer = QLinear(64, 8)
    layer.unfreeze(keys=["bias"])
    x = random(np.random.default_rng(1), (5, 64))
    _, gradients = nn.value_and_grad(layer, lambda x: layer(x).sum())(x)
    assert list(gradients) == ["bias"]
    assert_same_sums(gradients["bias"], mx.full((8,), 5.0))


def test_embedding_as_linear():
    stock = nn.QuantizedEmbedding(40, 128, 32, 8)
    ours = QEmbedding.from_quantized(stock)
    x = random(np.random.default_rng(2), (2, 3, 128))
    assert_same_sums(ours.as_linear(x), stock.as_linear(x))
    assert_same_sums(ours(mx.array([3, 5])), stock(mx.array([3, 5])))
