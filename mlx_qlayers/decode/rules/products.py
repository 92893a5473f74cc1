"""Products of few rows with quantized matrices, and what stands around them, in one launch.

A ``Products`` node takes what :func:`~mlx_qlayers.ops.fused_products.fused_products` does: rows,
the weight of a norm ahead, tile squares, a residual, the weight of a norm behind, and four arrays
of each matrix. Its arguments are group size, bits, mode, the epsilon of the norm and a gate.
"""

from __future__ import annotations

from typing import Any

from ...metal.quantized_matmul.qmv import MAX_MATRICES
from ..graph import Graph, Node, P, Pattern, Rule, Spec, rewrite
from ..primitives import MODES


def _product(root: Node) -> Node | None:
    """A product with the transposed rows of a quantized matrix."""
    size, bits, mode, transposed = root.arg
    x, w, scales, *biases = root.src
    if not transposed or len(w.shape) != 2 or not is_weight(w):
        return None
    matrix = (w, scales, *(biases or [None]), None)
    arg = size, bits, MODES[mode], None, None
    return root.like("Products", x, None, None, None, None, *matrix, arg=arg)


def is_weight(node: Node) -> bool:
    """Whether a node is an array of the model."""
    return node.op == "Input" and node.arg[0].startswith("model.")


def _biased(y: Node, bias: Node, root: Node) -> Node | None:
    """A product and what is added to each of its rows."""
    *before, own = y.src
    fits = is_weight(bias) and bias.shape == y.shape[-1:] and bias.dtype == root.dtype == y.dtype
    if not fits or own is not None or y.src[3] is not None or len(y.outputs) > 1:
        return None
    return root.like("Products", *before, bias, arg=y.arg)


def _gated(gate: Node, up: Node, act: Node, root: Node) -> Node | None:
    """The activation of a product times another product of the same rows."""
    if not _is_plain(gate) or not _is_plain(up) or gate.src[:5] != up.src[:5]:
        return None
    if gate.arg != up.arg or gate.src[5].shape != up.src[5].shape:
        return None
    arg = (*gate.arg[:4], GATES[act.op])
    return root.like("Products", *gate.src, *up.src[5:], arg=arg)


def _halved(y: Node, split: Node, gate: Node, up: Node, act: Node, root: Node) -> Node | None:
    """The same of the halves of one product, whose matrix is two."""
    (at, *more), axis = split.arg[0], split.arg[1]
    halves = not more and 2 * at == y.shape[-1] and axis == len(y.shape) - 1
    if not halves or not _is_plain(y) or gate.arg == up.arg:
        return None
    parts = (_rows_of(s, each.arg[0] * at, at) for each in (gate, up) for s in y.src[5:])
    return root.like("Products", *y.src[:5], *parts, arg=(*y.arg[:4], GATES[act.op]))


def _rows_of(array: Node | None, begin: int, count: int) -> Node | None:
    if array is None:
        return None
    rest = array.shape[1:]
    index = (begin, *(0 for _ in rest)), (begin + count, *rest), (1,) * len(array.shape)
    return Node("Slice", (array,), index, (Spec((count, *rest), array.dtype),))


GATES = {"Silu": "silu", "Gelu": "gelu", "GeluApprox": "gelu_approx", "Swiglu": "silu"}


def _is_plain(node: Node) -> bool:
    """Whether it is a single product with neither gate nor residual."""
    return len(node.src) == 9 and node.src[3] is None and node.arg[4] is None


def _added(y: Node, other: Node, root: Node) -> Node | None:
    """A product that is added to something of its shape."""
    if not _is_plain(y) or y.outputs != root.outputs or other.outputs != root.outputs:
        return None
    return root.like("Products", *y.src[:3], other, *y.src[4:], arg=y.arg)


def _normed(norm: Node, root: Node) -> Node | None:
    """Products of rows that go through an RMS norm first."""
    x, _, squares, *rest = root.src
    if x is not norm or squares is not None or root.arg[3] is not None:
        return None
    rows, weight = norm.src
    arg = (*root.arg[:3], norm.arg[0], root.arg[4])
    return Node("Products", (rows, weight, None, *rest), arg, root.outputs)


_ACT = Pattern(tuple(GATES))
_HALVES = P("act @ kind(gate @ Item(split @ Split(y @ +Products)))", kind=_ACT)
PRODUCT: list[Rule] = [(P("QuantizedMatmul"), _product), (P("Add(y @ +Products, bias)"), _biased)]
GATED: list[Rule] = [
    (P("Multiply(act @ kind(gate @ +Products), up @ +Products)", kind=_ACT), _gated),
    (P("Multiply(halves, up @ Item(split))", halves=_HALVES), _halved),
    (P("Add(y @ +Products, other)"), _added),
]
# With the bits of products that are rounded before.
ROUNDED: list[Rule] = [(P("act @ Swiglu(gate @ +Products, up @ +Products)"), _gated), GATED[-1]]
NORMED: list[Rule] = [(P("Products(norm @ RMSNorm, ...)"), _normed)]


def _rows(node: Node) -> tuple[Any, ...] | None:
    """How many products one launch takes, and what these must have in common."""
    if node.op == "Products" and _is_plain(node):
        return MAX_MATRICES, node.src[:5], node.arg
    if node.op == "Experts" and len(node.src) == 7:
        return 2, node.src[:3], node.arg, node.outputs
    return None


def side_by_side(graph: Graph) -> Graph:
    """Products of the same rows, of one format, as one node: a launch takes some of them."""
    alike: dict[tuple[Any, ...], list[Node]] = {}
    for node in graph.nodes:
        if (rows := _rows(node)) is not None:
            alike.setdefault(rows, []).append(node)
    places: dict[Node, Node] = {}
    for (most, rows, arg, *_), nodes in alike.items():
        for start in range(0, len(nodes), most):
            some = nodes[start : start + most]
            if len(some) == 1:
                continue
            matrices = [each for node in some for each in node.src[len(rows) :]]
            outputs = tuple(node.outputs[0] for node in some)
            whole = Node(some[0].op, (*rows, *matrices), arg, outputs)
            places |= {node: whole.item(i) for i, node in enumerate(some)}
    return graph.replaced(places)


def products(graph: Graph) -> Graph:
    """All rules of this file in turn."""
    graph = rewrite(rewrite(graph, PRODUCT), GATED)
    return rewrite(side_by_side(graph), NORMED)
