"""Copies and conversions of a model, and code that replaces its arrays in a call."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models import qwen2
from mlx_lm.models.cache import make_prompt_cache
from small_qwen import qwen

from mlx_qlayers import convert_model
from mlx_qlayers.decode import captured, engine

PROMPT, TOKEN = mx.array([[5, 17, 3]]), mx.array([[4]])


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    engine._steps.clear()


def after_prompt(model: Any) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    model(PROMPT, cache=caches)
    return caches


def test_a_copy_of_a_model_is_another_one() -> None:
    model = qwen()
    want = engine.step(model, TOKEN, after_prompt(model))
    other = copy.deepcopy(model)
    other.update(tree_map(lambda a: a * 2, {"model": {"norm": other.model.norm.parameters()}}))
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


class Clips(qwen2.Model):
    """A model that puts an array in the place of an equal one in each call, as Gemma 3n does."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """The logits."""
        self.model.norm.weight = mx.clip(self.model.norm.weight, -90, 90)
        return super().__call__(inputs, cache)


def test_arrays_that_are_replaced_by_equal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, plain = list[Any](), captured.Trace
    monkeypatch.setattr(captured, "Trace", lambda *a: runs.append(a) or plain(*a))
    model: Any = qwen()
    model.__class__ = Clips
    for factor, count in ((1, 2), (1, 2), (3, 4), (1, 4)):
        model.model.norm.weight = factor * model.model.norm.weight
        want = model(TOKEN, cache=after_prompt(model))
        found = engine.step(model, TOKEN, after_prompt(model))
        assert found is not None and mx.abs(found - want).max() < 1e-4 * mx.abs(want).max()
        assert len(runs) == count
