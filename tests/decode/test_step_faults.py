"""Faults around a compiled step of decoding: the text is still that of the stock model.

Everything here is asked of the public surface, and compared with the stock model beside it.
"""

import copy
import random
import re
from collections.abc import Callable
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
from noises import Counter, Noisy
from numerics import assert_same_model
from step_models import left, models_of, pair

from mlx_qlayers import convert_model, explain
from mlx_qlayers.conversion.report import LEFT
from mlx_qlayers.decode import engine

TOKENS = mx.random.randint(0, VOCABULARY, (1, 80), key=mx.random.key(1))


def decoded(model: nn.Module, cache: list[Any], begin: int, end: int) -> mx.array:
    """The logits of tokens, one at a time."""
    return mx.concatenate(
        [model(TOKENS[:, i : i + 1], cache=cache)[0] for i in range(begin, end)], axis=0
    )


# Changes of a model between two tokens.


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
# Statements; weights stand for themselves, as in place.
CHANGES = """
norm.weight = norm.weight * 3
norm.weight *= 3
norm.weight[:] = norm.weight * 0.5
norm.weight[3] = 40.0
weight = layers[0].input_layernorm.weight; weight -= 0.5
norm.weight /= 2; mx.eval(model.parameters())
layers[1].mlp.down_proj.scales *= 2
weight = layers[0].self_attn.o_proj.weight; weight[0], weight[1] = weight[1], weight[0] + 0
layers[0].self_attn.v_proj.biases += 0.25
model.model.embed_tokens.scales[5:90] *= -2
model.update(tree_map(lambda a: a * 1.5, {"model": {"norm": {"weight": norm.weight}}}))
model.load_weights([("model.norm.weight", norm.weight + 1)], strict=False)
SGD(0.3).update(model, {"model": {"norm": {"weight": mx.ones_like(norm.weight)}}})
model.apply(lambda a: a * 1.1 if a.ndim == 1 and a.dtype == mx.float32 else a)
layers[1].post_attention_layernorm.eps = 0.5
layers[0].self_attn.scale *= 4
model.model.norm = nn.RMSNorm(128)
layers[0].self_attn.rope = nn.RoPE(32, base=50.0)
layers[0].post_attention_layernorm = rms_norm_of(layers[0].post_attention_layernorm.weight)
layers[0], layers[1] = layers[1], layers[0]
layers[0].mlp = copy.deepcopy(layers[1].mlp)
norm.__class__ = Doubled
Doubled.factor = 3.0
Doubled.__call__ = lambda self, x: _DOUBLED(self, x) + 1
layers[1] = layers[0]
np.array(norm.weight, copy=False)[...] *= 2
model.model.norm = Hooked(norm, lambda x: -x)
model.__class__ = twice(type(model))
add_adapters(model, 1); model.eval()
""".strip().splitlines()


def rms_norm_of(weight: mx.array) -> nn.RMSNorm:
    norm = nn.RMSNorm(128, eps=2.0)
    norm.weight = weight
    return norm


def twice(cls: type) -> type:
    return type("Other", (cls,), {"__call__": lambda *a, **b: 2 * cls.__call__(*a, **b)})


NAMES = {"SGD": SGD, "copy": copy, "tree_map": tree_map, "add_adapters": add_adapters} | globals()


@pytest.fixture
def doubled():
    """A class that a test may change."""
    Doubled.factor = 2.0
    yield
    Doubled.__call__ = _DOUBLED  # type: ignore[method-assign]


@pytest.mark.usefixtures("doubled")
@pytest.mark.parametrize(("name", "count"), [("qwen2", len(CHANGES)), ("gemma3_text", 6)])
def test_every_change_of_a_model_is_seen(name, count, compiled_steps):
    """In place, too: what was computed of a weight follows it (of Gemma's norms 1 + w)."""
    models = models_of(name, ARCHITECTURES[name]._replace(format=(64, 4, "affine")))
    caches, results, at = [make_prompt_cache(model) for model in models], list[Any](), 3
    for model, cache in zip(models, caches, strict=True):
        model(TOKENS[:, :at], cache=cache)
    for change in CHANGES[:count]:
        before = [mx.array(0.0)] * 2
        for changed in (False, True):
            results = []
            for model, cache in zip(models, caches, strict=True):
                if changed:
                    named = {"model": model, "norm": model.model.norm}
                    exec(change, NAMES | named | {"layers": model.model.layers})
                for c in cache:
                    c.trim(c.offset - 3)
                results.append(decoded(model, cache, at, at + 2))
            stock, found = results
            assert_same_model(found, stock, bits=None, what=f"{name} {change} {changed}")
            assert not mx.array_equal(before[0], stock)
            before = results


# Code that is not the same twice.


