"""A model that somebody changes between two tokens, and one whose code is not the same twice."""

from __future__ import annotations

import copy
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from converted import add_adapters
from mlx.optimizers import SGD
from mlx.utils import tree_map
from mlx_lm.models import qwen2
from mlx_lm.models.cache import make_prompt_cache
from small_qwen import qwen

from mlx_qlayers import convert_model
from mlx_qlayers.decode import engine

PROMPT, TOKEN = mx.array([[5, 17, 3]]), mx.array([[4]])


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    engine._steps.clear()


class Doubled(nn.RMSNorm):
    """A norm whose class has a setting."""

    factor = 2.0

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x) * self.factor


class Hooked(nn.Module):
    """Calls something with what a module gives."""

    def __init__(self, inner: nn.Module, hook: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self.inner, self.hook = inner, hook

    def __call__(self, x: mx.array) -> mx.array:
        return self.hook(self.inner(x))


def _norm(model: Any) -> Any:
    return model.model.norm


def _layer(model: Any, number: int = 0) -> Any:
    return model.model.layers[number]


def replaced(model: Any) -> None:
    _norm(model).weight = _norm(model).weight * 3


def multiplied(model: Any) -> None:
    _norm(model).weight *= 3


def overwritten(model: Any) -> None:
    _norm(model).weight[:] = _norm(model).weight * 0.5


def an_element(model: Any) -> None:
    _norm(model).weight[3] = 40.0


def codes(model: Any) -> None:
    weight = _layer(model).self_attn.o_proj.weight
    weight[0], weight[1] = weight[1], weight[0] + 0


def of_the_embedding(model: Any) -> None:
    model.model.embed_tokens.scales[:] *= -2


def updated(model: Any) -> None:
    model.update({"model": {"norm": {"weight": _norm(model).weight * 1.5}}})


def loaded(model: Any) -> None:
    model.load_weights([("model.norm.weight", _norm(model).weight + 1)], strict=False)


def trained(model: Any) -> None:
    SGD(0.3).update(model, {"model": {"norm": {"weight": mx.ones_like(_norm(model).weight)}}})


def applied(model: Any) -> None:
    model.apply(lambda a: a * 1.1 if a.ndim == 1 and a.dtype == mx.float32 else a)


def adapted(model: Any) -> None:
    add_adapters(model, 1)
    model.eval()


def hooked(model: Any) -> None:
    model.model.norm = Hooked(_norm(model), lambda x: -x)


def a_setting(model: Any) -> None:
    _layer(model, 1).post_attention_layernorm.eps = 0.5


def a_number(model: Any) -> None:
    _layer(model).self_attn.scale *= 4


def a_setting_of_settings(model: Any) -> None:
    model.args.tie_word_embeddings = not model.args.tie_word_embeddings


def a_class(model: Any) -> None:
    model.model.norm = nn.RMSNorm(_norm(model).weight.size)
    _norm(model).__class__ = Doubled


def of_a_class(model: Any) -> None:
    Doubled.factor = 3.0


def a_call_of_a_class(model: Any) -> None:
    plain = Doubled.__call__
    Doubled.__call__ = lambda self, x: plain(self, x) + 1  # type: ignore[method-assign]


def without_arrays(model: Any) -> None:
    _layer(model).self_attn.rope = nn.RoPE(32, base=50.0)


def layers_in_turn(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def copied(model: Any) -> None:
    _layer(model).mlp = copy.deepcopy(_layer(model, 1).mlp)


def fewer_layers(model: Any) -> None:
    model.model.layers[1] = model.model.layers[0]


def of_the_model_itself(model: Any) -> None:
    cls = type(model)
    model.__class__ = type("Other", (cls,), {"__call__": lambda *a, **b: 2 * cls.__call__(*a, **b)})


CHANGES: list[Callable[[Any], None]] = [
    *(replaced, multiplied, overwritten, an_element, codes, of_the_embedding, updated, loaded),
    *(trained, applied, a_setting, a_number, a_class, of_a_class, a_call_of_a_class),
    *(without_arrays, layers_in_turn, copied, fewer_layers, hooked, of_the_model_itself, adapted),
]


def after_prompt(model: Any) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    model(PROMPT, cache=caches)
    return caches


def test_every_change_of_a_model_is_seen() -> None:
    model, plain = qwen(), Doubled.__call__
    Doubled.factor, before = 2.0, mx.array(0.0)
    try:
        for change in CHANGES:
            change(model)
            want, found = model(TOKEN, cache=after_prompt(model)), None
            found = engine.step(model, TOKEN, after_prompt(model))
            assert found is not None, (change.__name__, engine.stopped(model))
            assert mx.abs(found - want).max() < 1e-4 * mx.abs(want).max(), change.__name__
            assert not mx.array_equal(before, want), change.__name__
            before = want
    finally:
        Doubled.__call__ = plain  # type: ignore[method-assign]


def test_a_copy_of_a_model_is_another_one() -> None:
    model = qwen()
    want = engine.step(model, TOKEN, after_prompt(model))
    other = copy.deepcopy(model)
    other.update(tree_map(lambda a: a * 2, {"model": {"norm": _norm(other).parameters()}}))
    found = engine.step(other, TOKEN, after_prompt(other))
    assert want is not None and found is not None
    assert mx.abs(found - 2 * want).max() < 1e-4 * mx.abs(found).max()
    again = engine.step(model, TOKEN, after_prompt(model))
    assert again is not None and mx.abs(again - want).max() < 1e-5


def test_a_conversion_and_training_mode() -> None:
    model = qwen()
    want = engine.step(model, TOKEN, after_prompt(model))
    convert_model(model, verify=False)
    found = engine.step(model, TOKEN, after_prompt(model))
    assert want is not None and found is not None and mx.abs(found - want).max() < 1e-4
    caches = after_prompt(model)
    for mode in (True, False):
        model.train(mode)
        assert engine.step(model, TOKEN, caches) is not None


class Noisy(qwen2.Model):
    """A model whose code is not the same twice."""

    count = 0
    noise: Callable[[Any, mx.array], mx.array]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """The logits and something more."""
        return type(self).noise(self, super().__call__(inputs, cache))


class Clips(qwen2.Model):
    """A model that puts an array in the place of an equal one in each call, as Gemma 3n does."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """The logits."""
        self.model.norm.weight = mx.clip(self.model.norm.weight, -90, 90)
        return super().__call__(inputs, cache)


def test_arrays_that_are_replaced_by_equal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, plain = list[Any](), engine.Trace
    monkeypatch.setattr(engine, "Trace", lambda *a: runs.append(a) or plain(*a))
    model: Any = qwen()
    model.__class__ = Clips
    for factor, count in ((1, 2), (1, 2), (3, 4), (1, 4)):
        model.model.norm.weight = factor * model.model.norm.weight
        want = model(TOKEN, cache=after_prompt(model))
        found = engine.step(model, TOKEN, after_prompt(model))
        assert found is not None and mx.abs(found - want).max() < 1e-4 * mx.abs(want).max()
        assert len(runs) == count


class Counter:
    """Something with a number."""

    def __init__(self) -> None:
        self.n, self.seen = 0, list[mx.array]()


def of_mlx(model: Any, y: mx.array) -> mx.array:
    return y + mx.random.normal(y.shape)


def jitter(model: Any, y: mx.array) -> mx.array:
    return y * mx.random.uniform(0.9, 1.1)


def unused(model: Any, y: mx.array) -> mx.array:
    mx.random.normal((3,))
    return y


def dropout(model: Any, y: mx.array) -> mx.array:
    return model.drop(y)


def of_numpy(model: Any, y: mx.array) -> mx.array:
    return y + float(np.random.normal())


def of_python(model: Any, y: mx.array) -> mx.array:
    return y + random.random()


def a_generator(model: Any, y: mx.array) -> mx.array:
    return y + model.generator.normal()


def a_global_generator(model: Any, y: mx.array) -> mx.array:
    return y + GENERATOR.normal()


def own_key(model: Any, y: mx.array) -> mx.array:
    model.key, key = mx.random.split(model.key)
    return y + mx.random.normal(y.shape, key=key)


def the_clock(model: Any, y: mx.array) -> mx.array:
    return y + time.perf_counter() % 1


def a_count_of_a_class(model: Any, y: mx.array) -> mx.array:
    Noisy.count += 1
    return y + Noisy.count


def a_count_of_an_object(model: Any, y: mx.array) -> mx.array:
    model.counter.n += 1
    return y + model.counter.n


def a_global(model: Any, y: mx.array) -> mx.array:
    global calls
    calls += 1
    return y * calls


def a_list(model: Any, y: mx.array) -> mx.array:
    model.counter.seen.append(y)
    return y


def a_list_of_a_module(model: Any, y: mx.array) -> mx.array:
    model.seen.append(y)
    return y


def a_global_list(model: Any, y: mx.array) -> mx.array:
    SEEN.append(y)
    return y


def in_place(model: Any, y: mx.array) -> mx.array:
    model.sums[:] = model.sums + 1
    return y + model.sums


def a_value(model: Any, y: mx.array) -> mx.array:
    return y if y.max().item() > 0 else -y


def a_number_enclosed() -> Callable[[Any, mx.array], mx.array]:
    count = 0

    def noise(model: Any, y: mx.array) -> mx.array:
        nonlocal count
        count += 1
        return y + count

    return noise


def a_list_enclosed() -> Callable[[Any, mx.array], mx.array]:
    seen = []

    def noise(model: Any, y: mx.array) -> mx.array:
        seen.append(y)
        return y + len(seen)

    return noise


GENERATOR, SEEN, calls = np.random.default_rng(0), list[mx.array](), 0
RANDOM = [of_mlx, jitter, unused, dropout, of_numpy, of_python, a_generator, a_global_generator]
# What a reason says of code, or that its two runs differ.
NOISES: list[tuple[Any, str]] = [
    *((noise, "the model draws random numbers of") for noise in RANDOM),
    (own_key, "random|the model changes key"),
    (the_clock, "becomes .* with another batch size and position"),
    (a_count_of_a_class, "the model changes count of Noisy"),
    (a_count_of_an_object, "the model changes n of"),
    (a_global, "the model changes calls of"),
    (a_list, "the model changes .* of list"),
    (a_list_of_a_module, "the model changes .* of list"),
    (a_global_list, "the model changes .* of list"),
    (in_place, "the model changes model.sums in a call"),
    (a_value, r"test_changes.py:\d+: return y if y.max"),
    (a_number_enclosed, "the model changes what a function encloses"),
    (a_list_enclosed, "the model changes .* of list"),
]


@pytest.mark.parametrize(
    ("noise", "reason"), NOISES, ids=lambda each: getattr(each, "__name__", "")
)
def test_code_that_is_not_the_same_twice_is_left_to_the_model(
    noise: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And captures change nothing: numbers are those that come without them."""
    global calls, GENERATOR
    runs, plain = list[Any](), engine.Trace
    monkeypatch.setattr(engine, "Trace", lambda *a: runs.append(a) or plain(*a))
    model: Any = qwen()
    cls = type("Noisy", (Noisy,), {})
    model.__class__, model.drop, model.counter = cls, nn.Dropout(0.5), Counter()
    model.seen = []
    model.eval()
    model.drop.train()
    mx.eval(model.parameters())
    results = []
    for tried in (False, True):
        cls.noise = staticmethod(noise() if noise.__name__.endswith("enclosed") else noise)
        Noisy.count = calls = 0
        model.counter.n, model.seen[:] = 0, []
        GENERATOR, model.generator = np.random.default_rng(9), np.random.default_rng(5)
        model.key, model.sums = mx.random.key(3), mx.zeros(96)
        caches = after_prompt(model)
        for each in (SEEN, model.seen, model.counter.seen):
            each.clear()
        mx.random.seed(7), np.random.seed(7), random.seed(7)
        for _ in range(2):
            if tried:
                assert engine.step(model, TOKEN, caches) is None
                assert re.search(reason, str(engine.stopped(model))), engine.stopped(model)
            logits = model(TOKEN, cache=caches)
            assert [c.trim(1) for c in caches] == [1, 1]
        results.append([logits, mx.random.normal((4,)), np.random.normal(), random.random()])
        results[-1] += [mx.array(len(each)) for each in (SEEN, model.seen, model.counter.seen)]
    if noise is a_count_of_a_class:  # which is not captured again for each of many tokens
        runs.clear()
        for _ in range(40):
            assert engine.step(model, TOKEN, caches) is None
            Noisy.count += 1
        assert len(runs) < 50
    for one, other in zip(*results, strict=True):
        assert noise is the_clock or np.allclose(np.array(one), np.array(other), atol=1e-5)


def test_numbers_that_another_thread_draws_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were this model's code that draws them: once, so another capture finds it not."""
    model, draws, plain = qwen(), [random.random], engine.Trace

    def trace(*args: Any) -> Any:
        while draws:
            draws.pop()()
        return plain(*args)

    monkeypatch.setattr(engine, "Trace", trace)
    assert engine.step(model, TOKEN, after_prompt(model)) is not None, engine.stopped(model)


class Blocks(qwen2.Model):
    """A model that counts blocks of four tokens, once there are twelve."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """The logits and something more."""
        y, at = super().__call__(inputs, cache), cache[0].offset
        return y if at < 12 else y + at // 4


def test_positions_of_which_no_two_are_alike_stop_none_ahead_of_them() -> None:
    model: Any = qwen()
    model.__class__ = Blocks
    for begin in (9, 4, 10):
        caches, found = after_prompt(model), []
        model(mx.ones((1, begin - 3), mx.int32), cache=caches)
        for at in range(begin, 14):
            again = copy.deepcopy(caches)
            made, want = engine.step(model, TOKEN, caches), model(TOKEN, cache=again)
            found += [at] if made is not None else []
            assert made is None or mx.abs(made - want).max() < 1e-4 * mx.abs(want).max(), at
            caches = again
        assert {*range(begin, 11)} <= {*found}, engine.stopped(model)
