"""The parts of decoder layers: rotary embeddings, positions, and graphs that layers share."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import VOCABULARY
from converted import decoded, pair
from mlx_lm.models.rope_utils import initialize_rope
from numerics import assert_same_model

from mlx_qlayers.conversion import compiled_blocks
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
    made = []
    compile = mx.compile
    monkeypatch.setattr(mx, "compile", lambda function: made.append(function) or compile(function))
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
    assert compiled_blocks.positions(7, 2).tolist() == [7] * 8
    assert compiled_blocks.positions(7, 11).tolist() == [7] * 12
    own = compiled_blocks.positions_of(7, mx.array([3, 4])).tolist()
    assert own[:3] == [7, 3, 4] and len(own) >= 8


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5)])
def test_heads_in_front_and_side_by_side(shape):
    x = mx.random.normal(shape)
    ahead = compiled_blocks._heads_first(x)
    assert mx.array_equal(ahead, x.transpose(0, 2, 1, 3))
    joined = compiled_blocks.joined(ahead)
    assert mx.array_equal(joined, x.reshape(*shape[:2], -1))
    assert compiled_blocks.joined(joined) is joined
