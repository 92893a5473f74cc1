"""Routes the attention product of somebody else's module to this package's operation.

mlx-lm's architectures compute attention in a function that each of them imports by name. A module
is routed by giving it a class of its own, made from its class, in which the methods that use that
function are the same code over a private copy of their globals, where the name means ours. Neither
the module's file nor its class changes, so other models in the process are untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..layers.fused_attention import FusedAttention
from ..ops.attention import attention


def routed_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Stands in for ``mlx_lm.models.base.scaled_dot_product_attention``."""
    return attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def is_routed(module: nn.Module) -> bool:
    """Whether ``module`` is of a class that :func:`routed_class` made."""
    return "_routes" in type(module).__dict__


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class that a routed module had before."""
    return type(module).__dict__["_routes"]


@cache
def routed_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The class that stands in for ``cls``; None if ``cls`` does not use the shared function."""
    methods = {
        name: function
        for name in dir(cls)
        if isinstance(function := _defined(cls, name), FunctionType) and _uses_shared(function)
    }
    if not methods:
        return None
    namespaces: dict[int, dict[str, Any]] = {}
    rebound = {name: _rebind(function, namespaces) for name, function in methods.items()}
    body = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": _reduce,
        "_extra_repr": cls._extra_repr,
        "_routes": cls,
    }
    # FusedAttention comes last: it marks the module, and nothing of it is ever called.
    return type(f"Fused{cls.__name__}", (cls, FusedAttention), body | rebound)


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Pickle a routed module by the class it had before: its own has no importable name."""
    reduced = nn.Module.__reduce_ex__(module, max(2, protocol))
    return _new, (stock_class(module),), *reduced[2:]


def _new(stock: type[nn.Module]) -> nn.Module:
    cls = routed_class(stock)
    assert cls is not None
    return cls.__new__(cls)


def _defined(cls: type, name: str) -> object:
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return None


def _rebind(function: FunctionType, namespaces: dict[int, dict[str, Any]]) -> FunctionType:
    """The same code over a copy of its globals in which the shared function is ours."""
    scope = function.__globals__
    if id(scope) not in namespaces:
        namespaces[id(scope)] = namespace = {**scope}
        for name, value in scope.items():
            if _is_shared(value):
                namespace[name] = routed_attention
            elif isinstance(value, FunctionType) and _uses_shared(value):
                namespace[name] = _rebind(value, namespaces)
    twin = FunctionType(
        function.__code__,
        namespaces[id(scope)],
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(function.__dict__)
    twin.__doc__, twin.__qualname__ = function.__doc__, function.__qualname__
    return twin


def _uses_shared(function: FunctionType, seen: frozenset[CodeType] = frozenset()) -> bool:
    """Whether ``function``, or a function that it calls by name, names the shared one."""
    code = function.__code__
    if code in seen:
        return False
    used = [function.__globals__.get(name) for name in _names(code)]
    return any(map(_is_shared, used)) or any(
        isinstance(value, FunctionType) and _uses_shared(value, seen | {code}) for value in used
    )


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_shared(value: object) -> bool:
    from mlx_lm.models import base

    shared: Callable[..., mx.array] = base.scaled_dot_product_attention
    return value is shared
