"""What the modules of a decoder layer compute from: numbers and names, and arrays.

A stretch of :mod:`.compiled_blocks` is kept under the former and called with the latter.
"""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple

import mlx.nn as nn

from ..layers.qlinear import QLinear
from ..metal.quantized_matmul.qmv import Gate
from . import compiled_blocks as stretches
from .compiled_blocks import Matrix, Packing, Static
from .matcher import Known

# The activations of the feed-forward modules in :mod:`.patterns`.
GATES: dict[str, Gate] = {
    "mlp_swiglu": "silu",
    "mlp_silu": "silu",
    "mlp_gelu": "gelu",
    "mlp_gelu_approx": "gelu_approx",
}

# The names of a block's parts in :mod:`.patterns`.
BLOCK_PARTS = ("attention", "mlp", "first_norm", "second_norm")

Operands = tuple[Static, list[Any]]


def known_of(cls: type[nn.Module]) -> Known | None:
    """What a fused class is known to compute; None for other classes."""
    return cls.__dict__.get("_known")


def of_layers(*layers: Any) -> tuple[tuple[Packing, ...], list[Matrix]] | None:
    """Formats and arrays of quantized layers; None if one is of another class."""
    formats, matrices = [], []
    for layer in layers:
        if type(layer) is not QLinear:
            return None
        weight = layer["weight"]
        formats.append((layer.group_size, layer.bits, layer.mode, weight.shape))
        matrices.append((weight, layer["scales"], layer.get("biases"), layer.get("bias")))
    return tuple(formats), matrices


def of_feed_forward(mlp: Any, norm: Any) -> Operands | None:
    """Those of :func:`.compiled_blocks.feed_forward` without its residual; ``norm`` may be None."""
    known = known_of(type(mlp))
    if known is None or known.form not in GATES:
        return None
    names = known.names
    packed = of_layers(mlp[names["gate"]], mlp[names["up"]], mlp[names["down"]])
    if packed is None or packed[0][0] != packed[0][1]:
        return None
    (fmt, _, fmt_down), (gate, up, down) = packed
    if norm is None:
        return (fmt, fmt_down, GATES[known.form], None), [None, gate, up, down]
    if type(norm) is not nn.RMSNorm:
        return None
    return (fmt, fmt_down, GATES[known.form], norm.eps), [norm["weight"], gate, up, down]


def of_heads(attention: Any, norm: Any) -> Operands | None:
    """Those of :func:`.compiled_blocks.heads`, whose norm is ``norm`` if that is an RMS norm."""
    known = known_of(type(attention))
    if known is None or not known.form.startswith("attention"):
        return None
    names = known.names
    packed = of_layers(*(attention[names[key]] for key in "qkv"))
    if packed is None:
        return None
    weight, eps = (norm["weight"], norm.eps) if type(norm) is nn.RMSNorm else (None, None)
    norms, norm_eps = None, None
    if "q_norm" in names:
        pair = attention[names["q_norm"]], attention[names["k_norm"]]
        if not all(type(n) is nn.RMSNorm for n in pair):
            return None
        norms, norm_eps = [n["weight"] for n in pair], tuple(n.eps for n in pair)
    rope, freqs = stretches.split_rope(attention[names["rope"]])
    counts = getattr(attention, names["heads"]), getattr(attention, names["kv_heads"])
    return (packed[0], counts, eps, norm_eps, rope), [weight, packed[1], norms, freqs]


class Block(NamedTuple):
    """A decoder layer of which everything but attention itself is one of the stretches."""

    heads: Operands
    scale: float
    tail: Operands


def of_block(block: Any) -> Block | None:
    """Those of a whole decoder layer, if all its parts are known and nothing else is in it."""
    known = known_of(type(block))
    if known is None or not known.form.startswith("block"):
        return None
    attention, mlp, first, second = (block[known.names[key]] for key in BLOCK_PARTS)
    heads, feed = of_heads(attention, first), of_feed_forward(mlp, second)
    if heads is None or feed is None or type(first) is not nn.RMSNorm:
        return None
    names = known_of(type(attention)).names  # type: ignore[union-attr]
    output = of_layers(attention[names["o"]])
    if output is None:
        return None
    (fmt,), (matrix,) = output
    tail = (fmt, *feed[0]), [matrix, *feed[1]]
    return Block(heads, getattr(attention, names["scale"]), tail)


class Snapshot:
    """Modules with all that is in them, to see later whether that is still so."""

    def __init__(self, modules: list[nn.Module]) -> None:
        parts = [part for module in modules for part in module.modules()]
        self.modules = modules, parts
        # The numbers of a QLinear go with its arrays.
        numbers = [vars(part) for part in parts if type(part) is not QLinear]
        self.contents = [*parts, *numbers]
        self.types, self.before = self._types(), [dict(content) for content in self.contents]

    def holds(self, modules: list[nn.Module]) -> bool:
        """Whether these are the modules, and nothing in them was replaced."""
        try:
            same = len(modules) == len(self.modules[0]) and all(map(is_, modules, self.modules[0]))
            return same and self._types() == self.types and self.contents == self.before
        except Exception:  # dicts compare what is not identical, and arrays have no truth value
            return False

    def _types(self) -> list[type]:
        return [*map(type, self.modules[1])]
