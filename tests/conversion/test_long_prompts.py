"""Layers of a long prompt that are evaluated one behind the other compute what they did."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import VOCABULARY
from converted import add_adapters, pair
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from numerics import assert_same_model, assert_same_states

from mlx_qlayers.conversion import long_prompts

compiled = pytest.mark.parametrize("gpu_path", ["compiled"], indirect=True)
TOKENS = mx.random.randint(0, VOCABULARY, (1, 40), key=mx.random.key(1))


@pytest.fixture
def evaluated(gpu_path, monkeypatch):
    """Of each layer of a prompt, whether what it was given is evaluated with it."""
    found: list[bool] = []
    is_transformed = long_prompts.is_transformed

    def seen(arrays: list[mx.array]) -> bool:
        transformed = is_transformed(arrays)
        found.append(not transformed)
        return transformed

    monkeypatch.setattr(long_prompts, "is_dense", lambda x: x.shape[1] > 16)
    monkeypatch.setattr(long_prompts, "is_transformed", seen)
    return found


@compiled
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_prompts_and_tokens(name, evaluated):
    stock, model = pair(name, num_hidden_layers=3)
    results = []
    for m in (stock, model):
        cache = make_prompt_cache(m)
        parts = [m(TOKENS[:, a:b], cache=cache) for a, b in ((0, 20), (20, 39), (39, 40))]
        results.append((mx.concatenate(parts, 1), [c.state[:2] for c in cache]))
    (truth, theirs), (found, ours) = results
    assert_same_model(found, truth, bits=None, what=name)
    assert_same_states(ours, theirs, bits=None, what=f"{name}: caches")
    assert evaluated == [True] * 6


@compiled
def test_a_prompt_with_a_gradient(evaluated):
    stock, model = pair(num_hidden_layers=3)
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
    _, model = pair(num_hidden_layers=3)
    tokens = mx.zeros((1, 256), mx.int32)
    caches, held = [make_prompt_cache(model) for _ in range(2)], 0
    for cache in caches:  # what is kept for all calls is there after the first
        before = mx.get_active_memory()
        model(tokens, cache=cache)
        mx.eval([c.state for c in cache])
        held = mx.get_active_memory() - before
    assert 0 < held < 1.1 * sum(c.nbytes for c in caches[1])
