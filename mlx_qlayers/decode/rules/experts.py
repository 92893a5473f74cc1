"""Mixtures of experts: gathered products, what is made of two of them, and their sum by scores.

An ``Experts`` node takes rows (..., K), or (..., J, K), the experts (..., J) of each, tile squares
and four arrays of each of one or two matrices. Its arguments are group size, bits, mode, a gate and
the epsilon of a norm. A ``Combined`` node takes rows (..., J, K), experts, scores, four arrays of a
matrix and a residual. In between a ``Choices`` node has an axis more, as the model's code, or its
rows as they were sorted by experts in some order.
"""

from __future__ import annotations

from math import inf

from ...options import Clipped
from ..graph import Node, P, Pattern, Rule, Spec, fits
from ..primitives import MODES
from .canonical import CANCELLED, ELEMENTWISE, as_it_is
from .products import GATES, is_weight

_UNARY = ("Silu", "Gelu", "GeluApprox", "Sigmoid", "Tanh", "Square", "Sqrt", "AsType", "Negative")
# Each row of x, in turn.
_EVERY = P("~Broadcast(~Reshape(Arange[0, _, 1]()))")
_IN_ORDER = P("Squeeze(Gather(flat, order @ ArgSort(flat)))", flat=P("Flatten(experts)"))
_AGAIN = P("Gather(Choices(y, order), ArgSort(order))")
_OF_ORDER = P("FloorDivide(order, -each)")
_SORTED = P("Squeeze(Gather(Flatten(ExpandDims(rows)), at))", at=_OF_ORDER)
_ROWS = P("ExpandDims(rows) | sorted | Choices(rows) | Choices(rows, order)", sorted=_SORTED)


def _indices(right: Node | None, order: Node | None) -> Node | None:
    """The experts of products, as they were before they were sorted."""
    if order is None:
        return right
    found = fits(_IN_ORDER, right)
    return found["experts"] if found and found["order"] is order else None


def _experts(root: Node) -> Node | None:
    """Products with the transposed matrices that rows chose."""
    size, bits, mode, transposed, *_ = root.arg
    x, w, scales, *biases, left, right = root.src
    found = fits(_ROWS, x)
    experts = _indices(right, found.get("order")) if found else None
    affine = len(biases) == (mode == 0) and transposed
    if found is None or experts is None or not affine or fits(_EVERY, left) is None:
        return None
    rows, width = found["rows"], w.shape[1]
    each = found.get("each", experts.shape[-1])
    alike = rows.shape[:-1] in (experts.shape, experts.shape[:-1])
    whole = root.shape[-2] == 1 and ("order" in found or root.shape[:-2] == experts.shape)
    packed = len(w.shape) == 3 and is_weight(w)
    if not packed or not alike or not whole or each != experts.shape[-1]:
        return None
    matrix = (w, scales, *(biases or [None]), None)
    spec = Spec((*experts.shape, width), root.dtype)
    arg = size, bits, MODES[mode], None, None
    y = Node("Experts", (rows, experts, None, *matrix), arg, (spec,))
    order = [found["order"]] if "order" in found else []
    return root.like("Choices", y, *order)


def _biased(y: Node, choices: Node, bias: Node, right: Node, root: Node) -> Node | None:
    """Products and a bias of each expert."""
    order = [*choices.src[1:]]
    fit = y.src[1] is _indices(right, order[0] if order else None) and y.src[6] is None
    if not fit or len(y.src) != 7 or not is_weight(bias) or bias.dtype != root.dtype:
        return None
    y = Node(y.op, (*y.src[:6], bias), y.arg, y.outputs)
    return root.like("Choices", y, *order)


_GATE, _UP = (P(f"{n}_choices @ Choices({n} @ Experts, ...)") for n in ("gate", "up"))
_LIMITED = P("Minimum(gate, -limit) | gate", gate=_GATE)
_CLIPPED = P("Minimum(Maximum(up, -least), -most) | up", up=_UP)
_SHIFTED = P("Add(up, -shift) | up", up=_CLIPPED)
_SWISH = P("Multiply(g, Sigmoid(Multiply(g, -alpha)))")
# The numbers of patterns where the model's code has none.
_NUMBERS = {"limit": inf, "alpha": 1.0, "shift": 0.0, "most": inf, "least": -inf}


