"""Layers of a long prompt that are evaluated one behind the other compute what they did."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import VOCABULARY, Architecture, build
from converted import add_adapters
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model
from numerics import assert_same_model, assert_same_states

from mlx_qlayers import convert_model
from mlx_qlayers.conversion import compiled as compiled_module
from mlx_qlayers.conversion import compiled_blocks, fused_blocks, long_prompts
from mlx_qlayers.ops import gated_parts
from mlx_qlayers.runtime.backend import Mode, mode

compiled = pytest.mark.parametrize("gpu_path", ["compiled"], indirect=True)
TOKENS = mx.random.randint(0, VOCABULARY, (1, 40), key=mx.random.key(1))


@pytest.fixture
def evaluated(gpu_path: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each layer of a prompt, whether what it was given is evaluated with it."""
    found: list[bool] = []
    begin = long_prompts._Turn._begin

    def seen(self: object, arrays: list[mx.array]) -> mx.array | None:
        marker = begin(self, arrays)
        found.append(marker is not None)
        return marker

    for module in (fused_blocks, long_prompts):
        monkeypatch.setattr(module, "is_dense", lambda x: x.shape[1] > 16)
    monkeypatch.setattr(long_prompts._Turn, "_begin", seen)
    return found


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    config = {"num_hidden_layers": 3}
    stock, model = (build(name, Architecture(3, config, (64, 4, "affine"))) for _ in range(2))
    convert_model(model)
    return stock, model


@compiled
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_prompts_and_tokens(name, evaluated):
    stock, model = pair(name)
    results = []
    for m in (stock, model):
        cache = make_prompt_cache(m)
        parts = [m(TOKENS[:, a:b], cache=cache) for a, b in ((0, 20), (20, 39), (39, 40))]
        results.append((mx.concatenate(parts, 1), [c.state[:2] for c in cache]))
    (truth, theirs), (found, ours) = results
    assert_same_model(found, truth, bits=None, what=name)
    assert_same_states(ours, theirs, bits=None, what=f"{name}: caches")
    assert evaluated == [True] * 6


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of many rows in two parts, which are computed by MLX's operators."""

    def by_operators(x, h, packed, formats, gate, memory):
        at = zip((0, 4, 8), (formats[0], *formats), strict=True)
        gate, up, down = (mx.dequantize(*packed[i : i + 3], *fmt[:2], mode=fmt[2]) for i, fmt in at)
        y = nn.silu(x @ gate.T) * (x @ up.T)
        return h + y @ down.T, [[y[:1]], [y[1:2]]]

    monkeypatch.setattr(long_prompts, "_ROWS", range(16, 100))
    monkeypatch.setattr(long_prompts, "_LEAST", 0)
    monkeypatch.setattr(gated_parts, "MOST_DENSE", 128 * 256 * 2)
    monkeypatch.setattr(compiled_blocks, "gated_parts", by_operators)


@compiled
@pytest.mark.parametrize("cut", [False, True])
def test_a_prompt_with_a_gradient(evaluated, cut, request):
    if cut:
        request.getfixturevalue("parts")
    stock, model = pair("qwen2")
    for m in (stock, model):
        add_adapters(m, 2)
        m.eval()

    def loss(m: nn.Module) -> mx.array:
        return (m(TOKENS) ** 2).mean()

    (value, truth), (ours, found) = (nn.value_and_grad(m, loss)(m) for m in (stock, model))
    assert_same_states(ours, value, bits=None, what="loss")
    for (name, a), (_, b) in zip(tree_flatten(found), tree_flatten(truth), strict=True):
        assert_same_states(a, b, bits=None, what=name)
    assert len(evaluated) == 3 and not evaluated[-1]


@pytest.mark.parametrize("gpu_path", ["kernels"], indirect=True)
def test_a_cache_that_a_prompt_fills_keeps_nothing_else(evaluated):
    _, model = pair("qwen2")
    tokens = mx.zeros((1, 256), mx.int32)
    caches, held = [make_prompt_cache(model) for _ in range(2)], 0
    for cache in caches:  # what is kept for all calls is there after the first
        before = mx.get_active_memory()
        model(tokens, cache=cache)
        mx.eval([c.state for c in cache])
        held = mx.get_active_memory() - before
    assert 0 < held < 1.1 * sum(c.nbytes for c in caches[1])


