"""Decoder layers, attention and feed-forward modules that decode with few launches.

A module whose code :mod:`.matcher` knows gets a class of its own, made from its class, whose
``__call__`` computes the same from fused products where the rows are few, and on CUDA for prompts;
else, and where a projection is no :class:`QLinear` (an adapter, for instance), it runs the code it
had before. Its attributes stay what they are, so that it goes back by taking its class back.

A decoder layer then makes four launches of its own: norm and q, k, v; output projection and
residual; norm, gate, up and activation; down and residual. On a GPU the stretches between cache and
attention are traced once by ``mx.compile``, with the parameters as inputs: a token costs two calls
a layer. Where attention is by kernel there too, :mod:`.decoder_loop` traces whole layers together.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import FunctionType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from ..formats import Format
from ..ops.quantized_route import is_dense, is_qmv
from ..ops.traced import Place, place
from . import compiled_blocks as stretches
from .attention_patch import routed_attention, routed_class
from .decoder_loop import stacked
from .grouping import grouped
from .matcher import Known, recognise
from .operands import GATES, known_of, of_feed_forward, of_heads, of_layers

# The form of a module of which only products of one input are gathered.
GROUPED = "grouped"
# The form of a module that runs decoder layers in a loop.
STACK = "stack"


def is_fused(module: nn.Module) -> bool:
    """Whether ``module`` is of a class that :func:`fused_class` made."""
    return "_fuses" in type(module).__dict__


def unfused_class(module: nn.Module) -> type[nn.Module]:
    """The class that a fused module had before."""
    return type(module).__dict__["_fuses"]


def groups_of(cls: type[nn.Module]) -> tuple[tuple[str, ...], ...]:
    """The layers whose products of one input a class gathers that is known no further."""
    return cls.__dict__.get("_groups", ())


def input_width(module: Any) -> int | None:
    """The last axis of the input of a fused module; None where that does not follow from it."""
    known = known_of(type(module))
    if known is None or known.form in (GROUPED, STACK):
        return None
    if known.form.startswith("block"):
        return input_width(module[known.names["attention"]])
    layer = module[known.names["gate" if known.form in GATES else "q"]]
    return Format(layer.group_size, layer.bits, layer.mode).dims(layer["weight"])


@cache
def fused_class(cls: type[nn.Module], layers: frozenset[str]) -> type[nn.Module] | None:
    """The class that stands in for ``cls``, stock or routed; None if nothing in it can be fused.

    Args:
        cls: the class of a module.
        layers: the names of the quantized layers that the module holds: where no more is known of
            its code, their products of one input are gathered. None for one that runs layers in
            a loop.
    """
    stock = cls.__dict__.get("_routes", cls)
    known = recognise(stock)
    body: dict[str, Any] = {}
    if known is None:
        call = inspect.getattr_static(cls, "__call__", None)
        if not isinstance(call, FunctionType):
            return None
        if not layers:
            known, call = Known(STACK, {}), stacked(call)
        elif (found := grouped(call, layers, _together)) is not None:
            known, call = Known(GROUPED, {}), found.function
            body = {"_groups": found.groups, "_layers": layers}
        if known is None or call is None:
            return None
    elif known.form in GATES:
        call = _mlp_call
    else:
        call = _attention_call if known.form.startswith("attention") else _block_call
    body |= {
        "__module__": stock.__module__,
        "__doc__": stock.__doc__,
        "__call__": call,
        "__reduce_ex__": _reduce,
        "_extra_repr": stock._extra_repr,
        "_fuses": cls,
        "_known": known,
    }
    if cls is not stock:
        body |= {"_routes": stock, "_attend": staticmethod(routed_attention)}
    elif known.form.startswith("attention"):
        from mlx_lm.models.base import scaled_dot_product_attention

        body["_attend"] = staticmethod(scaled_dot_product_attention)
    return type(f"Fused{stock.__name__}", (cls,), body)


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Pickle a fused module by the class it had before: its own has no importable name."""
    reduced = nn.Module.__reduce_ex__(module, max(2, protocol))
    before = unfused_class(module)
    stock, layers = before.__dict__.get("_routes", before), type(module).__dict__.get("_layers")
    return _new, (stock, before is not stock, layers or frozenset()), *reduced[2:]


