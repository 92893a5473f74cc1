"""Lets somebody else's module compute attention and gates with this package's operations.

mlx-lm's architectures compute attention in a function that each of them imports by name, linear
attention in another, and the gate of feed-forward layers in a third. A module is patched by giving
it a class of its own, made from its class, in which the methods that use such a function are the
same code over a private copy of their globals, where the name means ours. Neither the module's file
nor its class changes, so other models in the process are untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import getclosurevars
from types import FunctionType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from ..decode.twin import full_name, rebound
from ..layers.fused_attention import FusedAttention
from ..ops.attention import attention
from ..ops.attention_invariant import attention_from
from ..ops.gated_delta import gated_delta
from ..ops.signature import FLOATS
from ..ops.swiglu import by_mlx, swiglu
from ..options import RotatedRows
from ..reference.hadamard import rotated_heads
from ..runtime.backend import current
from ..runtime.devices import device_of
from .invariance import in_time, starts_of
from .long_prompts import wait


def patched_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Stands in for ``mlx_lm.models.base.scaled_dot_product_attention``."""
    wait(queries)
    if isinstance(keys, RotatedRows):
        packed = tuple(keys), tuple(values)
        out = patched_attention(rotated_heads(queries), *packed, cache, scale, mask, sinks)
        return rotated_heads(out)
    if current.get().invariant:
        if device_of().gpu:
            starts = starts_of(cache, queries.shape[0])
            given = starts, queries, keys, values
            return attention_from(*given, scale=scale, mask=mask, sinks=sinks)
        keys, values, mask = in_time(cache, keys, values, mask)
    return attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def patched_gated_delta(*arrays: Any, **options: Any) -> tuple[mx.array, ...]:
    """Stands in for ``mlx_lm.models.gated_delta.gated_delta_ops``, which runs beside Metal."""
    return tuple(gated_delta(*arrays, **options))


def patched_swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Stands in for ``mlx_lm.models.activations.swiglu``, which is one kernel of MLX's on a GPU.

    Not so its gradients; and batch-invariant models' products take it in, computed as they do.
    """
    if by_mlx() or (gate.shape, gate.dtype) != (x.shape, x.dtype) or x.dtype not in FLOATS:
        from mlx_lm.models import activations

        stock: Any = activations.swiglu
        return cast(mx.array, stock(gate, x))
    return swiglu(gate, x)


# By the full names of the functions that they stand in for.
_STAND_INS: dict[str, Any] = {
    "mlx_lm.models.activations.swiglu": patched_swiglu,
    "mlx_lm.models.base.scaled_dot_product_attention": patched_attention,
    "mlx_lm.models.gated_delta.gated_delta_ops": patched_gated_delta,
}


def is_patched(module: nn.Module) -> bool:
    """Whether ``module`` is of a class that :func:`patched_class` made."""
    return "_patches" in type(module).__dict__


@cache
def patched_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The class that stands in for ``cls``; None if it uses no function that mlx-lm shares."""
    known = {name: each for base in reversed(cls.__mro__) for name, each in vars(base).items()}
    functions = {name: each for name, each in known.items() if isinstance(each, FunctionType)}
    methods = {name: each for name, each in functions.items() if _uses_shared(each)}
    if not methods:
        return None
    namespaces: dict[int, dict[str, Any]] = {}
    body: dict[str, Any] = {name: _patched(f, namespaces) for name, f in methods.items()}
    body |= {"_patches": cls}
    attends = any(_uses_shared(f, _attends) for f in methods.values())
    # FusedAttention comes last: it marks the module, and nothing of it is ever called.
    return made_class(cls, (cls, *[FusedAttention] * attends), body, patched_class)


def made_class(
    stock: type[nn.Module], bases: tuple[type, ...], body: dict[str, Any], *maker: Any
) -> type[nn.Module]:
    """A class that looks like a stock one, and what made it of its base: a function, arguments."""
    body |= {"__module__": stock.__module__, "__doc__": stock.__doc__, "__reduce_ex__": _reduce}
    body["_extra_repr"] = stock._extra_repr
    body["_made"] = (*getattr(bases[0], "_made", (stock,)), maker)
    return type(f"Fused{stock.__name__}", bases, body)


def _reduce(module: Any, protocol: int) -> tuple[Any, ...]:
    """Pickle a module by the class it had before: its own has no importable name."""
    return _new, module._made, *nn.Module.__reduce_ex__(module, max(2, protocol))[2:]


def _new(cls: Any, *makers: Any) -> nn.Module:
    for make, *arguments in makers:
        cls = make(cls, *arguments)
    return cls.__new__(cls)


def _patched(function: FunctionType, namespaces: dict[int, dict[str, Any]]) -> FunctionType:
    """The same code over a copy of its globals in which the shared function is ours."""
    scope = function.__globals__
    if id(scope) not in namespaces:
        namespaces[id(scope)] = namespace = {**scope}
        for name, value in scope.items():
            if (ours := _ours(value)) is not None:
                namespace[name] = ours
            elif isinstance(value, FunctionType) and _uses_shared(value):
                namespace[name] = _patched(value, namespaces)
    return rebound(function, namespaces[id(scope)])


def _uses_shared(
    function: FunctionType,
    counts: Callable[[object], Any] | None = None,
    seen: frozenset[FunctionType] = frozenset(),
) -> bool:
    """Whether ``function``, or a function that it calls by name, names a shared one that counts."""
    if function in seen:
        return False
    used = getclosurevars(function).globals.values()
    return any(map(counts or _ours, used)) or any(
        isinstance(value, FunctionType) and _uses_shared(value, counts, seen | {function})
        for value in used
    )


def _ours(value: object) -> Any:
    """The stand-in for a function that mlx-lm's architectures share; None for other objects."""
    return _STAND_INS.get(full_name(value))


def _attends(value: object) -> bool:
    return _ours(value) not in (None, patched_swiglu)
