"""What the modules of a decoder layer compute from: static descriptions, and arrays.

An operation of :mod:`.compiled_blocks` is bound to the former and called with the latter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..formats import Format
from ..layers.qlinear import QLinear
from ..metal.quantized_matmul.qmv import Gate
from .compiled_blocks import Static, split_rope
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


def of_layers(*layers: Any) -> Operands | None:
    """Formats and arrays of quantized layers; None if one is of another class."""
    packings, arrays = [], []
    for layer in layers:
        if type(layer) is not QLinear:
            return None
        packings.append((Format(layer.group_size, layer.bits, layer.mode), layer["weight"].shape))
        arrays += [layer.get(name) for name in ("weight", "scales", "biases", "bias")]
    return Operands(tuple(packings), arrays)


def of_feed_forward(mlp: Any, norm: Any) -> Operands | None:
    """Those of a feed-forward module and the norm ahead of it, which may be None."""
    match = match_of(type(mlp))
    if match is None or match.pattern not in GATES or type(norm) not in (nn.RMSNorm, type(None)):
        return None
    packed = of_layers(*(mlp[match.names[key]] for key in ("gate", "up", "down")))
    if packed is None or packed.static[0] != packed.static[1]:
        return None
    weight, eps = (None, None) if norm is None else (norm["weight"], norm.eps)
    return Operands((*packed.static[1:], GATES[match.pattern], eps), [weight, *packed.arrays])


def of_heads(attention: Any, norm: Any) -> Operands | None:
    """Those of :func:`.compiled_blocks.heads`, whose norm is ``norm`` if that is an RMS norm."""
    match = match_of(type(attention))
    if match is None or not match.pattern.startswith("attention"):
        return None
    names = match.names
    packed = of_layers(*(attention[names[key]] for key in "qkv"))
    norms = [attention[names[key]] for key in ("q_norm", "k_norm") if key in names]
    if packed is None or not all(type(each) is nn.RMSNorm for each in norms):
        return None
    weight, eps = (norm["weight"], norm.eps) if type(norm) is nn.RMSNorm else (None, None)
    weights = [each["weight"] for each in norms] or [None, None]
    rope, freqs = split_rope(attention[names["rope"]])
    counts = getattr(attention, names["heads"]), getattr(attention, names["kv_heads"])
    static = packed.static, counts, eps, tuple(each.eps for each in norms) or None, rope
    return Operands(static, [weight, *weights, freqs, *packed.arrays])


def of_tail(out: Operands | None, feed: Operands | None, residual: bool) -> Operands:
    """Those of :func:`.compiled_blocks.tail`."""
    weight, *packed = feed.arrays if feed else [None]
    static = out and out.static[0], feed and feed.static, residual
    return Operands(static, [weight, *(out.arrays if out else []), *packed])


class Snapshot:
    """What is in modules, to see later whether it still is.

    Args:
        parts: the modules.
        others: more dictionaries to look at.
    """

    def __init__(self, parts: list[nn.Module], *others: dict[str, Any]) -> None:
        # The settings of a QLinear go with its arrays.
        settings = [vars(part) for part in parts if type(part) is not QLinear]
        self.parts, self.types = parts, [*map(type, parts)]
        self.contents = [*parts, *settings, *others]
        self.before = [dict(each) for each in self.contents]

    def holds(self) -> bool:
        """Whether nothing in them was replaced."""
        try:  # dicts compare what is not identical, and arrays have no truth value
            return [*map(type, self.parts)] == self.types and self.contents == self.before
        except Exception:
            return False
