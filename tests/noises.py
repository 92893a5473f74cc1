"""Models whose code is not the same twice: what it adds to logits, from wherever that comes."""

import random
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import qwen2


class Noisy(qwen2.Model):
    """A model whose code is not the same twice."""

    count = 0
    noise: Callable[[Any, mx.array], mx.array]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """The logits and something more."""
        return type(self).noise(self, super().__call__(inputs, cache))


class Counter:
    """Something with a number."""

    def __init__(self) -> None:
        self.n, self.seen = 0, list[mx.array]()


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


def begin(model: Any) -> None:
    """All that code counts, draws from or keeps is as in the beginning."""
    global GENERATOR, calls
    Noisy.count = calls = model.counter.n = 0
    GENERATOR, model.generator = np.random.default_rng(9), np.random.default_rng(5)
    model.key, model.sums = mx.random.key(3), mx.zeros(128)
    for each in (SEEN, model.seen, model.counter.seen):
        each.clear()
