"""Steps by graphs compute what the model does with every kind of cache, and leave the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_table import ARCHITECTURES
from architectures import build
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from small_qwen import qwen
from stepping import ByGraph

from mlx_qlayers import use_backend
from mlx_qlayers.decode import captured, engine
from mlx_qlayers.decode.append_form import AppendForm
from mlx_qlayers.runtime.tracing import trace


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    engine._steps.clear()


def decoded(model: Any, cache: list[Any], length: int) -> mx.array:
    """The logits of tokens one by one behind a prompt of six."""
    rows = [model(mx.array([[1, 2, 3, 4, 5, 6]]), cache=cache)]
    rows += [model(mx.array([[7 + i % 50]]), cache=cache) for i in range(length)]
    return mx.concatenate(rows, axis=1)[0]


@pytest.mark.parametrize("kind", ["plain", "rotating", "kept", "quantized"])
def test_caches_that_grow_go_round_and_are_trimmed(kind: str) -> None:
    """The arrays of a cache and its counts stay those of mlx-lm's own."""
    model, results = qwen(), []
    for run in (model, ByGraph(model)):
        cache = make_prompt_cache(model)
        if kind in ("rotating", "kept"):
            cache = [RotatingKVCache(20, keep=4 * (kind == "kept")) for _ in cache]
        decoded(run, cache, 1)
        if kind == "quantized":
            cache = [c.to_quantized(32, 8) for c in cache]
        rows = [decoded(run, cache, 270 if kind == "plain" else 30)]
        if kind in ("plain", "quantized"):
            assert [c.trim(3) for c in cache] == [3, 3]
            rows.append(decoded(run, cache, 3))
        results.append((mx.concatenate(rows), [c.state for c in cache]))
    (want, states), (found, ours) = results
    assert run.steps > 30, engine.stopped(model)
    assert mx.abs(want - found).max() < 1e-4 * mx.abs(want).max()
    for one, other in zip(states, ours, strict=True):
        assert [a for a in one if isinstance(a, int)] == [a for a in other if isinstance(a, int)]
        for a, b in zip(one[:2], other[:2], strict=True):
            pairs = zip(a, b, strict=True) if isinstance(a, tuple | list) else [(a, b)]
            assert all(x.shape == y.shape and x.dtype == y.dtype for x, y in pairs)


def test_one_capture_for_batches_and_texts_that_grow_and_shrink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of tokens as a prompt has them, and as they are sampled."""
    runs = []
    plain = captured.Trace
    monkeypatch.setattr(captured, "Trace", lambda *a: runs.append(a) or plain(*a))
    model = qwen()
    for batch, length in ((1, 40), (5, 12), (2, 300), (64, 3), (1, 255), (1, 254), (1, 256)):
        caches = [make_prompt_cache(model) for _ in "ab"]
        prompt = mx.random.randint(0, 96, (batch, length), key=mx.random.key(batch))
        prompt = prompt.astype(mx.uint32 if batch > 4 else mx.int32)
        for cache in caches:
            model(prompt, cache=cache)
        want = model(prompt[:, :1], cache=caches[0])
        found = engine.step(model, prompt[:, :1], caches[1])
        assert found is not None and mx.abs(found - want).max() < 1e-4
    assert len(runs) == 2


def test_merged_sequences_of_any_lengths_take_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a server sequences come and go at other lengths each time."""
    traces, run = [], AppendForm._run
    monkeypatch.setattr(engine, "where", lambda: "a GPU")
    monkeypatch.setattr(AppendForm, "_run", lambda *a: traces.append(a[0].program.batch) or run(*a))
    model, token = qwen(), mx.array([[5]])
    with use_backend("reference"):
        for lengths in ((3, 9), (40, 11), (2, 250), (7, 100)):
            caches = [make_prompt_cache(model) for _ in lengths]
            for length, cache in zip(lengths, caches, strict=True):
                model(mx.arange(length)[None] % 96, cache=cache)
            merged = [KVCache.merge(layer) for layer in zip(*caches, strict=True)]
            found = engine.step(model, mx.concatenate([token] * 2), merged)
            want = mx.concatenate([model(token, cache=cache) for cache in caches])
            assert found is not None and mx.abs(found - want).max() < 1e-4
    assert traces == [2]


def test_several_tokens_at_once() -> None:
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


