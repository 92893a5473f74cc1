"""Layers of a long prompt that are evaluated one behind the other compute what they did."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import VOCABULARY
from converted import add_adapters, pair
from devices import has_device
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_qlayers.runtime.backend import backend

compiled = pytest.mark.parametrize("gpu_path", ["compiled"], indirect=True)
TOKENS = mx.random.randint(0, VOCABULARY, (1, 300), key=mx.random.key(1))


@pytest.fixture
def evaluated(gpu_path, monkeypatch):
    """The queries that are evaluated."""
    found: list[mx.array] = []
    evaluate = mx.eval

    def seen(*arrays: Any) -> None:
        found.extend(x for _, x in tree_flatten(arrays) if isinstance(x, mx.array) and x.ndim == 4)
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", seen)
    return found


def both(run: Callable[[], Any]) -> list[Any]:
    """The results of a call on a GPU that unpacks matrices for many rows, and elsewhere."""
    found = [run()]
    with pytest.MonkeyPatch.context() as patch:
        has_device(patch, backend(), tensor_cores=True, others=("sm_90",))
        found.append(run())
    return found


def converted(name: str = "qwen2") -> nn.Module:
    model = pair(name, num_hidden_layers=3)[1]
    model.set_dtype(mx.bfloat16)
    return model


@compiled
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_prompts_and_tokens(name, evaluated):
    model = converted(name)

    def run() -> list[mx.array]:
        cache = make_prompt_cache(model)
        ends = (0, 150), (150, 299), (299, 300)
        logits = [model(TOKENS[:, a:b], cache=cache) for a, b in ends]
        return [*logits, *(each for c in cache for each in c.state[:2])]

    elsewhere, found = both(run)
    assert all(map(mx.array_equal, found, elsewhere))
    assert [q.shape[2] for q in evaluated] == [150, 150, 149, 149]


@compiled
def test_a_prompt_with_a_gradient(evaluated):
    model = converted()
    add_adapters(model, 2)
    model.eval()

    def loss(m: nn.Module) -> mx.array:
        return (m(TOKENS) ** 2).mean()

    elsewhere, found = both(lambda: nn.value_and_grad(model, loss)(model))
    for (_, a), (_, b) in zip(tree_flatten(found), tree_flatten(elsewhere), strict=True):
        assert mx.array_equal(a, b)
    assert not evaluated


@pytest.mark.parametrize("gpu_path", ["kernels"], indirect=True)
def test_a_cache_that_a_prompt_fills_keeps_nothing_else(gpu_path, monkeypatch):
    has_device(monkeypatch, "host", tensor_cores=True, others=("sm_90",))
    model, tokens = converted(), mx.zeros((1, 512), mx.int32)
    caches, held = [make_prompt_cache(model) for _ in range(2)], 0
    for cache in caches:  # what is kept for all calls is there after the first
        before = mx.get_active_memory()
        model(tokens, cache=cache)
        mx.eval([c.state for c in cache])
        held = mx.get_active_memory() - before
    assert 0 < held < 1.1 * sum(c.nbytes for c in caches[1])
