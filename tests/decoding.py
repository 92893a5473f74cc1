"""Runs models side by side over a prompt and a few decoded tokens, with every kind of cache."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

#: ``own`` is what the model makes itself, ``padded right`` what mlx-lm's batch generation does.
KINDS = ("none", "own", "rotating", "quantized", "padded left", "padded right")
BITS = 8  # of the quantized cache
_CHUNKS = (11, 5, 1, 1, 1)  # tokens that the model sees at once
_PADDING = (2, 0, 5)


def logits(models: list[nn.Module], kind: str, batch: int, vocabulary: int) -> list[list[mx.array]]:
    """For each model its logits of prompt chunks and decoded tokens, (tokens, vocabulary) each.

    All see the same tokens: those that the first model decodes greedily. Logits at padding are
    left out.

    Raises:
        TypeError: the models have no key-value cache of which another kind could be made.
    """
    tokens = mx.random.randint(0, vocabulary, (batch, sum(_CHUNKS[:2])), key=mx.random.key(batch))
    found: list[list[mx.array]] = [[] for _ in models]
    if kind == "none":
        for model, results in zip(models, found, strict=True):
            results.append(model(tokens))
        return found
    padding = [0] * batch if kind in ("own", "rotating", "quantized") else [*_PADDING[:batch]]
    caches = [_caches(model, kind, padding, _CHUNKS[0]) for model in models]
    at = 0
    for step, length in enumerate(_CHUNKS):
        chunk = tokens[:, at : at + length]
        at += length
        for model, cache, results in zip(models, caches, found, strict=True):
            output = model(chunk, cache=cache)
            mx.eval(output)
            results.append(_without_padding(output, kind, padding if step == 0 else [0] * batch))
        if step == 0:
            caches = [_after_prefill(cache, kind) for cache in caches]
        if at == tokens.shape[1]:
            last = found[0][-1].reshape(batch, length, -1)[:, -1:]
            tokens = mx.concatenate([tokens, last.argmax(-1)], axis=1)
    return found


def _caches(model: nn.Module, kind: str, padding: list[int], length: int) -> list[Any]:
    own = make_prompt_cache(model)
    if kind in ("rotating", "quantized") and not _any_kv(own):
        raise TypeError("the model has no KVCache")
    if kind == "rotating":
        return _each(own, lambda c: RotatingKVCache(8, keep=4) if type(c) is KVCache else c)
    if kind == "padded left":
        return _each(own, lambda c: _left_padded(c, padding))
    if kind == "padded right":
        others = [make_prompt_cache(model) for _ in padding]
        merged = [caches[0].merge(list(caches)) for caches in zip(*others, strict=True)]
        for cache in merged:
            cache.prepare(lengths=[length - n for n in padding], right_padding=padding)
        return merged
    return own


def _left_padded(cache: Any, padding: list[int]) -> Any:
    if type(cache) is KVCache:
        return BatchKVCache(padding)
    if type(cache) is RotatingKVCache:
        return BatchRotatingKVCache(cache.max_size, padding)
    if type(cache) is ArraysCache:
        return ArraysCache(len(cache.cache), left_padding=padding)
    raise TypeError(f"{type(cache).__name__} knows no padding")


def _after_prefill(caches: list[Any], kind: str) -> list[Any]:
    if kind == "padded right":
        for cache in caches:
            cache.finalize()
    if kind == "quantized":
        return _each(caches, lambda c: c.to_quantized(32, BITS) if type(c) is KVCache else c)
    return caches


def _each(caches: list[Any], function: Callable[[Any], Any]) -> list[Any]:
    return [
        CacheList(*_each(list(c.caches), function)) if type(c) is CacheList else function(c)
        for c in caches
    ]


def _any_kv(caches: list[Any]) -> bool:
    return any(_any_kv(c.caches) if type(c) is CacheList else type(c) is KVCache for c in caches)


def _without_padding(output: mx.array, kind: str, padding: list[int]) -> mx.array:
    end = output.shape[1]
    real = [(n, end) if kind == "padded left" else (0, end - n) for n in padding]
    return mx.concatenate([row[a:b] for row, (a, b) in zip(output, real, strict=True)])
