"""Models that make tokens by graphs of steps, and what their caches hold."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from numerics import assert_same_model

from mlx_qlayers.decode import engine, rewinding

TOKENS = mx.random.randint(0, 96, (3, 300), key=mx.random.key(1))
PADDING = [2, 0, 4]
KINDS = ("plain", "bits", "ring", "kept", "batch", "batch of rings", "mixed")


class ByGraph:
    """A model whose steps are by graphs."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.steps = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        found = engine.step(self.model, tokens, cache) if tokens.shape[1] == 1 else None
        self.steps += found is not None
        return self.model(tokens, cache=cache) if found is None else found


def begun(model: nn.Module, kind: str, prompt: int = 5) -> list[Any]:
    """Caches of one kind behind a prompt."""
    made: dict[str, Callable[[int], Any]] = {
        "ring": lambda i: RotatingKVCache(12),
        "kept": lambda i: RotatingKVCache(12, keep=3),
        "batch": lambda i: BatchKVCache(PADDING),
        "batch of rings": lambda i: BatchRotatingKVCache(12, PADDING),
        "mixed": lambda i: RotatingKVCache(9) if i else KVCache(),
    }
    cache = make_prompt_cache(model)
    cache = [made[kind](i) for i in range(len(cache))] if kind in made else cache
    model(TOKENS[: sequences(kind), :prompt], cache=cache)
    return [c.to_quantized(32, 8) for c in cache] if kind == "bits" else cache


def sequences(kind: str) -> int:
    return len(PADDING) if "batch" in kind else 1


class Stepped:
    """A model whose tokens are by graphs, or by its own code."""

    def __init__(self, model: nn.Module, kind: str, by_graph: bool, prompt: int = 5) -> None:
        self.model, self.by_graph, self.at = model, by_graph, prompt
        self.cache, self.rows = begun(model, kind, prompt), sequences(kind)

    def __call__(self, count: int, length: int = 1) -> mx.array:
        """The logits of so many more tokens, ``length`` in a step."""
        made = []
        for i in range(self.at, self.at + count, length):
            tokens = TOKENS[: self.rows, i : i + length]
            step = engine.step if self.by_graph else lambda m, t, c: m(t, cache=c)
            logits = step(self.model, tokens, self.cache)
            assert logits is not None, engine.stopped(self.model)
            made.append(logits)
        self.at += count
        return mx.concatenate(made, axis=1)

    def drop(self, count: int) -> None:
        """Take the last tokens back."""
        if not self.by_graph or not rewinding.rewound(self.model, self.cache, count):
            assert {c.trim(count) for c in self.cache} == {count}
        self.at -= count


def state(cache: list[Any]) -> list[mx.array]:
    """The contents of caches, quantized ones as numbers."""
    found = []
    for c in cache:
        if not hasattr(c, "offset"):  # of states
            found += [part for part in c.state if part is not None]
            continue
        counts = (c._idx, c._offset) if hasattr(c, "_offset") else ()
        found += [mx.array(c.offset), *map(mx.array, counts)]
        for part in c.keys_and_values() if hasattr(c, "keys_and_values") else c.state[:2]:
            part = part if isinstance(part, mx.array) else mx.dequantize(*part, 32, 8)
            found.append(part[:, :, : c.size() or c.offset])
    return found


def assert_same(ours: Any, theirs: Any, kind: str, what: object) -> None:
    # A number may be rounded to the other of two that are packed.
    atol = 0.1 if kind == "bits" else 1e-4
    for (_, a), (_, b) in zip(tree_flatten(ours), tree_flatten(theirs), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, what
        assert mx.abs(a - b).max() <= atol * max(1.0, mx.abs(b).max().item()), what


def steps_as_the_model(model: nn.Module, make: Callable[[], list[Any]], lengths: list[int]) -> int:
    """How many parts of a token were by graphs, which give and leave in caches what the code does.

    Args:
        model: the model.
        make: gives new caches.
        lengths: of the parts of a text.
    """
    results = []
    for run in (model, ByGraph(model)):
        cache, rows, at = make(), [], 0
        for length in lengths:
            rows.append(run(TOKENS[:1, at : at + length], cache=cache))
            at += length
        results.append([mx.concatenate(rows, axis=1), state(cache)])
    (want, theirs), (found, ours) = results
    assert_same_model(found, want, bits=None, what=f"parts {lengths}")
    assert_same(ours, theirs, "plain", lengths)
    return run.steps
