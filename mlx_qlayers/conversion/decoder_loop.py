"""Decoder layers one after the other in one trace, where a token of each sequence is decoded.

A model runs its layers in a loop, ``for layer, c in zip(layers, cache): h = layer(h, mask, c)``.
Ahead of it they are offered to :func:`_first_layers`, which runs as many of them as it can and
leaves the others to the loop. The caches get buffers with the new keys and values in them.
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

from ..ops.attention_step import why_not
from ..ops.quantized_route import is_qmv
from ..ops.traced import Place, place
from ..runtime.legacy import being_traced
from . import compiled_blocks as stretches
from .attention_patch import routed_attention
from .grouping import compiled
from .matcher import definition_of
from .operands import Block, Snapshot, known_of, of_block

_FIRST_LAYERS, _LEFT = "_first_layers", "_layers_left"
# As ast.unparse writes it: for layer, c in zip(self.layers, cache): h = layer(h, mask, c)
# A layer may have a mask of its own: mask = swa_mask if layer.use_sliding else fa_mask
_LOOP = re.compile(
    r"for (?P<layer>\w+), (?P<c>\w+) in zip\([\w.]+, \w+\):\n"
    r"(    (?P<own>\w+) = (?P<value>\w+ if (?P=layer)\.[\w.]+ else \w+)\n)?"
    r"    (?P<x>\w+) = (?P=layer)"
    r"\((?P=x), (mask=)?(?P<mask>(?(own)(?P=own)|\w+)), (cache=)?(?P=c)\)"
)

# Layers of one trace. Alike ones share it: to trace more takes longer, and saves less and less.
_TOGETHER = 4

Pair = tuple[Any, Any]


@cache
def stacked(function: FunctionType) -> FunctionType | None:
    """The method with the layers of its loop offered ahead of it; None if it has no such loop."""
    definition = definition_of(function)
    if definition is None or "zip" in function.__globals__:
        return None
    loops = [node for node in definition.body if isinstance(node, ast.For)]
    found = [(loop, match) for loop in loops if (match := _LOOP.fullmatch(ast.unparse(loop)))]
    if len(found) != 1:
        return None
    loop, match = found[0]
    layer, x, start = match["layer"], match["x"], definition.body.index(loop)
    later = [n for part in definition.body[start + 1 :] for n in ast.walk(part)]
    set_by_loop = {layer, match["c"], match["own"]}
    if any(isinstance(node, ast.Name) and node.id in set_by_loop for node in later):
        return None
    mask = match["value"] if match["own"] else match["mask"]
    offered = f"{ast.unparse(loop.iter)}, {x}, lambda {layer}: {mask}"
    ahead = f"{x}, {_LEFT} = {_FIRST_LAYERS}({offered})"
    loop.iter = ast.Name(_LEFT, ast.Load())
    definition.body[start:start] = ast.parse(ahead).body
    scope = {**function.__globals__, _FIRST_LAYERS: _first_layers}
    code = compiled(definition, function)
    twin = FunctionType(code, scope, function.__name__, function.__defaults__)
    twin.__doc__, twin.__qualname__ = function.__doc__, function.__qualname__
    return twin


def _operands(block: nn.Module) -> Block | None:
    operands = of_block(block)
    if operands is None:
        return None
    attention = block[known_of(type(block)).names["attention"]]  # type: ignore[union-attr]
    turned = stretches.rotation_of(operands.heads[0][-1]) is not None
    return operands if turned and attention._attend is routed_attention else None


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
        starts = range(0, self.count, _TOGETHER)
        self.parts = [slice(i, min(i + _TOGETHER, self.count)) for i in starts]
        # Of each part its arrays side by side: mx.compile looks through a tree for each token.
        trees = [[(b.heads[1], b.tail[1]) for b in found[part]] for part in self.parts]
        self.arrays: list[list[mx.array]] = [[] for _ in trees]
        self.trees = [stretches.flatten(*pair) for pair in zip(trees, self.arrays, strict=True)]
        # The weight of the norm that follows each part, if a part follows.
        self.following_norms = [found[i].heads[1][0] for i in starts[1:]] + [None]
        self.functions: dict[Any, list[Callable[..., list[mx.array]]]] = {}
        # The length and the batch for which something is known, and that.
        self.known: tuple[int, int] | None = None
        self.following = mx.array(0)
        self.offset: int | mx.array = 0
        self.apart = False

    def why_not(self, cache: Any, length: int) -> str | None:
        """Why such a cache, with room for one key more, should be left to the loop, if so."""
        rotation = stretches.rotation_of(self.static[0][0][-1])
        assert rotation is not None
        batch, heads, rows, width = cache.keys.shape
        rows += cache.step if length == rows else 0
        return why_not((batch, heads, rows, width), cache.values.shape[3], rotation)

    def places(self, caches: list[Any], length: int) -> list[mx.array]:
        """What :func:`attention_step` takes: one array, or one for each layer.

        After the first token it follows from the one before: what the host writes anew, a GPU with
        memory of its own has to fetch.
        """
        batch, offset = len(caches[0].keys), caches[0].offset
        if self.known == (length, batch) and (
            isinstance(offset, int) or all(c.offset is self.offset for c in caches)
        ):
            return [self.following]
        if isinstance(offset, int):
            return [stretches.places(length, batch)]
        return [stretches.places_of(length, each) for each in self._positions(caches)]

    def _positions(self, caches: list[Any]) -> list[mx.array]:
        """The positions of the sequences: one array if they are the same in all caches."""
        found: list[mx.array] = [c.offset for c in caches]
        if self.apart or being_traced(found):
            return found
        self.apart = not (mx.stack(found) == found[0]).all().item()
        return found if self.apart else found[:1]

    def advance(self, caches: list[Any], length: int, places: list[mx.array]) -> None:
        """Count the token that the buffers of all caches hold now."""
        batch, is_plain = len(caches[0].keys), isinstance(caches[0].offset, int)
        later = [each + 1 for each in places]
        self.known = (length + 1, batch) if len(later) == 1 else None
        self.following = later[0]
        offsets = [length + 1 if is_plain else each[1 : 1 + batch] for each in later]
        self.offset = offsets[0]
        for i, c in enumerate(caches):
            c.offset = offsets[i % len(offsets)]
            if not is_plain:
                c._idx = length + 1

    def run(
        self,
        at: Place,
        x: mx.array,
        mask: mx.array | None,
        places: list[mx.array],
        buffers: list[mx.array],
    ) -> list[mx.array]:
        """What the layers give, and the buffers that their caches then have."""
        new: list[mx.array] = []
        key = at, buffers[0].shape[2], len(places)
        if key not in self.functions:
            self.functions[key] = [
                stretches.layers(
                    at,
                    self.static[part],
                    tree,
                    (*key[1:], part.start == 0, part.stop == self.count),
                )
                for part, tree in zip(self.parts, self.trees, strict=True)
            ]
        handed: list[mx.array] = []
        for part, function, arrays, norm in zip(
            self.parts, self.functions[key], self.arrays, self.following_norms, strict=True
        ):
            some = places if len(places) == 1 else places[part]
            pairs = buffers[2 * part.start : 2 * part.stop]
            x, *found = function(x, mask, some, arrays, pairs, handed, norm)
            handed = found[: -len(pairs)]
            new += found[-len(pairs) :]
        return [x, *new]


# As long as a sequence's cache lives; nobody else shall keep a model's arrays.
_stacks: WeakKeyDictionary[Any, _Stack] = WeakKeyDictionary()


def _first_layers(
    pairs: Iterable[Pair], x: mx.array, mask_of: Callable[[Any], Any]
) -> tuple[mx.array, list[Pair]]:
    """Run the first layers, as many as there are that can run together; also what is left."""
    pairs = list(pairs)
    caches = [cache for _, cache in pairs]
    mask = _common([mask_of(layer) for layer, _ in pairs])
    length = _length(caches, x, mask)
    at = None if length is None else place()
    if at is None or length is None:
        return x, pairs
    layers, stack = [layer for layer, _ in pairs], _stacks.get(caches[0])
    if stack is None or not stack.snapshot.holds(layers[: len(stack.seen)]):
        stack = _stacks[caches[0]] = _Stack(layers)
    caches = caches[: stack.count]
    if not caches or stack.why_not(caches[0], length):
        return x, pairs
    if length == caches[0].keys.shape[2]:
        _grow(caches)
    rows = caches[0].keys.shape[2]
    if mask is not None:
        mask = mx.pad(mask, [(0, 0)] * 3 + [(0, rows - 1 - length)])
    places = stack.places(caches, length)
    buffers = [buffer for c in caches for buffer in (c.keys, c.values)]
    x, *new = stack.run(at, x, mask, places, buffers)
    for i, c in enumerate(caches):
        c.keys, c.values = new[2 * i : 2 * i + 2]
    stack.advance(caches, length, places)
    return x, pairs[stack.count :]


def _grow(caches: list[Any]) -> None:
    """Make room for as many keys more as the caches do themselves."""
    for c in caches:
        for name in ("keys", "values"):
            buffer = getattr(c, name)
            batch, heads, _, width = buffer.shape
            more = mx.zeros((batch, heads, c.step, width), buffer.dtype)
            setattr(c, name, mx.concatenate([buffer, more], axis=2))


def _common(masks: list[Any]) -> Any:
    """The one mask of all layers; if they have several, something that is no mask."""
    return masks[0] if masks and all(mask is masks[0] for mask in masks) else masks


def _length(caches: list[Any], x: mx.array, mask: Any) -> int | None:
    """How many keys each cache holds, if their buffers are alike and hold as many."""
    from mlx_lm.models.cache import BatchKVCache, KVCache

    if not caches or x.ndim != 3 or x.shape[1] != 1 or not is_qmv(x):
        return None
    kind, buffer = type(caches[0]), getattr(caches[0], "keys", None)
    if kind not in (KVCache, BatchKVCache) or buffer is None or buffer.dtype != x.dtype:
        return None
    length: int = caches[0].offset if kind is KVCache else caches[0]._idx
    if mask is not None and not (
        isinstance(mask, mx.array)
        and mask.ndim == 4
        and mask.dtype == mx.bool_
        and mask.shape[2:] == (1, length + 1)
    ):
        return None
    shapes = buffer.shape, caches[0].values.shape
    for c in caches:
        if type(c) is not kind or c.keys is None or (c.keys.shape, c.values.shape) != shapes:
            return None
        if (c.offset if kind is KVCache else c._idx) != length:
            return None
    return length if length <= buffer.shape[2] else None
