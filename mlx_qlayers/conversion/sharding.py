"""Tensor parallel models: mlx-lm's own ``model.shard``, for converted models and uneven shares.

Sizes that the number of ranks does not divide are padded with zeros: heads that add nothing to the
output projection, and columns that add nothing behind an activation. Keys and values of fewer heads
than ranks are repeated. A layer that cannot be split stays as it is.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..decode.twin import stock_class
from ..formats import Format
from ..layers.qlinear import Counterpart
from ..runtime.explain import note
from .attention_patch import made_class
from .plan import copied, counterpart_of, modules

# Attributes that a class keeps of the one that it was made of.
_MARKS = ("_fuses", "_patches")
# The layers of modules as mlx-lm's code names them where it splits them.
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def shard_model(model: nn.Module, group: mx.distributed.Group, *, experts: bool = False) -> None:
    """Leave each rank of a group its share of the layers that mlx-lm's ``model.shard`` splits.

    All ranks make this call. With ``experts`` a rank has some experts of a mixture, whole. A
    ValueError names a layer that cannot be split among so many ranks; then nothing was changed.
    """
    if group.size() == 1:
        return
    if not hasattr(model, "shard"):
        raise ValueError(f"mlx-lm has no tensor parallel layers for {type(model).__module__}")
    _shard(copied(model), group, experts)  # where an error changes nothing that counts
    _shard(model, group, experts)


@cache
def sharding_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of converted models whose ``shard`` leaves their layers converted."""
    marks = {name: vars(cls)[name] for name in _MARKS if name in vars(cls)}

    def shard(self: nn.Module, group: mx.distributed.Group | None = None) -> None:
        shard_model(self, group or mx.distributed.init())

    body = marks | {"shard": shard, "_shards": cls}
    made = made_class(stock_class(cls), (cls,), body, sharding_class)
    made.__name__ = made.__qualname__ = cls.__name__
    return made


def _shard(model: Any, group: mx.distributed.Group, experts: bool) -> None:
    ranks, before = group.size(), dict(modules(model))
    converted = {path for path, module in before.items() if isinstance(module, Counterpart)}
    heads = dict(_heads(model))
    for path, module in before.items():
        if (heads_of := _names_of_heads(module)) is not None:
            _even_heads(path, module, heads_of, ranks)
        elif {*module} == {*_FEED_FORWARD}:
            _even_width(path, module, ranks)
    mixtures = _mixtures(before) if experts else []
    for _, mixture, names in mixtures:
        mixture.update_modules({name: nn.Module() for name in names})
    try:
        stock_class(type(model)).shard(model, group)
    except (ValueError, AttributeError, AssertionError) as error:
        raise ValueError(_blame(model, error, ranks)) from error
    for path, mixture, names in mixtures:
        owner = dict(modules(model))[path.rpartition(".")[0]]
        if getattr(owner, "sharding_group", None) is None:
            raise ValueError(f"{path}: nothing adds the experts of the ranks up")
        mixture.update_modules({name: before[f"{path}.{name}"] for name in names})
        _own_experts(mixture, names, group)
    for path, module in modules(model):
        cls = counterpart_of(type(module))
        if path in converted and cls is not None:
            module.__class__ = cls
    for (path, name), count in dict(_heads(model)).items():
        if count * ranks < heads[path, name]:
            raise ValueError(
                f"{path}: {heads[path, name]} {name} cannot be split among {ranks} ranks"
            )


def _heads(model: nn.Module) -> Iterator[tuple[tuple[str, str], int]]:
    """The numbers of heads of all modules."""
    for path, module in modules(model):
        for name, value in vars(module).items():
            if name.endswith("heads") and type(value) is int:
                yield (path, name), value


def _names_of_heads(module: Any) -> tuple[str, str] | None:
    """The attributes that hold the numbers of heads in plain attention; None for other modules."""
    if not {*_ATTENTION} <= {*module} <= {*_ATTENTION, "q_norm", "k_norm", "rope"}:
        return None
    named = [name for path, name in dict(_heads(module)) if not path]
    keys = [name for name in named if "kv" in name or "key_value" in name]
    rest = [name for name in named if name not in keys]
    if len(keys) != 1 or len(rest) != 1:
        return None
    (heads,), (kv_heads,) = rest, keys
    count, kv = getattr(module, heads), getattr(module, kv_heads)
    rows = [len(module[name]["weight"]) for name in _ATTENTION[:2]]
    return (heads, kv_heads) if rows[0] * kv == rows[1] * count else None


