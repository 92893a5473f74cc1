"""A model whose code is not the same twice is left alone, and captures change nothing of it."""

import copy
import random
from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen2
from mlx_lm.models.cache import make_prompt_cache
from numerics import assert_same_model
from small_qwen import qwen
from step_models import capturing

from mlx_qlayers.decode import engine

PROMPT, TOKEN = mx.array([[5, 17, 3]]), mx.array([[4]])


def after_prompt(model: Any) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    model(PROMPT, cache=caches)
    return caches


class Launches(qwen2.Model):
    """A model with a kernel of its own."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """The logits, by that where there is one token."""
        logits: mx.array = super().__call__(inputs, cache)
        kernel = mx.fast.metal_kernel("twice", ["x"], ["y"], "uint i = thread_position_in_grid.x;")
        more = {"output_shapes": [logits.shape], "output_dtypes": [logits.dtype]}
        sizes = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "stream": mx.gpu}
        return logits if inputs.shape[1] > 1 else kernel(inputs=[logits], **more, **sizes)[0]


FACTOR = 1.0


class Scales(qwen2.Model):
    """A model with a method that reads a global."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """The logits, scaled."""
        logits: mx.array = super().__call__(inputs, cache)
        return logits * FACTOR


def test_globals_are_those_that_there_are_at_a_capture(monkeypatch):
    for factor in (1.0, 2.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        model: Any = qwen()
        model.__class__ = Scales
        found = engine.step(model, TOKEN, after_prompt(model))
        assert found is not None, engine.stopped(model)
        assert_same_model(found, model(TOKEN, cache=after_prompt(model)), bits=None, what="scaled")


def test_a_kernel_that_the_models_code_launches_is_left_to_it():
    model: Any = qwen()
    model.__class__ = Launches
    assert engine.step(model, TOKEN, after_prompt(model)) is None
    assert "launches a kernel of its own: custom_kernel_twice" in str(engine.stopped(model))


def test_numbers_that_another_thread_draws_meanwhile():
    """As if it were this model's code that draws them: once, so another capture finds it not."""
    model, draws = qwen(), [random.random]
    with capturing(lambda: draws and draws.pop()()):
        found = engine.step(model, TOKEN, after_prompt(model))
    assert found is not None and not draws, engine.stopped(model)


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
