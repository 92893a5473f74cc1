"""What goes wrong around a compiled step of decoding: the text is still that of the stock model.

Everything here is asked of the public surface, and compared with the stock model beside it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import noises
import numpy as np
import pytest
from architecture_table import ARCHITECTURES
from architectures import VOCABULARY, build
from converted import PLAIN, add_adapters
from mlx.optimizers import SGD
from mlx.utils import tree_map
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from noises import Noisy
from numerics import assert_same_model
from step_models import models_of, pair

from mlx_qlayers import convert_model, explain
from mlx_qlayers.conversion.report import LEFT

TOKENS = mx.random.randint(0, VOCABULARY, (1, 80), key=mx.random.key(1))


def decoded(model: nn.Module, cache: list[Any], begin: int, end: int) -> mx.array:
    """The logits of tokens, one at a time."""
    return mx.concatenate(
        [model(TOKENS[:, i : i + 1], cache=cache)[0] for i in range(begin, end)], axis=0
    )


# A rotating cache that keeps its first tokens, and begins with fewer.


@pytest.mark.parametrize("ring", [(16, 4), (8, 4), (7, 2)], ids=str)
@pytest.mark.parametrize("prompt", [1, 2, 3])
def test_rings_that_begin_with_fewer_tokens_than_they_keep(
    ring: tuple[int, int], prompt: int, graphs: list[object]
) -> None:
    """More than twice around."""
    results = []
    for model in pair("phi3"):
        cache = [RotatingKVCache(*ring) for _ in make_prompt_cache(model)]
        model(TOKENS[:, :prompt], cache=cache)
        results.append(decoded(model, cache, prompt, prompt + 40))
    assert len(graphs) >= 40
    assert_same_model(*reversed(results), bits=None, what=f"{ring}, prompt of {prompt}")


# Changes of a model between two tokens.


def _norm(model: Any) -> Any:
    return model.model.norm


def _replaced(model: Any) -> None:
    _norm(model).weight = _norm(model).weight * 3


def _multiplied(model: Any) -> None:
    _norm(model).weight *= 3


def _overwritten(model: Any) -> None:
    _norm(model).weight[:] = _norm(model).weight * 0.5


def _an_element(model: Any) -> None:
    _norm(model).weight[3] = 40.0


def _elsewhere(model: Any) -> None:
    weight = model.model.layers[0].input_layernorm.weight
    weight -= 0.5


def _evaluated(model: Any) -> None:
    _norm(model).weight /= 2
    mx.eval(model.parameters())


def _scales(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.scales *= 2


def _codes(model: Any) -> None:
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight[0], weight[1] = weight[1], weight[0] + 0


def _bias(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.biases += 0.25


def _embedding(model: Any) -> None:
    model.model.embed_tokens.scales[5:90] *= -2


def _updated(model: Any) -> None:
    model.update(tree_map(lambda a: a * 1.5, {"model": {"norm": {"weight": _norm(model).weight}}}))


def _loaded(model: Any) -> None:
    weights = [("model.norm.weight", _norm(model).weight + 1)]
    model.load_weights(weights, strict=False)


def _trained(model: Any) -> None:
    gradients = {"model": {"norm": {"weight": mx.ones_like(_norm(model).weight)}}}
    SGD(0.3).update(model, gradients)


def _applied(model: Any) -> None:
    model.apply(lambda a: a * 1.1 if a.ndim == 1 and a.dtype == mx.float32 else a)


def _epsilon(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.eps = 0.5


def _scale(model: Any) -> None:
    model.model.layers[0].self_attn.scale *= 4


def _module(model: Any) -> None:
    model.model.norm = nn.RMSNorm(128)


def _without_arrays(model: Any) -> None:
    model.model.layers[0].self_attn.rope = nn.RoPE(32, base=50.0)


def _of_the_same_arrays(model: Any) -> None:
    norm = nn.RMSNorm(128, eps=2.0)
    norm.weight = model.model.layers[0].post_attention_layernorm.weight
    model.model.layers[0].post_attention_layernorm = norm


def _layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def _fewer_layers(model: Any) -> None:
    layers = model.model.layers
    layers[1] = layers[0]


def _copied(model: Any) -> None:
    model.model.layers[0].mlp = copy.deepcopy(model.model.layers[1].mlp)


def _class(model: Any) -> None:
    _norm(model).__class__ = Doubled


def _of_a_class(model: Any) -> None:
    Doubled.factor = 3.0


def _shared_memory(model: Any) -> None:
    np.array(_norm(model).weight, copy=False)[...] *= 2


def _adapters(model: Any) -> None:
    add_adapters(model, 1)
    model.eval()


def _hooked(model: Any) -> None:
    model.model.norm = Hooked(_norm(model), lambda x: -x)


def _a_call_of_a_class(model: Any) -> None:
    Doubled.__call__ = lambda self, x: _DOUBLED(self, x) + 1  # type: ignore[method-assign]


def _of_the_model_itself(model: Any) -> None:
    cls = type(model)
    model.__class__ = type("Other", (cls,), {"__call__": lambda *a, **b: 2 * cls.__call__(*a, **b)})


class Hooked(nn.Module):
    """Calls something with what a module gives."""

    def __init__(self, inner: nn.Module, hook: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self.inner, self.hook = inner, hook

    def __call__(self, x: mx.array) -> mx.array:
        """The result of the hook."""
        return self.hook(self.inner(x))


class Doubled(nn.RMSNorm):
    """A norm whose class has a setting."""

    factor = 2.0

    def __call__(self, x: mx.array) -> mx.array:
        """The norm times the setting."""
        return super().__call__(x) * self.factor


_DOUBLED = Doubled.__call__
CHANGES: list[Callable[[Any], None]] = [
    *(_replaced, _multiplied, _overwritten, _an_element, _elsewhere, _evaluated, _scales, _codes),
    *(_bias, _embedding, _updated, _loaded, _trained, _applied, _epsilon, _scale, _module),
    *(_without_arrays, _of_the_same_arrays, _layers, _copied, _class, _of_a_class),
    *(_a_call_of_a_class, _fewer_layers, _shared_memory, _hooked, _of_the_model_itself, _adapters),
]


@pytest.fixture
def doubled() -> Iterator[None]:
    """A class that a test may change."""
    Doubled.factor = 2.0
    yield
    Doubled.__call__ = _DOUBLED  # type: ignore[method-assign]


@pytest.mark.usefixtures("doubled")
@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
def test_every_change_of_a_model_is_seen(name: str, compiled_steps: None) -> None:
    """In place, too: what was computed of a weight follows it (of Gemma's norms 1 + w)."""
    models = models_of(name, ARCHITECTURES[name]._replace(format=(64, 4, "affine")))
    caches, results, at = [make_prompt_cache(model) for model in models], list[Any](), 3
    for model, cache in zip(models, caches, strict=True):
        model(TOKENS[:, :at], cache=cache)
    for change in CHANGES:
        before = [mx.array(0.0)] * 2
        for changed in (False, True):
            results = []
            for model, cache in zip(models, caches, strict=True):
                if changed:
                    change(model)
                for c in cache:
                    c.trim(c.offset - 3)
                results.append(decoded(model, cache, at, at + 2))
            stock, found = results
            assert_same_model(found, stock, bits=None, what=f"{name} {change.__name__} {changed}")
            assert not mx.array_equal(before[0], stock)
            before = results


# Code that is not the same twice.


NOISES = [noises.of_mlx, noises.dropout, noises.of_numpy, noises.a_count_of_a_class]


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.__name__)
def test_code_that_is_not_the_same_twice_is_left_to_the_model(
    noise: Callable[[Any, mx.array], mx.array], compiled_steps: None
) -> None:
    """And the report says so. Numbers are those that the stock model gets of the same seeds."""
    cls = type("Noisy", (Noisy,), {"noise": staticmethod(noise)})
    results = []
    for converted in (False, True):
        model = build("qwen2", PLAIN)
        model.__class__, model.drop, model.key = cls, nn.Dropout(0.5), mx.random.key(3)
        model.generator = np.random.default_rng(5)
        model.eval()
        if converted:
            rows = convert_model(model, verify=False).fusions
        model.drop.train()
        cache = make_prompt_cache(model)
        model(TOKENS[:, :3], cache=cache)
        explain(reset=True)
        mx.random.seed(7), np.random.seed(7), random.seed(7)
        Noisy.count = noises.calls = 0
        noises.GENERATOR = np.random.default_rng(9)
        model.generator, model.key = np.random.default_rng(5), mx.random.key(3)
        parts = []
        for _ in range(6):
            parts.append(model(TOKENS[:, 3:4], cache=cache)[0])
            mx.eval(parts)
            assert [c.trim(1) for c in cache] == [1] * len(cache)
        results.append(mx.concatenate(parts, axis=0))
        results.append(mx.random.normal((1, 4)))
    stock, more, found, others = results
    assert_same_model(found, stock, bits=None, what=noise.__name__)
    assert mx.array_equal(more, others)
    assert len({*stock.sum(-1).tolist()}) == 6
    what = (
        "the model changes" if noise in (noises.a_count_of_a_class, noises.a_global) else "random"
    )
    if noise is not noises.dropout:
        (row,) = [row for row in rows if row.kind == "step"]
        assert row.action == LEFT and what in row.reason, row
    else:  # which begins later
        (decision,) = [each for each in explain() if each.op == "step"]
        assert (decision.path, decision.calls) == ("layers", 6) and what in decision.reason


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "plamo3"])
def test_a_model_in_training_mode_decodes_as_one_graph(name: str, graphs: list[object]) -> None:
    """And what differs in training is what stock's does."""
    results = []
    for model in pair(name):
        model.train()
        cache = make_prompt_cache(model)
        model(TOKENS[:, :3], cache=cache)
        graphs.clear()
        results.append(decoded(model, cache, 3, 7))
    assert len(graphs) >= 4
    assert_same_model(*reversed(results), bits=None, what=name)


