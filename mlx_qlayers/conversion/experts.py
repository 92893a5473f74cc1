"""Experts of a mixture inside the graph of a step, with few launches.

mlx-lm computes them in ``SwitchGLU``: two gathered products, an activation and a third product. In
a graph of :mod:`.compiled_step` the first two and the activation are one launch, and the third is
another. For a single row that one also adds up the products by their scores, which the model's own
code does behind it, as ``(y * scores[..., None]).sum(axis=-2)``: there that expression asks here.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..formats import Format
from ..ops.experts import experts_chosen, experts_combined, experts_products
from ..ops.quantized_route import is_qmv
from ..options import PackedMatrix
from .attention_patch import made_class, stock_class
from .matcher import Match
from .step_slots import Chosen, current_step

# The name of what such a module is.
EXPERTS = "experts"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


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
    # Adapters stand in the place of layers, and have no scales.
    packed = step is not None and all("scales" in each for each in layers)
    plain = packed and not any("global_scale" in each or each.training for each in layers)
    few = is_qmv(x) and indices.shape[:-1] == x.shape[:-1]
    formats = [Format(each.group_size, each.bits, each.mode) for each in layers] if plain else []
    if step is None or not few or not formats or formats[0] != formats[1]:
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

    def combine(chosen: mx.array, scores: mx.array) -> mx.array:
        """Their sum by scores, for experts in any order."""
        if chosen is not indices:
            return combined(_call(self, x, chosen), scores, True)
        if scores.size == scores.shape[-1]:
            return experts_combined(h, indices, scores, down, formats[2])
        # Sequences may share experts, whose matrices are read once by the product alone.
        return (y * scores[..., None]).sum(axis=-2).astype(y.dtype)

    step.chosen[id(y)] = Chosen(y, indices, combine)
    return y


def combined(y: mx.array, scores: mx.array, cast: bool = False) -> mx.array:
    """``(y * scores[..., None]).sum(axis=-2)``, and cast to the dtype of ``y`` if so."""
    found = _seen("chosen", y)
    if found is None or scores.shape != y.shape[:-1]:
        total = (y * scores[..., None]).sum(axis=-2)
        return total.astype(y.dtype) if cast else total
    route = _seen("routes", scores)
    if route is not None and route.chosen is found.indices and not route.raw:
        count, normed = scores.shape[-1], route.normed
        chosen, scores = experts_chosen(route.logits, count, normed=normed, dtype=scores.dtype)
        total = found.combine(chosen, scores)
    else:
        total = found.combine(found.indices, scores)
    return total if cast else total.astype(mx.result_type(y.dtype, scores.dtype))


class Shares(NamedTuple):
    """Numbers of a softmax, for all experts or those that were chosen by it.

    Attributes:
        y: the numbers.
        logits: what the softmax was taken of.
        chosen: the experts, where the numbers are of some; these are also kept as ``y`` themselves.
        normed: whether the numbers add up to 1.
        raw: the numbers are the logits themselves.
    """

    y: mx.array
    logits: mx.array
    chosen: mx.array | None = None
    normed: bool = False
    raw: bool = False


def _seen(table: str, array: mx.array) -> Any:
    """What a graph knows of an array."""
    step = current_step.get()
    return None if step is None else getattr(step, table).get(id(array))


def _keep(shares: Shares) -> mx.array:
    """Let the graph know of an array."""
    if (step := current_step.get()) is not None:
        step.routes[id(shares.y)] = shares
    return shares.y


def softmax(x: mx.array, **options: Any) -> mx.array:
    """``mx.softmax`` over the last axis."""
    y, route = mx.softmax(x, **options), _seen("routes", x)
    if route is not None and route.raw:
        return _keep(Shares(y, route.logits, route.chosen, normed=True))
    return _keep(Shares(y, x))


def largest(x: mx.array, count: int) -> mx.array:
    """``mx.argpartition(x, kth=-count, axis=-1)[..., -count:]``."""
    chosen, route = mx.argpartition(x, kth=-count, axis=-1)[..., -count:], _seen("routes", x)
    return _keep((route or Shares(x, x))._replace(y=chosen, chosen=chosen))


def unchanged(x: mx.array) -> mx.array:
    """``mx.stop_gradient``, which is nothing where no gradient is taken."""
    return mx.stop_gradient(x) if _seen("routes", x) is None else x


def taken(x: mx.array, indices: mx.array) -> mx.array:
    """``mx.take_along_axis(x, indices, axis=-1)``."""
    y, route = mx.take_along_axis(x, indices, axis=-1), _seen("routes", indices)
    of = _seen("routes", x) or Shares(x, x, raw=True)
    if route is None or route.chosen is not indices or of.chosen is not None:
        return y
    return _keep(route._replace(y=y, raw=of.raw)) if of.logits is route.logits else y


def shares(x: mx.array) -> mx.array:
    """``x / mx.sum(x, axis=-1, keepdims=True)``."""
    y, route = x / mx.sum(x, axis=-1, keepdims=True), _seen("routes", x)
    known = route is not None and route.chosen is not None and not route.raw
    return y if not known else _keep(route._replace(y=y, normed=True))


_REWRITTEN = {f"_{f.__name__}": f for f in (combined, softmax, largest, unchanged, taken, shares)}


def _asked(name: str, *args: ast.expr, **options: ast.expr) -> ast.Call:
    keywords = [ast.keyword(key, value) for key, value in options.items()]
    return ast.Call(ast.Name(f"_{name}", ast.Load()), list(args), keywords)


class CombinedSums(ast.NodeTransformer):
    """Let sums of products by scores, and what routers are made of, ask this file's functions.

    Attributes:
        found: whether there is such a sum.
        names: those functions.
    """

    def __init__(self) -> None:
        self.found, self.names = False, dict[str, object](_REWRITTEN)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """A sum of products by scores, one cast to the products' dtype, and mx's functions."""
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(ast.BinOp(y, ast.Mult(), by), "sum")):
                if _text(node) == "axis=-2" and (scores := _unexpanded(by)) is not None:
                    self.found = True
                    return _asked("combined", y, scores)
            case ast.Call(
                ast.Attribute(ast.Call(ast.Name("_combined"), [y, scores]), "astype"),
                [ast.Attribute(of, "dtype")],
            ) if ast.unparse(of) == ast.unparse(y):
                return _asked("combined", y, scores, ast.Constant(True))
            case ast.Call(ast.Attribute(ast.Name("mx"), "softmax"), [x], keywords):
                if "axis=-1" in map(ast.unparse, keywords):
                    return ast.Call(ast.Name("_softmax", ast.Load()), [x], keywords)
            case ast.Call(ast.Attribute(ast.Name("mx"), "stop_gradient"), [x], []):
                return _asked("unchanged", x)
            case ast.Call(ast.Attribute(ast.Name("mx"), "take_along_axis"), [x, indices], [_]):
                if ast.unparse(node.keywords[0]) == "axis=-1":
                    return _asked("taken", x, indices)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """The last of what ``mx.argpartition`` gives, or the first of the negated."""
        self.generic_visit(node)
        match node.value:
            case ast.Call(ast.Attribute(ast.Name("mx"), "argpartition"), [x]):
                options = {k.arg: ast.unparse(k.value) for k in node.value.keywords}
                at, kth = ast.unparse(node.slice), options.get("kth", "")
                if options.keys() != {"kth", "axis"} or options["axis"] != "-1":
                    return node
                count = kth.removeprefix("-") if kth.startswith("-") else kth.removesuffix(" - 1")
                wanted = f"(..., -{count}:)" if kth.startswith("-") else f"(..., :{count})"
                negated = isinstance(x, ast.UnaryOp) and isinstance(x.op, ast.USub)
                if at not in (wanted, wanted[1:-1]) or negated == kth.startswith("-"):
                    return node
                number = ast.parse(count, mode="eval").body
                return _asked("largest", x.operand if isinstance(x, ast.UnaryOp) else x, number)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Numbers by their sum."""
        self.generic_visit(node)
        by = isinstance(node.op, ast.Div) and _is_sum(node.right, ast.unparse(node.left))
        return _asked("shares", node.left) if by else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        """The same in place."""
        self.generic_visit(node)
        if isinstance(node.op, ast.Div) and _is_sum(node.value, ast.unparse(node.target)):
            read = ast.parse(ast.unparse(node.target), mode="eval").body
            return ast.copy_location(ast.Assign([node.target], _asked("shares", read)), node)
        return node


def _is_sum(node: ast.expr, of: str) -> bool:
    """Whether a node is the sum of the last axis of an array, by the array's code."""
    text = ast.unparse(node)
    return text in (f"mx.sum({of}, axis=-1, keepdims=True)", f"{of}.sum(axis=-1, keepdims=True)")


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
