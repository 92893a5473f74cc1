"""Decoder layers, attention and feed-forward modules that decode with few launches.

A module whose code :mod:`.matcher` recognises gets a class of its own, made from its class, whose
``__call__`` computes the same from fused products where the rows are few, and on CUDA for prompts;
else, and where a projection is no :class:`QLinear` (an adapter, for instance), it runs the code it
had before. Its attributes stay what they are, so that it goes back by taking its class back.

A decoder layer then makes four launches of its own: norm and q, k, v; output projection and
residual; norm, gate, up and activation; down and residual. On a GPU what is ahead of the cache and
what follows attention are compiled, with the parameters as inputs: a token costs two such calls a
layer, where :mod:`.compiled_step` does not compile the whole model.
"""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Callable
from functools import cache
from itertools import chain
from operator import is_
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..decode.snapshot import Snapshot
from ..formats import Format
from ..layers.int8_linear import takes_int8
from ..ops.quantized_route import in_one_launch, is_dense
from ..ops.tensor_choice import takes_tensors
from . import attention_patch, compiled
from .attention_patch import is_patched, made_class, stock_class
from .compiled_blocks import heads, joined, position, tail, together
from .compiled_step import STEP
from .experts import EXPERTS
from .grouping import grouped
from .int8_prompts import INT8_PROMPTS
from .matcher import Match, Mismatch, recognise
from .operands import BLOCK_PARTS, Operands, match_of, of_feed_forward, of_heads, of_layers, of_tail
from .recorder import RECORDED, called
from .step_slots import current_step

# Rows that caches of mlx-lm's grow by.
_GROWTH = 256
# The name of what a module is of which only products of one input are gathered.
GROUPED = "grouped"


def is_fused(module: nn.Module) -> bool:
    """Whether ``module`` is of a class that :func:`fused_class` made."""
    return "_fuses" in type(module).__dict__


