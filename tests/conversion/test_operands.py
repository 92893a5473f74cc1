"""What modules compute from, and whether it is still the same."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import build
from converted import PLAIN, pair

from mlx_qlayers import QLinear
from mlx_qlayers.conversion.operands import Snapshot, of_feed_forward, of_heads, of_layers, of_tail
from mlx_qlayers.formats import Format


def test_layers_of_one_class_only():
    a, b = QLinear(64, 32), QLinear(64, 32, bias=False, group_size=32, bits=8)
    packed = of_layers(a, b)
    assert packed.static == ((Format(64, 4), (32, 8)), (Format(32, 8), (32, 16)))
    wanted = (a.weight, a.scales, a.biases, a.bias, b.weight, b.scales, b.biases, None)
    assert all(given is array for given, array in zip(packed.arrays, wanted, strict=True))
    assert of_layers(a, nn.QuantizedLinear(64, 32)) is None


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_operands_of_a_block(name):
    block = pair(name)[1].layers[0]
    norm = block.input_layernorm
    heads, feed = of_heads(block.self_attn, norm), of_feed_forward(block.mlp, norm)
    assert len(heads.arrays) == 4 + 3 * 4 and heads.arrays[0] is norm.weight
    assert (heads.static[3] is None) == (heads.arrays[1] is None) == (name == "qwen2")
    assert feed.static[2:] == ("silu", norm.eps) and len(feed.arrays) == 1 + 3 * 4
    out = of_layers(block.self_attn.o_proj)
    tail = of_tail(out, feed, True)
    assert tail.static == (out.static[0], feed.static, True) and len(tail.arrays) == 1 + 4 * 4
    assert of_tail(None, None, True).arrays == [None]
    assert of_heads(block.self_attn, nn.LayerNorm(128)).arrays[0] is None
    assert of_feed_forward(block.mlp, nn.LayerNorm(128)) is None


def test_modules_that_were_not_converted_have_none():
    block = build("qwen2", PLAIN).layers[0]
    assert of_heads(block.self_attn, None) is None and of_feed_forward(block.mlp, None) is None


CHANGES = {
    "an array": lambda m: setattr(m.layers[1], "weight", m.layers[1].weight + 0),
    "a number": lambda m: setattr(m.layers[1], "eps", 0.5),
    "a module": lambda m: setattr(m, "layers", [QLinear(64, 64), m.layers[1]]),
    "a class": lambda m: setattr(m.layers[0], "__class__", nn.QuantizedLinear),
    "another array": lambda m: setattr(m.layers[1], "more", mx.zeros(2)),
    "one array less": lambda m: m.layers[0].pop("bias"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_snapshot_sees(change):
    model, more = nn.Sequential(QLinear(64, 64), nn.RMSNorm(64)), {"key": 1}
    snapshot = Snapshot(model.modules(), more)
    assert snapshot.holds()
    CHANGES[change](model)
    assert not snapshot.holds()


def test_a_snapshot_sees_other_dictionaries():
    more = {"key": 1}
    snapshot = Snapshot([], more)
    more["key"] = 2
    assert not snapshot.holds()
