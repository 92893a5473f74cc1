"""Recurrent layers: the gated delta rule, and rows of a depthwise convolution.

A ``GatedDelta`` node takes what :func:`~mlx_qlayers.ops.gated_delta.gated_delta` does; its argument
is that of norms. A ``Depthwise`` node takes rows (B, L + K - 1, C) and a weight (C, K, 1).
"""

from __future__ import annotations

from itertools import pairwise

from ..graph import Graph, Node, P, Rule, Spec, fits, rewrite
from .canonical import CANCELLED

# Vectors of heads as rows or columns of a state, and the sum of products over its columns.
_WIDE = {n: P(f"~Broadcast(~AsType(ExpandDims({n})))") for n in ("q", "k", "g", "beta", "delta")}
_TOTAL = "Squeeze(Reduce[2, (3,)](Multiply({}, {})))"
_DECAYED = P("decayed @ Multiply(state, g)", **_WIDE)
_SEEN = P(_TOTAL.format("decayed", "k"), decayed=_DECAYED, **_WIDE)
_DELTA = P("Multiply(Subtract(~AsType(v), seen), beta)", seen=_SEEN, **_WIDE)
_AFTER = P("after @ Add(decayed, Multiply(k, delta))", **_WIDE)
_Y = P(_TOTAL.format("after", "q"), after=_AFTER, **_WIDE)


def gated_deltas(graph: Graph) -> Graph:
    """The graph with the rule as one node: first of each token, then of all."""
    nodes, places = graph.nodes(), dict[Node, Node]()
    kept = {n.src[1:]: n for n in nodes if n.op == "Select"}
    for node in nodes:
        if node.op != "Squeeze" or (found := fits(_Y, node)) is None:
            continue
        some = {name: found[name] for name in ("decayed", "k")}
        inner = next(_DELTA.match(found["delta"], some, {}), None)
        select = kept.get((found["after"], inner["state"])) if inner else None
        mask = fits(P("~ExpandDims(mask)"), select.src[0]) if select else {"mask": None}
        made = _delta(node, **found | inner | mask) if inner and mask else None
        if made is None:
            continue
        y = made.item(0)
        flat = Node("Squeeze", (y,), ((1,),), (Spec(node.shape, y.dtype),))
        same = y.dtype == node.dtype
        places[node] = flat if same else node.like("AsType", flat, arg=(node.dtype,))
        places[select or found["after"]] = made.item(1)
    if not places:
        return graph
    graph = rewrite(graph.replaced(places), CANCELLED)
    return rewrite(_of_all_tokens(graph), [(P("GatedDelta"), _normed)])


def _of_all_tokens(graph: Graph) -> Graph:
    """Tokens one after the other as one node."""
    nodes, places = graph.nodes(), dict[Node, Node]()
    states = {n.src[0]: n for n in nodes if n.op == "Item" and n.arg == (1,)}
    for node in nodes:
        if node.op != "Concatenate" or node.arg != (1,):
            continue
        some = [s.src[0] for s in node.src if s and s.op == "Item" and s.arg == (0,)]
        tokens = [s for s in some if s and s.op == "GatedDelta"]
        goes_on = all(b.src[5] is states.get(a) for a, b in pairwise(tokens))
        whole = [_whole([t.src[i] for t in tokens]) for i in (0, 1, 2, 3, 4, 6)]
        if len(tokens) != len(node.src) or not goes_on or False in whole:
            continue
        first, last = tokens[0], tokens[-1]
        src = *whole[:5], first.src[5], whole[5]
        made = Node(first.op, src, first.arg, (node.outputs[0], first.outputs[1]))
        places |= {node: made.item(0), states[last]: made.item(1)}
    return graph.replaced(places) if places else graph


def _whole(parts: list[Node | None]) -> Node | bool | None:
    """The array whose rows in turn the parts are; None of no parts, False of others."""
    if not any(parts):
        return None
    of = {part.src[0] if part and part.op == "Slice" else part for part in parts}
    whole = of.pop()
    if of or whole is None or whole.shape[1] != len(parts):
        return False
    for at, part in enumerate(parts):
        if part is None or part.op != "Slice" or (part.arg[0][1], part.shape[1]) != (at, 1):
            return False
        if whole.shape[2:] != part.shape[2:]:
            return False
    return whole


def _delta(root: Node, v: Node, state: Node, mask: Node | None, **found: Node) -> Node | None:
    q, k, g, beta = (found[name] for name in ("q", "k", "g", "beta"))
    if len(state.shape) != 4 or v.shape != root.shape or not q.dtype == k.dtype == v.dtype:
        return None
    outputs = Spec((v.shape[0], 1, *v.shape[1:]), v.dtype), state.outputs[0]
    src = *map(_in_time, (q, k, v, g, beta)), state, mask and _in_time(mask)
    return Node("GatedDelta", src, (None,), outputs)


def _normed(root: Node) -> Node | None:
    """Queries and keys of fewer heads, and before their norms."""
    q, k = root.src[:2]
    if root.arg != (None,):
        return None
    of_q, of_k = _unrepeated(q), _unrepeated(k)
    if of_q.shape != of_k.shape:
        of_q, of_k = q, k
    norms, one, other = None, fits(_NORMED, of_q), fits(_NORMED, of_k)
    of = [(each["norm"].arg, *each["norm"].src[1:]) for each in (one, other) if each]
    if one and other and of[0] == of[1] and of[0][1:] == (None,):
        norms = one["norm"].arg[0], one["factor"], other["factor"]
        of_q, of_k = one["x"], other["x"]
    src = of_q, of_k, *root.src[2:]
    return None if src == root.src else Node(root.op, src, (norms,), root.outputs)


_NORMED = P("Multiply(norm @ RMSNorm(x, ...), -factor)")
_REPEATED = P("(Reshape | Flatten)(Broadcast(ExpandDims[(3,),](x)))")


def _unrepeated(x: Node) -> Node:
    found = fits(_REPEATED, x)
    return found["x"] if found and len(found["x"].shape) == 4 else x


def _in_time(x: Node) -> Node:
    """(B, ...) of a token as (B, 1, ...)."""
    if x.op == "Squeeze" and x.arg == ((1,),):
        source: Node = x.src[0]
        return source
    return Node("ExpandDims", (x,), ((1,),), (Spec((x.shape[0], 1, *x.shape[1:]), x.dtype),))


def _depthwise(x: Node, w: Node, root: Node) -> Node | None:
    stride, low, high, kernel, inputs, groups, flip = root.arg
    plain = {*stride, *kernel, *inputs} == {1} and not (any(low) or any(high) or flip)
    one = len(x.shape) == 3 and (w.shape[0], w.shape[2:]) == (x.shape[-1], (1,))
    return root.like("Depthwise", x, w) if plain and one and groups == x.shape[-1] else None


RECURRENT: list[Rule] = [(P("Convolution(x, w)"), _depthwise)]
