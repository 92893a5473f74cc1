"""Decoder layers one after the other in one compiled graph, for a token of each sequence.

A model runs its layers in a loop, ``for layer, c in zip(layers, cache): h = layer(h, mask, c)``.
Ahead of it they are offered to :func:`_first_layers`, which runs as many of them as it can and
leaves the others to the loop. :mod:`.cache_tail` has what the caches hold meanwhile.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import cache
from operator import is_
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn

from ..ops.attention_step import MIN_TICKETS, why_not
from ..ops.quantized_route import in_one_launch
from ..runtime.transformed import is_transformed
from . import compiled
from .attention_patch import is_patched
from .cache_tail import (
    Buffer,
    Tail,
    advance,
    arrays_of,
    kind_of,
    layout,
    one_token,
    positions,
    positions_of,
    rows_of,
    tail_of,
)
from .compiled_blocks import layers_in_turn, rotation_of
from .long_prompts import in_turn
from .matcher import Mismatch, find_statement, parse
from .operands import BLOCK_PARTS, Operands, match_of, of_feed_forward, of_heads, of_layers, of_tail
from .rewriter import rewritten, statement
from .snapshot import Snapshot

_FIRST_LAYERS, _LEFT = "_first_layers", "_layers_left"
# Layers of one graph. Alike ones share it: to trace more takes longer, and saves less and less.
_TOGETHER = 4

Pair = tuple[Any, Any]


@cache
def with_layers_ahead(function: FunctionType) -> FunctionType | Mismatch:
    """The method with the layers of its loop offered ahead of it, or why it has no such loop."""
    method = parse(function)
    if isinstance(method, Mismatch):
        return method
    match = find_statement(method, "layer_loop", "layer_loop_with_masks")
    if isinstance(match, Mismatch):
        return match
    body, loop, names = method.definition.body, match.node, match.names
    assert isinstance(loop, ast.For)
    start = body.index(loop)
    own = match.pattern == "layer_loop_with_masks"
    set_by_loop = {names["layer"], names["c"]} | ({names["mask"]} if own else set())
    for node in (n for later in body[start + 1 :] for n in ast.walk(later)):
        if isinstance(node, ast.Name) and node.id in set_by_loop:
            return method.mismatch(f"{node.id} is used after the loop", node)
    given = [ast.unparse(loop.iter), names["x"], names["mask"]]
    if own:
        assign = loop.body[0]
        assert isinstance(assign, ast.Assign)
        given[2] = f"mask_of=lambda {names['layer']}: {ast.unparse(assign.value)}"
    ahead = f"{names['x']}, {_LEFT} = {_FIRST_LAYERS}({', '.join(given)})"
    body.insert(start, statement(ahead, loop))
    loop.iter = ast.Name(_LEFT, ast.Load())
    return rewritten(method, **{_FIRST_LAYERS: _first_layers})


def _first_layers(
    pairs: Iterable[Pair],
    x: mx.array,
    mask: Any = None,
    mask_of: Callable[[Any], Any] | None = None,
) -> tuple[mx.array, list[Pair]]:
    """Run the first layers, as many as there are that can run together; also what is left.

    Args:
        pairs: each layer and its cache.
        x: (B, L, K); only with L = 1 layers can run together.
        mask: of all layers, where ``mask_of`` does not say which one a layer has.
        mask_of: the mask of a layer.
    """
    pairs = list(pairs)
    if x.ndim != 3 or x.shape[1] != 1:
        return x, in_turn(pairs, x)
    caches = [cache for _, cache in pairs]
    if mask_of is not None:
        masks = [mask_of(layer) for layer, _ in pairs]
        if masks and any(other is not masks[0] for other in masks):
            return x, pairs
        mask = masks[0] if masks else None
    length = _length(caches, x, mask)
    where = None if length is None else compiled.context()
    if where is None or length is None:
        return x, pairs
    modules, plan = [layer for layer, _ in pairs], _plans.get(caches[0])
    if plan is None or not plan.fits(modules):
        plan = _plans[caches[0]] = _Plan(modules)
    caches = caches[: plan.count]
    if not caches or plan.why_not(caches[0], length):
        return x, pairs
    tail = tail_of(plan.tail, caches, length)
    rows = rows_of(tail.buffers[0])
    if mask is not None:
        mask = mx.pad(mask, [(0, 0)] * 3 + [(0, rows - 1 - length)])
    at = plan.positions(caches, tail.start, length)
    x, tail = plan.run(where, x, mask, at, tail)
    plan.advance(caches, length, at, tail)
    return x, pairs[plan.count :]


class _Plan:
    """How the layers from the first on are run that can run together, as they are now."""

    def __init__(self, modules: list[nn.Module]) -> None:
        operands: list[tuple[Operands, float, Operands]] = []
        for module in modules:
            if (each := _of_block(module)) is None:
                break
            operands.append(each)
        self.count = len(operands)
        self.seen = modules[: self.count + 1]
        self.snapshot = Snapshot([part for module in self.seen for part in module.modules()])
        self.static = tuple((b.static, scale, a.static) for b, scale, a in operands)
        starts = range(0, self.count, _TOGETHER)
        self.parts = [slice(i, min(i + _TOGETHER, self.count)) for i in starts]
        # Of each part the arrays that there are: mx.compile looks at each for each token.
        whole = [
            [array for before, _, after in operands[part] for array in before.arrays + after.arrays]
            for part in self.parts
        ]
        self.present = [tuple(array is not None for array in arrays) for arrays in whole]
        self.arrays = [[array for array in arrays if array is not None] for arrays in whole]
        # The weight of the norm that follows each part, if a part follows.
        self.next_weights = [operands[i][0].arrays[0] for i in starts[1:]] + [None]
        self.functions: dict[Any, list[Callable[..., list[mx.array]]]] = {}
        self.tail: Tail | None = None
        # Start, length and batch for which the positions that follow are at hand, and those.
        self.following: tuple[tuple[int, int, int], mx.array] | None = None
        self.offset: int | mx.array = 0
        self.differ = False
        # Of attention's launches, which run one behind the other.
        self.tickets = mx.zeros((MIN_TICKETS,), mx.int32)

    def fits(self, modules: list[nn.Module]) -> bool:
        """Whether these are the layers, as they were."""
        same = len(modules) >= len(self.seen) and all(map(is_, modules, self.seen))
        return same and self.snapshot.holds()

    def why_not(self, cache: Any, length: int) -> str | None:
        """Why such a cache, with room for one key more, should be left to the loop, if so."""
        (dtype, bits, keys, values, _), (count, kv_heads) = layout(cache), self.static[0][0][1]
        batch, heads, rows, width = keys
        rows += cache.step if length == rows else 0
        return why_not(dtype, count // kv_heads, (batch, heads, rows, width), values[3], bits)

    def positions(self, caches: list[Any], start: int, length: int) -> list[mx.array]:
        """What :func:`attention_step` takes: one array, or one for each layer.

        After the first token it follows from the one before: what the host writes anew, a GPU with
        memory of its own has to fetch.
        """
        batch, offset, held = layout(caches[0]).keys[0], caches[0].offset, length - start
        if (
            self.following is not None
            and self.following[0] == (start, length, batch)
            and (isinstance(offset, int) or all(c.offset is self.offset for c in caches))
        ):
            return [self.following[1]]
        if isinstance(offset, int):
            return [positions(start, held, batch)]
        offsets: list[mx.array] = [c.offset for c in caches]
        if not self.differ and not is_transformed(offsets):
            self.differ = not (mx.stack(offsets) == offsets[0]).all().item()
            offsets = offsets if self.differ else offsets[:1]
        return [positions_of(start, held, each) for each in offsets]

    def advance(self, caches: list[Any], length: int, at: list[mx.array], tail: Tail) -> None:
        """Count the token that the tails of all caches hold now."""
        batch, is_plain = len(tail.shown[0]), isinstance(caches[0].offset, int)
        later = [each + one_token(each.size) for each in at]
        following = ((tail.start, length + 1, batch), later[0]) if len(later) == 1 else None
        offsets = [length + 1 if is_plain else each[2 : 2 + batch] for each in later]
        counts = [
            {"offset": each} if is_plain else {"offset": each, "_idx": length + 1}
            for each in offsets
        ]
        advance(caches, tail, [counts[i % len(counts)] for i in range(len(caches))])
        self.tail, self.following, self.offset = tail, following, offsets[0]

    def run(
        self,
        where: Any,
        x: mx.array,
        mask: mx.array | None,
        at: list[mx.array],
        tail: Tail,
    ) -> tuple[mx.array, Tail]:
        """What the layers give, and the tail with the token in it."""
        key = where, tuple(a.shape[2:] for a in arrays_of(tail.buffers[0])), len(at)
        if (functions := self.functions.get(key)) is None:
            functions = self.functions[key] = [
                layers_in_turn(
                    where,
                    self.static[part],
                    present,
                    *key[1:],
                    part.start == 0,
                    part.stop == self.count,
                )
                for part, present in zip(self.parts, self.present, strict=True)
            ]
        # As many for all batches of a size, which share graphs.
        if self.tickets.size != (size := max(MIN_TICKETS, len(x) * self.static[0][0][1][0])):
            self.tickets = mx.zeros((size,), mx.int32)
        tails: list[mx.array] = []
        shown: list[Buffer] = []
        deferred: list[mx.array] = []
        parts = zip(self.parts, functions, self.arrays, self.next_weights, strict=True)
        for part, function, arrays, next_weight in parts:
            own, count = slice(2 * part.start, 2 * part.stop), 2 * (part.stop - part.start)
            given = at if len(at) == 1 else at[part], arrays, tail.buffers[own], tail.tails[own]
            x, *rest = function(x, mask, *given, deferred, next_weight, self.tickets)
            deferred = rest[: -2 * count]
            tails += rest[-2 * count : -count]
            shown += rest[-count:]
        return x, tail._replace(tails=tails, shown=shown)


# As long as a sequence's cache lives; nobody else shall keep a model's arrays.
_plans: WeakKeyDictionary[Any, _Plan] = WeakKeyDictionary()


def _of_block(block: Any) -> tuple[Operands, float, Operands] | None:
    """Operands of a layer's heads and tail, and its scale; None if it cannot run with others."""
    match = match_of(type(block))
    if match is None or match.kind != "block":
        return None
    attention, mlp, first, second = (block[match.names[key]] for key in BLOCK_PARTS)
    heads, feed = of_heads(attention, first), of_feed_forward(mlp, second)
    inner = match_of(type(attention))
    if inner is None or heads is None or feed is None:
        return None
    if type(first) is not nn.RMSNorm or not is_patched(attention):
        return None
    names = inner.names
    out = of_layers(attention[names["o"]])
    if out is None or rotation_of(heads.static[-1]) is None:
        return None
    return heads, getattr(attention, names["scale"]), of_tail(out, feed, True)


def _length(caches: list[Any], x: mx.array, mask: Any) -> int | None:
    """How many keys each cache holds, if their buffers are alike and hold as many."""
    from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

    if not caches or not in_one_launch(x):
        return None
    kind = kind_of(caches[0])
    kinds = KVCache, BatchKVCache, QuantizedKVCache
    if kind not in kinds or (first := vars(caches[0]))["keys"] is None:
        return None
    counted = "_idx" if kind is BatchKVCache else "offset"
    length: int = first[counted]
    if mask is not None and not (
        isinstance(mask, mx.array)
        and mask.ndim == 4
        and mask.dtype == mx.bool_
        and mask.shape[2:] == (1, length + 1)
    ):
        return None
    alike = layout(caches[0])
    if alike.dtype != x.dtype:
        return None
    plain = None if alike.bits else (alike.keys, alike.values, alike.dtype)
    for c in caches:
        if kind_of(c) is not kind or (own := vars(c))["keys"] is None:
            return None
        keys = own["keys"]
        if (keys.shape, own["values"].shape, keys.dtype) != plain if plain else layout(c) != alike:
            return None
        if own[counted] != length:
            return None
    return length if length <= alike.keys[2] else None