def _even_heads(path: str, attention: Any, names: tuple[str, str], ranks: int) -> None:
    """Let the number of ranks divide that of the heads, for keys and values too."""
    q, k, v, o = (attention[name] for name in _ATTENTION)
    count, kv = (getattr(attention, name) for name in names)
    if kv % ranks == 0:
        return
    each = count // kv
    if ranks % kv == 0 and each % (ranks // kv) == 0:
        total = ranks
        for layer in (k, v):
            repeated = {
                name: mx.repeat(array.reshape(kv, -1), ranks // kv, 0).reshape(-1, *array.shape[1:])
                for name, array in layer.parameters().items()
            }
            layer.update(repeated)
    else:
        total = -(-kv // ranks) * ranks
        for layer, had in ((q, count), (k, kv), (v, kv)):
            _grow(path, layer, had, had * total // kv)
        _grow(path, o, count, each * total, columns=True)
        count = each * total
    vars(attention).update(zip(names, (count, total), strict=True))
    note("sharding", "uneven", f"{path}: {kv} heads of keys, as {total}")


def _even_width(path: str, mlp: Any, ranks: int) -> None:
    """Let the number of ranks divide the groups of the product behind an activation."""
    gate, up, down = (mlp[name] for name in _FEED_FORWARD)
    width, unit = gate["weight"].shape[0], ranks * getattr(down, "group_size", 1)
    total = -(-width // unit) * unit
    if width == total:
        return
    for layer, columns in ((gate, False), (up, False), (down, True)):
        _grow(path, layer, width, total, columns)
    note("sharding", "uneven", f"{path}: a width of {width}, as {total}")


def _grow(path: str, layer: nn.Module, count: int, total: int, columns: bool = False) -> None:
    """Add rows or columns of zeros to a layer, from ``count`` equal parts to ``total``."""
    grown = {}
    for name, array in layer.parameters().items():
        if name == "bias" and columns:
            continue
        axis = array.ndim - 1 if columns or name == "bias" else array.ndim - 2
        more, rest = divmod(array.shape[axis] * (total - count), count)
        if rest:
            raise ValueError(
                f"{path}: {count} parts of {_told(layer)} cannot be made {total}: a group of its "
                "quantized weight belongs to two of them"
            )
        grown[name] = mx.pad(array, [(0, more if i == axis else 0) for i in range(array.ndim)])
    layer.update(grown)


def _mixtures(parts: dict[str, nn.Module]) -> list[tuple[str, Any, list[str]]]:
    """The mixtures of experts with the names of the layers that have an expert in each matrix."""
    from mlx_lm.models.switch_layers import SwitchGLU

    found = []
    for path, module in parts.items():
        if isinstance(module, SwitchGLU):
            names = [name for name, layer in module.children().items() if "weight" in layer]
            found.append((path, module, names))
    if not found:
        raise ValueError("the model has no mixture of experts")
    return found


def _own_experts(mixture: Any, names: list[str], group: mx.distributed.Group) -> None:
    """Leave a mixture the experts of this rank; the first ranks may have one more."""
    total = len(mixture[names[0]]["weight"])
    base, extra = divmod(total, group.size())
    first = group.rank() * base + min(group.rank(), extra)
    own = range(first, first + base + (group.rank() < extra))
    if total < group.size():
        raise ValueError(f"{total} experts cannot be split among {group.size()} ranks")
    for name in names:
        layer = mixture[name]
        layer.update(
            {key: array[own.start : own.stop] for key, array in layer.parameters().items()}
        )
    mixture.own_experts = own
    cls: Any = type(mixture)
    mixture.__class__ = _experts_class(cls)


@cache
def _experts_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of mixtures that have some of the experts: what others have to give is zero."""

    def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        experts = self.own_experts
        own = (indices >= experts.start) & (indices < experts.stop)
        y: mx.array = self._of_own(x, mx.where(own, indices - experts.start, 0))
        return mx.where(own[..., None], y, 0)

    body = {"__call__": call, "_of_own": cls.__call__}
    return made_class(cls, (cls,), body, _experts_class)


def _blame(model: nn.Module, error: BaseException, ranks: int) -> str:
    """Which layer could not be split, by what mlx-lm's code was at."""
    parts, at = dict(model.named_modules()), ""
    paths = {id(module): path for path, module in parts.items()}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        at = paths.get(id(frame.f_locals.get("module")), at)
        inner = frame.f_locals.get("path", "") if frame.f_code.co_name == "_shard_fn" else ""
        at = ".".join(filter(None, (at, inner.rpartition(".")[0])))
    if "weight" not in parts.get(at, ()):
        return f"the model cannot be split among {ranks} ranks: {error}"
    return (
        f"{at}: {_told(parts[at])} cannot be split among {ranks} ranks, which takes whole rows and "
        f"whole groups of columns: {error}"
    )


def _told(layer: Any) -> str:
    """A layer's matrix in words."""
    *rows, columns = layer["weight"].shape
    if "scales" not in layer:
        return "x".join(map(str, (*rows, columns)))
    fmt = Format(layer.group_size, layer.bits, layer.mode)
    shape = "x".join(map(str, (*rows, fmt.dims(layer["weight"]))))
    return f"{shape} in groups of {fmt.group_size}"