# What fails with one cache.


@pytest.mark.parametrize("name", ["phi3", "gemma3_text"])
@pytest.mark.parametrize("size", [4096, 19])
def test_rings_that_are_trimmed_right_behind_a_prompt(
    name: str, size: int, graphs: list[object]
) -> None:
    """They run as graphs, and so do caches that come later."""
    results = []
    for model in pair(name):
        parts = []
        for trimmed in (2, 17, 0):
            cache = [RotatingKVCache(size) for _ in make_prompt_cache(model)]
            model(TOKENS[:, :18], cache=cache)
            assert [c.trim(trimmed) for c in cache] == [trimmed] * len(cache)
            parts.append(decoded(model, cache, 20, 34))
        results.append(mx.concatenate(parts, axis=0))
    # Where Gemma's windows begin to hide tokens, one is the model's own.
    assert len(graphs) >= 3 * 14 - 2
    assert_same_model(*reversed(results), bits=None, what=name)


def test_a_failure_with_some_caches_is_none_with_others(graphs: list[object]) -> None:
    """With caches that are not as models make them, and that the stock model takes."""
    results = []
    for model in pair("phi3"):
        parts = []
        for strange in (True, False):
            cache = make_prompt_cache(model)
            model(TOKENS[:, :5], cache=cache)
            if strange:  # rows of which no graph can be made, whatever it is made for
                cache[1].keys = cache[1].keys[:, :, :5].astype(mx.float16)
            graphs.clear()
            parts.append(decoded(model, cache, 5, 9))
        results.append(mx.concatenate(parts, axis=0))
    assert len(graphs) >= 4
    assert_same_model(*reversed(results), bits=None, what="after it")
