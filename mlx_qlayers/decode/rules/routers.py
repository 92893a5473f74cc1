"""How experts are chosen by logits, and their weights: in one node.

A ``Chosen`` node takes logits (..., E), a bias and factors (E,) or None, and gives the experts and
their weights, (..., J). Its argument is a :class:`~mlx_qlayers.options.Router`. It is looked for
where both are used, backwards: in which order and by which functions the code has it is open.
"""

from __future__ import annotations

from math import inf
from typing import Any

from ...options import Router
from ..graph import Graph, Node, P, fits, number_of

_MORE = P("Add(sum, -epsilon) | sum", sum=P("sum @ Reduce[2, _](of)"))
_SHARE = P("Divide(part, ~Broadcast(Maximum(more, -floor) | more))", more=_MORE)
_TOP = P("Slice(sorted @ ArgPartition(ranked))")
_OF_EXPERT = P("Squeeze(Gather(factors, at))")
_TWO = P("Slice(Partition(inside))")
_PUT = P("(Flatten | Reshape)(ScatterAxis(inside, ~Broadcast(at), -fill))")
_ROOT = P("Sqrt(LogAddExp(logits, zero))")
# Each choice of a sparse mixer takes a softmax of the logits that are close enough to the largest.
_LOW = P("Divide(Subtract(top, logits), Maximum(Abs(logits), top))")
_BAND = P("Select(Greater(low, -epsilon), -lowest, left)", low=_LOW)
_MIXED = P("GatherAxis(~AsType(Softmax(~AsType(band))), at)", band=_BAND)
_LEFT = P("ScatterAxis(left, at, -lowest)")


def plain(node: Node, *views: str) -> Node:
    """A node before casts, broadcasts and other views."""
    while node.op in ("AsType", "StopGradient", "Broadcast", *views):
        node = node.src[0]
    return node


def routed(graph: Graph) -> Graph:
    """The graph with experts and weights that one launch gives."""
    places: dict[Node, Node] = {}
    nodes = graph.nodes
    # Where the code changes them before they are used, it is the weights as they were taken.
    pairs = [node.src[1:3] for node in nodes if node.op == "Combined"]
    pairs += [(node.src[1], node) for node in nodes if node.op == "GatherAxis"]
    for experts, weights in pairs:
        if experts and weights and experts not in places and (made := _chosen(experts, weights)):
            places |= {experts: made.item(0), weights: made.item(1)}
    return graph.replaced(places) if places else graph


def _mixed(experts: Node, weights: Node) -> Node | None:
    """The choices of a sparse mixer: one after the other, each without those before."""
    axis, known, before = len(experts.shape) - 1, None, None
    taken: dict[str, Node] | None
    for at, weight in zip(experts.src, weights.src, strict=False):
        found = fits(_MIXED, weight)
        if found is None or at is None or found["at"] is not at:
            return None
        left, logits = found["left"], found["logits"]
        epsilon, lowest = found["epsilon"], found["lowest"]
        best = at.like("ArgReduce", left, arg=(1, axis)).key()[:3]
        top = at.like("Reduce", left, arg=(5, (axis,))).key()[:3]
        if (best, top) != (at.key()[:3], found["top"].key()[:3]):
            return None
        taken = fits(_LEFT, left) if before else None
        fit = taken and (taken["left"], taken["at"]) == before if before else left is logits
        if not fit or lowest != -inf or (known or (logits, epsilon)) != (logits, epsilon):
            return None
        known, before = (logits, epsilon), (left, at)
    alike = experts.op == weights.op == "Concatenate" and experts.arg == weights.arg == (axis,)
    if known is None or not alike or len(experts.src) != len(weights.src):
        return None
    options = {"normed": False, "epsilon": known[1], "dtype": weights.dtype}
    router = Router(len(experts.src), "sparsemixer", **options)
    outputs = experts.outputs[0], weights.outputs[0]
    return Node("Chosen", (plain(known[0]), None, None), (router,), outputs)


def _chosen(experts: Node, weights: Node) -> Node | None:
    found = _best(experts, -1)
    read = _weights(weights, experts)
    if found is None or read is None:
        return _mixed(experts, weights)
    numbers, options, source = found[0], found[1] | read[1], read[0]
    factors, bias = read[2], None
    if "score" in options:
        if plain(source) is not plain(numbers):
            return None
        logits = source
    else:
        before, groups = _groups(numbers)
        options |= groups
        scores, bias = _bias(before)
        options["masked"] = "groups" in groups and plain(source) is plain(numbers)
        known = _logits(scores)
        if known is None or not (options["masked"] or plain(source) is plain(scores)):
            return None
        logits, options["score"] = known
    router = Router(**options, dtype=weights.dtype)
    outputs = experts.outputs[0], weights.outputs[0]
    return Node("Chosen", (plain(logits), bias, factors), (router,), outputs)