@compiled
@pytest.mark.parametrize("bits", [None, 8])
def test_a_layer_in_parts(evaluated, parts, bits):
    """Each part is evaluated in turn, behind the one before; the kernels have a test of theirs."""
    results = []
    for m in pair("qwen2"):
        cache = make_prompt_cache(m)
        if bits:
            cache = [c.to_quantized(32, bits) for c in cache]
        given = [m(TOKENS[:, a:b], cache=cache) for a, b in ((0, 20), (20, 39), (39, 40))]
        results.append(mx.concatenate(given, 1))
    assert_same_model(*reversed(results), bits=bits, what="in parts")
    # Of all layers but the last: attention, half of it, and what comes out; over a packed cache
    # attention, rows, two parts and what comes out, and that twice. What goes in is counted last.
    assert evaluated == [True] * (6 + (2 * 2 * 5 if bits else 2 * 3))


@pytest.mark.parametrize("gpu_path", ["kernels"], indirect=True)
def test_layers_that_compute_in_the_same_memory(evaluated, monkeypatch):
    """By kernels, as inside a graph: the same each time, and as at once but for roundings."""

    def call(self: compiled_module.Graph, *arrays: mx.array) -> Any:
        with mode(Mode.INFERENCE):
            return self.function(*arrays)

    monkeypatch.setattr(compiled_module.Graph, "__call__", call)
    monkeypatch.setattr(compiled_module.Graph, "ready", lambda self, *_: self)
    monkeypatch.setattr(long_prompts, "_LEAST", 0)
    monkeypatch.setattr(gated_parts, "MOST_DENSE", 64 * 256 * 2)
    config, found = {"num_hidden_layers": 3}, []
    model = build("qwen2", Architecture(3, config, format=(64, 4, "affine")), mx.bfloat16)
    convert_model(model, verify=False)
    for rows in (range(16, 100), range(16, 100), range(0)):
        monkeypatch.setattr(long_prompts, "_ROWS", rows)
        evaluated.clear()
        cache = [c.to_quantized(32, 8) for c in make_prompt_cache(model)]
        parts = [model(TOKENS[:, a:b], cache=cache) for a, b in ((0, 20), (20, 40))]
        found.append(mx.concatenate(parts, 1))
        # Of two layers attention, rows, three parts and what comes out; what goes into each.
        assert len(evaluated) == 2 * (3 + 2 * 6 * (len(rows) > 0))
    assert mx.array_equal(*found[:2])
    parts, whole = (a.astype(mx.float32) for a in found[1:])
    assert mx.abs(parts - whole).max() < 0.02 * mx.abs(whole).max()


@pytest.mark.parametrize(("room", "ahead"), [(0, 1), (1 << 40, 4), (None, 1)])
def test_as_much_is_handed_over_as_there_is_room_for(room, ahead):
    turn = long_prompts._Turn()
    turn.room = room
    for _ in range(4):
        turn.pending.append([mx.ones(1000) + 1])
        turn.run()
    assert len(turn._begun) == ahead and not turn.pending


@pytest.mark.cuda
@pytest.mark.parametrize("bits", [None, 8])
def test_parts_on_a_gpu(monkeypatch, bits):
    """The same each time, and as close to dense float32 weights as at once."""
    config = {"num_hidden_layers": 3, "hidden_size": 1024, "intermediate_size": 8192}
    stock, model = (build("qwen2", Architecture(3, config), mx.bfloat16) for _ in range(2))
    convert_model(model, verify=False)
    tokens, found = mx.random.randint(0, VOCABULARY, (1, 1500)), []
    monkeypatch.setattr(gated_parts, "MOST_DENSE", 8 << 20)
    monkeypatch.setattr(long_prompts, "_LEAST", 0)
    for rows in (range(1024, 2048), range(1024, 2048), range(0)):
        monkeypatch.setattr(long_prompts, "_ROWS", rows)
        cache = make_prompt_cache(model)
        if bits:
            cache = [c.to_quantized(64, bits) for c in cache]
        found.append(model(tokens, cache=cache))
    assert mx.array_equal(found[0], found[1])
    exact = dequantize_model(stock)
    exact.set_dtype(mx.float32)
    exact = exact(tokens)
    parts, whole = (mx.abs(a.astype(mx.float32) - exact).mean().item() for a in found[1:])
    assert parts <= 1.5 * whole
