"""Attention by kernels in models: every cache of mlx-lm, and speculative decoding."""

import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from architectures import VOCABULARY
from converted import pair
from mlx_lm.models import cache as caches
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)
from numerics import assert_same_model

from mlx_qlayers import use_backend
from mlx_qlayers.conversion.attention_patch import patched_swiglu
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.transformed import uncompiled

PADDING = [2, 0, 5]
# Tokens that a model sees at once: a prompt, a few, one after the other.
CHUNKS = (11, 5, 1, 1)
# How each class of mlx-lm's is made, and the number of bits that it keeps.
CACHES: dict[str, tuple[Callable[[], Any], int | None]] = {
    "KVCache": (KVCache, None),
    "RotatingKVCache": (lambda: RotatingKVCache(8, keep=4), None),
    "QuantizedKVCache": (lambda: QuantizedKVCache(32, 8), 8),
    "QuantizedKVCache 4": (lambda: QuantizedKVCache(32, 4), 4),
    "ChunkedKVCache": (lambda: ChunkedKVCache(64), None),
    "ConcatenateKVCache": (ConcatenateKVCache, None),
    "BatchKVCache": (lambda: BatchKVCache(PADDING), None),
    "BatchRotatingKVCache": (lambda: BatchRotatingKVCache(8, PADDING), None),
}
# Those that only some architectures make, and one that does.
OF_ARCHITECTURES = {"ArraysCache": "falcon_h1", "CacheList": "falcon_h1"}
PROMPT = mx.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])


@pytest.fixture(autouse=True)
def without_compilation():
    """The host backend runs at once: under ``mx.compile`` it cannot."""
    with uncompiled():
        yield


def attention_kernels(launches: list[Any]) -> set[str]:
    """The launches of attention, of which every one ran on the host backend."""
    found = [launch for launch in launches if launch.kernel.startswith("attention")]
    assert {launch.backend for launch in found} <= {"host"}
    return {re.split("_(?:counted|masked|packed)", launch.kernel)[0] for launch in found}


def run(model: nn.Module, cache: list[Any], tokens: mx.array) -> list[mx.array]:
    """Logits of the chunks, where nothing is padded."""
    results = []
    for chunk in mx.split(tokens, np.cumsum(CHUNKS)[:-1].tolist(), axis=1):
        logits = model(chunk, cache=cache)
        mx.eval(logits)
        start = max(PADDING) if logits.shape[1] == CHUNKS[0] else 0
        results.append(logits[:, start:])
    return results


def test_every_cache_class_is_here():
    known = {name.split()[0] for name in CACHES} | set(OF_ARCHITECTURES)
    assert {cls.__name__ for cls in caches._BaseCache.__subclasses__()} == known


@pytest.mark.parametrize("name", CACHES)
def test_caches(name):
    make, bits = CACHES[name]
    stock, model = pair()
    tokens = mx.random.randint(0, VOCABULARY, (3, sum(CHUNKS)), key=mx.random.key(1))
    expected = run(stock, [make() for _ in stock.layers], tokens)
    with use_backend("host"), trace() as launches:
        found = run(model, [make() for _ in model.layers], tokens)
    assert attention_kernels(launches) == {"attention_forward", "attention_serial"}
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_same_model(a, b, bits=bits, what=f"{name}, chunk {i}")


@pytest.mark.parametrize("first", ["stock", "converted"])
@pytest.mark.parametrize("name", [n for n in CACHES if "Batch" not in n and n[0] != "C"])
def test_prompt_caches_are_interchangeable(name, first, tmp_path):
    """Filled by one model and saved, it continues in the other as in the one that filled it."""
    make, bits = CACHES[name]
    stock, model = pair()

    def fill(m: nn.Module) -> list[Any]:
        cache = [make() for _ in m.layers]
        mx.eval(m(PROMPT[None], cache=cache))
        return cache

    def go_on(m: nn.Module, cache: list[Any]) -> mx.array:
        save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
        cache = load_prompt_cache(str(tmp_path / "cache.safetensors"))
        chunks = [m(mx.array([[7, 8, 9]]), cache=cache), m(mx.array([[1]]), cache=cache)]
        return mx.concatenate(chunks, axis=1)

    with use_backend("host"), trace() as launches:
        if first == "stock":
            found, expected = go_on(model, fill(stock)), go_on(stock, fill(stock))
        else:
            found, expected = go_on(stock, fill(model)), go_on(model, fill(model))
        mx.eval(found, expected)
    assert "attention_serial" in attention_kernels(launches)
    assert_same_model(found, expected, bits=bits, what=f"{name}, {first} first")


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_gates_of_prompts_go_by_a_kernel(dtype):
    """Of every layer; other shapes and dtypes than those of a gate are mlx-lm's."""
    stock, model = pair()
    stock.set_dtype(dtype)
    model.set_dtype(dtype)
    with use_backend("host"), trace() as launches:
        found = model(PROMPT[None])
        mx.eval(found)
    assert [launch.kernel for launch in launches].count("swiglu_forward") == len(model.layers)
    if dtype == mx.float32:
        assert_same_model(found, stock(PROMPT[None]), bits=None, what="gates")
    with use_backend("host"), trace() as launches:
        wide = patched_swiglu(mx.ones((3, 1)), mx.ones((3, 8)))
        mixed = patched_swiglu(mx.ones((3, 1)), mx.ones((3, 1), mx.float16))
    assert not launches and (wide.shape, mixed.dtype) == ((3, 8), mx.float32)


@pytest.mark.parametrize("backend", ["host", "reference", "auto"])
def test_gates_have_gradients(backend):
    """By a kernel or not, those of the stock module, also under ``mx.checkpoint``."""
    stock, model = (m.layers[0].mlp for m in pair())
    x = mx.random.normal((2, 5, stock.gate_proj.scales.shape[-1] * 64), key=mx.random.key(2))

    def slopes(module: nn.Module) -> list[mx.array]:
        calls = module, mx.checkpoint(lambda x: module(x))
        return [mx.grad(lambda x, call=call: (call(x) ** 2).sum())(x) for call in calls]

    expected = slopes(stock)
    with use_backend(backend), trace() as launches:
        found = slopes(model)
        mx.eval(found)
    names = {launch.kernel for launch in launches}
    assert ("swiglu_gradient" in names) == (backend != "reference")
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_model(ours, theirs, bits=None, what=backend)