def unfused_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a fused class was made from; any other class itself."""
    return cls.__dict__.get("_fuses", cls)


def groups_of(cls: type[nn.Module]) -> tuple[tuple[str, ...], ...]:
    """The layers whose products of one input a class gathers of which no more is recognised."""
    return cls.__dict__.get("_groups", ())


def input_width(module: Any) -> int | None:
    """The last axis of the input of a fused module; None where that does not follow from it."""
    match = match_of(type(module))
    if match is None or match.pattern in (GROUPED, STEP, EXPERTS):
        return None
    if match.kind == "block":
        return input_width(module[match.names["attention"]])
    layer = module[match.names["gate" if match.kind == "mlp" else "q"]]
    return Format(layer.group_size, layer.bits, layer.mode).dims(layer["weight"])


@cache
def fused_class(
    cls: type[nn.Module], layers: frozenset[str], recorded: bool
) -> type[nn.Module] | Mismatch:
    """The class that stands in for ``cls``, stock or patched, or why nothing in it can be fused.

    Args:
        cls: the class of a module.
        layers: the names of the quantized layers that the module holds: where no more of its code
            is recognised, their products of one input are gathered.
        recorded: of a module with experts, which are to be seen to be chosen and added up.
    """
    stock, body = stock_class(cls), dict[str, Any]()
    match = recognise(stock)
    if isinstance(match, Mismatch):
        rewritten = inspect.getattr_static(cls, "__call__", None)
        if not isinstance(rewritten, FunctionType):
            return Mismatch("its __call__ is no plain method")
        gathered = grouped(rewritten, layers, _together, recorded)
        if isinstance(gathered, Mismatch):
            return gathered
        match = Match(GROUPED, {})
        body = {"_groups": gathered.groups, RECORDED: gathered.recorded}
        call: Callable[..., Any] = gathered.function
    else:
        call = _mlp_call if match.kind == "mlp" else _attention_call
    body |= {"__call__": call, "_fuses": cls, "_match": match}
    if cls is not stock:
        body |= {"_patches": stock}
    return made_class(stock, (cls,), body, fused_class, layers, recorded)


def _is_fused_for(module: nn.Module, x: mx.array) -> bool:
    """Whether products of ``x`` go together: where one launch takes all, or no gradient is due."""
    if in_one_launch(x) or _int8_of(module, x) is not None:
        return True
    return not module.training and (is_dense(x) or takes_tensors(x))


def _int8_of(module: nn.Module, x: mx.array) -> mx.Dtype | None:
    """The dtype of rows that the layers of a module multiply in 8-bit integers; None elsewhere."""
    return x.dtype if INT8_PROMPTS in vars(module) and takes_int8(module, x) else None


def _together(x: mx.array, *layers: Any) -> list[mx.array]:
    """The products of one input with several layers."""
    int8 = _int8_of(layers[0], x)
    packed = of_layers(*layers, int8=int8) if _is_fused_for(layers[0], x) else None
    if packed is None or any(each.summed for each in packed.static):
        return [layer(x) for layer in layers]
    return together(compiled.context(), *packed.static)(x, *packed.arrays)


def _mlp_call(self: Any, x: mx.array) -> mx.array:
    plan = _plans.get(id(self))
    if (plan is None or not plan.fits(self, x)) and (plan := _planned(self, x)) is None:
        return unfused_class(type(self)).__call__(self, x)
    where = compiled.context()
    _, after = plan.bound.get(where) or plan.bind(where, x, None)
    return after(x, None, *plan.arrays)


# In the hot path every call of a Python function counts: see tests/python_calls.py.
def _attention_call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    """Of attention modules and of decoder layers."""
    plan = _plans.get(id(self))
    if (plan is None or not plan.fits(self, x)) and (plan := _planned(self, x)) is None:
        return unfused_class(type(self)).__call__(self, x, mask, cache)
    where = compiled.context()
    if plan.heads is None:  # the cache may be of any kind
        _, after = plan.bound.get(where) or plan.bind(where, x, None)
        return after(plan.attended(x, mask, cache), None, *plan.arrays)
    offset = 0 if cache is None else cache.offset
    at = position(offset) if isinstance(offset, int) else offset
    before, after = plan.bound.get(where) or plan.bind(where, x, at)
    q, k, v = before(x if plan.norm is None else plan.norm(x), at, *plan.heads.arrays)
    if plan.rope is not None:
        options = {} if cache is None else {"offset": offset}
        q, k = plan.rope(q, **options), plan.rope(k, **options)
    if cache is not None:
        if x.shape[1] % _GROWTH == 0 and getattr(cache, "keys", x) is None:
            # A cache keeps what fills it as it is: views of the products of all three matrices.
            k, v = mx.contiguous(k), mx.contiguous(v)
        k, v = cache.update_and_fetch(k, v)
        if (step := current_step.get()) is not None:
            step.attending(k)
    if plan.is_patched:
        out = attention_patch.patched_attention(q, k, v, cache, plan.scale, mask)
    else:
        out = plan.stock(q, k, v, cache=cache, scale=plan.scale, mask=mask)
    return after(x, out, *plan.arrays)


class _Plan:
    """How a fused module computes, for as long as nothing in it is replaced.

    It does not hold the module itself, with which it is let go.

    Attributes:
        heads: operands of attention's projections, or None where attention runs as it was.
        norm: ahead of them, where that is no RMS norm.
        rope: behind them, where that cannot be compiled.
        arrays: those that follow the rows, or attention and the rows, in the second function.
        int8: the dtype of rows that are multiplied in 8-bit integers, or None.
        bound: by context, the function ahead of the cache, and the one behind attention, for rows
            of the last shape.
    """

    def __init__(self, module: Any, match: Match, int8: mx.Dtype | None) -> None:
        kind, names, self.int8 = match.kind, match.names, int8
        self.is_block, self.by_name = kind == "block", match.pattern == "block_by_keywords"
        attention: Any = module if kind == "attention" else None
        mlp: Any = module if kind == "mlp" else None
        first, second = None, None
        if self.is_block:
            attention, mlp, first, second = (module[names[key]] for key in BLOCK_PARTS)
            self.attention, self.mlp, self.first, self.second = attention, mlp, first, second
        self.feed = None if mlp is None else of_feed_forward(mlp, second, int8)
        inner = match_of(type(attention))
        self.heads: Any = None if inner is None else of_heads(attention, first, int8)
        self.norm = None if first is None or type(first) is nn.RMSNorm else first
        self.out: Operands | None = None
        if inner and self.heads:
            from mlx_lm.models.base import scaled_dot_product_attention

            names, self.stock = inner.names, scaled_dot_product_attention
            self.o = attention[names["o"]]
            self.out = of_layers(self.o, int8=int8)
            self.scale, self.is_patched = getattr(attention, names["scale"]), is_patched(attention)
            self.rope = None if self.heads.static[-1] else attention[names["rope"]]
        self.tail = of_tail(self.out if self.is_block else None, self.feed, self.is_block)
        self.arrays = self.tail.arrays if self.is_block or self.feed else []
        self.bound: dict[Any, tuple[Any, Callable[..., Any]]] = {}
        self.shape: tuple[int, ...] = ()
        inside = [part for part in module.modules() if part is not module]
        self.items, self.snapshot = dict(module), Snapshot(inside, vars(module), dict(module))

    def fits(self, module: nn.Module, x: mx.array) -> bool:
        """Whether the module still is what it was planned for, and ``x`` of the last shape."""
        seen = self.snapshot
        try:  # as in Snapshot.holds, which would be one more call
            return (
                x.shape == self.shape
                and module.keys() == self.items.keys()
                and all(map(is_, module.values(), self.items.values()))
                and len(now := [*chain.from_iterable(seen.owners)]) == len(seen.owned)
                and all(map(is_, now, seen.owned))
                and seen.contents == seen.before
                and [*map(type, seen.parts)] == seen.types
            )
        except Exception:
            return False

    def bind(self, where: Any, x: mx.array, at: Any) -> tuple[Any, Callable[..., Any]]:
        """Both functions where calls are now, for such rows and positions."""
        before, after, attended = None, self._behind(where), None
        if self.heads:
            before = heads(where, *self.heads.static)
            before = compiled.ready(before, x, at, *self.heads.arrays)
        if self.heads and self.out:
            (fmt, (*_, words), *_), (count, _) = self.out.static[0], self.heads.static[1]
            batch, length, _ = x.shape
            shape = batch, count, length, words * 32 // fmt.bits // count
            attended = mx.zeros(shape, x.dtype)
        self.bound[where] = pair = before, compiled.ready(after, x, attended, *self.arrays)
        return pair

    def _behind(self, where: Any) -> Callable[..., Any]:
        """What takes the rows, and attention; None where that was added to them."""
        if not self.is_block and not self.feed:
            return lambda x, attended: self.o(joined(attended))
        run = tail(where, *self.tail.static)
        if self.feed and (self.out or not self.is_block):
            return run

        def behind(x: mx.array, attended: mx.array | None, *arrays: mx.array | None) -> mx.array:
            if attended is not None and not self.out:
                x = x + self.o(joined(attended))
            h: mx.array = run(x, attended, *arrays)
            if not self.feed:
                h = called(operator.add, h, self.mlp(self.second(h)))
            return h

        return behind

    def attended(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        """The first half of a decoder layer whose attention runs as it was."""
        given = {"mask": mask, "cache": cache}
        rest = () if self.by_name else tuple(given.values())
        y = called(self.attention, self.first(x), *rest, **given if self.by_name else {})
        h: mx.array = called(operator.add, x, y)
        return h


# By the identity of modules, which are dicts and cannot be keys.
_plans: dict[int, _Plan] = {}


def _planned(module: Any, x: mx.array) -> _Plan | None:
    """The plan of a module for such rows, kept for the next call; None if it runs as it was."""
    match = match_of(type(module))  # None where another thread reverts it meanwhile
    if match is None or not _is_fused_for(module, x):
        return None
    plan = _plans.get(id(module))
    if plan is None:
        weakref.finalize(module, _plans.pop, id(module), None).atexit = False
    else:
        plan.shape = x.shape
    int8 = _int8_of(module, x)
    # A Dtype does not compare with None.
    if plan is None or str(plan.int8) != str(int8) or not plan.fits(module, x):
        plan = _plans[id(module)] = _Plan(module, match, int8)
    useful = x.ndim == 3 if plan.heads else plan.feed is not None
    # For many rows it depends on more than the shape whether they are fused.
    plan.shape = x.shape if useful and in_one_launch(x) else ()
    plan.bound.clear()
    return plan if useful else None
