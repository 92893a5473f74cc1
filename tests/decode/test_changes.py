"""A model that somebody changes between two tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from converted import add_adapters
from mlx.optimizers import SGD
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
