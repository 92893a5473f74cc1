"""Steps by graphs compute what the model does with every kind of cache, and leave the same ones."""

from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from architecture_table import ARCHITECTURES
from architectures import build
from machine import on_a_gpu
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from numerics import assert_same_model
from small_qwen import qwen
from step_models import capturing
from stepping import ByGraph, Stepped, assert_same, state

from mlx_qlayers import use_backend
from mlx_qlayers.decode import engine
from mlx_qlayers.runtime.tracing import trace


def decoded(model: Any, cache: list[Any], length: int) -> mx.array:
    """The logits of tokens one by one behind a prompt of six."""
    rows = [model(mx.array([[1, 2, 3, 4, 5, 6]]), cache=cache)]
    rows += [model(mx.array([[7 + i % 50]]), cache=cache) for i in range(length)]
    return mx.concatenate(rows, axis=1)[0]


@pytest.mark.parametrize("kind", ["plain", "ring", "kept", "bits"])
def test_caches_that_grow_go_round_and_are_trimmed(kind):
    """The arrays of a cache and its counts stay those of mlx-lm's own."""
    model = qwen()
    runs = Stepped(model, kind, True), Stepped(model, kind, False)
    found, want = (run(270 if kind == "plain" else 30) for run in runs)
    assert_same_model(found, want, bits=None, what="grown")
    if kind in ("plain", "bits"):
        for run in runs:
            run.drop(3)
        found, want = (run(3) for run in runs)
        assert_same_model(found, want, bits=None, what="trimmed")
    assert_same(*(state(run.cache) for run in runs), kind, "behind all")


def test_one_capture_for_batches_and_texts_that_grow_and_shrink():
    """Of tokens as a prompt has them, and as they are sampled; no code runs for a new batch."""
    runs, model = [], qwen()
    shapes = (1, 40), (5, 12), (2, 300), (64, 3), (1, 255), (1, 254), (1, 256)
    for batch, length in (*shapes, *((batch, 7) for batch in range(1, 9))):
        caches = [make_prompt_cache(model) for _ in "ab"]
        prompt = mx.random.randint(0, 96, (batch, length), key=mx.random.key(batch))
        prompt = prompt.astype(mx.uint32 if batch > 4 else mx.int32)
        for cache in caches:
            model(prompt, cache=cache)
        want = model(prompt[:, :1], cache=caches[0])
        with capturing(partial(runs.append, batch)):
            found = engine.step(model, prompt[:, :1], caches[1])
        assert found is not None and mx.abs(found - want).max() < 1e-4
        assert len(runs) == 2


def test_merged_sequences_of_any_lengths_take_one_trace(monkeypatch):
    """In a server sequences come and go at other lengths each time."""
    traces, compiled = [], mx.compile

    def counted(function):
        return compiled(lambda x, *rest: traces.append(x.shape) or function(x, *rest))

    monkeypatch.setattr(mx, "compile", counted)
    model, token = qwen(), mx.array([[5]])
    with on_a_gpu(), use_backend("reference"):
        for lengths in ((3, 9), (40, 11), (2, 250), (7, 100)):
            caches = [make_prompt_cache(model) for _ in lengths]
            for length, cache in zip(lengths, caches, strict=True):
                model(mx.arange(length)[None] % 96, cache=cache)
            merged = [KVCache.merge(layer) for layer in zip(*caches, strict=True)]
            found = engine.step(model, mx.concatenate([token] * 2), merged)
            want = mx.concatenate([model(token, cache=cache) for cache in caches])
            assert found is not None and mx.abs(found - want).max() < 1e-4
    assert traces == [(2, 1)]


def test_several_tokens_at_once():
    """Tokens see those before them; up to eight by one plan for all positions."""
    model = qwen()
    caches = [make_prompt_cache(model) for _ in "ab"]
    for length in (9, 3, 16, 2):
        tokens = mx.random.randint(0, 96, (2, length), key=mx.random.key(length))
        want = model(tokens, cache=caches[0])
        found = engine.step(model, tokens, caches[1]) if length != 9 else None
        if found is None:
            assert length == 9
            found = model(tokens, cache=caches[1])
        assert mx.abs(found - want).max() < 1e-4
    assert caches[1][0].offset == 30


# Changes of a model's caches between two steps.
CHANGES = {
    "scaled": ("qwen2", lambda model, cache: setattr(cache[0], "keys", cache[0].keys * 2)),
    "trimmed": ("qwen2", lambda model, cache: [c.trim(2) for c in cache]),
    "decoded": ("qwen2", lambda model, cache: model(mx.array([[3]]), cache=cache)),
    "a state": ("mamba2", lambda model, cache: cache[0].__setitem__(1, cache[0][1] * 2)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_caches_that_somebody_changes_between_two_steps(what):
    name, change = CHANGES[what]
    model, results = build(name, ARCHITECTURES[name]), []
    for run in (model, ByGraph(model)):
        cache = make_prompt_cache(model)
        rows = [decoded(run, cache, 5)]
        change(model, cache)
        rows += [run(mx.array([[token]]), cache=cache)[0] for token in (7, 8)]
        results.append(mx.concatenate(rows))
    want, found = results
    assert mx.abs(want - found).max() < 1e-4 * mx.abs(want).max()
    assert run.steps == 7 and engine.stopped(model) is None


def test_a_graph_deeper_than_python_recurses():
    same = ARCHITECTURES["qwen2"]
    model = build("qwen2", same._replace(config={**same.config, "num_hidden_layers": 70}))
    cache = make_prompt_cache(model)
    model(mx.array([[5, 17, 3]]), cache=cache)
    assert engine.step(model, mx.array([[4]]), cache) is not None, engine.stopped(model)


def test_steps_by_another_backend_in_between():
    model, rows, made = qwen(), [], []
    cache = make_prompt_cache(model)
    decoded(ByGraph(model), cache, 3)
    for backend in ("host", "reference", "host", "reference"):
        with use_backend(backend), trace() as launches:
            rows.append(engine.step(model, mx.array([[5]]), cache))
            mx.eval(rows[-1])
        made.append(len(launches))
    own = make_prompt_cache(model)
    decoded(model, own, 3)
    for row in rows:
        assert mx.abs(row - model(mx.array([[5]]), cache=own)).max() < 1e-4
    assert made[0] == made[2] > 10 and made[1] == made[3] == 0


def test_what_is_left_to_the_model_and_why():
    class Other(KVCache):
        """A cache of somebody else's."""

    model = qwen()
    cache = [Other(), Other()]
    model(mx.array([[5, 17, 3]]), cache=cache)
    assert engine.step(model, mx.array([[4]]), cache) is None
    assert engine.stopped(model) == "a cache is a Other"
    seen = []

    def traced(token: mx.array) -> mx.array:
        cache = make_prompt_cache(model)
        model(mx.array([[5, 17, 3]]), cache=cache)
        seen.append(engine.step(model, token, cache))
        return token

    mx.eval(mx.compile(traced)(mx.array([[4]])))
    assert seen == [None]


def test_an_empty_cache_of_states_is_no_step():
    model = build("mamba2", ARCHITECTURES["mamba2"])
    cache = make_prompt_cache(model)
    assert all(type(c) is ArraysCache for c in cache)
    want = model(mx.array([[5]]), cache=make_prompt_cache(model))
    found = ByGraph(model)(mx.array([[5]]), cache=cache)
    assert mx.abs(found - want).max() < 1e-3 * mx.abs(want).max()
