"""Rotary embeddings, as MLX spells them out on a CPU: to one node."""

from __future__ import annotations

import math
import struct
from math import exp

import mlx.core as mx

from ..graph import Node, P, Rule, Spec, Value, fits

_MOST = Value(mx.array(1e30))

_POSITIONS = P("Multiply(Add(range @ Arange(), ~Broadcast(~AsType(offset))), -scale)")
_THETA = P("theta @ Multiply(~Broadcast(ExpandDims(at)), ~Broadcast(rate))", at=_POSITIONS)
_ANGLES = {
    "cos": P("~Broadcast(~(c @ AsType(Cos(theta))))", theta=_THETA),
    "sin": P("~Broadcast(~AsType(Sin(theta)))"),
}
_TURNED = {
    "one": P("Subtract(Multiply(x1 @ Slice(x), cos), Multiply(x2 @ Slice(x), sin))", **_ANGLES),
    "other": P("Add(Multiply(x1, sin), Multiply(x2, cos))", **_ANGLES),
}


def _rope(
    x: Node, x1: Node, x2: Node, offset: Node, scale: float, rate: Node, root: Node, **found: Node
) -> Node | None:
    half = x1.shape[-1]
    begins = [part.arg[0][-1] for part in (x1, x2)]
    step = x1.arg[2][-1]
    traditional = step == 2 and begins == [0, 1]
    if not (traditional or (step == 1 and begins == [0, half])):
        return None
    dims, frequencies = 2 * half, _frequencies(rate)
    if frequencies is None:
        return None
    base, freqs = frequencies
    if root.shape != x.shape or ("rest" in found and found["rest"].arg[0][-1] != dims):
        return None
    if offset.op == "ExpandDims":
        offset = offset.src[0]
    src = (x, offset) if freqs is None else (x, offset, freqs)
    return Node("RoPE", src, (dims, traditional, base, scale, True), x.outputs)


_POWERS = P("Exp(Multiply(steps @ Arange(), -log))")


def _frequencies(rate: Node) -> tuple[float, Node | None] | None:
    """The base of a rotary embedding, or 1 and the array of its periods."""
    if rate.op == "Divide":
        return 1.0, rate.src[1]
    found = fits(_POWERS, rate)
    if found is None:
        return None
    log, half = found["log"], -found["steps"].arg[1]
    base = exp(log * half)
    # MLX computes it in float32.
    near = [n for n in (float(round(base)), base) if n > 0 and _float32(math.log(n) / half) == log]
    return (near or [base])[0], None


def _float32(x: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    return rounded


def _reshaped(turned: Node, root: Node) -> Node | None:
    same = turned.shape == root.shape
    return Node(turned.op, turned.src, turned.arg, root.outputs) if same else None


# Neighbours that were turned.
_PAIRS = P("Reshape(Concatenate(ExpandDims(one), ExpandDims(other)))", **_TURNED)
ROTARY: list[Rule] = [
    (P("Concatenate(one, other)", **_TURNED), _rope),
    (P("Concatenate(one, other, rest @ Slice(x))", **_TURNED), _rope),
    (P("Concatenate(pairs, rest @ Slice(x))", pairs=_PAIRS), _rope),
    (_PAIRS, _rope),
    (P("Reshape(turned @ RoPE)"), _reshaped),
]


def finite(freqs: Node | None) -> Node | None:
    """Reciprocals of rates as this package's kernels take them: infinite ones are none."""
    if freqs is None:
        return None
    most = Node("Constant", (), (_MOST,), (Spec((), mx.float32),))
    return Node("Minimum", (freqs, most), (), freqs.outputs)
