"""What the modules of a decoder layer are as operands of :mod:`.compiled_blocks`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..formats import Format
from ..layers.int8_linear import Int8Linear
from ..layers.sharded import LINEARS, QShardedToAllLinear
from ..metal.quantized_matmul.qmv import Gate
from .compiled_blocks import INT8, Packing, Static, split_rope
from .matcher import Match

# The activations of the feed-forward modules in :mod:`.patterns`.
GATES: dict[str, Gate] = {
    "mlp_swiglu": "silu",
    "mlp_silu": "silu",
    "mlp_gelu": "gelu",
    "mlp_gelu_approx": "gelu_approx",
}

# The names of a block's parts in :mod:`.patterns`.
BLOCK_PARTS = ("attention", "mlp", "first_norm", "second_norm")


class Operands(NamedTuple):
    """Static arguments of an operation, and its arrays beside the rows."""

    static: Static
    arrays: list[mx.array | None]


def match_of(cls: type[nn.Module]) -> Match | None:
    """What a fused class was recognised as; None for other classes."""
    return cls.__dict__.get("_match")


def of_layers(*layers: Any, int8: mx.Dtype | None = None) -> Operands | None:
    """Formats and arrays of quantized layers; None if one is of another class.

    Args:
        layers: the layers.
        int8: the dtype of rows that are multiplied in 8-bit integers, if they are.
    """
    if int8 is not None:
        return _of_int8(layers, int8)
    packings, arrays = [], []
    for layer in layers:
        if not isinstance(layer, LINEARS):
            return None
        fmt, group = Format(layer.group_size, layer.bits, layer.mode), getattr(layer, "group", None)
        groups = (None, group) if type(layer) is QShardedToAllLinear else (group, None)
        packings.append(Packing(fmt, layer["weight"].shape, *groups))
        arrays += [layer.get(name) for name in ("weight", "scales", "biases", "bias")]
    return Operands(tuple(packings), arrays)


def _of_int8(layers: Sequence[Any], dtype: mx.Dtype) -> Operands | None:
    if not all(isinstance(each, Int8Linear) and each.goes_with(dtype) for each in layers):
        return None
    packings = tuple(Packing(INT8, each["_int8"].shape) for each in layers)
    arrays = [(each["_int8"], each["_int8_scales"], None, each.get("bias")) for each in layers]
    return Operands(packings, [*chain.from_iterable(arrays)])


def of_feed_forward(mlp: Any, norm: Any, int8: mx.Dtype | None = None) -> Operands | None:
    """Those of a feed-forward module and the norm ahead of it, which may be None."""
    match = match_of(type(mlp))
    if match is None or match.kind != "mlp" or type(norm) not in (nn.RMSNorm, type(None)):
        return None
    packed = of_layers(*(mlp[match.names[key]] for key in ("gate", "up", "down")), int8=int8)
    if packed is None or packed.static[0] != packed.static[1]:
        return None
    weight, eps = _of_norm(norm)
    return Operands((*packed.static[1:], GATES[match.pattern], eps), [weight, *packed.arrays])


def of_heads(attention: Any, norm: Any, int8: mx.Dtype | None = None) -> Operands | None:
    """Those of :func:`.compiled_blocks.heads`, whose norm is ``norm`` if that is an RMS norm."""
    match = match_of(type(attention))
    if match is None or match.kind != "attention":
        return None
    names = match.names
    packed = of_layers(*(attention[names[key]] for key in "qkv"), int8=int8)
    inner = [attention[names[key]] if key in names else None for key in ("q_norm", "k_norm")]
    if packed is None or not all(type(each) in (nn.RMSNorm, type(None)) for each in inner):
        return None
    weight, eps = _of_norm(norm if type(norm) is nn.RMSNorm else None)
    (q_weight, q_eps), (k_weight, k_eps) = map(_of_norm, inner)
    rope, freqs = split_rope(attention[names["rope"]])
    counts = getattr(attention, names["heads"]), getattr(attention, names["kv_heads"])
    static = packed.static, counts, eps, (q_eps, k_eps), rope
    return Operands(static, [weight, q_weight, k_weight, freqs, *packed.arrays])


def _of_norm(norm: Any) -> tuple[mx.array | None, float | None]:
    return (None, None) if norm is None else (norm["weight"], norm.eps)


def of_tail(out: Operands | None, feed: Operands | None, residual: bool) -> Operands:
    """Those of :func:`.compiled_blocks.tail`."""
    weight, *packed = feed.arrays if feed else [None]
    static = out and out.static[0], feed and feed.static, residual
    return Operands(static, [weight, *(out.arrays if out else []), *packed])