def _gated(first: Node, second: Node, root: Node) -> Node | None:
    """The activation of products, which may be clipped, times others of the same rows, likewise."""
    swish = fits(_SWISH, first) or {}
    name = "silu" if swish else GATES.get(first.op)
    gates = fits(_LIMITED, swish.get("g", first.src[0])) if name else None
    ups = fits(_SHIFTED, second) if gates else None
    if gates is None or ups is None:
        return None
    found = gates | ups | swish
    *clip, most, least = (found.get(name, number) for name, number in _NUMBERS.items())
    gate, up = found["gate"], found["up"]
    plain = len(gate.src) == len(up.src) == 7 and gate.arg == up.arg and gate.arg[3] is None
    if not plain or gate.src[:3] != up.src[:3] or gate.outputs != up.outputs:
        return None
    clipped = clip != [inf, 1.0, 0.0]
    if most != clip[0] or least != -most or (clipped and name != "silu"):
        return None
    arg = (*gate.arg[:3], Clipped(*clip) if clipped else name, gate.arg[4])
    y = Node("Experts", (*gate.src, *up.src[3:]), arg, gate.outputs)
    return root.like("Choices", y, *found["gate_choices"].src[1:])


def _lifted(root: Node) -> Node | None:
    """Elementwise operations move ahead of a change of the order of rows."""
    first = next((s for s in root.src if s.op == "Choices"), None)
    if first is None:
        return None
    inner, *order = first.src
    alike = [s.op == "Choices" and [*s.src[1:]] == order for s in root.src]
    if any(s.shape and not fit for s, fit in zip(root.src, alike, strict=True)):
        return None
    src = tuple(s.src[0] if fit else s for s, fit in zip(root.src, alike, strict=True))
    made = Node(root.op, src, root.arg, (Spec(inner.shape, root.dtype),))
    return root.like("Choices", made, *order)


def _unsorted(y: Node, order: Node, root: Node) -> Node | None:
    whole = root.shape == (*y.shape[:-1], 1, y.shape[-1])
    return root.like("Choices", y) if whole else None


def _combined(y: Node, scores: Node, wide: Node, sum: Node, root: Node) -> Node | None:
    """The sum of products by scores, in their dtype."""
    single = len(y.src) == 7 and len(y.src[0].shape) == len(y.shape)
    axis = len(y.shape) - 2
    if not single or sum.arg != (2, (axis,)) or scores.shape != y.shape[:-1]:
        return None
    if wide.arg != ((axis + 1,),):
        return None
    rows, experts, _, *matrix = y.src
    src, spec = (rows, experts, scores, *matrix, None), Spec(root.shape, y.dtype)
    total = Node("Combined", src, y.arg[:3], (spec,))
    return total if root.dtype == y.dtype else root.like("AsType", total, arg=(root.dtype,))


def _added(y: Node, other: Node, root: Node) -> Node | None:
    """A sum by scores that is added to something; not what MLX computes with the next sum."""
    fit = y.src[-1] is None and other.op != "Multiply" and y.outputs == other.outputs
    if not fit or y.outputs != root.outputs:
        return None
    return root.like("Combined", *y.src[:-1], other, arg=y.arg)


def _through(y: Node, other: Node, root: Node) -> Node | None:
    """A product with a sum by scores as its residual, that is added to something."""
    inner = y.src[3]
    if inner is None or inner.op != "Combined" or len(y.outputs) > 1:
        return None
    residual = _added(inner, other, root)
    return residual and root.like("Products", *y.src[:3], residual, *y.src[4:], arg=y.arg)


_BIAS = P("ExpandDims(Squeeze(Gather(bias, right)))")
EXPERTS: list[Rule] = [
    (P("GatherQMM"), _experts),
    (P("Add(choices @ +Choices(y @ Experts, ...), bias)", bias=_BIAS), _biased),
    (P("Multiply(first, second)"), _gated),
    (P("Unflatten(Squeeze(again))", again=_AGAIN), _unsorted),
    (P("Squeeze(Choices(x))"), as_it_is),
]
# Behind these, for what is made of products in another way.
LIFTED: list[Rule] = [(Pattern((*ELEMENTWISE, *_UNARY)), _lifted), *EXPERTS]
_SCALED = P("Multiply(~AsType(y @ +Experts), ~AsType(wide @ ExpandDims(scores)))")
COMBINED: list[Rule] = [(P("Squeeze(sum @ Reduce(scaled))", scaled=_SCALED), _combined)]
COMBINED += CANCELLED
# Behind the rules of products.
RESIDUAL: list[Rule] = [
    (P("Add(y @ +Combined, other)"), _added),
    (P("Add(y @ +Products, other)"), _through),
]
