"""Decoding with caches of every kind, in any order of what may be done with them, beside stock."""

import copy
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from tests.architectures import VOCABULARY
from tests.fuzz.target import fuzz
from tests.numerics import assert_same_states
from tests.step_models import as_graphs, pair

# Plain, windows, states beside keys, latent keys, chunks, sinks.
NAMES = ["phi3", "qwen2", "gemma3_text", "qwen3_next", "deepseek_v3", "llama4", "gpt_oss"]
RINGS = [(8, 0), (8, 4), (7, 2), (16, 4), (16, 0), (19, 3), (300, 4), (4096, 0)]
_FEW = st.integers(1, 6)
_ACTION = st.one_of(
    st.tuples(st.just("tokens"), st.integers(1, 12)),
    st.tuples(st.just("tokens"), _FEW),
    st.tuples(st.just("prompt"), st.sampled_from([2, 3, 5, 9, 17, 18])),
    st.tuples(st.just("trim"), st.sampled_from([1, 2, 3, 5, 11, 40])),
    st.tuples(st.just("look"), _FEW),
    st.tuples(st.just("copy"), _FEW),
    st.tuples(st.just("quantize"), st.sampled_from([4, 8])),
    st.tuples(st.just("merge"), _FEW),
    st.tuples(st.just("extend"), _FEW),
    st.tuples(st.just("filter"), st.integers(1, 7)),
    st.tuples(st.just("extract"), _FEW),
)
CASES = st.builds(
    SimpleNamespace,
    name=st.sampled_from(NAMES),
    ring=st.none() | st.sampled_from(RINGS),
    batch=st.sampled_from([1, 1, 2, 11]),
    prompt=st.sampled_from([1, 2, 3, 5, 9, 15, 18, 250]),
    actions=st.lists(_ACTION, min_size=2, max_size=12).map(tuple),
)


class _Decoder:
    """A model and its caches."""

    def __init__(self, model: nn.Module, case: SimpleNamespace) -> None:
        self.model, self.ring, self.at, self.bits = model, case.ring, 0, None
        self.batch, self.cache = case.batch, self.begun(case.batch, case.prompt)

    def begun(self, batch: int, length: int) -> list[Any]:
        own = make_prompt_cache(self.model)
        if self.ring:
            own = [RotatingKVCache(*self.ring) if type(c) is KVCache else c for c in own]
        self.cache, self.batch = own, batch
        self.prompt(length)
        return own

    def prompt(self, length: int) -> mx.array:
        self.at += 1
        key = mx.random.key(1000 * self.at + length)
        tokens = mx.random.randint(0, VOCABULARY, (self.batch, length), key=key)
        return self.model(tokens, cache=self.cache)

    def tokens(self, count: int) -> mx.array:
        return mx.concatenate([self.prompt(1) for _ in range(count)], axis=1)

    def trim(self, count: int) -> None:
        held = [mx.array(c.offset).min().item() for c in self.cache if hasattr(c, "offset")]
        if held and all(c.is_trimmable() for c in self.cache):
            count = min(count, max(min(held) - 1, 0))
            assert len({c.trim(count) for c in self.cache}) == 1

    def look(self, number: int) -> None:
        mx.eval([a for a in self.cache[number % len(self.cache)].state if a is not None])

    def copy(self, number: int) -> None:
        """Every second time it goes on with the copy."""
        twin = copy.deepcopy(self.cache)
        self.cache = twin if number % 2 else self.cache

    def quantize(self, bits: int) -> None:
        if all(isinstance(c, KVCache) for c in self.cache):
            self.cache, self.bits = [c.to_quantized(32, bits) for c in self.cache], bits

    def merge(self, length: int) -> None:
        """Into a batch, with another one."""
        packed = any(isinstance(c, QuantizedKVCache) for c in self.cache)
        if self.batch == 1 and not self.is_batch and not packed:
            one = self.cache
            other = self.begun(1, length)
            pairs = zip(one, other, strict=True)
            self.cache, self.batch = [a.merge([a, b]) for a, b in pairs], 2

    def extend(self, length: int) -> None:
        if self.is_batch:
            batch, now = self.batch, self.cache
            other = [c.merge([c]) for c in self.begun(1, length)]
            for a, b in zip(now, other, strict=True):
                a.extend(b)
            self.cache, self.batch = now, batch + 1

    def filter(self, chosen: int) -> None:
        kept = [i for i in range(self.batch) if chosen >> i & 1]
        if self.is_batch and kept:
            for c in self.cache:
                c.filter(mx.array(kept))
            self.batch = len(kept)

    def extract(self, number: int) -> None:
        if self.is_batch:
            self.cache = [c.extract(number % self.batch) for c in self.cache]
            self.batch = 1

    @property
    def is_batch(self) -> bool:
        return any(type(each).__name__.startswith("Batch") for each in _leaves(self.cache))


def _leaves(caches: list[Any]) -> list[Any]:
    return [x for c in caches for x in (_leaves(c.caches) if isinstance(c, CacheList) else [c])]


@cache
def _models(name: str) -> tuple[nn.Module, nn.Module]:
    return pair(name)


@fuzz(CASES, examples=30, seconds=6.0)
def test_caches(case: SimpleNamespace) -> None:
    """A cache that stock takes gives the same numbers; where stock fails the case ends."""
    stock, model = _models(case.name)
    with as_graphs():
        try:
            wanted = _Decoder(stock, case)
        except Exception:
            return
        found = _Decoder(model, case)
        for number, (action, count) in enumerate(case.actions):
            try:
                truth = getattr(wanted, action)(count)
                mx.eval(truth if truth is not None else [])
            except Exception:
                return
            ours = getattr(found, action)(count)
            if truth is not None and mx.isfinite(truth).all().item():
                what = f"{number}: {action} {count}"
                assert_same_states(ours, truth, bits=found.bits, what=what)
