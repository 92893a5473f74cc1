"""A model whose code is not the same twice is left alone, and captures change nothing of it."""

import copy
import random
import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import noises
import numpy as np
import pytest
from mlx_lm.models import qwen2
from mlx_lm.models.cache import make_prompt_cache
from noises import Counter, Noisy
from small_qwen import qwen

from mlx_qlayers.decode import captured, engine

PROMPT, TOKEN = mx.array([[5, 17, 3]]), mx.array([[4]])


@pytest.fixture(autouse=True)
def forgotten():
    yield
    engine._steps.clear()


def after_prompt(model: Any) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    model(PROMPT, cache=caches)
    return caches


RANDOM = [
    noises.of_mlx,
    noises.jitter,
    noises.unused,
    noises.dropout,
    noises.of_numpy,
    noises.of_python,
    noises.a_generator,
    noises.a_global_generator,
]
# What a reason says of code, or that its two runs differ.
NOISES: list[tuple[Any, str]] = [
    *((noise, "the model draws random numbers of") for noise in RANDOM),
    (noises.own_key, "random|the model changes key"),
    (noises.the_clock, "becomes .* with another batch size and position"),
    (noises.a_count_of_a_class, "the model changes count of Noisy"),
    (noises.a_count_of_an_object, "the model changes n of"),
    (noises.a_global, "the model changes calls of"),
    (noises.a_list, "the model changes .* of list"),
    (noises.a_list_of_a_module, "the model changes .* of list"),
    (noises.a_global_list, "the model changes .* of list"),
    (noises.in_place, "the model changes model.sums in a call"),
    (noises.a_value, r"noises.py:\d+: return y if y.max"),
    (noises.a_number_enclosed, "the model changes what a function encloses"),
    (noises.a_list_enclosed, "the model changes .* of list"),
]


@pytest.mark.parametrize(
    ("noise", "reason"), NOISES, ids=lambda each: getattr(each, "__name__", "")
)
def test_code_that_is_not_the_same_twice_is_left_to_the_model(noise, reason, monkeypatch):
    """And captures change nothing: numbers are those that come without them."""
    runs, plain = list[Any](), captured.Trace
    monkeypatch.setattr(captured, "Trace", lambda *a: runs.append(a) or plain(*a))
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
        Noisy.count = noises.calls = 0
        model.counter.n, model.seen[:] = 0, []
        noises.GENERATOR, model.generator = np.random.default_rng(9), np.random.default_rng(5)
        model.key, model.sums = mx.random.key(3), mx.zeros(96)
        caches = after_prompt(model)
        for each in (noises.SEEN, model.seen, model.counter.seen):
            each.clear()
        mx.random.seed(7), np.random.seed(7), random.seed(7)
        for _ in range(2):
            if tried:
                assert engine.step(model, TOKEN, caches) is None
                assert re.search(reason, str(engine.stopped(model))), engine.stopped(model)
            logits = model(TOKEN, cache=caches)
            assert [c.trim(1) for c in caches] == [1, 1]
        results.append([logits, mx.random.normal((4,)), np.random.normal(), random.random()])
        results[-1] += [
            mx.array(len(each)) for each in (noises.SEEN, model.seen, model.counter.seen)
        ]
    if noise is noises.a_count_of_a_class:  # which is not captured again for each of many tokens
        runs.clear()
        for _ in range(40):
            assert engine.step(model, TOKEN, caches) is None
            Noisy.count += 1
        assert len(runs) < 2 * 40
    for one, other in zip(*results, strict=True):
        assert noise is noises.the_clock or np.allclose(np.array(one), np.array(other), atol=1e-5)


class Launches(qwen2.Model):
    """A model with a kernel of its own."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """The logits, by that where there is one token."""
        logits: mx.array = super().__call__(inputs, cache)
        kernel = mx.fast.metal_kernel("twice", ["x"], ["y"], "uint i = thread_position_in_grid.x;")
        more = {"output_shapes": [logits.shape], "output_dtypes": [logits.dtype]}
        sizes = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "stream": mx.gpu}
        return logits if inputs.shape[1] > 1 else kernel(inputs=[logits], **more, **sizes)[0]


def test_a_kernel_of_its_own_is_left_to_the_model():
    model: Any = qwen()
    model.__class__ = Launches
    assert engine.step(model, TOKEN, after_prompt(model)) is None
    assert "launches a kernel of its own: custom_kernel_twice" in str(engine.stopped(model))


def test_numbers_that_another_thread_draws_meanwhile(monkeypatch):
    """As if it were this model's code that draws them: once, so another capture finds it not."""
    model, draws, plain = qwen(), [random.random], captured.Trace

    def trace(*args: Any) -> Any:
        while draws:
            draws.pop()()
        return plain(*args)

    monkeypatch.setattr(captured, "Trace", trace)
    assert engine.step(model, TOKEN, after_prompt(model)) is not None, engine.stopped(model)


class Blocks(qwen2.Model):
    """A model that counts blocks of four tokens, once there are twelve."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """The logits and something more."""
        y, at = super().__call__(inputs, cache), cache[0].offset
        return y if at < 12 else y + at // 4


def test_positions_of_which_no_two_are_alike_stop_none_ahead_of_them():
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
