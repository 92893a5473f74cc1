"""Experts of a mixture inside the graph of a step, with few launches.

mlx-lm computes them in ``SwitchGLU``: two gathered products, an activation and a third product. In
a graph of :mod:`.compiled_step` the first two and the activation are one launch, and the third is
another. For a single row that one also adds up the products by their scores, which the model's own
code does behind it, as ``(y * scores[..., None]).sum(axis=-2)``: there that expression asks here.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..formats import Format
from ..ops.experts import experts_combined, experts_products
from ..ops.quantized_route import is_qmv
from ..options import PackedMatrix
from .attention_patch import made_class, stock_class
from .matcher import Match
from .step_slots import Chosen, current_step

# The name of what such a module is.
EXPERTS = "experts"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_COMBINED = "_products_combined"


def is_experts(cls: type) -> bool:
    """Whether a class is mlx-lm's of gated experts."""
    stock = stock_class(cls)
    return (stock.__module__, stock.__name__) == ("mlx_lm.models.switch_layers", "SwitchGLU")


@cache
def experts_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that stands in for mlx-lm's of gated experts."""
    body = {"__call__": _call, "_fuses": cls, "_match": Match(EXPERTS, {})}
    return made_class(stock_class(cls), (cls,), body, experts_class)


def _call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
    step = current_step.get()
    layers = [self[name] for name in PROJECTIONS]
    formats = [Format(each.group_size, each.bits, each.mode) for each in layers]
    plain = not any("global_scale" in each or each.training for each in layers)
    few = is_qmv(x) and indices.shape[:-1] == x.shape[:-1]
    if step is None or not plain or not few or formats[0] != formats[1]:
        y: mx.array = type(self)._fuses.__call__(self, x, indices)
        return y
    gate, up, down = (
        PackedMatrix(*(each.get(name) for name in ("weight", "scales", "biases", "bias")))
        for each in layers
    )
    activation = "silu" if type(self.activation).__qualname__ == "SwiGLU" else None
    products = experts_products(x, indices, [gate, up], formats[0], gate=activation)
    h = products[0] if activation else self.activation(products[1], products[0])
    (y,) = experts_products(h, indices, [down], formats[2])
    step.chosen[id(y)] = Chosen(
        y, lambda scores: experts_combined(h, indices, scores, down, formats[2])
    )
    return y


def combined(y: mx.array, scores: mx.array, cast: bool = False) -> mx.array:
    """``(y * scores[..., None]).sum(axis=-2)``, and cast to the dtype of ``y`` if so."""
    step = current_step.get()
    found = step.chosen.get(id(y)) if step is not None else None
    # Sequences may share experts, whose matrices are read once by the product alone.
    if found is None or scores.shape != y.shape[:-1] or scores.size != scores.shape[-1]:
        total = (y * scores[..., None]).sum(axis=-2)
        return total.astype(y.dtype) if cast else total
    total = found.combine(scores)
    return total if cast else total.astype(mx.result_type(y.dtype, scores.dtype))


class CombinedSums(ast.NodeTransformer):
    """Let sums of products by scores ask :func:`combined`; ``names`` are what that takes."""

    def __init__(self) -> None:
        self.names: dict[str, object] = {}

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """A sum of products by scores, and such a one cast to the dtype of the products."""
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(ast.BinOp(y, ast.Mult(), by), "sum")):
                if _text(node) == "axis=-2" and (scores := _unexpanded(by)) is not None:
                    self.names[_COMBINED] = combined
                    return ast.Call(ast.Name(_COMBINED, ast.Load()), [y, scores], [])
            case ast.Call(
                ast.Attribute(ast.Call(ast.Name(id=name), [y, scores]), "astype"),
                [ast.Attribute(of, "dtype")],
            ) if name == _COMBINED and ast.unparse(of) == ast.unparse(y):
                return ast.Call(ast.Name(name, ast.Load()), [y, scores, ast.Constant(True)], [])
        return node


def _text(call: ast.Call) -> str:
    return ", ".join(ast.unparse(each) for each in (*call.args, *call.keywords))


def _unexpanded(node: ast.expr) -> ast.expr | None:
    """``scores`` of ``scores[..., None]`` or ``mx.expand_dims(scores, axis=-1)``."""
    match node:
        case ast.Subscript(scores, ast.Tuple([ast.Constant(a), ast.Constant(b)])):
            return scores if a is ... and b is None else None
        case ast.Call(ast.Attribute(ast.Name("mx"), "expand_dims"), [scores, *_]):
            return scores if _text(node).removeprefix(ast.unparse(scores)) == ", axis=-1" else None
    return None