def _new(stock: type[nn.Module], routed: bool, layers: frozenset[str]) -> nn.Module:
    before = routed_class(stock) if routed else stock
    assert before is not None
    cls = fused_class(before, layers)
    assert cls is not None
    return cls.__new__(cls)


def _is_fused(module: nn.Module, x: mx.array) -> bool:
    """Whether products of ``x`` go together: of few rows, and of many where no gradient is due."""
    return is_qmv(x) or (not module.training and is_dense(x))


def _together(x: mx.array, *layers: Any) -> list[mx.array]:
    """The products of one input with several layers."""
    packed = of_layers(*layers) if _is_fused(layers[0], x) else None
    if packed is None:
        return [layer(x) for layer in layers]
    return cast(list[mx.array], stretches.together(place(), packed[0])(x, packed[1]))


def _mlp_call(self: Any, x: mx.array) -> mx.array:
    if _is_fused(self, x) and (feed := of_feed_forward(self, None)) is not None:
        static, arrays = feed
        return cast(mx.array, stretches.feed_forward(place(), *static)(x, *arrays, None))
    return cast(mx.array, self._fuses.__call__(self, x))


def _attention_call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    out = _attended(place(), self, None, x, mask, cache) if _is_fused(self, x) else None
    if out is None:
        return cast(mx.array, self._fuses.__call__(self, x, mask, cache))
    o = self[self._known.names["o"]]
    return cast(mx.array, o(stretches.joined(out)))


def _block_call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    if not _is_fused(self, x):
        return cast(mx.array, self._fuses.__call__(self, x, mask, cache))
    names = self._known.names
    attention, mlp = self[names["attention"]], self[names["mlp"]]
    first, second = self[names["first_norm"]], self[names["second_norm"]]
    at = place()
    out = _attended(at, attention, first, x, mask, cache)
    feed = of_feed_forward(mlp, second)
    if out is None and feed is None:
        return cast(mx.array, self._fuses.__call__(self, x, mask, cache))
    if out is None:
        by_name = self._known.form == "block_by_keywords"
        args, options = ((), {"mask": mask, "cache": cache}) if by_name else ((mask, cache), {})
        h = x + attention(first(x), *args, **options)
    else:
        o = attention[attention._known.names["o"]]
        if (packed := of_layers(o)) is not None:
            (fmt,), (matrix,) = packed
            if feed is None:
                h = stretches.projected(at, fmt)(out, x, matrix)
            else:
                return cast(mx.array, stretches.tail(at, fmt, *feed[0])(out, x, matrix, *feed[1]))
        else:
            h = x + o(stretches.joined(out))
    if feed is None:
        return cast(mx.array, h + mlp(second(h)))
    return cast(mx.array, stretches.feed_forward(at, *feed[0])(h, *feed[1], h))


def _attended(
    at: Place | None, attention: Any, norm: Any, x: mx.array, mask: Any, cache: Any
) -> mx.array | None:
    """Attention of ``norm(x)`` before the output projection, (B, H, L, D), if it is known."""
    operands = of_heads(attention, norm) if x.ndim == 3 else None
    if operands is None:
        return None
    key, (weight, *arrays) = operands
    if norm is not None and type(norm) is not nn.RMSNorm:
        x = norm(x)
    offset = 0 if cache is None else cache.offset
    position = stretches.position(offset) if isinstance(offset, int) else offset
    q, k, v = stretches.heads(at, *key)(x, position, weight, *arrays)
    names = attention._known.names
    if key[-1] is None:
        rope, options = attention[names["rope"]], {} if cache is None else {"offset": offset}
        q, k = rope(q, **options), rope(k, **options)
    if cache is not None:
        k, v = cache.update_and_fetch(k, v)
    scale = getattr(attention, names["scale"])
    return cast(mx.array, attention._attend(q, k, v, cache=cache, scale=scale, mask=mask))