RANDOM = [
    *(noises.unused, noises.dropout, noises.of_numpy, noises.of_python),
    *(noises.a_generator, noises.a_global_generator),
]
# Reasons that name code, or say that its two runs differ.
NOISES = [
    *((noise, "the model draws random numbers of") for noise in RANDOM),
    (noises.own_key, "random|the model changes key"),
    (noises.the_clock, "becomes .* with another batch size and position"),
    (noises.a_count_of_a_class, "the model changes count of Noisy"),
    (noises.a_count_of_an_object, "the model changes n of|becomes"),
    (noises.a_global, "the model changes calls of"),
    (noises.a_list, "the model changes .* of list"),
    (noises.a_list_of_a_module, "the model changes .* of list"),
    (noises.a_global_list, "the model changes .* of list"),
    (noises.in_place, "the model changes model.sums in a call"),
    (noises.a_value, r"noises.py:\d+: return y if y.max"),
    (noises.a_number_enclosed, "the model changes what a function encloses"),
    (noises.a_list_enclosed, "the model changes .* of list"),
]


@pytest.mark.parametrize(("noise", "reason"), NOISES, ids=lambda x: getattr(x, "__name__", ""))
def test_code_that_is_not_the_same_twice_is_left_to_the_model(noise, reason, compiled_steps):
    """And somebody says so. Numbers are those that the stock model gets of the same seeds, and
    captures change nothing."""
    results = []
    for converted in (False, True):
        model = build("qwen2", PLAIN)
        cls = model.__class__ = type("Noisy", (Noisy,), {})
        cls.noise = staticmethod(noise() if noise.__name__.endswith("enclosed") else noise)
        model.drop, model.counter, model.seen, model.key = nn.Dropout(0.5), Counter(), [], None
        noises.begin(model)
        model.eval()
        explain(reset=True)
        rows = convert_model(model, verify=False).fusions if converted else ()
        model.drop.train()
        cache = make_prompt_cache(model)
        model(TOKENS[:, :3], cache=cache)
        noises.begin(model)
        mx.random.seed(7), np.random.seed(7), random.seed(7)
        parts = []
        for _ in range(4):
            parts.append(model(TOKENS[:, 3:4], cache=cache)[0])
            mx.eval(parts)
            assert [c.trim(1) for c in cache] == [1] * len(cache)
        results.append([mx.concatenate(parts, axis=0), mx.random.normal((4,))])
        results[-1] += [np.random.normal(), random.random()]
        results[-1] += [len(each) for each in (noises.SEEN, model.seen, model.counter.seen)]
    said = [row.reason for row in rows if (row.kind, row.action) == ("step", LEFT)]
    said += [each.reason for each in explain() if (each.op, each.path) == ("step", "layers")]
    assert re.search(reason, " ".join(said)), said
    for one, other in zip(*results, strict=True):
        assert noise is noises.the_clock or np.allclose(np.array(one), np.array(other), atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "plamo3"])
def test_a_model_in_training_mode_decodes_as_one_graph(name, graphs):
    """And what differs in training is what stock's does."""
    results = []
    for model in pair(name):
        model.train()
        cache = make_prompt_cache(model)
        model(TOKENS[:, :3], cache=cache)
        results.append(decoded(model, cache, 3, 7))
    assert engine.stopped(model) is None
    assert_same_model(*reversed(results), bits=None, what=name)


# Operations that fail with one cache.


@pytest.mark.parametrize(("name", "size"), [("phi3", 19), ("gemma3_text", 4096)])
def test_rings_that_are_trimmed_right_behind_a_prompt(name, size, graphs):
    """They run as graphs, and so do caches that come later."""
    results = []
    explain(reset=True)
    for model in pair(name):
        parts = []
        for trimmed in (2, 17, 0):
            cache = [RotatingKVCache(size) for _ in make_prompt_cache(model)]
            model(TOKENS[:, :18], cache=cache)
            assert [c.trim(trimmed) for c in cache] == [trimmed] * len(cache)
            parts.append(decoded(model, cache, 20, 34))
        results.append(mx.concatenate(parts, axis=0))
    # Where Gemma's windows begin to hide tokens, one is the model's own.
    assert left(model) <= 2
    assert_same_model(*reversed(results), bits=None, what=name)


def test_a_failure_with_some_caches_is_none_with_others(graphs):
    """With caches that are not as models make them, and that the stock model takes."""
    results = []
    for model in pair("phi3"):
        parts = []
        for strange in (True, False):
            cache = make_prompt_cache(model)
            model(TOKENS[:, :5], cache=cache)
            if strange:  # rows of which no graph can be made, whatever it is made for
                cache[1].keys = cache[1].keys[:, :, :5].astype(mx.float16)
            explain(reset=True)
            parts.append(decoded(model, cache, 5, 9))
        results.append(mx.concatenate(parts, axis=0))
    assert left(model) == 0
    assert_same_model(*reversed(results), bits=None, what="after it")
