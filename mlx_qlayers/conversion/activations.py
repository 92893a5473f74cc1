"""Recognises what experts make of the products with their two matrices, by what the code did."""

from __future__ import annotations

from math import inf
from typing import Any

import mlx.core as mx

from ..options import Clipped
from .matcher import Mismatch
from .recorder import Recorder, recorded, recording
from .routers import plain

_BY_NAME = ("silu", "gelu", "gelu_approx")


def recognise_activation(module: Any) -> str | Clipped | None:
    """The ``gate`` of :func:`.ops.experts.experts_products` for a module of (up, gate), or None."""
    call = recorded(type(module).__call__)
    if isinstance(call, Mismatch):
        return None
    up, gate = mx.zeros((1,)), mx.zeros((1,))
    with recording(Recorder({})) as recorder:
        y = call(module, up, gate)
    product = recorder.node(plain(recorder, y))
    if product is None or product.op != "mul":
        return None
    for first, second in (product.args, product.args[::-1]):
        of_gate, of_up = _of_gate(recorder, first, gate), _of_up(recorder, second, up)
        if of_gate is None or of_up is None or of_gate[1] != of_up[0]:
            continue
        (name, limit, alpha), (_, shift) = of_gate, of_up
        if (limit, alpha, shift) == (inf, 1.0, 0.0):
            return name
        return Clipped(limit, alpha, shift) if name == "silu" else None
    return None


def _of_gate(recorder: Recorder, array: Any, gate: mx.array) -> tuple[str, float, float] | None:
    """The activation of the gate, what that is clipped to, and the scale in a sigmoid."""
    node = recorder.node(plain(recorder, array))
    if node is None:
        return None
    name, alpha, inner = node.op, 1.0, node.args[0]
    if name == "mul":  # x * sigmoid(alpha * x)
        sigmoid = recorder.node(plain(recorder, node.args[1]))
        if sigmoid is None or sigmoid.op != "sigmoid":
            return None
        name, turned = "silu", sigmoid.args[0]
        scaled = recorder.node(plain(recorder, turned))
        if scaled is not None and scaled.op == "mul":
            alpha, turned = sorted(scaled.args, key=lambda each: isinstance(each, mx.array))
        if not isinstance(alpha, int | float) or not _same(recorder, turned, inner):
            return None
    limit, least = inf, recorder.node(plain(recorder, inner))
    if least is not None and least.op == "minimum" and isinstance(least.args[1], int | float):
        inner, limit = least.args
    if name not in _BY_NAME or not _same(recorder, inner, gate):
        return None
    return name, float(limit), float(alpha)


def _of_up(recorder: Recorder, array: Any, up: mx.array) -> tuple[float, float] | None:
    """What the second product is clipped to, and what is added."""
    limit, shift, node = inf, 0.0, recorder.node(plain(recorder, array))
    if node is not None and node.op == "add" and isinstance(node.args[1], int | float):
        array, shift = node.args
        node = recorder.node(plain(recorder, array))
    if node is not None and node.op == "clip" and len(node.args) == 3:
        array, least, limit = node.args
        if not isinstance(limit, int | float) or least != -limit:
            return None
    return (float(limit), float(shift)) if _same(recorder, array, up) else None


def _same(recorder: Recorder, one: Any, other: Any) -> bool:
    return plain(recorder, one) is plain(recorder, other)
