"""Decoder layers one after the other in one trace, where a token of each sequence is decoded.

A model runs its layers in a loop, ``for layer, c in zip(self.layers, cache): h = layer(h, mask, c)``.
Before such a loop the layers are offered to :func:`_first_layers`, which runs as many of them as it
can and leaves the others to the loop. Attention then sees the new keys and values beside the
cache's buffer; they are written into the cache afterwards, by the cache itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from functools import cache
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn

from ..runtime.backend import backend, requested
from . import stretches
from .grouping import compiled
from .operands import Block, Snapshot, known_of, of_block
from .recognition import definition_of
from .routing import routed_attention

_FIRST_LAYERS, _LEFT = "_first_layers", "_layers_left"
# As ast.unparse writes it: for layer, c in zip(self.layers, cache): h = layer(h, mask, c)
_LOOP = re.compile(
    r"for (?P<layer>\w+), (?P<c>\w+) in zip\([\w.]+, \w+\):\n"
    r"    (?P<x>\w+) = (?P=layer)\((?P=x), (mask=)?(?P<mask>\w+), (cache=)?(?P=c)\)"
)

Pairs = list[tuple[Any, Any]]


@cache
def stacked(function: FunctionType) -> FunctionType | None:
    """The method with the layers of its loop offered ahead of it; None if it has no such loop."""
    definition = definition_of(function)
    if definition is None or "zip" in function.__globals__:
        return None
    loops = [node for node in ast.walk(definition) if isinstance(node, ast.For)]
    found = [(loop, names) for loop in loops if (names := _names(loop)) is not None]
    if len(found) != 1:
        return None
    loop, (layer, c, x, mask) = found[0]
    uses = [n.id for n in ast.walk(definition) if isinstance(n, ast.Name) and n.id in (layer, c)]
    if len(uses) > 4:  # something else than the loop depends on them
        return None
    ahead = f"{x}, {_LEFT} = {_FIRST_LAYERS}({ast.unparse(loop.iter)}, {x}, {mask})"
    loop.iter = ast.Name(_LEFT, ast.Load())
    for node in ast.walk(definition):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list) and loop in body:
                body[body.index(loop) : body.index(loop)] = ast.parse(ahead).body
    scope = {**function.__globals__, _FIRST_LAYERS: _first_layers}
    code = compiled(definition, function)
    twin = FunctionType(code, scope, function.__name__, function.__defaults__)
    twin.__doc__, twin.__qualname__ = function.__doc__, function.__qualname__
    return twin


def _names(loop: ast.For) -> tuple[str, str, str, str] | None:
    """Layer, cache, input and mask of ``for l, c in zip(layers, cache): h = l(h, mask, c)``."""
    match = _LOOP.fullmatch(ast.unparse(loop))
    return match and (match["layer"], match["c"], match["x"], match["mask"])


def can_stack(block: nn.Module) -> bool:
    """Whether a decoder layer can be one of those that :func:`_first_layers` runs."""
    return _operands(block) is not None


def _operands(block: nn.Module) -> Block | None:
    operands = of_block(block)
    if operands is None:
        return None
    names = known_of(type(block)).names
    attend = type(block[names["attention"]])._attend
    return operands if attend is routed_attention else None


class _Stack:
    """Layers from the first to the last that can be run together, as they are now."""

    def __init__(self, layers: list[nn.Module]) -> None:
        found: list[Block] = []
        for layer in layers:
            if (operands := _operands(layer)) is None:
                break
            found.append(operands)
        self.count = len(found)
        self.seen = layers[: self.count + 1]
        self.snapshot = Snapshot(self.seen)
        self.static = tuple((b.heads[0], b.scale, b.tail[0]) for b in found)
        self.arrays = [(b.heads[1], b.tail[1]) for b in found]
        self.functions: dict[Any, Callable[..., list[mx.array]]] = {}

    def function(self, at: stretches.Place, rows: int) -> Callable[..., list[mx.array]]:
        """Their stretch for buffers of so many rows."""
        key = at, rows
        if key not in self.functions:
            self.functions[key] = stretches.layers(at, self.static, rows)
        return self.functions[key]


# As long as a sequence's cache lives; nobody else shall keep a model's arrays.
_stacks: WeakKeyDictionary[Any, _Stack] = WeakKeyDictionary()


def _first_layers(
    pairs: Iterable[tuple[Any, Any]], x: mx.array, mask: Any
) -> tuple[mx.array, Pairs]:
    """The first layers with their caches, as many as run together; then what is left of them."""
    pairs = list(pairs)
    caches = [cache for _, cache in pairs]
    length = _length(caches, x, mask)
    at = None if length is None else stretches.place()
    if at is None or length is None:
        return x, pairs
    stack = _stacks.get(caches[0])
    layers = [layer for layer, _ in pairs]
    if stack is None or not stack.snapshot.holds(layers[: len(stack.seen)]):
        stack = _stacks[caches[0]] = _Stack(layers)
    if stack.count == 0:
        return x, pairs
    caches, rows = caches[: stack.count], caches[0].keys.shape[2]
    if mask is not None:
        mask = mx.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, rows - length)])
    start = stretches.position(length)
    positions = [start] if isinstance(caches[0].offset, int) else [c.offset for c in caches]
    buffers = [(c.keys, c.values) for c in caches]
    x, *new = stack.function(at, rows)(x, mask, start, positions, stack.arrays, buffers)
    for i, c in enumerate(caches):
        c.update_and_fetch(new[2 * i], new[2 * i + 1])
    return x, pairs[stack.count :]


def _length(caches: list[Any], x: mx.array, mask: Any) -> int | None:
    """How many keys each cache holds, if attention can look for them in the caches' buffers."""
    from mlx_lm.models.cache import BatchKVCache, KVCache

    if not caches or x.ndim != 3 or x.shape[1] != 1 or not stretches.is_few(x):
        return None
    kind, buffer = type(caches[0]), getattr(caches[0], "keys", None)
    if kind not in (KVCache, BatchKVCache) or buffer is None:
        return None
    length: int = caches[0].offset if kind is KVCache else caches[0]._idx
    if mask is not None and not (
        isinstance(mask, mx.array) and mask.dtype == mx.bool_ and mask.shape[-1] == length + 1
    ):
        return None
    if buffer.dtype != x.dtype or not _is_worth_it():
        return None
    shape = buffer.shape
    for c in caches:
        if type(c) is not kind or c.keys is None or c.keys.shape != shape:
            return None
        if (c.offset if kind is KVCache else c._idx) != length:
            return None
    return length


def _is_worth_it() -> bool:
    """Whether attention to a buffer is faster; on an Apple GPU that was not measured."""
    return backend() == "cuda" or requested() == "metal"