def _best(taken: Node, axis: int) -> tuple[Node, dict[str, Any]] | None:
    """The numbers whose largest were taken, how many, and whether the last of equal ones."""
    found = fits(_TOP, taken)
    if found is None:
        return None
    ranked, (kth, by) = found["ranked"], found["sorted"].arg
    (start, stop, _), count = taken.arg, taken.shape[axis]
    size, at = ranked.shape[axis], len(ranked.shape) + axis
    if not isinstance(size, int) or not isinstance(count, int):  # those are rows of a cache
        return None
    last = start[at] != 0
    ends = (size - count, size) if last else (0, count)
    whole = taken.shape == (*ranked.shape[:at], count, *ranked.shape[at + 1 :])
    if (start[at], stop[at]) != ends or by != at or kth != (ends[0] if last else count - 1):
        return None
    if not whole or (ranked.op == "Negative") is last:
        return None
    numbers = ranked if last else ranked.src[0]
    return (numbers, {"top_k": count, "last": last}) if numbers else None


def _weights(weights: Node, experts: Node) -> tuple[Node, dict[str, Any], Node | None] | None:
    """The numbers that the weights were gathered from, the options, and a factor of each expert."""
    options: dict[str, Any] = {"scale": 1.0, "normed": False}
    factors, node = None, plain(weights)
    while node.op != "GatherAxis":
        if options["normed"]:
            return None
        if node.op == "Softmax":
            options |= {"normed": True, "score": "logits"}
            node = plain(node.src[0])
        elif found := fits(_SHARE, node):
            last = found["sum"].arg[1] == (len(node.shape) - 1,)
            if plain(found["of"]) is not plain(found["part"]) or not last:
                return None
            options |= {name: found[name] for name in ("epsilon", "floor") if name in found}
            options["normed"] = True
            node = plain(found["part"])
        elif node.op == "Multiply":
            one, other = map(plain, node.src)
            part, by = (one, other) if number_of(one) is None else (other, one)
            scale = number_of(by)
            if scale is not None:
                options["scale"] *= scale
            else:
                found = fits(_OF_EXPERT, by) or fits(_OF_EXPERT, part)
                if found is None or found["at"] is not experts or factors is not None:
                    return None
                part = part if fits(_OF_EXPERT, by) else by
                factors = found["factors"]
            node = part
        else:
            return None
    source, at = node.src
    whole = node.arg == (len(node.shape) - 1,) and at is experts
    return (source, options, factors) if whole else None


def _groups(numbers: Node) -> tuple[Node, dict[str, Any]]:
    """The numbers before groups of them were left out."""
    found = fits(_PUT, plain(numbers))
    inside = found["inside"] if found else numbers
    before = inside.src[0] if inside.op in ("Unflatten", "Reshape") else None
    if not found or before is None or before.shape != numbers.shape:
        return numbers, {}
    if 0 in found["at"].shape:  # none is left out
        return before, {}
    if (best := _lowest(found["at"], inside)) is None:
        return numbers, {}
    return before, {"groups": inside.shape[-2], "fill": found["fill"], **best}


def _lowest(at: Node, inside: Node) -> dict[str, Any] | None:
    """How many of the lowest groups are dropped, and whether by their two largest numbers."""
    found = fits(_TOP, plain(at))
    if found is None or (rank := plain(found["ranked"])).op != "Reduce":
        return None
    kind, axes = rank.arg
    two = fits(_TWO, rank.src[0])
    count, axis = plain(at).shape[-2], len(inside.shape) - 2
    of = two["inside"] if two and kind == 2 else rank.src[0] if kind == 5 else None
    if of is not inside or axes != (axis + 1,) or found["sorted"].arg != (count - 1, axis):
        return None
    return {"dropped": count, "pairs": kind == 2}


def _bias(numbers: Node) -> tuple[Node, Node | None]:
    """The scores, and the bias that was added to them."""
    node = plain(numbers)
    if node.op != "Add":
        return node, None
    for scores, bias in (node.src, node.src[::-1]):
        bias = plain(bias, "Reshape", "ExpandDims")
        if bias.shape == node.shape[-1:]:
            return plain(scores), bias
    return node, None


def _logits(scores: Node) -> tuple[Node, str] | None:
    """The logits that scores were computed from, and by which function."""
    node = plain(scores)
    if found := fits(_ROOT, node):
        return found["logits"], "sqrtsoftplus"
    known = {"Softmax": "softmax", "Sigmoid": "sigmoid"}
    return (plain(node.src[0]), known[node.op]) if node.op in known else None
