"""The parts of decoder layers: what they compute from, positions, and graphs that layers share."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import VOCABULARY, build
from converted import PLAIN, decoded, pair
from mlx_lm.models.rope_utils import initialize_rope
from numerics import assert_same_model

from mlx_qlayers import QLinear
from mlx_qlayers.conversion import compiled_blocks, compiled_step, operands
from mlx_qlayers.conversion.compiled import Graph
from mlx_qlayers.decode import cache_tail
from mlx_qlayers.decode.snapshot import Snapshot
from mlx_qlayers.formats import Format
from mlx_qlayers.ops.attention_step import Rotation

ROPES = {
    "llama3": {"factor": 8.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_rotary_embeddings(name, kind, gpu_path):
    scaling = {"rope_type": kind, "type": kind, **ROPES[kind]}
    stock, model = pair(name, rope_scaling=scaling)
    assert_same_model(decoded(model), decoded(stock), bits=None, what=f"{name} {kind}")


@pytest.mark.parametrize("gpu_path", ["compiled"], indirect=True)
def test_layers_that_are_alike_share_their_graphs(gpu_path, monkeypatch):
    made, compile = [], mx.compile

    def counted(function):
        made.extend([function] if isinstance(getattr(function, "__self__", None), Graph) else [])
        return compile(function)

    monkeypatch.setattr(mx, "compile", counted)
    monkeypatch.setattr(compiled_step, "step", lambda *args: None)
    _, model = pair(num_hidden_layers=4, vocab_size=VOCABULARY + 1, rms_norm_eps=2e-5)
    decoded(model)
    first = len(made)
    decoded(pair(num_hidden_layers=4, rms_norm_eps=2e-5)[1])
    # Of blocks, of their parts while they are verified, and of the head.
    assert 0 < first == len(made) <= 5


def test_rotary_embeddings_by_what_can_be_compared():
    rope = nn.RoPE(16, traditional=True, base=500.0, scale=0.5)
    static, freqs = compiled_blocks.split_rope(rope)
    assert static == compiled_blocks.split_rope(nn.RoPE(16, True, 500.0, 0.5))[0]
    assert static != compiled_blocks.split_rope(nn.RoPE(16, True, 500.0))[0]
    assert freqs is None and hash(static)
    assert compiled_blocks.rotation_of(static) == Rotation(16, True, 500.0, 0.5)
    scaled = initialize_rope(16, 1e4, False, {"type": "llama3", **ROPES["llama3"]}, 64)
    static, freqs = compiled_blocks.split_rope(scaled)
    assert compiled_blocks.rotation_of(static).base is None and freqs.shape == (8,)
    yarn = initialize_rope(16, 1e4, False, {"type": "yarn", **ROPES["yarn"]}, 64)
    static, freqs = compiled_blocks.split_rope(yarn)
    assert compiled_blocks.rotation_of(static) is None  # it scales the rows as well
    x = mx.random.normal((1, 2, 3, 16))
    assert mx.array_equal(compiled_blocks._join_rope(static, freqs)(x, offset=5), yarn(x, offset=5))

    class Other(nn.RoPE):
        pass

    assert compiled_blocks.split_rope(Other(16)) == (None, None)


def test_positions():
    assert compiled_blocks.position(7) is compiled_blocks.position(7)
    assert cache_tail.positions(4, 3, 2).tolist() == [4, 3, *[7] * 8]
    assert cache_tail.positions(4, 3, 11).tolist() == [4, 3, *[7] * 11]
    own = cache_tail.positions_of(4, 3, mx.array([5, 6]))
    assert own[:4].tolist() == [4, 3, 5, 6] and own.size >= 8
    assert (own + cache_tail.one_token(own.size))[:4].tolist() == [4, 4, 6, 7]


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5)])
def test_heads_in_front_and_side_by_side(shape):
    x = mx.random.normal(shape)
    ahead = compiled_blocks._heads_first(x)
    assert mx.array_equal(ahead, x.transpose(0, 2, 1, 3))
    joined = compiled_blocks.joined(ahead)
    assert mx.array_equal(joined, x.reshape(*shape[:2], -1))
    assert compiled_blocks.joined(joined) is joined


def test_layers_of_one_class_only():
    a, b = QLinear(64, 32), QLinear(64, 32, bias=False, group_size=32, bits=8)
    packed = operands.of_layers(a, b)
    shapes = (Format(64, 4), (32, 8)), (Format(32, 8), (32, 16))
    assert packed.static == tuple(compiled_blocks.Packing(*each) for each in shapes)
    wanted = (a.weight, a.scales, a.biases, a.bias, b.weight, b.scales, b.biases, None)
    assert all(given is array for given, array in zip(packed.arrays, wanted, strict=True))
    assert operands.of_layers(a, nn.QuantizedLinear(64, 32)) is None


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_operands_of_a_block(name):
    block = pair(name)[1].layers[0]
    norm = block.input_layernorm
    heads, feed = (
        operands.of_heads(block.self_attn, norm),
        operands.of_feed_forward(block.mlp, norm),
    )
    assert len(heads.arrays) == 4 + 3 * 4 and heads.arrays[0] is norm.weight
    assert (heads.static[3] == (None, None)) == (heads.arrays[1] is None) == (name == "qwen2")
    assert feed.static[2:] == ("silu", norm.eps) and len(feed.arrays) == 1 + 3 * 4
    out = operands.of_layers(block.self_attn.o_proj)
    tail = operands.of_tail(out, feed, True)
    assert tail.static == (out.static[0], feed.static, True) and len(tail.arrays) == 1 + 4 * 4
    assert operands.of_tail(None, None, True).arrays == [None]
    assert operands.of_heads(block.self_attn, nn.LayerNorm(128)).arrays[0] is None
    assert operands.of_feed_forward(block.mlp, nn.LayerNorm(128)) is None


def test_modules_that_were_not_converted_have_none():
    block = build("qwen2", PLAIN).layers[0]
    assert (
        operands.of_heads(block.self_attn, None) is None
        and operands.of_feed_forward(block.mlp, None) is None
    )


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
