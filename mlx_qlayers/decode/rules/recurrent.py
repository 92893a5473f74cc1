"""Recurrent layers: the gated delta rule of a token, and a row of a depthwise convolution.

A ``GatedDelta`` node takes what :func:`~mlx_qlayers.ops.gated_delta.gated_delta` does; its argument
is that of norms. A ``Depthwise`` node takes as many rows (B, K, C) as the weight (C, K, 1) is long.
"""

from __future__ import annotations

from ..graph import (
    Either,
    Graph,
    Node,
    P,
    Pattern,
    Rule,
    Spec,
    any_,
    fits,
    maybe,
    number_of,
    rewrite,
    under,
)
from .canonical import CANCELLED


def _wide(name: str) -> Either:
    """Vectors of heads as rows or columns of a state."""
    wide = P("ExpandDims", any_(name))
    return maybe("Broadcast", maybe("AsType", wide))


def _total(*factors: Pattern | Either) -> Pattern:
    """The sum of products over the columns of a state."""
    return P(
        "Squeeze",
        P("Reduce", P("Multiply", *factors), arg=lambda kind, axes: (kind, *axes) == (2, 3)),
    )


_DECAYED = P("Multiply", any_("state"), _wide("g"), name="decayed")
_DELTA = P(
    "Multiply",
    P("Subtract", maybe("AsType", any_("v")), _total(_DECAYED, _wide("k"))),
    _wide("beta"),
)
_AFTER = P("Add", any_("decayed"), P("Multiply", _wide("k"), _wide("delta")), name="after")
_Y = _total(_AFTER, _wide("q"))


def gated_deltas(graph: Graph) -> Graph:
    """The graph with the rule, of a token, as one node."""
    nodes, places = graph.nodes(), dict[Node, Node]()
    kept = {n.src[1:]: n for n in nodes if n.op == "Select"}
    for node in nodes:
        if node.op != "Squeeze" or (found := fits(_Y, node)) is None:
            continue
        some = {name: found[name] for name in ("decayed", "k")}
        inner = next(_DELTA.match(found["delta"], some, {}), None)
        select = kept.get((found["after"], inner["state"])) if inner else None
        mask = fits(maybe("ExpandDims", any_("mask")), select.src[0]) if select else {"mask": None}
        made = _delta(node, **found | inner | mask) if inner and mask else None
        if made is None:
            continue
        y = made.item(0)
        flat = Node("Squeeze", (y,), ((1,),), (Spec(node.shape, y.dtype),))
        same = y.dtype == node.dtype
        places[node] = flat if same else node.like("AsType", flat, arg=(node.dtype,))
        places[select or found["after"]] = made.item(1)
    return rewrite(graph.replaced(places), CANCELLED) if places else graph


def _delta(
    root: Node,
    q: Node,
    k: Node,
    v: Node,
    g: Node,
    beta: Node,
    state: Node,
    mask: Node | None,
    **_: Node,
) -> Node | None:
    if len(state.shape) != 4 or v.shape != root.shape or not q.dtype == k.dtype == v.dtype:
        return None
    of_q, of_k = (_unrepeated(_in_time(each)) for each in (q, k))
    if of_q.shape != of_k.shape:
        of_q, of_k = _in_time(q), _in_time(k)
    norms, one, other = None, fits(_NORMED, of_q), fits(_NORMED, of_k)
    if one and other and one["norm"].arg == other["norm"].arg:
        factors = [number_of(under(each["factor"])) for each in (one, other)]
        if None not in factors and one["norm"].src[1:] == other["norm"].src[1:] == (None,):
            norms, of_q, of_k = (one["norm"].arg[0], *factors), one["x"], other["x"]
    shown = mask and _in_time(mask)
    outputs = Spec((v.shape[0], 1, *v.shape[1:]), v.dtype), state.outputs[0]
    src = of_q, of_k, *map(_in_time, (v, g, beta)), state, shown
    return Node("GatedDelta", src, (norms,), outputs)


_NORMED = P(
    "Multiply",
    Pattern(("RMSNorm",), (any_("x"),), "norm", more=True),
    any_("factor"),
)
_REPEATED = P(("Reshape", "Flatten"), P("Broadcast", P("ExpandDims", any_("x"), arg=((3,),))))


def _unrepeated(x: Node) -> Node:
    found = fits(_REPEATED, x)
    return found["x"] if found and len(found["x"].shape) == 4 else x


def _in_time(x: Node) -> Node:
    """(B, ...) of a token as (B, 1, ...)."""
    if x.op == "Squeeze" and x.arg == ((1,),) and x.src[0] is not None:
        return x.src[0]
    return Node("ExpandDims", (x,), ((1,),), (Spec((x.shape[0], 1, *x.shape[1:]), x.dtype),))


def _depthwise(x: Node, w: Node, root: Node) -> Node | None:
    stride, low, high, kernel, inputs, groups, flip = root.arg
    plain = {*stride, *kernel, *inputs} == {1} and not (any(low) or any(high) or flip)
    one = w.shape == (x.shape[-1], x.shape[1], 1) if len(x.shape) == 3 else False
    return root.like("Depthwise", x, w) if plain and one and groups == x.shape[-1] else None


RECURRENT: list[Rule] = [(P("Convolution", any_("x"), any_("w")), _depthwise)]
