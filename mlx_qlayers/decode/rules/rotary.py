"""Rotary embeddings, as MLX spells them out on a CPU: to one node."""

from __future__ import annotations

import math
import struct
from math import exp
from typing import Any

from ..graph import Node, P, Rule, any_, maybe, number_of, under


def _part(name: str) -> Any:
    return P("Slice", any_("x"), name=name)


_POSITIONS = P(
    "Multiply",
    P("Add", P("Arange", name="range"), maybe("Broadcast", maybe("AsType", any_("offset")))),
    maybe("Broadcast", any_("scale")),
)
_THETA = P(
    "Multiply",
    maybe("Broadcast", P("ExpandDims", _POSITIONS)),
    maybe("Broadcast", any_("rate")),
    name="theta",
)
_COS = maybe("Broadcast", maybe("AsType", P("Cos", _THETA), name="c"))
_SIN = maybe("Broadcast", maybe("AsType", P("Sin", any_("theta"))))
_TURNED = (
    P("Subtract", P("Multiply", _part("x1"), _COS), P("Multiply", _part("x2"), _SIN)),
    P("Add", P("Multiply", any_("x1"), _SIN), P("Multiply", any_("x2"), _COS)),
)


def _rope(
    x: Node,
    x1: Node,
    x2: Node,
    offset: Node,
    scale: Node,
    rate: Node,
    root: Node,
    rest: Node | None = None,
    **_: Node,
) -> Node | None:
    half = x1.shape[-1]
    factor = number_of(scale)
    begins = [part.arg[0][-1] for part in (x1, x2)]
    step = x1.arg[2][-1]
    traditional = step == 2 and begins == [0, 1]
    if factor is None or not (traditional or (step == 1 and begins == [0, half])):
        return None
    dims, frequencies = 2 * half, _frequencies(rate)
    if frequencies is None:
        return None
    base, freqs = frequencies
    if root.shape != x.shape or (rest is not None and rest.arg[0][-1] != dims):
        return None
    if offset.op == "ExpandDims":
        offset = offset.src[0]  # type: ignore[assignment]
    src = (x, offset) if freqs is None else (x, offset, freqs)
    return Node("RoPE", src, (dims, traditional, base, factor, True), x.outputs)


def _frequencies(rate: Node) -> tuple[float, Node | None] | None:
    """The base of a rotary embedding, or 1 and the array of its periods."""
    if rate.op == "Divide":
        return 1.0, rate.src[1]
    if rate.op != "Exp" or rate.src[0] is None or rate.src[0].op != "Multiply":
        return None
    numbers = [s for s in rate.src[0].src if s is not None]
    steps = next((n for n in numbers if n.op == "Arange"), None)
    logs = [number_of(under(n)) for n in numbers if n is not steps]
    log = logs[0] if logs else None
    if steps is None or log is None:
        return None
    half = -steps.arg[1]
    base = exp(log * half)
    # MLX computes it in float32.
    near = [n for n in (float(round(base)), base) if n > 0 and _float32(math.log(n) / half) == log]
    return (near or [base])[0], None


def _float32(x: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    return rounded


def _reshaped(turned: Node, root: Node) -> Node | None:
    return (
        Node(turned.op, turned.src, turned.arg, root.outputs)
        if turned.shape == root.shape
        else None
    )


# What is not turned, and neighbours that were.
_REST = P("Slice", any_("x"), name="rest")
_NEIGHBOURS = P("Reshape", P("Concatenate", *(P("ExpandDims", each) for each in _TURNED)))

ROTARY: list[Rule] = [
    (P("Concatenate", *_TURNED), _rope),
    (P("Concatenate", *_TURNED, _REST), _rope),
    (P("Concatenate", _NEIGHBOURS, _REST), _rope),
    (_NEIGHBOURS, _rope),
    (P("Reshape", P("RoPE", name="turned", more=True)), _reshaped),
]