def test_a_changed_model_is_captured_anew() -> None:
    """Weights that were replaced or written into, and training."""
    model = qwen()
    prompt, token = mx.array([[5, 17, 3]]), mx.array([[4]])

    def both() -> float:
        caches = [make_prompt_cache(model) for _ in "ab"]
        for cache in caches:
            model(prompt, cache=cache)
        found = engine.step(model, token, caches[0])
        assert found is not None, engine.stopped(model)
        return mx.abs(found - model(token, cache=caches[1])).max().item()

    assert both() < 1e-4
    layer = model.model.layers[0]
    layer.input_layernorm.weight = layer.input_layernorm.weight * 3
    assert both() < 1e-4
    layer.mlp.gate_proj.scales[...] = layer.mlp.gate_proj.scales * 2
    assert both() < 1e-4
    layer.mlp.down_proj = nn.Linear(192, 128)
    assert both() < 1e-4
    model.train()
    assert both() < 1e-4


def _scaled(model: Any, cache: list[Any]) -> None:
    cache[0].keys = cache[0].keys * 2


def _written(model: Any, cache: list[Any]) -> None:
    cache[1].values[:, :, 2] = 1.0


def _trimmed(model: Any, cache: list[Any]) -> None:
    for c in cache:
        c.trim(2)


def _decoded(model: Any, cache: list[Any]) -> None:
    model(mx.array([[3]]), cache=cache)


def _state(model: Any, cache: list[Any]) -> None:
    cache[0][1] = cache[0][1] * 2


CHANGES = [
    ("qwen2", _scaled),
    ("qwen2", _written),
    ("qwen2", _trimmed),
    ("qwen2", _decoded),
    ("mamba2", _state),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_caches_that_somebody_changes_between_two_steps(
    name: str, change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step goes on from the last one, and looks at caches anew that are not as that left them."""
    looks, plain = [], engine.facts
    monkeypatch.setattr(engine, "facts", lambda *a: looks.append(a) or plain(*a))
    model, results = build(name, ARCHITECTURES[name]), []
    for run in (model, ByGraph(model)):
        cache = make_prompt_cache(model)
        rows = [decoded(run, cache, 5)]
        first = len(looks)
        change(model, cache)
        rows.append(run(mx.array([[7]]), cache=cache)[0])
        looked = len(looks) - first
        rows.append(run(mx.array([[8]]), cache=cache)[0])
        results.append(mx.concatenate(rows))
    want, found = results
    assert mx.abs(want - found).max() < 1e-4 * mx.abs(want).max()
    assert run.steps == 7 and engine.stopped(model) is None
    # What is written into an array is there for the next step, whoever does it.
    again = 0 if change is _written else len(cache)
    assert (first, looked, len(looks)) == (first, again, first + again) and first <= 2 * len(cache)


def test_steps_by_another_backend_in_between() -> None:
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


def test_what_is_left_to_the_model_and_why() -> None:
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


def test_an_empty_cache_of_states_is_no_step() -> None:
    model = build("mamba2", ARCHITECTURES["mamba2"])
    cache = make_prompt_cache(model)
    assert all(type(c) is ArraysCache for c in cache)
    want = model(mx.array([[5]]), cache=make_prompt_cache(model))
    found = ByGraph(model)(mx.array([[5]]), cache=cache)
    assert mx.abs(found - want).max() < 1e-3 * mx.abs(want).max()


@pytest.mark.parametrize("backend", ["reference", "host"])
def test_steps_that_are_compiled(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: by what mx.compile makes of MLX's operators, and by kernels one by one."""
    monkeypatch.setattr(engine, "where", lambda: "a GPU")
    model, results = qwen(), []
    if backend == "host":
        mx.disable_compile()
    try:
        for run in (model, ByGraph(model)):
            with use_backend(backend):
                cache = make_prompt_cache(model)
                rows = [decoded(run, cache, 254)]
                state = mx.array(cache[0].keys[..., : cache[0].offset, :])
                rows.append(decoded(run, cache, 4))
                assert [c.trim(3) for c in cache] == [3, 3]
                rows.append(decoded(run, cache, 9))
                results.append((mx.concatenate(rows), state, cache[1].values))
    finally:
        mx.enable_compile()
    (want, *arrays), (found, *others) = results
    assert run.steps == 254 + 4 + 9 and engine.stopped(model) is None
    steps = engine._steps[id(model)]
    assert steps.progress, "no step went on where the last one ended"
    assert mx.abs(want - found).max() < 1e-4 * mx.abs(want).max()
    rows = cache[1].offset
    assert mx.abs(arrays[0] - others[0]).max() < 1e-4
    assert mx.abs(arrays[1][:, :, :rows] - others[1][:, :, :rows]).max() < 1e-4
