"""Norms and gates of batch-invariant models, by operators that steps take several of at once.

On a GPU, prompts have the norms and gates of :mod:`..ops.products_invariant`, whose bits products
with a norm or a gate have, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..decode.twin import BY_OPERATORS
from ..ops.products_invariant import gated_pair, normed_rows
from ..runtime.backend import current
from ..runtime.devices import device_of
from .attention_patch import made_class, names_used, rebound


def _applies() -> bool:
    return current.get().invariant and device_of().gpu


def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Stands in for ``mlx_lm.models.activations.swiglu``."""
    from mlx_lm.models.activations import swiglu

    return gated_pair(gate, x) if _applies() else swiglu(gate, x)


def _norm(self: nn.RMSNorm, x: mx.array) -> mx.array:
    if _applies():
        return normed_rows(x, self["weight"], self.eps)
    return nn.RMSNorm.__call__(self, x)


@cache
def class_by_operators(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The class that stands in for that of a norm, or of what gates products; None for others."""
    from mlx_lm.models.activations import swiglu

    call = inspect.getattr_static(cls, "__call__", None)
    if cls is nn.RMSNorm:
        call = _norm
    elif isinstance(call, FunctionType):
        scope = call.__globals__
        names = [name for name in names_used(call) if scope.get(name) is swiglu]
        if not names:
            return None
        call = rebound(call, {**scope, **dict.fromkeys(names, _swiglu)})
    else:
        return None
    return made_class(cls, (cls,), {"__call__": call, BY_OPERATORS: cls}, class_by_operators)


def parts_by_operators(model: nn.Module) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """The norms of a model and what gates products of its own layers, and what they become."""
    for module in model.modules():
        has_layers = isinstance(module, nn.RMSNorm) or any(map(len, module.children().values()))
        stock: Any = type(module)
        if has_layers and (cls := class_by_operators(stock)) is not None:
            yield module, cls


def stock_part(module: Any) -> type[nn.Module] | None:
    """The class that such a part had before; None for other modules."""
    return vars(type(module)).get(BY_OPERATORS)
