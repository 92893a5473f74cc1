"""Copies of models and caches with other arrays: a capture runs them, so that neither changes.

A twin of a model has the stock classes of its modules, so a capture shows one form whatever was
converted. Its code calls some functions of MLX and mlx-lm as :mod:`.marks` has them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..layers.qlinear import Counterpart
from . import marks
from .snapshot import OTHERS

# From the path of an array and the array itself to what takes its place.
Swap = Callable[[str, mx.array], mx.array]
# The attributes of classes that stand in for others, which hold the class that they were made of.
_MADE_OF = ("_patches", "_fuses", "_shards")
# Most of what modules hold.
_PLAIN = (bool, int, float, str, type(None))


def twin(value: Any, swap: Swap, path: str = "", made: dict[int, Any] | None = None) -> Any:
    """A copy of modules, caches and what holds them, with other arrays; everything else is shared.

    ``path`` is that of ``value``, with dots, and ``made`` are twins so far, by what they are of.
    """
    if type(value) in _PLAIN:
        return value
    made = {} if made is None else made
    if id(value) in made:
        return made[id(value)]

    def twins(items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        return {key: twin(each, swap, f"{path}.{key}", made) for key, each in items}

    is_module = isinstance(value, nn.Module)
    if is_module or _is_cache(value):
        cls: Any = _exported(stock_class(type(value))) if is_module else type(value)
        made[id(value)] = new = cls.__new__(cls)
        if is_module:
            dict.update(new, twins(value.items()))
        vars(new).update(twins(vars(value).items()))
    elif isinstance(value, mx.array):
        made[id(value)] = swap(path, value)
    elif type(value) is dict:
        made[id(value)] = twins(value.items())
    elif type(value) in (list, tuple):
        made[id(value)] = type(value)(twins(enumerate(value)).values())
    else:
        return value
    return made[id(value)]


def contents(value: Any) -> dict[Any, Any]:
    """The contents of the twin of a module, list or dict."""
    if isinstance(value, nn.Module):
        return {**value, **vars(value)}
    if isinstance(value, list):
        return dict(enumerate(value))
    return dict(value) if isinstance(value, dict) else {}


def _is_cache(value: Any) -> bool:
    files = [cls.__module__ for cls in type(value).__mro__]
    return "mlx_lm.models.cache" in files and hasattr(value, "__dict__")


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The caches, those in lists of caches too."""
    found: list[Any] = []
    for each in caches:
        if type(each).__name__ == "CacheList":
            found += leaves(each.caches)
        elif each is not None:
            found.append(each)
    return found


def arrays_of(value: Any, path: str = "") -> Iterable[tuple[str, mx.array]]:
    """The arrays of modules and caches and their paths, each once."""
    found: dict[str, mx.array] = {}
    twin(value, found.setdefault, path)
    return found.items()


def is_stepped(model: nn.Module) -> bool:
    """Whether a model of mlx-lm was converted so that it decodes by the graphs of its steps."""
    return "_fuses" in vars(type(model))


def stock_class(cls: Any) -> Any:
    """The class of somebody else's that one of this package's stands in for; else the class."""
    before = None
    while cls is not before:
        before = cls
        for name in _MADE_OF:
            cls = vars(cls).get(name, cls)
        if issubclass(cls, Counterpart):
            cls = cls.stock
    return cls


class _Instead:
    """A module of MLX's, with other things by some of its names."""

    def __init__(self, module: Any, **names: Any) -> None:
        vars(self).update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# The exporter cannot write some operations: these are spelled otherwise, with the same values.
_FAST = "rms_norm", "layer_norm", "rope", "scaled_dot_product_attention"
_EXPORTED = _Instead(
    mx,
    distributed=_Instead(mx.distributed, all_sum=marks.all_sum),
    contiguous=lambda x, *args, **options: x,
    fast=_Instead(mx.fast, **{name: getattr(marks, name) for name in _FAST}),
)


class _Scope(dict[str, Any]):
    """The globals of a file as they are now, but for those that a twin has other versions of.

    Assignments of a twin's code stay here.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        # Python does not ask for these by __missing__.
        super().__init__({name: each for name, each in names.items() if name.startswith("__")})
        self.names = names

    def __missing__(self, name: str) -> Any:
        value = self.names[name]
        return _EXPORTED if value is mx else _otherwise(value)


class _Made(threading.local):
    """The twins of files and classes in this thread: code of others assigns globals meanwhile."""

    def __init__(self) -> None:
        self.scopes, self.classes = dict[int, _Scope](), dict[Any, Any]()


_made = _Made()


def _scope_of(function: FunctionType) -> _Scope:
    names = function.__globals__
    return _made.scopes.setdefault(id(names), _Scope(names))


def assigned() -> list[str]:
    """The globals that twins' code has assigned since the last call; they are forgotten."""
    every = ((scope, name) for scope in _made.scopes.values() for name in scope)
    found = [(scope, name) for scope, name in every if not name.startswith("__")]
    for scope, name in found:
        del scope[name]
    return [name for _, name in found]


def _exported(cls: Any) -> Any:
    """The class for a twin of a module: its methods, as they are now, in other scopes."""
    bases = reversed([each for each in cls.__mro__ if each not in nn.Module.__mro__])
    methods = {name: each for base in bases for name, each in vars(base).items()}
    key = cls, *((n, m) for n, m in methods.items() if isinstance(m, FunctionType))
    if key not in _made.classes:
        body = {name: _otherwise(method, True) for name, method in key[1:]}
        _made.classes[key] = type(cls.__name__, (cls,), body)
    return _made.classes[key]


def _otherwise(value: Any, is_method: bool = False) -> Any:
    """A function or method as twins have it; any other value itself."""
    name, stock = full_name(value), value
    if isinstance(value, FunctionType) and (is_method or name.partition(".")[0] not in OTHERS):
        stock = rebound(value, _scope_of(value))
    mark = marks.INSTEAD.get(name)
    return stock if mark is None else lambda *args, **options: mark(stock, *args, **options)


def full_name(value: Any) -> str:
    """The names of the module and of a function or method in it."""
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', None)}"


def rebound(function: Any, scope: dict[str, Any]) -> FunctionType:
    """A function as another one is, with other globals."""
    more = function.__name__, function.__defaults__, function.__closure__
    new = FunctionType(function.__code__, scope, *more)
    new.__kwdefaults__, new.__doc__ = function.__kwdefaults__, function.__doc__
    new.__qualname__ = function.__qualname__
    new.__dict__.update(function.__dict__)
    return new
