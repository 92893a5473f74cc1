"""Modules of a model whose step is no graph, each as a graph of its own.

Only those that compute with one array and arrays of their own, such as what mixes the streams of
hyper-connections: each of their operations would be a launch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import compiled
from .attention_patch import made_class, stock_class
from .matcher import Mismatch
from .step_kinds import Unsupported

# Of an input: for more rows launches take longer than they cost.
_MAX_ROWS = 128
_STATE = ("_no_grad", "_training")


@cache
def graph_class(cls: type[nn.Module]) -> type[nn.Module] | Mismatch:
    """The class that stands in for that of a module without others in it, or why there is none."""
    stock, call = stock_class(cls), inspect.getattr_static(cls, "__call__", None)
    if not isinstance(call, FunctionType) or stock.__module__.startswith("mlx."):
        return Mismatch("its __call__ is no method of a model")
    if len(inspect.signature(call).parameters) != 2:
        return Mismatch("it takes more than an array")
    failed: list[str] = []

    def graphed(self: Any, x: Any) -> Any:
        where = compiled.context()
        if where is None or failed or self.training or x.size > _MAX_ROWS * x.shape[-1]:
            return call(self, x)
        settings = tuple(item for item in vars(self).items() if item[0] not in _STATE)
        try:
            return _graph(where, call, stock, settings, (*self,))(x, *self.values())
        except Exception as error:  # it looks at values, or has settings that cannot be compared
            failed.append(repr(error))  # without the arrays that its traceback holds
            return call(self, x)

    return made_class(stock, (cls,), {"__call__": graphed, "_fuses": cls}, graph_class)


@compiled.operation
def _graph(
    call: FunctionType, cls: type[nn.Module], settings: Any, names: tuple[str, ...]
) -> Callable[..., Any]:
    def run(x: mx.array, *arrays: mx.array) -> Any:
        module: Any = cls.__new__(cls)
        vars(module).update(settings)
        dict.update(module, zip(names, arrays, strict=True))
        y = call(module, x)
        if [*map(id, module.values())] != [*map(id, arrays)] or (
            *vars(module).items(),
        ) != settings:
            raise Unsupported("a call changes the module")
        return y

    return run
